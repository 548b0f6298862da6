"""The page of jobs beside each other, over sources of its own; and how jobs are chosen for it."""

from __future__ import annotations

from collections.abc import Callable

from test_views_job import NOW, update
from test_views_sides import launched, side
from test_widgets_dashboard import FakeSource
from test_widgets_panels import listed
from workbench_widgets.comparison import Comparison, names_of
from workbench_widgets.overview import Listing
from workbench_widgets.panels.jobs import Jobs, picked
from workbench_widgets.source import Picture
from workbench_widgets.tab import Tab

from workbench.state import JobPhase
from workbench.views.sides import MOST, By


class Page:
    """Three jobs, one of which nobody knows."""

    def __init__(self, by: By = By.STEP) -> None:
        self.sources = [FakeSource() for _ in range(3)]
        for name, source, news in zip("ab", self.sources, (update(), launched(args=("--lr", "0.3"))), strict=False):
            known = side(name, news)
            source.job_id, source.picture = f"job-{name}", Picture(known.view, more=known.more)
        self.sources[2].job_id, self.sources[2].picture = "job-c", Picture(None, "there is no job <job-c>")
        self.planned: list[Callable[[], None]] = []
        self.page = Comparison(self.sources, "dark", lambda _, call: self.planned.append(call), lambda: 0.0, by=by)
        self.page.pacer.shown()
        self.run()

    def run(self) -> None:
        while self.planned:
            self.planned.pop(0)()
            self.page.pacer.shown() if not self.planned else None

    def head(self) -> str:
        return str(self.page.roots["head"].markup)


def test_the_jobs_are_laid_over_each_other_and_what_is_unknown_is_told() -> None:
    page = Page()
    loss = page.page._curves[0]
    assert loss.figure.visible and [line.name for line in loss.lines[:3]] == ["job-a", "job-b", ""]
    assert list(loss.lines[0].data_source.data["x"])[-1] == 600.0
    styles = [(line.glyph.line_color, str(line.glyph.line_dash)) for line in loss.lines]
    assert len(set(styles)) == MOST
    assert "there is no job &lt;job-c&gt;" in page.head() and "job?id=job-a&amp;theme=dark" in page.head()
    assert "--lr 0.3" in page.page.roots["tables"].markup


def test_jobs_of_saved_sessions_are_told_apart_by_their_files() -> None:
    key = "0123456789ab"
    assert names_of([f"a.dtrain-{key}:trial", f"b-2.dtrain-{key}:trial", f"a.dtrain-{key}:other", "live-1"]) == [
        "trial of a.dtrain", "trial of b-2.dtrain", "other", "live-1",
    ]  # fmt: skip
    assert names_of([f"a.dtrain-{key}:trial", f"a.dtrain-f{key[1:]}:trial"]) == [
        "trial of a.dtrain", "trial of a.dtrain (2)",
    ]  # fmt: skip
    assert names_of(["trial", f"a.dtrain-{key}:trial"]) == ["trial", "trial of a.dtrain"]


def test_the_reader_chooses_the_axis_and_the_address_follows() -> None:
    page = Page()
    page.page._head._chosen("by", "time")
    page.run()
    loss = page.page._curves[0]
    assert loss.lines[0].data_source.data["x"][0] == 1050.5 - 990.0
    assert page.page.frame.where == "by=time" and loss.figure.xaxis.formatter.format == "00:00:00"
    assert '<option value="time" selected>' in page.head()
    page.page._head._chosen("by", "nonsense")
    assert page.page.frame.where == "by=time"
    assert Page(By.TIME).page._curves[0].lines[0].data_source.data["x"][0] == 1050.5 - 990.0


def test_a_zoom_stays_until_all_is_wanted_again() -> None:
    page = Page()
    page.page._axis.range.update(start=520.0, end=560.0)
    page.run()
    assert "Show all again" in page.head()
    page.sources[0].changed[0]()
    page.run()
    assert page.page._axis.range.start == 520.0
    page.page._head._chosen("all", "")
    page.run()
    assert (page.page._axis.range.start, page.page._axis.range.end) == (0.0, 606.0)  # and room for a mark


def test_too_few_and_the_end_of_a_page() -> None:
    lonely = Comparison([FakeSource()], "", lambda *_: None)
    assert "Give two to six jobs" in lonely.roots["head"].markup
    page = Page()
    page.page.close()
    assert [source.changed for source in page.sources] == [[], [], []]


def test_jobs_are_chosen_on_the_list() -> None:
    jobs = Jobs("dark")
    jobs.update(Listing(("pool",), tuple(listed(f"job-{k}", submitted_at=NOW) for k in range(8)), (("HEALTHY", 8),)))
    assert "Choose two to six" in jobs._compare.markup
    jobs._turned("pick", "job-1")
    assert "choose another one" in jobs._compare.markup
    jobs._turned("pick", "job-<3>")
    assert 'href="compare?id=job-1&amp;id=job-%3C3%3E&amp;theme=dark">Compare 2 jobs' in jobs._compare.markup
    assert 'value="job-1" aria-pressed="true"' in jobs._list.markup
    jobs._turned("pick", "job-1")
    assert "choose another one" in jobs._compare.markup
    jobs._turned("none", "")
    assert "Choose two to six" in jobs._compare.markup and jobs.query.phase is None
    assert JobPhase.HEALTHY.value in jobs._list.markup
    assert picked([str(k) for k in range(MOST)], "7") == [str(k) for k in range(MOST)]


def test_the_link_of_a_comparison() -> None:
    tab = Tab(4000, "ACT", "LOOK", "ONCE")
    assert tab.link("a", "b c") == "http://127.0.0.1:4000/compare?id=a&id=b+c&token=ACT"
    assert tab.link("a", "b", read_only=True) == "http://127.0.0.1:4000/look/compare?id=a&id=b&token=LOOK"

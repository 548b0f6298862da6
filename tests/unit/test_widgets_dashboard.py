"""A page over a source of its own, and which pool a page asks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import panel as pn
import pytest
from msgspec.structs import replace
from test_views_job import NOW, beat, state, update, view_of
from test_widgets_panels import Reader
from workbench_widgets import pools as pools_module
from workbench_widgets.charts import CLIP
from workbench_widgets.dashboard import Dashboard, time_of_step
from workbench_widgets.files import Made
from workbench_widgets.live import Live
from workbench_widgets.overview import listing_of
from workbench_widgets.panels.period import Period, step_of
from workbench_widgets.pools import Pools
from workbench_widgets.source import Choice, Filter, LogTail, Picture

from workbench import WorkbenchError
from workbench.events import CheckpointSaved, Event, LaunchRequested, PhaseChanged
from workbench.feed import JobSummary, PoolStatus
from workbench.state import Checkpoint, JobPhase
from workbench.views.acts import Act
from workbench.views.job import ViewBuilder
from workbench.views.logs import Level, LogLine
from workbench.views.sheets import SHEETS


class FakeSource:
    job_id = "digits-12ab"

    def __init__(self) -> None:
        self.picture, self.log_version = Picture(), 0
        self.asked: list[Filter] = []
        self.until: float | None = None
        self.trips: list[tuple[float, Callable[[Picture], object]]] = []
        self.acts: list[str] = []
        self.changed: list[Callable[[], object]] = []

    def log(self, wanted: Filter, most: int, until: float | None = None) -> LogTail:
        self.asked.append(wanted)
        self.until = until
        return LogTail((LogLine(ranks=(0,), text=f"v{self.log_version}", time=1.0, stream="", level=Level.INFO),), "")

    def travel(self, time: float, done: Callable[[Picture], object]) -> None:
        self.trips.append((time, done))

    def subscribe(self, changed: Callable[[], object]) -> Callable[[], None]:
        self.changed.append(changed)
        return lambda: self.changed.remove(changed)

    def act(self, act: Act, done: Callable[[str], None], *, by: str) -> None:
        self.acts.append(f"{act.name} by {by}")
        done("it is done")

    def make(self, what: str, done: Callable[[Made], None], *, with_code: bool) -> None:
        self.acts.append(f"{what} {'with' if with_code else 'without'} code")
        done(Made(f"{what} <is> made", "text/html", b"made"))


class Page:
    """A dashboard with a clock set by hand and a browser that answers at once."""

    def __init__(self) -> None:
        self.time, self.source = 100.0, FakeSource()
        self.planned: list[tuple[float, Callable[[], None]]] = []
        self.dashboard = Dashboard(self.source, "light", self._later, lambda: self.time)
        self.dashboard.pacer.shown()
        self.run(0)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self.planned.append((self.time + seconds, call))

    def run(self, seconds: float) -> None:
        """Let time pass in steps of 50 ms."""
        end = self.time + seconds
        while True:
            due = [call for at, call in self.planned if at <= self.time + 1e-9]
            self.planned = [(at, call) for at, call in self.planned if at > self.time + 1e-9]
            for call in due:
                call()
            self.dashboard.pacer.shown()
            if not due:
                if self.time >= end:
                    return
                self.time += 0.05

    def change(self) -> None:
        for changed in self.source.changed:
            changed()

    def markup(self, name: str) -> str:
        return str(self.dashboard.roots[name].markup)


def test_a_silence_is_counted_until_news_come() -> None:
    page = Page()
    view = view_of(update())
    page.source.picture = Picture(view, "the pool does not answer", heard=page.time)
    page.change()
    page.run(12.2)
    assert "No data for 12 s" in page.markup("header")
    page.source.picture = Picture(view, heard=page.time)
    page.change()
    page.run(3.0)
    assert "No data for" not in page.markup("header") and page.planned == []


def test_a_change_is_drawn_by_every_panel() -> None:
    page = Page()
    assert "reading the job" in page.markup("header")
    page.source.picture = Picture(view_of(update()))
    page.change()
    page.run(0.2)
    assert "HEALTHY" in page.markup("header") and "<table" in page.markup("ranks")
    assert 'data-do="cancel" class="danger"' in page.markup("controls")
    assert set(page.dashboard.roots) == {
        "header", "controls", "ranks", "timeline", "checkpoints", "throughput", "logs", "frame", "notices", "period",
        "heatmap", "loss", "stragglers", "communication", "events", "resources", "findings", "gradients", "keeping",
        *(f"save_{name}" for name in SHEETS),
    }  # fmt: skip


def test_a_paused_page_stands_still_until_it_goes_on() -> None:
    page = Page()
    page.source.picture = Picture(view_of(update()))
    page.change()
    page.run(0.2)
    page.dashboard._period._pressed("pause", "")
    page.source.picture = Picture(view_of(update(now=NOW + 20, state=state(phase=JobPhase.STOPPING))))
    page.change()
    page.run(0.2)
    assert "STOPPING" in page.markup("header")  # what matters is told all the same
    assert "stands still since 20 s ago" in page.markup("period") and "no data" not in page.markup("ranks")
    page.dashboard._period._pressed("pause", "")
    page.run(0.2)
    assert "no data" in page.markup("ranks") and page.dashboard._period.paused_at is None


# --- time travel ---


def then(at: float) -> Picture:
    """How the job stood at a time: at a step that tells which."""
    return Picture(view_of(update(now=at, beats=(beat(0, step=int(at)),), buckets=())), at=at)


def test_a_moment_of_the_past_is_shown_by_all_panels_until_the_reader_goes_live() -> None:
    page = Page()
    page.source.picture = Picture(view_of(update()))
    page.change()
    page.run(0.2)
    page.dashboard._period._pressed("time", "30")
    ((asked, done),) = page.source.trips
    assert asked == 990.0 + 30
    done(then(asked))
    page.run(0.2)
    assert "As it stood 30 s after the start" in page.markup("header") and "1,020" in page.markup("header")
    assert page.source.until == asked and page.dashboard.frame.where == "at=30"
    assert 'value="30.0"' in page.markup("period") and "data-live" not in page.markup("period")
    assert 'data-do="cancel" class="danger"' in page.markup("controls")  # acts are done now
    page.source.picture = Picture(view_of(update(now=NOW + 20)))
    page.change()
    page.run(0.2)
    assert "1,020" in page.markup("header") and 'max="90.0"' in page.markup("period")
    page.dashboard._period._pressed("live", "")
    page.run(0.2)
    assert "As it stood" not in page.markup("header") and page.source.until is None
    assert page.dashboard.frame.where == "" and "data-live" in page.markup("period")


def test_of_a_slider_that_moves_one_moment_at_a_time_is_asked_and_the_last_is_shown() -> None:
    page = Page()
    page.source.picture = Picture(view_of(update()))
    page.change()
    page.run(0.2)
    for seconds in range(20, 60, 5):
        page.dashboard._period._pressed("time", str(seconds))
        page.run(0.1)
    assert [asked for asked, _ in page.source.trips] == [1010.0]
    page.source.trips[0][1](then(1010.0))
    page.run(0.2)
    assert [asked for asked, _ in page.source.trips] == [1010.0, 1045.0]
    page.dashboard._period._pressed("live", "")
    page.source.trips[1][1](then(1045.0))
    page.run(0.2)
    assert "As it stood" not in page.markup("header")  # what comes too late is not shown


def test_a_link_leads_to_a_moment_and_one_that_cannot_be_told_is_now() -> None:
    source = FakeSource()
    page = Dashboard(source, "light", lambda seconds, call: call(), at=12.5)
    assert page.frame.where == "at=12.5" and source.trips == []
    source.picture = Picture(view_of(update()))
    page.draw()
    ((asked, done),) = source.trips
    assert asked == 1002.5
    done(Picture(notice="the pool is gone"))
    page.draw()
    assert "the pool is gone" in page.roots["period"].markup and len(source.trips) == 1
    assert "As it stood" not in page.roots["header"].markup


def test_the_past_is_nothing_to_act_on() -> None:
    saved = Checkpoint(step=400, path="/x/step400", world_size=2, saved_at=1000.0)
    save = CheckpointSaved(time=1000.0, restart_count=0, checkpoint=saved)
    ended = view_of(update(state=state(phase=JobPhase.FAILED, ended_at=NOW), events=(*update().events, save)))
    for picture, has_button in ((Picture(ended), True), (Picture(ended, at=1050.0), False)):
        source = FakeSource()
        source.picture = picture
        page = Dashboard(source, "light", lambda seconds, call: None)
        assert ("Resume" in page.roots["checkpoints"].markup) is has_button


@pytest.mark.parametrize("length,step", [(0.0, 0.1), (90.0, 0.1), (3600.0, 5.0), (86_400.0, 100.0), (1000.0, 1.0)])
def test_the_slider_has_a_thousand_places_at_most(length: float, step: float) -> None:
    assert step_of(length) == pytest.approx(step)
    period = Period(lambda: None)
    period.update(length)
    assert float(period.root.markup.split('max="')[1].split('"')[0]) >= length


def test_what_no_slider_says_moves_nothing() -> None:
    period = Period(lambda: None)
    period.update(100.0)
    for value in ("", "x", "nan", "1e999", "-inf"):
        period._pressed("time", value)
        assert period.at is None
    period._pressed("time", "40")
    assert period.at == 40.0
    period._pressed("time", "-5")
    assert period.at == 0.0
    period._pressed("time", "100")
    assert period.at is None


def test_a_zoom_by_the_reader_pauses_and_following_does_not() -> None:
    page = Page()
    page.source.picture = Picture(view_of(update()))
    page.change()
    page.run(0.2)
    assert page.dashboard._period.paused_at is None
    page.dashboard._axis.range.update(start=12.0, end=15.0)
    assert page.dashboard._period.paused_at is not None


def test_a_place_in_the_heatmap_is_a_rank_and_a_step() -> None:
    source = FakeSource()
    source.picture = Picture(view_of(update()))
    page = Dashboard(source, "light", lambda seconds, call: None)
    page._pointed_in_time(1, 65.5)
    assert page.choice.rank == 1 and page.choice.step is not None
    view = view_of(update())
    assert time_of_step(view, page.choice.step) == pytest.approx(65.5)
    assert time_of_step(view, 10**9) is None and time_of_step(view, None) is None


def test_log_lines_are_flushed_twice_a_second_at_most() -> None:
    page = Page()
    page.source.asked.clear()
    for _ in range(40):  # 2 s
        page.source.log_version += 1
        page.change()
        page.run(0.05)
    assert 3 <= len(page.source.asked) <= 6
    page.run(1.0)
    assert f"v{page.source.log_version}" in page.dashboard.roots["logs"][1].markup  # the last is not forgotten


def test_a_filter_is_applied_at_once() -> None:
    page = Page()
    page.source.asked.clear()
    page.dashboard._logs._chosen("rank", "1")
    page.run(0.1)
    assert page.source.asked == [Filter(ranks=(1,))]


def test_an_act_is_told() -> None:
    page = Page()
    page.source.picture = Picture(view_of(update()))
    page.change()
    page.run(0.2)
    page.dashboard._controls._pressed("stacks", "")
    page.run(0)
    assert page.source.acts == ["stacks by the live page"] and "it is done" in page.markup("controls")


def test_a_closed_page_lets_go_of_its_source() -> None:
    page = Page()
    page.dashboard.close()
    assert page.source.changed == []
    before = page.dashboard.frame.pulse
    page.dashboard.pacer.want()
    page.run(1)
    assert page.dashboard.frame.pulse == before


def test_a_page_that_may_only_look_asks_nothing_of_the_job() -> None:
    source = FakeSource()
    saved = Checkpoint(step=400, path="/x/step400", world_size=2, saved_at=1000.0)
    save = CheckpointSaved(time=1000.0, restart_count=0, checkpoint=saved)
    source.picture = Picture(view_of(update(events=(*update().events, save))))
    page = Dashboard(source, "light", lambda seconds, call: None, may_act=False)
    assert "<button" not in page.roots["controls"].markup + page.roots["checkpoints"].markup
    page._act(Act("stacks"))
    page._checkpoints._on_act(Act("resume"))
    page._controls._pressed("stacks", "")
    assert source.acts == []


def test_a_rank_is_pointed_at_everywhere_and_in_the_address() -> None:
    source = FakeSource()
    source.picture = Picture(view_of(update()))
    page = Dashboard(source, "light", lambda seconds, call: None, choice=Choice(rank=1, step=410))
    assert page.frame.where == "rank=1&step=410"
    assert source.asked[-1].ranks == (1,)
    assert 'class="chosen"' in page.roots["ranks"].markup
    page._pointed("rank", "1")
    assert page.choice == Choice(step=410) and page.frame.where == "step=410"
    page._pointed("rank", "rm -rf")
    page._pointed("rank", "0")
    assert page.choice == Choice(0, 410)


# --- pools ---


class FakeSession:
    """Pools by name: which jobs run there; all know of all jobs, as pools of one home do."""

    running: dict[str, tuple[str, ...]]
    known = ("a-1", "b-1", "old-1")

    def __init__(self, *, pool: str, start: bool, timeout: float) -> None:
        assert not start
        if pool not in self.running:
            raise WorkbenchError(f"pool {pool} does not run")
        self.name, self.is_open = pool, True

    def pool_status(self) -> PoolStatus:
        return PoolStatus(name=self.name, version="", address="", slots=2, free=1, running=self.running[self.name])

    def attach(self, job_id: str) -> Any:
        if job_id not in self.known:
            raise WorkbenchError(f"no job {job_id}")
        return self.name, job_id

    def job_counts(self, search: str) -> dict[str, int]:
        return {"HEALTHY": 2, "FAILED": 1}

    def jobs(self, limit: int, offset: int, phase: JobPhase | None, search: str) -> list[JobSummary]:
        def line(job_id: str, number: int) -> JobSummary:
            step = 7 if job_id in self.running[self.name] else 0
            return JobSummary(
                job_id=job_id, label="", phase=JobPhase.HEALTHY, reason="", world_size=1, submitted_at=number, step=step
            )

        return [line(job_id, number) for number, job_id in enumerate(self.known)]

    def close(self) -> None:
        self.is_open = False


@pytest.fixture
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pools:
    FakeSession.running = {"a": ("a-1",), "b": ("b-1",)}
    monkeypatch.setattr(pools_module, "Session", FakeSession)
    for name in ("a", "b", "gone"):
        (tmp_path / "pools" / name).mkdir(parents=True)
    return Pools(tmp_path)


def test_a_running_job_is_asked_of_the_pool_that_runs_it(pools: Pools) -> None:
    found: Any = pools.find
    assert found("a-1") == ("a", "a-1")
    assert found("b-1") == ("b", "b-1")  # a would have its record too, but only as it was
    assert found("old-1") == ("a", "old-1")
    with pytest.raises(WorkbenchError, match="no job x"):
        found("x")


def test_no_pool_is_told(pools: Pools, tmp_path: Path) -> None:
    FakeSession.running = {}
    with pytest.raises(WorkbenchError, match="pool a does not run"):
        pools.find("a-1")
    with pytest.raises(WorkbenchError, match="%dtrain up"):
        Pools(tmp_path / "empty").find("a-1")


def test_a_forgotten_session_is_made_anew(pools: Pools) -> None:
    first: Any = pools.session("a")
    assert pools.session("a") is first
    pools.forget(first)
    assert not first.is_open and pools.session("a") is not first


def test_the_listing_takes_each_job_from_its_pool(pools: Pools) -> None:
    listing = listing_of(pools)
    assert listing.jobs is not None
    assert {job.job_id: job.step for job in listing.jobs} == {"old-1": 0, "b-1": 7, "a-1": 7}
    assert listing.total(None) == 3 and listing.total(JobPhase.HEALTHY) == 2
    assert listing.pools[0].startswith("pool a · 2 slots") and "gone does not run" in listing.pools[2]


def test_every_chart_hides_the_pixel_that_is_never_cleared() -> None:
    charts = [pane for root in Page().dashboard.roots.values() for pane in root.select(pn.pane.Bokeh)]
    assert len(charts) == 6 and all(CLIP in pane.object.stylesheets for pane in charts)


# --- nothing to show ---


def texts(page: Page) -> dict[str, str]:
    """What the panels say that a reader gets to see, by name."""
    found = {}
    for name, root in page.dashboard.roots.items():
        parts = root.select(Live) if isinstance(root, pn.Column) else [root] if isinstance(root, Live) else []
        found[name] = " ".join(Reader(part.markup).text for part in parts)
    return found


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("phase", [JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.STOPPED, None])
def test_of_a_job_that_is_over_nothing_is_told_as_if_it_went_on(phase: JobPhase | None, ranks: int) -> None:
    """`phase` None: it went on when it was saved."""
    page = Page()
    page.source.log = lambda *_: LogTail((), "")  # type: ignore[method-assign]
    going = state(ranks, phase=JobPhase.HEALTHY if ranks else JobPhase.INIT)
    record: tuple[Event, ...] = (LaunchRequested(time=going.submitted_at, job_id=going.job_id, spec=going.spec),)
    page.source.picture = Picture(view_of(update(state=going, beats=(), buckets=(), events=record)))
    page.change()
    page.run(1.0)
    before = texts(page)
    if phase is not None:
        going = replace(going, phase=phase, ended_at=NOW)
        record += (PhaseChanged(time=NOW, phase=phase, reason="", restart_count=0),)
    builder = ViewBuilder(is_saved=phase is None)
    builder.add(update(state=going, beats=(), buckets=(), events=record))
    page.source.picture = Picture(builder.view(), is_saved=phase is None)
    page.change()
    page.run(1.0)
    after = texts(page)
    assert [name for name in EMPTY_PANELS if after[name] in ("", before[name])] == []
    for name, text in after.items():
        assert not re.search(PRESENT, text), (name, text)
    assert ("never given slots" if not ranks else "never called optimizer.step()") in after["header"]


PRESENT = r"(?i)\b(yet|so far|appears?|once|will|now|running|waiting|stands)\b"
EMPTY_PANELS = (
    "findings", "timeline", "throughput", "loss", "heatmap", "stragglers", "communication", "logs", "events",
    "resources", "gradients", "checkpoints",
)  # fmt: skip

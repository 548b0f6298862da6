"""What the panels show, as HTML made of a view."""

from __future__ import annotations

import math
import re
import time
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace
from test_views_job import beat, history, state, update, view_of
from workbench_widgets.live import Live
from workbench_widgets.overview import ALL as ALL_JOBS
from workbench_widgets.overview import MOST as JOBS_SHOWN
from workbench_widgets.overview import Listing, Query
from workbench_widgets.panels import jobs as jobs_panel
from workbench_widgets.panels.controls import Controls, controls_html
from workbench_widgets.panels.header import header_html
from workbench_widgets.panels.logs import MOST, Logs, bar_html, lines_html
from workbench_widgets.panels.ranks import EMPTY, ranks_html
from workbench_widgets.panels.throughput import ALL, Throughput, as_table_html, head_html, lines_of, summary
from workbench_widgets.source import Filter, LogTail, Picture

from workbench.feed import JobSummary
from workbench.findings import Finding
from workbench.state import Failure, FailureKind, JobPhase
from workbench.verbs.parse import parse
from workbench.verbs.table import find_verb
from workbench.views.acts import Act
from workbench.views.logs import Level, LogLine

EVIL = "<img src=x onerror=alert(1)>\"'&"


class Reader(HTMLParser):
    """Collects tags and text, and fails on tags that do not close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == [], self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("input", "line"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def line(text: str, *ranks: int, **changes: object) -> LogLine:
    made = LogLine(ranks=ranks or (0,), text=text, time=1.0, stream="stdout", level=Level.INFO)
    return replace(made, **changes)


def failed(reason: str, traceback: str = "") -> Failure:
    return Failure(kind=FailureKind.EXCEPTION, rank=1, reason=reason, time=1.0, traceback=traceback, step=3)


def listed(job_id: str, **changes: object) -> JobSummary:
    made = JobSummary(job_id=job_id, label="d", phase=JobPhase.HEALTHY, reason="", world_size=2, submitted_at=1.0)
    return replace(made, **changes)


def jobs_html(listing: Listing, query: Query = ALL_JOBS) -> str:
    """All of the page of jobs."""
    return (
        jobs_panel.head_html(listing)
        + jobs_panel.bar_html(listing, query)
        + jobs_panel.list_html(listing, query, "dark")
    )


# --- nothing of a job can become markup ---


def test_what_comes_from_a_job_is_text() -> None:
    bad = state(phase=JobPhase.FAILED, reason=EVIL, job_id=EVIL, failure=failed(EVIL, EVIL))
    view = view_of(update(state=bad, beats=(beat(0, activity="COLLECTIVE", collective=EVIL), beat(1))))
    jobs = (listed(EVIL, phase=JobPhase.FAILED, reason=EVIL),)
    for html in (
        header_html(EVIL, Picture()),
        header_html(EVIL, Picture(view, EVIL)),
        ranks_html(view),
        controls_html(view, f"{EVIL}\n\n{EVIL}", is_asking=False),
        lines_html(LogTail((line(EVIL),), EVIL), Filter()),
        jobs_html(Listing((EVIL,), jobs)),
    ):
        read = Reader(html)
        assert read.of("img") == [] and not any("onerror" in name for _, attrs in read.tags for name in attrs)


# --- header ---


def test_header_before_anything_is_known() -> None:
    assert "reading the job’s record" in Reader(header_html("digits-1", Picture())).text


def test_header_of_a_running_job() -> None:
    read = Reader(header_html("digits-12ab", Picture(view_of(update()))))
    assert "digits-12ab" in read.text and "HEALTHY" in read.text and "2 ranks · running for" in read.text
    assert "600 of 3,000" in re.sub(r"\s+", " ", read.text)
    assert "samples/s" in read.text and "0.5" in read.text
    (progress,) = [a for a in read.of("div") if a.get("role") == "progressbar"]
    assert progress["aria-valuenow"] == "20"


def test_header_leaves_to_the_findings_what_they_tell() -> None:
    odd = Finding(symptom="all ranks got the same batch", cause="one shard", advice="a sampler", evidence=("digests",))
    view = replace(view_of(update()), findings=(odd,), slowest="rank 1 works long", output_dropped=10**6)
    text = Reader(header_html("x", Picture(view))).text
    assert "slowest: rank 1 works long" in text and "1 MB of output left out" in text
    assert not any(part in text for part in ("same batch", "digests", "one shard", "a sampler"))


def test_header_says_that_it_is_stale_and_keeps_the_picture() -> None:
    text = Reader(header_html("x", Picture(view_of(update()), "the pool does not answer"))).text
    assert "No news: the pool does not answer. Below is the last that was heard. Trying again." in text
    assert "600" in text and "last known:" in text and "No data for" not in text
    html = header_html("x", Picture(view_of(update()), "the pool does not answer"), silence=12.3)
    assert "No data for 12 s." in Reader(html).text and "12 s" not in html.partition('role="status">')[2].split("<")[0]


def test_header_shows_the_first_cause_once_with_its_traceback() -> None:
    reason = "rank 1 raised ValueError: bad batch"
    ended = state(phase=JobPhase.FAILED, reason=reason, failure=failed(reason, "Traceback …\nValueError: bad batch"))
    html = header_html("x", Picture(view_of(update(state=ended))))
    (copied,) = re.findall(r'<pre id="error" hidden>(.*?)</pre>', html, re.DOTALL)
    text = Reader(html.replace(copied, "")).text
    assert reason in copied and "Copy error report" in text
    assert text.replace("is FAILED. " + reason, "").count(reason) == 1  # once more for screen readers alone
    assert "ValueError: bad batch" in text and "%dtrain logs digits-12ab -r 1" in text


def test_header_tells_a_failure_as_past_once_the_job_has_recovered() -> None:
    again = state(failure=failed("rank 1 raised ValueError: bad batch", "Traceback …"), restart_count=1, fruitless=1)
    html = header_html("x", Picture(view_of(update(state=again))))
    assert "recovered from: rank 1 raised ValueError: bad batch" in Reader(html).text
    assert '<details class="notice good"><summary>recovered from: ' in html and "notice bad" not in html


def test_what_is_spoken_changes_with_the_state_alone() -> None:
    def spoken(now: float) -> str:
        html = header_html("x", Picture(view_of(update(now=now))))
        return re.findall(r'aria-live="polite">(.*?)</p>', html)[0]

    assert spoken(1060.0) == spoken(1061.0)


# --- ranks ---


def test_ranks_are_a_table_with_headings_and_bars_with_words() -> None:
    read = Reader(ranks_html(view_of(update())))
    assert [a["scope"] for a in read.of("th")].count("row") == 2
    bars = [a for a in read.of("div") if a.get("role") == "img"]
    assert len(bars) == 2 and "comm wait 40 %" in (bars[0]["aria-label"] or "")
    assert "where a step goes" in read.text and "40 %" in read.text


def test_the_slowest_rank_is_marked_by_text_and_row() -> None:
    slow = (*history(1), *(replace(b, rank=1, comm=0.05) for b in history(1)))
    read = Reader(ranks_html(view_of(update(buckets=slow))))
    assert "◀ slowest" in read.text
    assert [a.get("class") for a in read.of("tr")] == [None, None, "marked"]


def test_many_ranks_are_folded() -> None:
    html = ranks_html(view_of(update(1024)))
    assert len(html) < 50_000 and "0–1023" in html


def test_no_rank_yet() -> None:
    assert ranks_html(replace(view_of(update()), rows=())) == EMPTY.html()


# --- throughput ---


def test_a_line_a_rank_with_gaps_where_nothing_came() -> None:
    buckets = tuple(b for b in history() if not 1053 <= b.start < 1057)
    lines, unit = lines_of(view_of(update(buckets=buckets)))
    assert unit == "samples/s" and set(lines) == {0, 1}
    assert sum(math.isnan(y) for y in lines[0].y) == 1
    assert lines[0].y[0] == pytest.approx(320.0)


def test_steps_where_samples_are_not_known() -> None:
    lines, unit = lines_of(view_of(update(buckets=history(samples=0.0))))
    assert unit == "steps/s" and lines[0].y[-1] == pytest.approx(10.0)


def test_many_ranks_are_one_line() -> None:
    lines, _ = lines_of(view_of(update(64, buckets=history(64))))
    assert set(lines) == {ALL}
    assert summary(lines, "samples/s").startswith("Chart of all ranks together")
    assert "Throughput of all ranks, samples/s" in head_html(lines, "samples/s")


def test_the_chart_in_words_and_numbers() -> None:
    lines, unit = lines_of(view_of(update()))
    assert "2 ranks" in summary(lines, unit) and "320 samples/s" in summary(lines, unit)
    assert "rank 1, samples/s" in Reader(as_table_html(lines, unit)).text
    assert "after the first seconds" in head_html({}, unit)


def test_the_chart_takes_new_points_and_themes() -> None:
    panel = Throughput("light")
    panel.update(view_of(update()))
    sources = {r.name: r.data_source.data["x"] for r in panel.figure.renderers}
    assert len(sources["rank 0"]) == 10 and len(sources["rank 2"]) == 0
    before = panel.figure.renderers[1].glyph.line_color
    panel.paint("dark")
    assert panel.figure.renderers[1].glyph.line_color != before


# --- logs ---


def test_lines_say_who_and_how_often() -> None:
    read = Reader(
        lines_html(LogTail((line("epoch 1", 0, 1, times=2), line("boom", 1, level=Level.ERROR)), ""), Filter())
    )
    assert "0, 1 ×2" in read.text and "epoch 1" in read.text
    assert [a.get("class") for a in read.of("div") if "data-key" in a] == [None, "level2"]


def test_a_line_keeps_its_key_when_another_rank_says_the_same() -> None:
    def key(one: LogLine) -> str | None:
        return next(
            a["data-key"] for a in Reader(lines_html(LogTail((one,), ""), Filter())).of("div") if "data-key" in a
        )

    assert key(line("x", 0)) == key(line("x", 0, 1, times=2)) != key(line("y", 0))


def test_logs_are_bounded_and_say_what_is_missing() -> None:
    html = lines_html(LogTail(tuple(line("x" * 5000) for _ in range(MOST)), "3 earlier lines not shown here"), Filter())
    assert len(html) < MOST * 700
    assert "the newest 400 lines; 3 earlier lines not shown here" in html


def test_empty_logs_say_what_would_fill_them() -> None:
    assert "Nothing has been printed yet" in lines_html(LogTail((), ""), Filter())
    assert "No line here is of this choice" in lines_html(LogTail((), ""), Filter(text="x"))


def test_the_readers_choice() -> None:
    asked: list[Filter] = []
    logs = Logs(lambda: asked.append(logs.filter))
    for name, value in [
        ("rank", "3"),
        ("level", "2"),
        ("text", " loss "),
        ("level", "99"),
        ("nonsense", ""),
        ("rank", ""),
    ]:
        logs._chosen(name, value)
    assert asked == [
        Filter(ranks=(3,)),
        Filter((3,), Level.ERROR),
        Filter((3,), Level.ERROR, "loss"),
        Filter(None, Level.ERROR, "loss"),
    ]
    assert len(Reader(bar_html(8)).of("option")) == 9 + 3


# --- controls ---


def test_cancel_asks_first() -> None:
    acts: list[Act] = []
    controls = Controls(acts.append)
    controls.update(view_of(update()))
    controls._pressed("cancel", "")
    assert acts == [] and "End this job?" in controls.root.markup
    controls._pressed("keep", "")
    assert "End this job?" not in controls.root.markup
    controls._pressed("cancel", "")
    controls._pressed("cancel", "")
    assert acts == [Act("cancel")] and "cancel: asking the pool" in controls.root.markup


def test_a_question_goes_when_the_job_has_ended_meanwhile() -> None:
    controls = Controls(lambda _: None)
    controls.update(view_of(update()))
    controls._pressed("cancel", "")
    controls.update(view_of(update(state=state(phase=JobPhase.SUCCEEDED, ended_at=1050.0))))
    assert "End this job?" not in controls.root.markup


def test_a_button_that_cannot_says_why() -> None:
    acts: list[Act] = []
    controls = Controls(acts.append)
    controls.update(view_of(update(state=state(phase=JobPhase.SUCCEEDED, ended_at=1050.0))))
    assert controls.root.markup.count('aria-disabled="true"') == 4  # all but resume
    controls._pressed("stacks", "")
    assert "Nothing done: the job has ended: SUCCEEDED." in controls.root.markup and acts == []
    controls._pressed("rm -rf", "")
    assert acts == []


# --- jobs ---


def test_jobs_link_to_their_pages() -> None:
    read = Reader(jobs_html(Listing(("pool default · 2 slots",), (listed("digits-1"),))))
    assert [a["href"] for a in read.of("a")] == ["job?id=digits-1&theme=dark"]
    assert "pool default" in read.text


def test_no_jobs_and_no_pool() -> None:
    assert "asking the pools" in jobs_html(Listing())
    assert "%dtrain up" in jobs_html(Listing((), ()))
    assert "No job is like that" in jobs_html(Listing((), ()), Query(search="x"))


def test_before_the_first_job_the_form_and_a_line_to_copy_are_pointed_at() -> None:
    for above in ([], [Live(markup="a form")]):
        jobs = jobs_panel.Jobs("light", above=above)
        jobs.update(Listing(("pool default",), ()))
        read = Reader(jobs._list.markup)
        assert "No job has run here yet." in read.text and ("Open “Launch a job” above" in read.text) is bool(above)
        (line,), (button,) = read.of("pre"), read.of("button")
        assert button["data-copy"] == line["id"] and jobs_panel.FIRST in read.text
        prefix, *words = jobs_panel.FIRST.split()
        assert prefix == "%dtrain" and parse(*find_verb(words)).nproc_per_node == 2
    jobs._turned("copied", "1")
    assert "The line is in the clipboard." in jobs._list.markup
    jobs.update(Listing(("pool default",), (listed("digits-1"),)))
    assert "clipboard" not in jobs._list.markup and "digits-1" in jobs._list.markup


def test_jobs_tell_when_they_were_launched_and_how_long_ago() -> None:
    now = time.mktime((2026, 12, 1, 15, 37, 0, 0, 0, -1))
    jobs = (listed("a-1", submitted_at=now - 200.0), listed("b-2", submitted_at=now - 86_400.0))
    html = jobs_html(Listing((), jobs, at=now))
    assert "15:33, 3 min ago" in html and "2026-11-30 15:37, 1 d ago" in html
    assert 'title="2026-12-01 15:33:40 ' in html


def test_progress_is_a_bar_and_a_number() -> None:
    html = jobs_html(Listing((), (listed("a-1", progress=(41, 100)),)))
    assert "width:41.0%" in html and "41 %" in Reader(html).text and "41 of 100" in html


def test_a_reader_searches_filters_and_turns_pages() -> None:
    asked: list[Query] = []
    jobs = jobs_panel.Jobs("light", lambda: asked.append(jobs.query))
    many = tuple(listed(f"a-{k}") for k in range(JOBS_SHOWN))
    jobs.update(Listing((), many, (("FAILED", 3), ("HEALTHY", 9_997))))
    assert "1–50 of 10,000" in jobs._list.markup and "FAILED (3)" in jobs._bar.markup
    jobs._turned("older", "")
    jobs._chosen("search", " Digits ")
    jobs._chosen("search", "Digits")  # nothing new
    jobs._chosen("phase", "FAILED")
    jobs._chosen("phase", "no such phase")
    assert asked == [
        Query(offset=JOBS_SHOWN), Query(search="Digits"), Query(JobPhase.FAILED, "Digits"), Query(search="Digits")
    ]  # fmt: skip
    jobs._turned("newer", "")
    assert jobs.query.offset == 0


def test_a_rank_is_chosen_with_a_button_and_its_row_is_marked() -> None:
    read = Reader(ranks_html(view_of(update()), chosen=1))
    assert [b["aria-pressed"] for b in read.of("button")] == ["false", "true"]
    assert sum("chosen" in (row.get("class") or "") for row in read.of("tr")) == 1


def test_a_link_that_only_looks_has_no_button_and_does_nothing() -> None:
    acts: list[Act] = []
    controls = Controls(acts.append, may_act=False)
    controls.update(view_of(update()))
    assert "<button" not in controls.root.markup and "only to look at" in controls.root.markup
    controls._pressed("stacks", "")
    assert acts == [] and "this link is for looking only" in controls.root.markup

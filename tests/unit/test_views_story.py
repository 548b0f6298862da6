"""A job's life in words, lanes of letters and tables."""

from __future__ import annotations

import pytest
from test_views_job import update, view_of
from test_views_timeline import began, killed, launched, phase, places
from timeline_records import JOB, Story, timeline_of

from workbench.events import (
    CheckpointSaved,
    Event,
    FailureDetected,
    LaunchRequested,
    RecoveryStarted,
    ResizeRequested,
    RunResumed,
    SlotsGranted,
)
from workbench.spec import JobSpec
from workbench.state import Checkpoint, CheckpointTier, Failure, FailureKind
from workbench.views.html import snapshot_html
from workbench.views.lane_rows import Row, rows_of
from workbench.views.lane_text import (
    MOST_MARKS,
    NOTHING_EVER,
    NOTHING_YET,
    lane_lines,
    mark_text,
    render_timeline,
    span_text,
)
from workbench.views.spans import MarkKind, Span, SpanKind, size_of
from workbench.views.story import attempts_table, numbers_line, since, story_lines
from workbench.views.text import render_status


def clock(time: float) -> str:
    return f"14:00:{time:04.1f}"


def resumed(at: float, step: int, count: int = 1) -> RunResumed:
    return RunResumed(time=at, restart_count=count, step=step, tier=CheckpointTier.MEMORY)


RECOVERED: list[Event] = [*launched(), *killed(5.0, 1), resumed(5.5, 9), began(5.6, 1, 10)]


# --- a short story ----------------------------------------------------------------------------------------------------


def test_a_recovery_in_a_line() -> None:
    lines = story_lines(timeline_of(RECOVERED, now=9.0), clock)
    assert lines[0] == "14:00:05.0 rank 1 killed by SIGKILL at step 10 → restart 1 of 3 → back after 0.6 s, 1 step lost"
    assert lines[-1] == "1 restart · 1 step lost"


@pytest.mark.parametrize(
    ("more", "now", "end"),
    [
        ([], 8.0, "→ restart 1 of 3 → waiting for its first step for 2.8 s"),
        ([phase(9.0, "FAILED", 1, "rank 1 died again")], 9.0, "→ restart 1 of 3 → which did not get to a step"),
    ],
)
def test_a_recovery_that_is_not_done(more: list[Event], now: float, end: str) -> None:
    lines = story_lines(timeline_of([*launched(), *killed(5.0, 1), *more], now=now), clock)
    assert lines[0].endswith(end)


def test_an_attempt_that_ended_in_its_first_step_got_to_it() -> None:
    again = [*launched(), *killed(5.0, 1), resumed(5.5, 9), *killed(5.8, 1, count=1), resumed(6.5, 9, count=2)]
    lines = story_lines(timeline_of(again, now=9.0), clock)
    assert lines[0].endswith("→ restart 1 of 3 → which got to step 10, 1 step lost")


def test_what_is_no_failure_is_told_by_its_decision() -> None:
    record = [
        *launched(4),
        ResizeRequested(time=5.0, ranks=2, by="ana"),
        phase(5.0, "RECOVERING"),
        RecoveryStarted(time=5.5, restart_count=1, reason="resized to 2 ranks by ana"),
        SlotsGranted(time=5.5, placements=places(2)),
        resumed(5.8, 10),
        began(6.0, 1, 11),
    ]
    (line, _) = story_lines(timeline_of(record, now=9.0), clock)
    assert line == "14:00:05.5 resized to 2 ranks by ana → steps again after 0.5 s, 0 steps lost"


def test_a_job_that_never_failed_has_no_story() -> None:
    assert story_lines(timeline_of(launched(), now=9.0)) == []


def test_only_the_newest_are_told() -> None:
    record = [*launched()]
    for k in range(6):
        record += [*killed(5.0 + k, 1, k), began(5.6 + k, k + 1, 11)]
    lines = story_lines(timeline_of(record, now=20.0))
    assert lines[0] == "… 3 earlier attempts: see timeline" and len(lines) == 5
    assert lines[1].startswith("+8.0 s rank 1 killed")


def test_numbers() -> None:
    story = Story()
    story.launch()
    story.take(99)
    assert numbers_line(story.timeline()) == "goodput 100 % · ETTR 98.5 %"


def test_what_a_script_loads_by_itself_makes_its_losses_a_bound() -> None:
    """Its counter begins at 0 in each attempt, and its own checkpoint may have had all but a step."""
    alone = [*launched(), *killed(5.0, 1), began(5.6, 1, 1)]
    lines = story_lines(timeline_of(alone, now=9.0), clock)
    assert lines[0].endswith("back after 0.6 s, up to 10 steps lost")
    assert lines[-1].endswith("1 restart · up to 10 steps lost")


# --- where it is shown ------------------------------------------------------------------------------------------------


def test_status_and_snapshot_tell_the_story() -> None:
    view = view_of(update(events=tuple(RECOVERED)))
    told = "rank 1 killed by SIGKILL at step 10 → restart 1 of 3 → back after 0.6 s, 1 step lost"
    assert f"14:00:05.0 {told}" in render_status(view, width=200, clock=clock)
    html = snapshot_html(view)
    assert told in html and "<caption>Attempts</caption>" in html and len(html) < 20_000
    assert "Attempts" not in snapshot_html(view_of(update(events=tuple(launched()))))


def test_attempts_in_a_table() -> None:
    table = attempts_table(timeline_of(RECOVERED, now=9.0), clock)
    rows = [dict(zip([c.title for c in table.columns], cells, strict=True)) for cells in zip(*[c.cells for c in table.columns], strict=True)]  # fmt: skip  # noqa: E501
    assert rows[0] == {
        "attempt": "0", "began": "14:00:00.0", "lasted": "5.2 s", "ranks": "2", "from": "–", "steps": "1–10",
        "lost": "1 step", "detected after": "0 ms", "back after": "600 ms",
        "how it ended": "rank 1 killed by SIGKILL at step 10",
    }  # fmt: skip
    assert rows[1]["from"] == "step 9, memory" and rows[1]["how it ended"] == "goes on" and rows[1]["lost"] == "–"


def test_a_timeline_in_a_terminal() -> None:
    text = render_timeline(timeline_of(RECOVERED, now=9.0), JOB, clock, width=60)
    lines = text.splitlines()
    assert lines[0] == "timeline of train-1a2b · until now 9.0 s"
    lanes = {line[:6].strip(): line[8:] for line in lines[3:8]}
    assert lanes["rank 0"].count("=") > 20 and "r" in lanes["rank 0"] and "X" not in lanes["rank 0"]
    assert "X" in lanes["rank 1"] and "F" in lanes["marks"]
    assert "= stepping" in text and "X dead" in text and "F failure detected" in text
    assert "14:00:05.2  F  rank 1 killed by SIGKILL at step 10" in text
    assert all(len(line) <= 60 for line in lines)


def test_a_moment_is_seen_in_hours() -> None:
    timeline = timeline_of(RECOVERED, now=36_000.0)
    lane = next(line for line in lane_lines(timeline, clock, 80) if line.startswith("rank 1"))
    assert "X" in lane and lane.count("=") > 50


def test_before_there_is_anything() -> None:
    record: list[Event] = [LaunchRequested(time=0.0, job_id=JOB, spec=JobSpec(entrypoint="t.py", nproc_per_node=0))]
    assert NOTHING_YET in render_timeline(timeline_of(record, now=5.0), JOB)
    over = [*record, phase(5.0, "STOPPED", 0)]
    assert NOTHING_EVER in render_timeline(timeline_of(over, now=5.0), JOB)


def test_marks_are_few_and_the_rest_is_counted() -> None:
    record = [*launched()]
    for k in range(30):
        record += [*killed(5.0 + k, 1, k), began(5.6 + k, k + 1, 11)]
        point = Checkpoint(step=11, path="/c", world_size=2, saved_at=5.8 + k)
        record.append(CheckpointSaved(time=5.8 + k, restart_count=k + 1, checkpoint=point))
    lines = render_timeline(timeline_of(record, now=40.0), JOB, clock, width=100).splitlines()
    assert sum("  C  checkpoint" in line for line in lines) == 3
    (left,) = [line for line in lines if line.endswith("earlier marks")]
    assert left == f"… {4 * 30 - MOST_MARKS} earlier marks"
    folded = timeline_of(record, now=40.0).marks[0]
    assert mark_text(folded).startswith("rank 1 killed")


def test_a_span_in_words() -> None:
    spans = timeline_of(RECOVERED, now=9.0).spans
    assert "ranks 0, 1 stepping for 3.4 s: stepping from step 10" in [span_text(one) for one in spans]
    assert any(span_text(s).startswith("rank 1 dead for 200 ms: killed by SIGKILL at step 10") for s in spans)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_ranks_that_did_the_same_share_a_row() -> None:
    timeline = timeline_of([*launched(1024), *killed(5.0, 700)[:4]], now=6.0)
    rows = rows_of(timeline.spans)
    assert [row.ranks for row in rows] == [((0, 699), (701, 1023)), ((700, 700),)]
    assert rows[0].label == "ranks 0–699, 701–1023"


def test_too_many_rows_keep_the_latest_trouble_apart() -> None:
    spans = [Span(kind=SpanKind.STEPPING, ranks=((0, 99),), start=0.0, end=100.0, title="")]
    spans += [Span(kind=SpanKind.DEAD, ranks=((k, k),), start=100.0 + k, end=101.0 + k, title="") for k in range(40)]
    rows = rows_of(spans, most=8)
    assert len(rows) == 8 and sum(size_of(row.ranks) for row in rows) == 100
    assert [row.ranks for row in rows[:2]] == [((34, 34),), ((35, 35),)]
    mixed: Row = rows[-1]
    assert mixed.is_mixed and mixed.label == "34 other ranks" and size_of(mixed.ranks) == 34


def test_what_a_host_says_has_no_control_characters() -> None:
    failure = Failure(kind=FailureKind.EXCEPTION, rank=1, reason="rank 1 raised \x1b[31mEvil\nError", time=5.0)
    record = [*launched(), phase(5.0, "STOPPING"), FailureDetected(time=5.0, restart_count=0, failure=failure)]
    text = render_timeline(timeline_of(record, now=6.0), JOB, clock)
    assert "\x1b" not in text and since(0.0)(61.0) == "+1 min 01 s"
    assert {m.kind for m in timeline_of(record).marks} == {MarkKind.FAILED}

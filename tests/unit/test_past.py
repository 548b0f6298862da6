"""How a job stood at a time of its past: as a follower saw it then."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace
from test_views_job import bucket
from timeline_records import JOB, Story

from workbench import past as past_module
from workbench.feed import Bucket, Cursor, Total, Update
from workbench.past import Past, until
from workbench.state import JobPhase
from workbench.telemetry import ConsistencyReport, RankBeat
from workbench.views.buckets import across_ranks
from workbench.views.happenings import HappeningList
from workbench.views.job import JobView, ViewBuilder
from workbench.views.panels import PanelBuilder, panels_at


def failing() -> Story:
    """Two ranks that step for 4 s, lose one of them, begin anew and finish; the record starts at a whole second."""
    story = Story(step_time=0.125)
    story.launch()
    story.take(20)
    story.save()
    story.take(11)
    story.kill(1)
    story.pool.run()
    story.launch()
    story.take(30)
    story.finish()
    return story


def told(story: Story, now: float, **changes: Any) -> Update:
    """What a pool tells a follower who knows nothing, at a time at which the record ended."""
    events = tuple(event for event in story.events if event.time <= now)
    whole = Past()
    whole.add(Update(state=story.pool.states[JOB], cursor=Cursor(), now=now, events=events))
    buckets = tuple(b for b in story.buckets() if b.start + b.width <= now)
    state = whole.at(now).state
    return replace(Update(state=state, cursor=Cursor(event=len(events)), now=now, events=events, buckets=buckets),
                   **changes)  # fmt: skip


def past_of(story: Story, **changes: Any) -> Past:
    made = Past()
    made.add(told(story, story.pool.now + 2, **changes))
    return made


def view_of(update: Update) -> JobView:
    builder = ViewBuilder(is_past=True)
    builder.add(update)
    return builder.view()


def test_it_is_what_a_follower_saw_at_the_time() -> None:
    story = failing()
    past, first = past_of(story), math.ceil(past_of(story).begin)
    phases = []
    for second in range(first, math.ceil(story.pool.now) + 1):
        then, now = view_of(past.at(second)), view_of(told(story, second))
        assert then == now
        phases.append(then.phase)
    assert phases[-1] is JobPhase.SUCCEEDED and phases[0] is JobPhase.HEALTHY and len(phases) > 8


def test_before_a_failure_nothing_is_known_of_it() -> None:
    story = failing()
    past, (failed, *_) = past_of(story), [e.time for e in story.events if type(e).__name__ == "FailureDetected"]
    before, after = view_of(past.at(failed - 0.005)), view_of(past.at(failed))
    assert (before.restart_count, after.restart_count) == (0, 1)
    assert before.timeline is not None and after.timeline is not None
    assert (len(before.timeline.attempts), len(after.timeline.attempts)) == (1, 2)
    assert before.timeline.attempts[0].cause is None and after.timeline.attempts[0].cause is not None
    assert before.failure is None and not before.rows[1].exit


def test_a_time_before_the_first_event_is_the_first_event() -> None:
    past = past_of(failing())
    assert past.at(0.0) == past.at(past.begin) and past.at(0.0).now == past.begin
    with pytest.raises(ValueError, match="no update"):
        Past().at(0.0)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.999])
def test_of_a_stretch_the_part_that_had_passed(share: float) -> None:
    whole = bucket(0, 1000.0, width=60.0, steps=600, last_step=700, duration=60.0, samples=19_200.0)
    part = until(whole, 1000.0 + 60 * share)
    assert part is not None and part.last_step == 100 + part.steps
    assert part.steps == round(600 * share) and part.width == pytest.approx(60 * share)
    assert part.duration / part.steps == pytest.approx(0.1) and part.samples / part.steps == pytest.approx(32)
    assert (part.loss, part.slowest) == (whole.loss, whole.slowest)
    total = until(across_ranks([whole, replace(whole, rank=1)])[0], 1000.0 + 60 * share)
    assert isinstance(total, Total) and total.steps == round(1200 * share)
    assert total.last_step == pytest.approx(part.last_step, abs=1)


def test_nothing_is_known_of_a_stretch_that_had_not_begun_or_had_ended_no_step() -> None:
    whole = bucket(0, 1000.0, width=10.0, steps=1)
    assert until(whole, 1000.0) is None and until(whole, 999.0) is None and until(whole, 1001.0) is None
    assert until(whole, 1010.0) is whole


def test_of_few_ranks_finer_numbers_are_wanted_only_where_they_are_coarse() -> None:
    story = failing()
    past, end = past_of(story), story.pool.now
    assert past.wanted(end) == () and past.wanted(past.begin - 1) == ()
    coarse = Past()
    rough = tuple(replace(b, width=10.0, start=b.start // 10 * 10) for b in story.buckets() if b.start % 10 == 0)
    coarse.add(told(story, end + 10, buckets=rough))
    (wanted,) = coarse.wanted(end)
    assert wanted.until == end and wanted.width == 1.0 and 5 < end - wanted.since < 8
    fine = [b for b in story.buckets() if wanted.since <= b.start < end]
    then = coarse.at(end, fine)
    known = [b for b in then.buckets if b.rank == 0]
    assert [b.start for b in known] == sorted(b.start for b in known)
    assert all(a.start + a.width <= b.start + 1e-9 for a, b in pairwise(known))
    assert view_of(then).rows[0].step_time == pytest.approx(0.125)


def test_of_many_ranks_only_totals_are_kept() -> None:
    story = Story(ranks=20, step_time=0.5)
    story.launch()
    story.take(40)
    past, now = past_of(story), math.floor(story.pool.now)
    first, *wider = past.wanted(now)
    assert (
        first.width == 2.0
        and now - first.since == pytest.approx(3.0, abs=1e-6)
        and [one.width for one in wider] == [10.0, 60.0, 600.0]
    )
    assert past.at(now).buckets == ()
    fine = [b for b in story.buckets() if first.since <= b.start < now]
    view = view_of(past.at(now, fine))
    assert len(view.rows) == 20 and all(row.step_time == pytest.approx(0.5) for row in view.rows)
    assert view.series and not view.rank_series


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_module, "EVENTS", 256)
    story = Story(ranks=4, max_restarts=1000)
    for _ in range(60):
        story.launch()
        story.take(3)
        story.kill(2)
        story.pool.run()
    past, now = past_of(story), story.pool.now
    assert len(story.events) > 600 and len(past.at(now).events) <= 257
    whole = Past()
    monkeypatch.setattr(past_module, "EVENTS", 10**6)
    whole.add(told(story, now + 2))
    for time in (past.begin, past.begin + 1, now - 3, now):
        assert past.at(time).state == whole.at(time).state
    assert past.begin > whole.begin and past.at(0.0).now == past.begin
    assert past.at(now).events[0] == story.events[0]
    long = [bucket(0, 1000.0 + k) for k in range(5000)]
    past.add(told(story, now, events=(), buckets=tuple(long)))
    assert len(past._totals.items) <= 600 and all(len(h.items) <= 600 for h in past._by_rank.values())


def test_reports_and_beats_of_later_are_not_known_yet() -> None:
    story = failing()
    start = past_of(story).begin
    report = ConsistencyReport(job_id=JOB, restart_count=0, rank=0, start=start + 1, end=start + 2, first_step=1,
                               last_step=8, ranks=(0, 1), checked=8, agreed=8)  # fmt: skip
    beat = RankBeat(job_id=JOB, restart_count=1, rank=0, time=start + 8, step=60, activity="FORWARD", since=0.0)
    past = past_of(story, checks=(report, replace(report, start=start + 2, end=start + 3)), beats=(beat,))
    assert len(past.at(start + 2.5).checks) == 1 and past.at(start + 2.5).beats == ()
    assert len(past.at(start + 9).checks) == 2 and past.at(start + 9).beats == (beat,)


def test_what_ranks_were_doing_is_that_of_the_record() -> None:
    story = failing()
    past = past_of(story)
    start = past.begin

    def beat(rank: int, time: float, **changes: Any) -> RankBeat:
        fields = {"restart_count": 0, "step": 3, "activity": "COLLECTIVE", "since": 0.25, "rss": 2**20} | changes
        return RankBeat(job_id=JOB, rank=rank, time=time, **fields)

    row = view_of(past.at(start + 2, beats=[beat(0, start + 1.5), beat(1, start + 2.5)])).rows
    assert (row[0].activity, row[0].since, row[0].rss) == ("COLLECTIVE", pytest.approx(0.75), 2**20)
    assert (row[1].activity, row[1].rss) == ("", None), "it comes later"
    long = view_of(
        past.at(start + 3.5, beats=[beat(0, start + 3.5 - past_module.FRESH - 1, collective="barrier")])
    ).rows
    assert (long[0].activity, long[0].collective, long[0].rss) == ("", "", 2**20), "it may be at something else by now"
    assert past.at(start + 8, beats=[beat(0, start + 7.9)]).beats == (), "of a generation that is gone"
    newer = past_of(story, beats=(beat(0, start + 1.75, step=5),)).at(start + 2, beats=[beat(0, start + 1.0)])
    assert [one.step for one in newer.beats] == [5]


def test_panels_are_cut_at_the_moment() -> None:
    story = failing()
    past, end = past_of(story), story.pool.now
    builder = PanelBuilder()
    builder.add(told(story, end + 2))
    whole = builder.view()
    middle = math.floor(past.begin) + 4.0
    then = panels_at(whole, past.at(middle))
    fresh = PanelBuilder()
    fresh.add(told(story, middle))
    assert then == fresh.view()._replace(heat=then.heat)
    assert then.heat.columns == tuple(c for c in whole.heat.columns if c.start < middle)
    assert 0 < len(then.heat.columns) < len(whole.heat.columns) and 0 < then.happened < whole.happened
    lines = HappeningList()
    lines.add(past.at(end).events)
    assert panels_at(whole, past.at(end + 2)).happenings == lines.view() == whole.happenings


def test_a_bucket_is_used_as_it_is_once_it_has_passed() -> None:
    known: list[Bucket] = list(past_of(failing()).at(math.inf).buckets)
    assert sorted(known, key=lambda b: (b.start, b.rank)) == sorted(failing().buckets(), key=lambda b: (b.start, b.rank))  # fmt: skip  # noqa: E501

"""A job's view from its updates."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from msgspec.structs import replace

from workbench.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    RecoveryStarted,
    SlotsGranted,
)
from workbench.feed import Bucket, Cursor, Update
from workbench.spec import JobSpec
from workbench.state import Checkpoint, JobPhase, JobState, Placement, RankPhase, RankState
from workbench.telemetry import RankBeat
from workbench.views.buckets import across_ranks
from workbench.views.job import JobView, ViewBuilder
from workbench.views.straggler import find_slowest, shares
from workbench.views.table import notes

NOW = 1060.0


def bucket(rank: int, start: float, **changes: Any) -> Bucket:
    """Ten steps of 100 ms: 60 ms own work, 40 ms waiting; 32 samples each."""
    whole = Bucket(rank=rank, start=start, width=1.0, steps=10, last_step=int(start - 1000) * 10 + 10, duration=1.0,
                   slowest=0.15, data=0.05, forward=0.2, backward=0.3, comm=0.4, optimizer=0.05, checkpoint=0.0,
                   samples=320.0, tokens=0.0, loss=0.5)  # fmt: skip
    return replace(whole, **changes)


def state(ranks: int = 2, **changes: Any) -> JobState:
    places = tuple(Placement(rank=k, local_rank=k, node_rank=0, worker="w", slot=k) for k in range(ranks))
    return replace(
        JobState(
            job_id="digits-12ab",
            spec=JobSpec(entrypoint="train.py", nproc_per_node=ranks, max_restarts=3),
            phase=JobPhase.HEALTHY,
            reason="every rank runs",
            placements=places,
            ranks=tuple(RankState(rank=k, worker="w", phase=RankPhase.HEALTHY, pid=k + 100) for k in range(ranks)),
            submitted_at=990.0,
        ),
        **changes,
    )


def beat(rank: int, **changes: Any) -> RankBeat:
    return replace(
        RankBeat(
            job_id="digits-12ab", restart_count=0, rank=rank, time=NOW - 0.1, step=600, activity="FORWARD", since=0.01,
            rss=10**9, cpu=98.0, progress=(600, 3000),
        ),
        **changes,
    )  # fmt: skip


def history(ranks: int = 2, seconds: int = 10, **changes: Any) -> tuple[Bucket, ...]:
    return tuple(bucket(k, NOW - seconds + s, **changes) for s in range(seconds) for k in range(ranks))


def update(ranks: int = 2, **changes: Any) -> Update:
    whole = Update(
        state=state(ranks),
        cursor=Cursor(),
        now=NOW,
        beats=tuple(beat(k) for k in range(ranks)),
        buckets=history(ranks),
        events=(SlotsGranted(time=1000.0, placements=state(ranks).placements),),
    )
    return replace(whole, **changes)


def view_of(*updates: Update) -> JobView:
    builder = ViewBuilder()
    for one in updates:
        builder.add(one)
    return builder.view()


def test_the_numbers_of_a_running_job() -> None:
    view = view_of(update())
    assert view.throughput == pytest.approx(640.0) and view.step_time == pytest.approx(0.1)
    assert (view.step, view.progress, view.loss, view.running_for) == (600, (600, 3000), 0.5, 60.0)
    assert view.left == pytest.approx(240.0)
    row = view.rows[1]
    assert (row.rank, row.pid, row.activity, row.rss, row.silent_for) == (1, 101, "FORWARD", 10**9, 0.0)
    assert row.samples_per_s == pytest.approx(320.0) and row.own_time == pytest.approx(0.06)
    assert sum(row.shares.values()) == pytest.approx(1.0) and row.shares["comm"] == pytest.approx(0.4)


def test_only_the_last_seconds_count_for_now() -> None:
    old = tuple(bucket(0, 1000.0 + k, duration=9.0) for k in range(40))
    view = view_of(update(1, buckets=old), update(1, buckets=history(1), events=()))
    assert view.rows[0].step_time == pytest.approx(0.1)


def test_steps_longer_than_the_window_are_seen() -> None:
    long = tuple(bucket(0, 1000.0 + 20 * k, steps=1, duration=20.0) for k in range(4))
    row = view_of(update(1, buckets=long)).rows[0]
    assert row.step_time == 20.0 and row.samples_per_s == pytest.approx(16.0)


def test_a_job_that_no_longer_steps_has_no_throughput_but_its_last_step_time() -> None:
    view = view_of(update(), update(now=NOW + 60, buckets=(), events=()))
    assert view.throughput == 0.0 and view.step_time == pytest.approx(0.1)


def test_an_ended_job_keeps_the_throughput_of_its_whole_run() -> None:
    slow = tuple(bucket(k, 1000.0 + s, duration=2.0) for s in range(10) for k in (0, 1))
    ended = state(phase=JobPhase.SUCCEEDED, ended_at=NOW)
    view = view_of(update(buckets=slow), update(state=ended, now=NOW + 1e6, events=()))
    assert view.throughput == pytest.approx(2 * 6400 / 30) and view.running_for == 60.0 and view.left is None


def test_a_rank_that_is_not_heard_says_for_how_long() -> None:
    heard, silent = view_of(update(now=NOW + 12, beats=(beat(0, time=NOW + 12), beat(1)))).rows
    assert heard.silent_for == 0.0 and silent.silent_for == pytest.approx(12.0, abs=0.2)
    exited = state(1)
    gone = replace(exited, ranks=(replace(exited.ranks[0], phase=RankPhase.FAILED, signal=9),))
    row = view_of(update(1, state=gone, now=NOW + 12)).rows[0]
    assert row.silent_for == 0.0 and row.exit == "killed by SIGKILL" and row.activity == ""
    ended = replace(exited, ranks=(replace(exited.ranks[0], phase=RankPhase.STOPPED, signal=15),))
    assert view_of(update(1, state=ended)).rows[0].exit == "stopped by the job with SIGTERM"


def test_another_generation_starts_from_nothing() -> None:
    again = state(restart_count=1)
    view = view_of(update(), update(state=again, beats=(), buckets=(), events=()))
    assert view.rows[0].step_time is None and view.rows[0].step == 0
    assert view.throughput == 0.0 and view.step == 600 and view.restart_count == 1
    assert sum(point.width for point in view.series) == 10


def test_before_ranks_there_are_placeholders_and_before_an_update_nothing() -> None:
    view = view_of(update(state=state(ranks=3, phase=JobPhase.LAUNCHING), beats=(), buckets=()))
    assert [row.phase for row in view_of(update(3, state=replace(state(3), ranks=()), beats=(), buckets=())).rows] == [
        RankPhase.INIT
    ] * 3
    assert view.throughput == 0.0 and view.series == ()
    with pytest.raises(ValueError, match="no update"):
        ViewBuilder().view()


# --- the slowest ------------------------------------------------------------------------------------------------------


def window(own: dict[int, float], step: float = 0.1, comm: bool = True) -> dict[int, Bucket]:
    return {
        rank: bucket(rank, 0.0, duration=step * 10, comm=(step - time) * 10 if comm else 0.0, forward=time * 10 - 0.4)
        for rank, time in own.items()
    }


def test_the_slowest_is_the_one_that_does_not_wait() -> None:
    rank, why = find_slowest(window({0: 0.06, 1: 0.06, 2: 0.09, 3: 0.061}))
    assert rank == 2
    assert why == "rank 2 works 90 ms a step by itself, the others 60 ms, most of it in forward"


def test_of_two_ranks_each_is_compared_with_the_other() -> None:
    assert find_slowest(window({0: 0.05, 1: 0.07}))[0] == 1


@pytest.mark.parametrize(
    "own",
    [
        {0: 0.06},
        {0: 0.06, 1: 0.07},  # less than 1.2 times
        {0: 0.001, 1: 0.002},  # twice as much, but 1 % of a step
        {},
    ],
)
def test_a_difference_that_hardly_matters_marks_nobody(own: dict[int, float]) -> None:
    assert find_slowest(window(own)) == (None, "")


def test_where_waiting_is_not_measured_nobody_is_blamed() -> None:
    assert find_slowest(window({0: 0.05, 1: 0.09}, comm=False)) == (None, "")


def test_without_synchrony_the_longer_step_is_the_slower_rank() -> None:
    alone = {0: bucket(0, 0.0, duration=1.0, comm=0.0), 1: bucket(1, 0.0, duration=2.0, comm=0.0)}
    assert find_slowest(alone)[0] == 1


def test_one_row_is_marked() -> None:
    slow = tuple(replace(b, comm=0.1, forward=0.5) if b.rank == 1 else b for b in history())
    view = view_of(update(buckets=slow))
    assert [row.is_slowest for row in view.rows] == [False, True] and "most of it in forward" in view.slowest


def test_shares_sum_to_one_also_where_phases_overlap() -> None:
    assert sum(shares(bucket(0, 0.0, comm=0.9)).values()) == pytest.approx(1.0)
    assert shares(bucket(0, 0.0, **dict.fromkeys(("data", "forward", "backward", "comm", "optimizer"), 0.0))) == {
        "data": 0.0, "forward": 0.0, "backward": 0.0, "comm": 0.0, "optimizer": 0.0, "checkpoint": 0.0, "other": 1.0,
    }  # fmt: skip


# --- series -----------------------------------------------------------------------------------------------------------


def test_series_are_bounded_and_keep_the_whole_run() -> None:
    builder = ViewBuilder()
    for first in range(0, 2000, 40):
        buckets = tuple(bucket(k, 1000.0 + first + s) for s in range(40) for k in (0, 1))
        builder.add(update(now=1040.0 + first, buckets=buckets, beats=()))
    view = builder.view()
    assert 200 < len(view.series) <= 600 and sum(point.width for point in view.series) == 2000
    assert set(view.rank_series) == {0, 1} and 200 < len(view.rank_series[0]) <= 600
    assert all(point.samples_per_s == pytest.approx(640) for point in view.series)


def test_totals_are_the_history_where_an_update_has_them() -> None:
    whole = [bucket(k, 1000.0 + s) for s in range(60) for k in range(20)]
    recent = tuple(b for b in whole if b.start >= NOW - 5)
    view = view_of(update(20, buckets=recent, totals=tuple(across_ranks(whole))))
    assert len(view.series) == 60 and view.rank_series == {}
    assert view.series[0].samples_per_s == pytest.approx(6400) and view.rows[19].step_time == pytest.approx(0.1)


def test_a_loss_that_nobody_reports_is_none() -> None:
    view = view_of(update(buckets=history(loss=math.nan)))
    assert view.loss is None and view.rows[0].loss is None and view.series[0].loss is None


def test_a_thousand_ranks_are_quick() -> None:
    builder = ViewBuilder()
    builder.add(update(1024, buckets=history(1024, seconds=5)))
    took = []
    for _ in range(3):
        before = time.process_time()
        view = builder.view()
        took.append(time.process_time() - before)
    assert min(took) < 0.1 and len(view.rows) == 1024


def test_progress_in_another_unit_than_steps_tells_no_time_left() -> None:
    """As of a pass of many, or of samples: the job is at step 600."""
    passes = view_of(update(beats=tuple(beat(k, progress=(8, 10)) for k in range(2))))
    assert (passes.step, passes.progress, passes.counts_steps, passes.left) == (600, (8, 10), False, None)


def test_an_ended_job_is_as_far_as_its_last_steps_say() -> None:
    late = history()[:-2] + tuple(bucket(k, NOW - 1, last_step=609) for k in range(2))
    assert view_of(update(buckets=late)).progress == (609, 3000)


def test_a_job_that_went_back_is_where_it_is_now_and_not_where_it_was() -> None:
    again = state(restart_count=1)
    events = (SlotsGranted(time=1000.0, placements=again.placements), SlotsGranted(time=1058.5, placements=()))
    beats = tuple(beat(k, restart_count=1, step=12, progress=None) for k in range(2))
    buckets = (*history()[:-2], *(bucket(k, NOW - 1, last_step=11) for k in range(2)))
    view = view_of(update(state=again, events=events, beats=beats, buckets=buckets))
    assert view.step == 12 and {row.step for row in view.rows} == {12}
    attached_later = view_of(update(state=again, events=events, beats=(), buckets=buckets))
    assert attached_later.step == 11 and {row.step for row in attached_later.rows} == {11}


@pytest.mark.parametrize(
    ("count", "fruitless", "limit", "text"),
    [
        (0, 0, 3, ""),
        (1, 1, 3, "restart 1 of 3"),
        (1, 0, 0, "restart 1"),  # resumed by hand
        (5, 2, 3, "restart 5, 2 of 3 without progress"),
    ],
)
def test_restarts_in_words(count: int, fruitless: int, limit: int, text: str) -> None:
    spec = JobSpec(entrypoint="train.py", nproc_per_node=2, max_restarts=limit)
    assert view_of(update(state=state(restart_count=count, fruitless=fruitless, spec=spec))).restarts == text


def test_trouble_that_ends_nothing_is_told_until_it_is_over() -> None:
    saved = Checkpoint(step=40, path="/c/40", world_size=2, saved_at=1.0)
    story: list[tuple[Event, list[str]]] = [
        (CheckpointFailed(time=1.0, restart_count=0, step=20, reason="disk full"),
         ["no checkpoint at step 20: disk full; there is none"]),
        (CheckpointSaved(time=2.0, restart_count=0, checkpoint=saved), []),
        (CheckpointFailed(time=3.0, restart_count=0, step=60, reason="disk full"),
         ["no checkpoint at step 60: disk full; the newest is of step 40"]),
        (RecoveryStarted(time=5.0, restart_count=1, reason="restart 1 of 3"), []),
    ]  # fmt: skip
    builder = ViewBuilder()
    for event, told in story:
        builder.add(update(events=(event,)))
        assert list(builder.view().trouble) == told
        assert all(line in notes(builder.view()) for line in told)


def test_a_record_that_cannot_be_written_is_told() -> None:
    view = view_of(update(problems=("telemetry of this job cannot be written: disk full",)))
    assert "telemetry of this job cannot be written: disk full" in notes(view)

"""What agents of other hosts tell is put into the scheduler's time where it arrives."""

from __future__ import annotations

import math

import pytest

from workbench.blackbox import STEP, StepRecord
from workbench.events import CheckpointSaved, Event, RankRaised
from workbench.policy.failure import first_cause, raise_failure
from workbench.pool.clocks import WINDOW, HostClock, by_our_clock
from workbench.pool.messages import Message
from workbench.spec import JobSpec
from workbench.state import Checkpoint, JobPhase, JobState, RankState
from workbench.telemetry import CellFinished, OutputWritten, Report, StepsTaken


def test_the_earliest_of_many_messages_tells_how_far_a_clock_is_ahead() -> None:
    clock = HostClock()
    assert clock.ahead == 0.0
    for delay in (0.8, 0.004, 0.3, 7.0):
        clock.heard(5000.0 + 3600.0, 5000.0 + delay)
    assert clock.ahead == pytest.approx(3599.996)


def test_clocks_that_agree_are_left_alone() -> None:
    clock = HostClock()
    clock.heard(100.0, 100.04)
    assert clock.ahead == 0.0


def test_what_was_held_up_by_a_cut_is_not_taken_for_a_wrong_clock() -> None:
    clock = HostClock()
    clock.heard(100.0, 100.001)
    for sent in (101.0, 102.0, 103.0):
        clock.heard(sent, 103.0 + 2 * WINDOW)
    assert clock.ahead == 0.0


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_is_known_anew(jump: float) -> None:
    clock = HostClock()
    for second in range(0, int(3 * WINDOW)):
        clock.heard(second + (jump if second > 10 else 0.0), second + 0.001)
    assert clock.ahead == pytest.approx(jump, abs=0.1)


def test_our_own_clock_that_is_set_back_is_noticed() -> None:
    clock = HostClock()
    for second in range(int(2 * WINDOW)):
        clock.heard(4000.0 + second, 4000.0 + second - (3600.0 if second > 5 else 0.0))
    assert clock.ahead == pytest.approx(3600.0)


def _moved(news: Event | Report, ahead: float = 3600.0) -> Event | Report:
    message = Message("job", None, news) if isinstance(news, Report) else Message("job", news, None)
    found = by_our_clock(message, ahead)
    assert found.job_id == "job"
    return found.event or found.report  # type: ignore[return-value]


def test_events_and_telemetry_are_moved_by_what_the_clock_is_ahead() -> None:
    saved = Checkpoint(step=4, path="/4", world_size=2, saved_at=7200.0)
    event = _moved(CheckpointSaved(time=7201.0, restart_count=0, checkpoint=saved))
    assert isinstance(event, CheckpointSaved)
    assert (event.time, event.checkpoint.saved_at, event.checkpoint.step) == (3601.0, 3600.0, 4)
    output = OutputWritten(job_id="job", rank=0, stream="stdout", text="a", time=7200.0)
    assert getattr(_moved(output), "time") == 3600.0  # noqa: B009
    answer = CellFinished(job_id="job", cell_id="c", rank=0, ok=True)
    assert _moved(answer) == answer
    steps = [StepRecord(n, 7200.0 + n, 0.5, *[0.25] * 8, math.nan) for n in (1, 2)]
    block = b"".join(STEP.pack(*step) for step in steps)
    report = _moved(StepsTaken(job_id="job", restart_count=0, rank=1, block=block))
    assert isinstance(report, StepsTaken)
    found = [StepRecord._make(row) for row in STEP.iter_unpack(report.block)]
    assert [(step.step, step.end, step.duration, step.comm) for step in found] == [
        (1, 3601.0, 0.5, 0.25),
        (2, 3602.0, 0.5, 0.25),
    ]


def test_the_first_cause_of_two_hosts_is_the_first_whatever_their_clocks_say() -> None:
    """Found with a host an hour ahead: the rank that failed second was named."""
    ranks = (RankState(rank=0, worker="a"), RankState(rank=1, worker="b"))
    state = JobState(job_id="job", spec=JobSpec(), phase=JobPhase.HEALTHY, ranks=ranks)
    first = RankRaised(time=3600.0 + 100.0, restart_count=0, rank=1, error="ValueError: first", traceback="")
    second = RankRaised(time=100.1, restart_count=0, rank=0, error="ValueError: second", traceback="")
    here = _moved(first)
    assert isinstance(here, RankRaised)
    failures = tuple(raise_failure(state, event, state.ranks[event.rank]) for event in (second, here))
    cause = first_cause(failures)  # type: ignore[arg-type]
    assert cause.rank == 1

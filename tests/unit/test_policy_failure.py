"""What an end is called, and which kind of failure it is."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from workbench.events import RankExited, RankRaised
from workbench.policy.failure import exit_failure, raise_failure
from workbench.spec import JobSpec
from workbench.state import Failure, FailureKind, JobPhase, JobState, RankPhase, RankState


def state(*phases: RankPhase) -> JobState:
    ranks = tuple(
        RankState(rank=rank, worker="w", phase=phase, log_path=f"/l{rank}") for rank, phase in enumerate(phases)
    )
    return JobState(job_id="a-1", spec=JobSpec(), phase=JobPhase.HEALTHY, ranks=ranks)


def raised(rank: int, error: str) -> Failure:
    event = RankRaised(time=5.0, restart_count=0, rank=rank, error=error, traceback="T", step=7)
    found = raise_failure(state(*[RankPhase.HEALTHY] * 4), event, RankState(rank=rank, worker="w"))
    assert found is not None
    return found


def exited(rank: int = 1, **how: Any) -> Failure:
    event = RankExited(time=5.0, restart_count=0, rank=rank, step=7, **how)
    found = exit_failure(state(*[RankPhase.HEALTHY] * 4), event, RankState(rank=rank, worker="w"))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("MemoryError", "rank 0 raised MemoryError at step 7: out of memory"),
        ("MemoryError: Unable to allocate 3 GiB", "rank 0 raised MemoryError: Unable to allocate 3 GiB at step 7"),
        ("ValueError", "rank 0 raised ValueError at step 7"),
    ],
)
def test_an_exception_without_words_gets_some(error: str, reason: str) -> None:
    assert raised(0, error).reason == reason


def test_a_crash_has_its_stack_and_a_watchdogs_abort_is_no_cause() -> None:
    crash = exited(signal=int(signal.SIGSEGV), detail="in train.py:12 in step", traceback="Fatal")
    assert crash.kind is FailureKind.SIGNAL and crash.traceback == "Fatal"
    assert crash.reason == "rank 1 killed by SIGSEGV at step 7: in train.py:12 in step"
    abort = exited(
        signal=int(signal.SIGABRT), detail="c10::DistBackendError: Watchdog caught collective operation timeout"
    )
    assert abort.kind is FailureKind.COLLECTIVE
    assert exited(signal=int(signal.SIGABRT), detail="gloo::EnforceNotMet: 20 vs 8").kind is FailureKind.SIGNAL
    assert exited(exit_code=3).kind is FailureKind.EXIT

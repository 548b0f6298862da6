"""What explains collectives that failed: ranks that had entered different ones, a rank that had ended before."""

from __future__ import annotations

from typing import Any

from workbench.events import RankExited, RankRaised
from workbench.policy.failure import exit_failure, find_mismatch, first_cause, raise_failure
from workbench.spec import JobSpec
from workbench.state import Failure, FailureKind, JobPhase, JobState, RankPhase, RankState, StallKind

SMALL, LARGE = "all_reduce[8 float32]", "all_reduce[4096 float32]"


def failed(rank: int, collective: str, kind: FailureKind = FailureKind.COLLECTIVE, seq: int = 4) -> Failure:
    return Failure(
        kind=kind, rank=rank, reason=f"rank {rank} failed", time=1.0, step=30, collective=collective, collective_seq=seq
    )


def state(*phases: RankPhase, failures: tuple[Failure, ...] = (), **fields: Any) -> JobState:
    ranks = tuple(RankState(rank=number, worker="w", phase=phase) for number, phase in enumerate(phases))
    return JobState(job_id="j", spec=JobSpec(entrypoint="t.py"), ranks=ranks, failures=failures, **fields)


def test_the_rank_that_aborts_is_not_the_cause_where_another_gave_another_shape() -> None:
    aborted = failed(2, LARGE, FailureKind.SIGNAL)
    stopped = RankState(rank=1, worker="w", phase=RankPhase.STOPPED, collective=LARGE, collective_seq=4)
    cause = first_cause((aborted, failed(0, SMALL)), (stopped,))
    assert cause.rank == 0
    assert cause.kind is FailureKind.EXCEPTION
    assert cause.reason == (f"rank 0 entered {SMALL}, the others entered {LARGE} (collective 4); rank 2 failed")
    assert cause.stall is not None
    assert (cause.stall.kind, cause.stall.ranks, cause.stall.step) == (StallKind.MISMATCH, (0,), 30)


def test_of_two_neither_is_blamed_and_equal_ones_explain_nothing() -> None:
    cause = first_cause((failed(0, SMALL), failed(1, LARGE)))
    assert cause.rank is None
    assert "cannot be told which of the two is wrong" in cause.reason
    assert find_mismatch((failed(0, SMALL), failed(1, SMALL)), ()) is None
    assert find_mismatch((failed(0, SMALL), failed(1, LARGE, seq=3)), ()) is None, "an older one had gone well"
    assert find_mismatch((failed(0, "send[8 float32]", seq=0), failed(1, "recv[8 float32]", seq=0)), ()) is None
    killed = Failure(kind=FailureKind.SIGNAL, rank=1, reason="rank 1 killed by SIGKILL", time=1.0)
    assert first_cause((failed(0, SMALL), killed)) is killed


def raised(rank: int) -> RankRaised:
    return RankRaised(
        time=1.0,
        restart_count=0,
        rank=rank,
        error="RuntimeError: Connection closed by peer",
        traceback="",
        is_collective=True,
        step=30,
        collective=SMALL,
        collective_seq=4,
    )


def test_a_rank_that_ended_before_the_others_is_the_cause_whichever_comes_first() -> None:
    before = state(RankPhase.HEALTHY, RankPhase.SUCCEEDED, phase=JobPhase.HEALTHY)
    failure = raise_failure(before, raised(0), before.ranks[0])
    assert failure is not None and failure.stall is not None
    assert failure.reason.startswith("rank 1 ended while the others go on; rank 0 raised RuntimeError")
    assert (failure.stall.kind, failure.stall.ranks, failure.stall.collective) == (StallKind.RETURNED, (1,), SMALL)

    known = raise_failure(state(RankPhase.HEALTHY, RankPhase.HEALTHY), raised(0), before.ranks[0])
    assert known is not None
    after = state(RankPhase.HEALTHY, RankPhase.HEALTHY, failures=(known,), phase=JobPhase.STOPPING, phase_since=1.0)
    exited = RankExited(time=1.1, restart_count=0, rank=1, exit_code=0, step=29)
    late = exit_failure(after, exited, after.ranks[1])
    assert late is not None and late.stall is not None
    assert late.reason.startswith("rank 1 ended at step 29 while the others go on; rank 0 raised")
    assert first_cause((known, late)) is late
    assert exit_failure(before, exited, before.ranks[1]) is None, "a good end explains nothing where nothing failed"

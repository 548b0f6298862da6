"""Real hangs of small programs in a real pool: found in time, and the right rank, line and collective told.

And pauses that are none: nothing is told of them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

import tests.waiting
from workbench.events import FailureDetected, StallDetected, StallEnded, StepsBegan
from workbench.session import Job, Session, stop_pool
from workbench.state import Failure, Stall, StallKind

until = partial(tests.waiting.until, timeout=40.0, every=0.05)

PROGRAM = Path(__file__).parent / "programs" / "hangs.py"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A pool of 3 slots in a home of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTRAIN_HOME", str(tmp_path_factory.mktemp("home")))
        session = Session(slots=3, timeout=60)
        yield session
        session.close()
        stop_pool()


@pytest.fixture
def launch(pool: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Start the program with a fault; its job is ended with the test."""
    started: list[Job] = []

    def start(fault: str, ranks: int = 2, seconds: float = 0.0, **spec: object) -> Job:
        options = {"nproc_per_node": ranks, "env": {"SECONDS": str(seconds)}, "cwd": str(PROGRAM.parent), **spec}
        started.append(pool.launch(str(PROGRAM), args=[fault], **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for job in started:
        job.cancel(force=True, by="the test's end")
        job.exception(timeout=20)


def events(job: Job, kind: type) -> list[object]:
    return [event for event in job.events() if isinstance(event, kind)]


def stall_of(job: Job) -> Stall:
    until(lambda: events(job, StallDetected) or job.phase.is_terminal, "stall")
    told = events(job, StallDetected)
    assert told, job.reason
    assert isinstance(told[0], StallDetected)
    return told[0].stall


# fault, kind, culprits, what `where` names, what the collective's name begins with
HANGS = [
    ("regular_expression", StallKind.BUSY, (1,), "in regular_expression", "all_reduce[20 float32]"),
    ("live_lock", StallKind.BUSY, (1,), "in live_lock", "all_reduce[20 float32]"),
    ("polling", StallKind.ABSENT, (1,), "in polling", "all_reduce[20 float32]"),
    ("dead_mutex", StallKind.ABSENT, (1,), "in dead_mutex", "all_reduce[20 float32]"),
    ("sleeping_loader", StallKind.DATA, (1,), "in sleeping", "all_reduce[20 float32]"),
    ("looping_loader", StallKind.DATA, (1,), "in live_lock", "all_reduce[20 float32]"),
    ("looping_worker", StallKind.DATA, (1,), "in live_lock", "all_reduce[20 float32]"),
    ("two_groups", StallKind.DEADLOCK, (0, 1), "in two_groups", "all_reduce[16 float32]"),
    ("returned", StallKind.RETURNED, (1,), "", "all_reduce[20 float32]"),
]


@pytest.mark.parametrize(("fault", "kind", "culprits", "where", "collective"), HANGS, ids=[hang[0] for hang in HANGS])
def test_a_hang_is_found_and_its_culprit_named(
    launch: Callable[..., Job], fault: str, kind: StallKind, culprits: tuple[int, ...], where: str, collective: str
) -> None:
    stall = stall_of(launch(fault))
    assert (stall.kind, stall.ranks) == (kind, culprits), stall.reason
    assert where in stall.where, stall.reason
    assert not where or stall.where.startswith("hangs.py:")
    assert stall.collective == collective
    assert stall.collective_seq > 0
    assert stall.step == 30
    assert stall.evidence
    assert stall.stacks[0].ranks[0] in culprits


@pytest.mark.parametrize(
    ("fault", "kind", "word"),
    [
        ("skipped", StallKind.MISMATCH, "rank 1 entered broadcast[32 float32], the others entered all_reduce[64"),
        ("other_order", StallKind.MISMATCH, "rank 1 entered broadcast[64 float32], the others entered all_reduce[64"),
    ],
)
def test_of_three_the_odd_one_is_named(launch: Callable[..., Job], fault: str, kind: StallKind, word: str) -> None:
    stall = stall_of(launch(fault, ranks=3))
    assert (stall.kind, stall.ranks) == (kind, (1,)), stall.reason
    assert word in stall.reason
    assert f"in {fault}" in stall.where
    assert stall.collective == "all_reduce[64 float32]"


def test_of_two_in_another_order_both_are_shown(launch: Callable[..., Job]) -> None:
    stall = stall_of(launch("other_order"))
    assert (stall.kind, stall.ranks) == (StallKind.MISMATCH, ())
    assert "all_reduce[64 float32] by rank 0 and broadcast[64 float32] by rank 1" in stall.reason
    assert "cannot be told which of the two" in stall.reason


def test_another_shape_is_the_cause_and_not_the_innocent_rank_that_aborts(launch: Callable[..., Job]) -> None:
    job = launch("other_shape", ranks=3)
    until(lambda: events(job, FailureDetected) or events(job, StallDetected), "failure")
    job.exception(20)
    failure = job.state.failure
    assert isinstance(failure, Failure)
    assert failure.stall is not None
    assert (failure.stall.kind, failure.stall.ranks) == (StallKind.MISMATCH, (1,)), failure.reason
    assert "rank 1 entered all_reduce[8 float32], the others entered all_reduce[4096 float32]" in failure.reason


def test_a_stopped_rank_is_named_and_when_it_goes_on_that_is_told(launch: Callable[..., Job]) -> None:
    job = launch("none")
    until(lambda: "READY" in job.logs(rank=1), "steps")
    job.inject("stop", rank=1)
    stall = stall_of(job)
    assert (stall.kind, stall.ranks) == (StallKind.STOPPED, (1,))
    assert stall.collective == "all_reduce[20 float32]"
    assert stall.where.startswith("hangs.py:"), "py-spy reads a stopped process as well"
    assert "stalled: rank 1 stopped by a signal" in job.reason
    job.inject("continue", rank=1)
    until(lambda: events(job, StallEnded), "end of the stall")
    until(lambda: "stalled" not in job.reason, "reason without it")


def test_a_stopped_loader_worker_is_named(launch: Callable[..., Job]) -> None:
    job = launch("stopped_worker")
    until(lambda: "READY" in job.logs(rank=1), "steps")
    (worker,) = psutil.Process(job.ranks[1].pid).children()
    worker.send_signal(signal.SIGSTOP)
    stall = stall_of(job)
    assert (stall.kind, stall.ranks) == (StallKind.DATA, (1,)), stall.reason
    assert f"worker process {worker.pid} is stopped by a signal" in stall.reason


def test_a_rank_that_hangs_before_the_process_group(launch: Callable[..., Job]) -> None:
    """It may take its time there, so it is told first, and ended once a start may take no longer."""
    job = launch("before_init", startup_timeout=18.0, max_restarts=1)
    stall = stall_of(job)
    assert (stall.kind, stall.ranks) == (StallKind.NOT_STARTED, (1,))
    assert "in nothing" in stall.where
    assert stall.collective == "init_process_group"
    assert 0.0 < stall.patience < 18.0 and job.state.restart_count == 0
    assert job.reason.startswith("kept waiting: rank 1 did not join the process group"), job.reason
    until(lambda: events(job, FailureDetected), "failure")
    (failure,) = [event.failure for event in events(job, FailureDetected)][:1]  # type: ignore[attr-defined]
    assert failure.stall is not None and failure.stall.patience == 0.0 and failure.rank == 1


def test_with_restarts_left_a_hang_is_ended_and_the_job_goes_on(launch: Callable[..., Job]) -> None:
    job = launch("sleeping_loader", max_restarts=1)
    until(lambda: job.state.restart_count == 1 and job.view().step > 5, "second generation")
    (failure,) = [event.failure for event in events(job, FailureDetected)][:1]  # type: ignore[attr-defined]
    assert failure.stall is not None
    assert failure.rank == 1
    assert len(events(job, StepsBegan)) in (1, 2)


@pytest.mark.parametrize(
    ("fault", "seconds"), [("slow_first", 4.0), ("evaluation", 4.0), ("checkpoint", 4.0), ("expected", 4.0)]
)
def test_a_pause_that_is_none_is_not_told(launch: Callable[..., Job], fault: str, seconds: float) -> None:
    job = launch(fault, seconds=seconds)
    until(lambda: job.view().step > 80, "steps after the pause")
    assert not events(job, StallDetected)
    assert len(events(job, StepsBegan)) == 1

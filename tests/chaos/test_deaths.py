"""Ranks die in every way there is, in a real pool over gloo: which one, at which step, in which words; all goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from workbench.agent.memory import group_of, make_group
from workbench.errors import UsageError
from workbench.events import Event, FailureDetected, FaultHappened, FaultInjected, RecoveryFinished
from workbench.session import Job, Session, stop_pool
from workbench.state import Failure, FailureKind, JobPhase
from workbench.views.advice import advise

# The first generation goes on for ever, the next ones end after some steps.
TRAIN = """
import os, time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rank, last = dist.get_rank(), 20 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else 10**9
step = 0
while step < last:
    for (x,) in DataLoader(TensorDataset(torch.ones(400, 4)), batch_size=1, num_workers=1):
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        step += 1
        if step == last or (rank == RETURNS_ON and step == 30):
            break
        time.sleep(0.005)
    if rank == RETURNS_ON:
        break
dist.destroy_process_group()
"""
SOON = 0.1  # s between a fault and what its record says


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """One pool of 2 slots for all of them: a fault must not harm it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTRAIN_HOME", str(tmp_path_factory.mktemp("home")))
        session = Session(slots=2, timeout=60)
        yield session
        session.close()
        stop_pool()


def launch(session: Session, *, returns_on: int = -1, restarts: int = 2) -> tuple[Job, list[int]]:
    """A job that takes steps."""
    source = TRAIN.replace("RETURNS_ON", str(returns_on))
    job = session.launch(source=source, nproc_per_node=2, max_restarts=restarts, stop_grace=2.0)
    pids = until(job, lambda: [rank.pid for rank in job.ranks if rank.pid] * (job.view().step > 3), "steps")
    return job, pids


def until(job: Job, found: Callable[[], object], what: str, timeout: float = 40.0) -> list[int]:
    deadline = time.monotonic() + timeout
    while not (value := found()):
        assert time.monotonic() < deadline, f"no {what} within {timeout:g} s: {job.phase} {job.reason}"
        time.sleep(0.02)
    return value  # type: ignore[return-value]


def of(job: Job, kind: type[Event]) -> list[Event]:
    return [event for event in job.events() if isinstance(event, kind)]


def recovered(job: Job, pids: list[int]) -> Failure:
    """The first cause that the job told; it has gone on and ended well, and the old ranks are gone."""
    assert job.wait(60) is JobPhase.SUCCEEDED, job.reason
    told = [event for event in of(job, FailureDetected) if isinstance(event, FailureDetected)]
    assert told and {event.restart_count for event in told} == {0}, "one failure, and none in the next generation"
    assert len(of(job, RecoveryFinished)) == 1 and job.state.restart_count == 1
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    return told[-1].failure


# What is injected into rank 1 → the kind of failure, and what its reason says.
DEATHS: dict[str, tuple[FailureKind, str]] = {
    "kill": (FailureKind.SIGNAL, "killed by SIGKILL at step"),
    "exception": (FailureKind.EXCEPTION, "raised RuntimeError: exception injected on purpose at step"),
    "exit": (FailureKind.EXIT, "exited with code 1 at step"),
    "segfault": (FailureKind.SIGNAL, "killed by SIGSEGV at step"),
    "abort": (FailureKind.SIGNAL, "killed by SIGABRT at step"),
    "oom": (FailureKind.EXCEPTION, "raised MemoryError at step"),
    "oom-kill": (FailureKind.SIGNAL, "out of memory (the kernel ended it"),
    "kill-loader": (FailureKind.EXCEPTION, "DataLoader worker (pid"),
    "kill-zygote": (FailureKind.SIGNAL, "lost with its zygote"),
}


def can_limit_memory() -> bool:
    """Whether this user may make a memory cgroup here."""
    try:
        with psutil.Popen(["sleep", "60"]) as process:
            try:
                group = make_group("dtrain-test", process.pid, 2**26)
            finally:
                process.kill()
        group.remove()
    except OSError:
        return False
    return group_of() is not None


@pytest.mark.parametrize("fault", DEATHS)
def test_a_death_is_named_and_survived(session: Session, fault: str) -> None:
    if fault == "oom-kill" and not can_limit_memory():
        pytest.skip("no memory cgroup can be made here")
    job, pids = launch(session)
    asked = time.time()
    job.inject(fault, 1)
    cause = recovered(job, pids)
    kind, words = DEATHS[fault]
    assert cause.kind is kind and words in cause.reason, cause
    assert fault == "kill-zygote" or cause.rank == 1, cause
    assert cause.step is not None and cause.step > 0
    (injected,), (happened,) = of(job, FaultInjected), of(job, FaultHappened)
    assert isinstance(happened, FaultHappened) and not happened.problem and happened.fault == fault
    assert asked - SOON <= injected.time <= happened.time + SOON
    assert happened.time - SOON <= cause.time
    assert advise(cause) is not None


def test_a_crash_shows_its_stack(session: Session) -> None:
    job, _ = launch(session, restarts=0)
    job.inject("segfault", 1)
    error = job.exception(30)
    assert error is not None and error.rank == 1
    cause = job.state.failure
    assert cause is not None and "killed by SIGSEGV" in cause.reason and "in <cell cell>:" in cause.reason, cause.reason
    assert "Fatal Python error: Segmentation fault" in cause.traceback and "string_at" in cause.traceback
    assert error._render_traceback_()[1] == cause.reason, "the survivor's error, if it had one, comes beneath"


def test_collectives_of_different_shapes_are_told_as_such(session: Session) -> None:
    job, pids = launch(session)
    job.inject("mismatch", 1)
    cause = recovered(job, pids)
    # Which words depend on where the other rank was: of a collective that DDP makes in C++ no name is known.
    assert "all_reduce[" in cause.reason, cause
    assert "the ranks disagree" in cause.reason or "a distributed collective mismatch" in cause.reason, cause
    advice = advise(cause)
    assert advice is not None and "different sizes" in advice.cause


def test_a_rank_that_returns_early_is_told_as_such(session: Session) -> None:
    job, pids = launch(session, returns_on=1)
    cause = recovered(job, pids)
    assert cause.reason.startswith("rank 1 ended") and "while the others go on" in cause.reason, cause
    assert cause.stall is not None and cause.stall.ranks == (1,)


def test_what_cannot_be_done_is_told_to_who_asks(session: Session) -> None:
    job, _ = launch(session, restarts=0)
    with pytest.raises(UsageError, match="no checkpoint yet"):
        job.inject("corrupt", 0)
    with pytest.raises(UsageError, match=r"there is no fault 'melt'.*kill, stop, continue"):
        job.inject("melt", 0)
    job.inject("hang", 0)
    job.inject("continue", 0)
    step = job.view().step
    until(job, lambda: job.view().step > step + 5, "steps after continue")
    job.cancel(force=True)
    assert job.wait(10) is JobPhase.STOPPED


def test_failure_recovery_and_end_are_notified(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    monkeypatch.setenv("DTRAIN_NOTIFY", f"cat >> {told}")
    job, pids = launch(session)
    job.inject("exit", 1)
    recovered(job, pids)
    until(job, lambda: told.exists() and '"end"' in told.read_text(), "note of the end")
    notes = [json.loads(line) for line in told.read_text().splitlines()]
    assert [note["what"] for note in notes] == ["failure", "recovery", "end"]
    assert notes[0]["rank"] == 1 and "exited with code 1" in notes[0]["reason"] and notes[0]["job_id"] == job.job_id
    assert notes[-1]["phase"] == "SUCCEEDED"
    record = Path(job.state.ranks[0].log_path).parents[1] / "job.sqlite"
    assert b"DTRAIN_NOTIFY" not in record.read_bytes() and str(told).encode() not in record.read_bytes()


NAN = """
import torch
from workbench.training import Run
run, model = Run.current(), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
while True:
    loss = model(torch.ones(2, 4)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.report(loss=loss)
    step += 1
"""


def test_a_loss_that_is_not_finite_is_named_and_ends_a_job_that_asked_for_it(session: Session) -> None:
    job = session.launch(source=NAN, nproc_per_node=2, on_nan="stop")
    until(job, lambda: job.view().step > 10, "steps")
    job.inject("nan", 1)
    error = job.exception(30)
    assert error is not None and error.rank == 1
    cause = job.state.failure
    assert cause is not None and cause.kind is FailureKind.DIVERGED
    assert "loss, with the gradient of 0.weight, is not finite at step" in cause.reason, cause.reason

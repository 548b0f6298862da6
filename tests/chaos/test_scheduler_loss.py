"""The scheduler of a pool of this machine is killed: the pool comes back by itself, and so do its jobs that may."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.waiting import until
from workbench.errors import JobError
from workbench.events import FailureDetected, FaultHappened, PoolLost, RunResumed, StepsBegan
from workbench.policy.comeback import MOST
from workbench.pool.local import Mark, find_pool, pool_dir, read_marks
from workbench.session import Job, Session, stop_pool
from workbench.state import CheckpointTier, JobPhase

SOON = 10.0  # s in which the pool is back, on a machine that is busy with other things
STEPS = 150
TRAIN = """
import os, sys, time, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from workbench.training import Run

folder, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = TensorDataset(torch.arange(4.0 * 64).reshape(64, 4) / 256)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3))
run = Run.current()
with open(f"{folder}/batches{rank}", "a") as seen:
    for step, (batch,) in run.steps(loader, {"model": model, "optimizer": optimizer, "loader": loader}, epochs=10**6):
        if step >= steps:
            break
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        print(step, float(batch.sum()), file=seen, flush=True)
        time.sleep(0.01)
torch.save(model.module.state_dict(), f"{folder}/weights{rank}.pt")
dist.barrier()
dist.destroy_process_group()
"""
ENDLESS = 10**9


def launch(session: Session, folder: Path, steps: int = ENDLESS, **options: object) -> Job:
    folder.mkdir(exist_ok=True)
    return session.launch(source=TRAIN, args=[str(folder), str(steps)], nproc_per_node=2, **options)


def marks() -> dict[str, Mark]:
    return read_marks(pool_dir("default"))


def kill_scheduler() -> Mark:
    """The mark of the one that was killed."""
    mark = marks()["scheduler"]
    os.kill(mark.pid, signal.SIGKILL)
    until(lambda: not mark.is_alive, "its end")
    return mark


def await_steps(job: Job, count: int = 20) -> None:
    until(lambda: job.view().step >= count, "steps", 60.0)


def await_generation(job: Job, number: int) -> StepsBegan:
    """Its first step."""
    began = lambda: [e for e in job.events() if isinstance(e, StepsBegan) and e.restart_count == number]  # noqa: E731
    return until(began, f"steps of generation {number}", 60.0)[0]


def batches(folder: Path, rank: int) -> dict[int, str]:
    """What the rank read at each step, the last time that it took it."""
    lines = (folder / f"batches{rank}").read_text().splitlines()
    return {int(step): batch for step, batch in map(str.split, lines)}


def processes_of(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def test_a_job_goes_on_by_itself_and_ends_as_if_nothing_had_happened(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken, notes = tmp_path / "whole", tmp_path / "broken", tmp_path / "notes"
    assert launch(session, whole, STEPS).wait(60) is JobPhase.SUCCEEDED
    monkeypatch.setenv("DTRAIN_NOTIFY", f"cat >> {notes}")  # which only the old scheduler was told
    job = launch(session, broken, STEPS, max_restarts=1, snapshot_every=1)
    await_steps(job)
    kill_scheduler()
    killed = time.time()
    began = await_generation(job, 1)
    assert began.time - killed < SOON
    assert job.wait(60) is JobPhase.SUCCEEDED
    assert job.state.restart_count == 1
    (resumed,) = [event for event in job.events() if isinstance(event, RunResumed)]
    assert resumed.tier is CheckpointTier.MEMORY, "its copies in memory have outlived the scheduler"
    (told,) = [event for event in job.events() if isinstance(event, FailureDetected)]
    assert "the pool's scheduler died" in told.failure.reason
    assert abs(told.failure.time - killed) < 0.5
    for rank in (0, 1):
        assert batches(broken, rank) == batches(whole, rank)
        one, other = (torch.load(folder / f"weights{rank}.pt", weights_only=True) for folder in (whole, broken))
        assert all(torch.equal(one[name], other[name]) for name in one)
    first, second = job.timeline.attempts
    assert first.cause is not None and "scheduler died" in first.cause.reason
    assert first.lost_steps is not None and first.lost_steps <= 1, "a copy each step"
    assert second.decision.startswith("restart 1")
    until(lambda: len(notes.read_text().splitlines()) == 3, "notes")
    assert [json.loads(line)["what"] for line in notes.read_text().splitlines()] == ["failure", "recovery", "end"]


def test_who_holds_a_session_or_follows_a_job_sees_it_go_on(session: Session, tmp_path: Path) -> None:
    job = launch(session, tmp_path / "job", max_restarts=1)
    await_steps(job)
    address, told = session.address, []
    follower = threading.Thread(target=lambda: told.extend(job.updates()))
    follower.start()
    kill_scheduler()
    status = session.pool_status()
    assert status.address == session.address != address
    assert status.slots == 2
    with Session(start=False) as other:
        assert other.address == session.address
    await_generation(job, 1)
    step = job.view().step
    until(lambda: job.view().step > step + 20, "steps in the view")
    job.cancel(force=True)
    assert job.wait(20) is JobPhase.STOPPED
    follower.join(20)
    events = [event for update in told for event in update.events]
    assert events == job.events(), "whoever follows misses nothing, and hears nothing twice"
    assert any(beat.restart_count == 1 for update in told for beat in update.beats)


def test_what_waited_waits_on_with_its_environment_and_what_may_not_restart_ends(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launch(session, tmp_path / "job")
    until(lambda: any(bucket.last_step > 5 for bucket in job.history(width=1.0)), "steps on record")
    monkeypatch.setenv("OF_THE_LAUNCHER", "secret")
    waiting = [session.launch(source="import os; print(os.environ['OF_THE_LAUNCHER'])", nproc_per_node=2)]
    waiting.append(session.launch(source="print('last')", nproc_per_node=2))
    assert waiting[0].phase is JobPhase.INIT
    monkeypatch.delenv("OF_THE_LAUNCHER")
    kill_scheduler()
    assert job.exception(SOON) is not None
    assert job.phase is JobPhase.FAILED
    assert "the pool's scheduler died after step " in job.reason
    for one in waiting:
        assert one.wait(60) is JobPhase.SUCCEEDED
        assert one.state.restart_count == 0
    assert "secret" in waiting[0].logs(rank=0)
    ends = [one.state.ended_at or 0.0 for one in waiting]
    assert ends == sorted(ends), "in the order in which they came"
    assert session.launch(source="print(1)", nproc_per_node=2).wait(30) is JobPhase.SUCCEEDED
    job.resume()
    await_generation(job, 1)


def test_a_cell_ends_with_the_ranks_that_held_its_state(session: Session) -> None:
    job = session.launch(interactive=True, nproc_per_node=2)
    until(lambda: job.phase is JobPhase.HEALTHY, "ranks")
    run = job.execute("import time; print('in it', flush=True); time.sleep(60)")
    next(iter(run))
    kill_scheduler()
    with pytest.raises(JobError, match="the pool's scheduler died"):
        run.answers_or_raise()
    assert job.phase is JobPhase.FAILED


def test_a_stop_while_it_comes_back_wins_and_leaves_nothing(session: Session, tmp_path: Path) -> None:
    job = launch(session, tmp_path / "job", max_restarts=5)
    await_steps(job)
    for delay in (0.0, 0.1, 0.3):
        family = [process for mark in marks().values() for process in processes_of(mark.pid)]
        kill_scheduler()
        time.sleep(delay)
        stop_pool()
        until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), "end", 5.0)  # noqa: B023
        assert not marks()
        assert not list((pool_dir("default") / "tls").glob("*"))
        assert find_pool("default") is None
        with Session(slots=2, timeout=60) as again:
            job = launch(again, tmp_path / "job", max_restarts=5)
            await_steps(job)


def test_on_purpose_and_told_with_its_times(session: Session, tmp_path: Path) -> None:
    job = launch(session, tmp_path / "job", max_restarts=1)
    await_steps(job)
    assert job.inject("kill-scheduler", 1)
    began = await_generation(job, 1)
    (happened,) = [event for event in job.events() if isinstance(event, FaultHappened)]
    until(lambda: len(job.timeline.attempts) == 2, "second attempt")
    first, _ = job.timeline.attempts
    assert first.injected_at == first.fault_at == happened.time
    assert abs(first.cause.time - happened.time) < 0.5  # type: ignore[union-attr]
    assert first.fault_at < first.detected_at < began.time  # type: ignore[operator]


def test_two_who_miss_it_bring_one_back(session: Session, tmp_path: Path) -> None:
    job = launch(session, tmp_path / "job", max_restarts=1)
    await_steps(job)
    code = "import workbench as wb; print(wb.Session(timeout=60).address)"
    kill_scheduler()
    others = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {other.communicate(timeout=60)[0].strip() for other in others}
    assert found == {session.pool_status() and session.address}
    await_generation(job, 1)
    worker = marks()["worker"]
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(pool_dir("default")) in (p.info["cmdline"] or [])]
    assert {p.pid for p in mine} == {marks()["scheduler"].pid, worker.pid}
    assert len([event for event in job.events() if isinstance(event, PoolLost)]) == 1


def test_one_that_dies_again_and_again_is_given_up_and_the_record_tells(session: Session, tmp_path: Path) -> None:
    job = launch(session, tmp_path / "job", max_restarts=100)
    await_steps(job)
    worker = marks()["worker"]
    family = processes_of(worker.pid)
    for death in range(MOST + 1):
        dead = kill_scheduler()
        if death < MOST:
            until(lambda: "scheduler" in marks() and marks()["scheduler"].pid != dead.pid, "another", SOON)  # noqa: B023
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), "the end", SOON)
    assert not marks()
    with Session(slots=2, timeout=60) as again:
        known = again.attach(job.job_id)
        assert known.phase is JobPhase.FAILED
        assert f"{MOST + 1}th time within 5 minutes, and is not started again" in known.reason
        assert len([event for event in known.events() if isinstance(event, PoolLost)]) == MOST + 1
        known.resume()
        await_generation(known, known.state.restart_count)


def test_a_worker_that_dies_while_it_comes_back_is_replaced(session: Session, tmp_path: Path) -> None:
    """Two faults at once: the pool is back, and the job is lost only with what was in memory."""
    job = launch(session, tmp_path / "job", max_restarts=3, checkpoint_every=10)
    await_steps(job, 30)
    worker = marks()["worker"]
    dead = kill_scheduler()
    until(lambda: "scheduler" in marks() and marks()["scheduler"].pid != dead.pid, "another", SOON)
    os.kill(worker.pid, signal.SIGKILL)
    number = until(lambda: job.state.restart_count, "restart", SOON)
    await_generation(job, number)
    assert marks()["worker"].pid != worker.pid

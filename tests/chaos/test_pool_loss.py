"""Real deaths: of the client, the scheduler, the worker, the zygote. Nothing is left, and the record tells it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import until
from workbench.errors import PoolLostError, PoolUnavailableError
from workbench.pool.local import find_pool, pool_dir, read_marks
from workbench.session import Job, Session, stop_pool
from workbench.state import JobPhase

TRAIN = """
import os, time, torch
parameter = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([parameter], lr=0.1)
print("pid", os.getpid(), flush=True)
while True:
    parameter.square().sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


def _launch(session: Session) -> tuple[Job, list[int]]:
    job = session.launch(source=TRAIN, nproc_per_node=2)
    until(lambda: any(bucket.last_step > 5 for bucket in job.history(width=1.0)), "steps on record")
    return job, [rank.pid for rank in job.ranks]


def _all_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_a_killed_client_leaves_its_job_running(session: Session) -> None:
    code = f"""
import time, workbench as wb
job = wb.Session(start=False).launch(source={TRAIN!r}, nproc_per_node=2)
print(job.job_id, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        job = session.attach(client.stdout.readline().strip())
        until(lambda: job.view().step > 5, "steps")
        client.kill()
    step = job.view().step
    until(lambda: job.view().step > step + 20, "steps after the client's death")
    until(lambda: job.history(width=1.0), "closed second")
    history = job.history(width=1.0)
    assert min(bucket.last_step - bucket.steps for bucket in history) == 0, "the history is whole from the first step"
    job.cancel(force=True)
    assert job.wait(10) is JobPhase.STOPPED


def test_a_pool_without_any_process_takes_the_ranks_along_and_the_record_tells(session: Session) -> None:
    """As after a crash of the machine: nobody is left who could bring it back."""
    job, pids = _launch(session)
    marks = read_marks(pool_dir("default"))
    os.kill(marks["worker"].pid, signal.SIGSTOP)  # so that it does not bring it back before it is killed as well
    os.kill(marks["scheduler"].pid, signal.SIGKILL)
    os.kill(marks["worker"].pid, signal.SIGKILL)
    until(lambda: _all_gone([*pids, marks["worker"].pid]), "end of ranks and worker", 3.0)
    with pytest.raises(PoolLostError, match="does not answer"):
        session.pool_status()
    assert find_pool("default") is None, "a stale pool file is recognised"
    with pytest.raises(PoolUnavailableError):
        Session(start=False)
    with Session(slots=2, timeout=60) as again:
        assert again.was_started
        known = again.attach(job.job_id)
        assert known.phase is JobPhase.FAILED
        assert "the pool's scheduler went away at step " in known.reason
        assert known.view().step > 5
        assert f"pid {pids[0]}" in known.logs(rank=0)
        assert again.launch(source="print(1)", nproc_per_node=2).wait(30) is JobPhase.SUCCEEDED


def test_a_killed_worker_is_named_leaves_no_rank_and_is_replaced(session: Session) -> None:
    job, pids = _launch(session)
    worker = read_marks(pool_dir("default"))["worker"].pid
    os.kill(worker, signal.SIGKILL)
    until(lambda: _all_gone(pids), "end of the ranks", 3.0)
    error = job.exception(10)
    assert error is not None
    assert "was lost with its worker" in str(error)
    until(lambda: session.pool_status().slots == 2, "another worker")
    assert read_marks(pool_dir("default"))["worker"].pid != worker


def test_a_job_goes_on_after_the_loss_of_its_worker(session: Session) -> None:
    job = session.launch(source=TRAIN, nproc_per_node=2, max_restarts=1)
    until(lambda: job.view().step > 5, "steps")
    os.kill(read_marks(pool_dir("default"))["worker"].pid, signal.SIGKILL)
    until(lambda: job.state.restart_count == 1 and job.phase is JobPhase.HEALTHY, "the restart")
    assert "was lost with its worker" in str(job.state.failure)
    job.cancel(force=True)
    assert job.wait(10) is JobPhase.STOPPED


def test_a_killed_zygote_is_replaced(session: Session) -> None:
    job, pids = _launch(session)
    zygote = psutil.Process(pids[0]).ppid()
    os.kill(zygote, signal.SIGKILL)
    error = job.exception(10)
    assert error is not None
    assert "lost with its zygote" in str(error)
    until(lambda: _all_gone([*pids, zygote]), "end of the ranks", 3.0)
    assert session.launch(source="print(1)", nproc_per_node=2).wait(30) is JobPhase.SUCCEEDED


def test_stop_leaves_nothing(session: Session) -> None:
    _job, pids = _launch(session)
    marks = read_marks(pool_dir("default"))
    family = [mark.pid for mark in marks.values()]
    family += [child.pid for pid in family for child in psutil.Process(pid).children(recursive=True)]
    assert set(pids) <= set(family)
    ports = {
        c.laddr.port for pid in family for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"
    }
    assert stop_pool()
    assert _all_gone(family)
    left = {c.laddr.port for c in psutil.net_connections("inet") if c.status == "LISTEN"} & ports
    assert not left
    assert not list(pool_dir("default").glob("*.json"))
    assert not list((pool_dir("default") / "tls").glob("*"))
    assert not stop_pool(), "a second stop finds nothing to do"


def test_a_second_start_finds_the_first(session: Session, tmp_path: Path) -> None:
    with Session(slots=7) as second:
        assert not second.was_started
        assert second.address == session.address
        assert second.pool_status().slots == 2
    with Session(pool="other", slots=1, timeout=60) as other:
        assert other.address != session.address
        assert [name for name, mark in _pools() if mark] == ["default", "other"]
    stop_pool("other")


def _pools():  # type: ignore[no-untyped-def]
    from workbench.pool.local import list_pools

    return list_pools()

"""Jobs that go on: by hand after their end, on more or fewer ranks, and elastic ones when slots go and come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.waiting import until
from workbench.errors import CheckpointNotFoundError, NotEnoughSlotsError, UsageError
from workbench.events import ResumeRequested
from workbench.session import Job, Session, stop_pool
from workbench.state import JobPhase

# Keeps its own count in a file, as scripts that checkpoint themselves do; the file named first ends it.
COUNTING = """
import os, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
print("world", world, "restart", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
ready = torch.zeros(1)
while not ready:
    ready[0] = os.path.exists(sys.argv[1])
    dist.broadcast(ready, 0)
    time.sleep(0.01)
if "fail" in sys.argv[2:] and rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("bad batch")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("home")
        patch.setenv("DTRAIN_HOME", str(path))
        yield path


@pytest.fixture(scope="module")
def session(home: Path) -> Iterator[Session]:
    session = Session(slots=3, timeout=60)
    yield session
    session.close()
    stop_pool()


def is_up(job: Job, ranks: int, restart: int) -> bool:
    """Whether that generation is past its rendezvous."""
    state = job.state
    if (state.phase, state.restart_count, len(state.ranks)) != (JobPhase.HEALTHY, restart, ranks):
        return False
    return f"world {ranks} restart {restart}" in job.logs(rank=0)


def test_a_failed_job_goes_on_where_it_is_asked_to_and_once(session: Session, tmp_path: Path) -> None:
    end = tmp_path / "end"
    end.touch()
    job = session.launch(source=COUNTING, args=[end, "fail"], nproc_per_node=2)
    assert "bad batch" in str(job.exception(30))
    end.unlink()
    job.resume(by="ana")
    job.resume(by="ana")
    until(lambda: is_up(job, 2, 1), "second generation")
    assert "restart 1" in job.reason
    end.touch()
    assert job.wait(30) is JobPhase.SUCCEEDED
    assert job.state.restart_count == 1, "the second click did nothing"
    assert job.state.failure is None


def test_a_finished_job_goes_on_on_other_ranks_also_from_another_session(session: Session, tmp_path: Path) -> None:
    end = tmp_path / "end"
    end.touch()
    job = session.launch(source=COUNTING, args=[end], nproc_per_node=2)
    assert job.wait(30) is JobPhase.SUCCEEDED
    with pytest.raises(NotEnoughSlotsError, match="needs 9 slots"):
        job.resume(ranks=9)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 40"):
        job.resume(step=40)
    with Session() as other:
        other.attach(job.job_id).resume(ranks=3)
    assert job.wait(30) is JobPhase.SUCCEEDED
    assert "world 3 restart 1" in job.logs(rank=0)


def test_a_job_of_a_stopped_pool_goes_on_in_the_next(home: Path, tmp_path: Path) -> None:
    end = tmp_path / "end"
    with Session(pool="first", slots=1, timeout=60) as first:
        job = first.launch(source=COUNTING, args=[end], nproc_per_node=1)
        until(lambda: is_up(job, 1, 0), "start")
        with Session(pool="second", slots=1, timeout=60) as second:
            with pytest.raises(UsageError, match="runs in another pool"):
                second.attach(job.job_id).resume()
            stop_pool("first")
            again = second.attach(job.job_id)
            until(lambda: again.phase is JobPhase.STOPPED, "word of its end")
            cursor = again.follow(timeout=0.0).cursor
            with ThreadPoolExecutor(1) as follower:  # a page that is open: the record is opened anew under it
                news = follower.submit(again.follow, cursor, 20.0)
                time.sleep(0.2)
                again.resume()
                assert any(isinstance(event, ResumeRequested) for event in news.result(30).events)
            until(lambda: is_up(again, 1, 1), "second generation")
            end.touch()
            assert again.wait(30) is JobPhase.SUCCEEDED
        stop_pool("second")


def test_a_running_job_is_resized(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint to wait for it takes some seconds; with one, see the tests of checkpoints."""
    end = tmp_path / "end"
    job = session.launch(source=COUNTING, args=[end], nproc_per_node=2)
    until(lambda: is_up(job, 2, 0), "start")
    with pytest.raises(NotEnoughSlotsError):
        job.resize(9)
    job.resize(3)
    assert "resized to 3 ranks after its next checkpoint" in job.reason
    until(lambda: is_up(job, 3, 1), "3 ranks", timeout=60.0)
    end.touch()
    assert job.wait(30) is JobPhase.SUCCEEDED
    with pytest.raises(UsageError, match="has ended"):
        job.resize(2)

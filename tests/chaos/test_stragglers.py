"""A rank that is slow by itself is named, and taken back when it is not any more; nobody is killed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import tests.waiting
from workbench.events import StallDetected, StragglerDetected, StragglerGone
from workbench.session import Session
from workbench.state import JobPhase

until = partial(tests.waiting.until, timeout=60.0, every=0.05)

PROGRAM = Path(__file__).parent / "programs" / "straggler.py"


def test_a_slow_rank_is_named_and_taken_back(session: Session, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    job = session.launch(str(PROGRAM), args=[str(slow)], nproc_per_node=2)
    until(lambda: any(isinstance(event, StragglerDetected) for event in job.events()), "straggler")
    (told,) = [event for event in job.events() if isinstance(event, StragglerDetected)]
    assert told.rank == 1
    assert told.score >= 3
    assert "rank 1 takes " in told.reason
    slow.unlink()
    until(lambda: any(isinstance(event, StragglerGone) for event in job.events()), "end of it")
    assert job.phase is JobPhase.HEALTHY
    assert not [event for event in job.events() if isinstance(event, StallDetected)]
    job.cancel(force=True)
    job.wait(20)


CELL = """
import torch, torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(3))
"""


def test_a_cell_that_hangs_in_a_collective_is_told_and_never_killed(session: Session) -> None:
    job = session.launch(interactive=True, nproc_per_node=2, max_restarts=2, progress_timeout=2.0)
    until(lambda: job.phase is JobPhase.HEALTHY, "ranks")
    job.execute("import time; time.sleep(3)")
    job.execute(CELL)
    until(lambda: any(isinstance(event, StallDetected) for event in job.events()), "stall")
    (told,) = [event for event in job.events() if isinstance(event, StallDetected)]
    assert told.stall.ranks == (1,)
    assert "its cell has ended" in told.stall.reason
    assert told.stall.collective == "all_reduce[3 float32]"
    assert (job.phase, job.state.restart_count) == (JobPhase.HEALTHY, 0)
    job.cancel(force=True)
    job.wait(20)

"""Jobs that keep their state: saved by `Run`, gone on with after a failure as if there had been none."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from workbench.events import CheckpointFailed, CheckpointRefused, CheckpointSaved, RunResumed
from workbench.session import Job, Session
from workbench.state import JobPhase
from workbench.training import catalogue

TRAIN = """
    import os, random, sys, time, torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    from workbench.training import Run

    out, epochs, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, size, rank, seed=3))
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    torch.manual_seed(10 + rank)
    run = Run.current()
    log = open(f"{out}/losses.{rank}", "a")
    for step, (x, y) in run.steps(loader, {"model": model, "optimizer": optimizer, "lr": scheduler}, epochs=epochs):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(step, float(loss).hex(), file=log, flush=True)
        time.sleep(pause)
    print("weights", [float(p.sum()).hex() for p in model.parameters()], file=log, flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAIN))
    return path


def launch(session: Session, program: Path, out: Path, epochs: int, pause: float = 0.0, **options: Any) -> Job:
    out.mkdir(exist_ok=True)
    return session.launch(program, args=[str(out), str(epochs), str(pause)], nproc_per_node=2, **options)


def losses(out: Path, rank: int) -> dict[str, str]:
    """By step, the last one said; and the weights."""
    return dict(line.split(" ", 1) for line in (out / f"losses.{rank}").read_text().splitlines())


def of(job: Job, kind: type) -> list[Any]:
    return [event for event in job.events() if isinstance(event, kind)]


def until(found: Any, timeout: float = 40.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def test_a_killed_rank_is_gone_on_with_exactly(session: Session, program: Path, tmp_path: Path) -> None:
    straight = launch(session, program, tmp_path / "straight", 5)
    straight.wait(50)
    job = launch(session, program, tmp_path / "killed", 5, 0.05, max_restarts=1, checkpoint_every=5, snapshot_every=-1)
    saved = until(lambda: [s for s in of(job, CheckpointSaved) if s.checkpoint.step >= 10])[-1].checkpoint
    os.kill(job.ranks[1].pid, signal.SIGKILL)
    assert job.wait(50) is JobPhase.SUCCEEDED
    (resumed,) = of(job, RunResumed)
    assert resumed.restart_count == 1 and resumed.step >= saved.step and resumed.step % 5 == 0
    for rank in (0, 1):
        assert losses(tmp_path / "killed", rank) == losses(tmp_path / "straight", rank)
    assert job.view().step == 40
    steps = [event.checkpoint.step for event in of(job, CheckpointSaved)]
    assert steps == sorted(set(steps)) and not of(job, CheckpointFailed)
    folder = Path(saved.path).parent
    assert len(catalogue.scan(folder)) == 3 and not list(folder.glob("*.partial*"))


def test_another_job_goes_on_in_the_same_folder_with_other_ranks(
    session: Session, program: Path, tmp_path: Path
) -> None:
    first = launch(session, program, tmp_path / "one", 1, checkpoint_every=5, checkpoint_dir=str(tmp_path / "kept"))
    first.wait(50)
    assert [found.step for found in catalogue.scan(tmp_path / "kept")] == [8, 5]
    newest = tmp_path / "kept" / "step-00000008" / "__0_0.distcp"
    newest.write_bytes(newest.read_bytes()[:-1])
    (tmp_path / "two").mkdir()
    second = session.launch(
        program, args=[str(tmp_path / "two"), "1", "0"], nproc_per_node=1, checkpoint_dir=str(tmp_path / "kept")
    )
    second.wait(50)
    (refused,), (resumed,) = of(second, CheckpointRefused), of(second, RunResumed)
    assert refused.checkpoint.step == 8 and "is truncated" in refused.checkpoint.problem
    assert resumed.step == 5
    assert min(int(step) for step in losses(tmp_path / "two", 0) if step != "weights") == 5


def test_by_time_and_listed_with_what_is_wrong(session: Session, program: Path, tmp_path: Path) -> None:
    job = launch(session, program, tmp_path / "out", 1000, 0.005, checkpoint_seconds=0.4)
    until(lambda: len(of(job, CheckpointSaved)) >= 4)
    job.cancel(force=True)
    job.exception(20)
    assert not of(job, CheckpointFailed)
    found = job.checkpoints
    assert len(found) == 3 and {each.problem for each in found} == {""}
    assert found[0].step > found[1].step and found[0].world_size == 2
    weights = Path(found[0].path) / "__1_0.distcp"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    assert job.checkpoints[0].problem == ""
    assert job.verify_checkpoints()[0].problem.startswith("__1_0.distcp is damaged")
    assert job.checkpoints[0].problem and not job.checkpoints[1].problem


def test_scripts_of_another_kind_are_told_where_to_go_on(session: Session, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import os, torch\nfrom workbench.training import Run\nmodel = torch.nn.Linear(1, 1)\n"
        "print(os.environ['DTRAIN_CHECKPOINT_DIR'], os.environ.get('DTRAIN_RESUME_FROM'))\n"
        "run = Run.current()\nprint(run.load({'model': model}), run.save({'model': model}))\n"
        "raise SystemExit(3)"
    )
    job = session.launch(script, nproc_per_node=1, max_restarts=1)
    assert job.exception(40) is not None
    first, second = [line.split() for line in job.logs(rank=0).splitlines() if line.startswith("/")]
    assert first[1] == "None" and second[1] == f"{first[0]}/step-00000000"
    assert len(of(job, CheckpointSaved)) == 2  # written while the script had long called exit
    assert len(of(job, RunResumed)) == 1

"""Checkpoints against what disks and kills do: whatever happens, the newest that was published loads, and no other."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.savers import program, save_for_ever
from tests.integration.training_ranks import context, end_forkserver, store_port
from workbench.events import CheckpointFailed, CheckpointSaved
from workbench.session import Session
from workbench.state import JobPhase
from workbench.training import catalogue, manifest
from workbench.training.checkpoint import Checkpointer
from workbench.training.saving import Where
from workbench.training.team import Team

KILLS = int(os.environ.get("CHAOS_KILLS", "40"))
HARMS = 200


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    yield
    end_forkserver()


def load(folder: Path, width: int = 64) -> tuple[int | None, list[tuple[str, dict[str, Any]]]]:
    """The step of what loads, checked in its numbers as well."""
    told: list[tuple[str, dict[str, Any]]] = []
    state = program(width=width)
    keeper = Checkpointer(Where(folder=folder), Team(), lambda event, **fields: told.append((event, fields)))
    loaded = keeper.load(state)
    values = {float(number) for p in state["model"].parameters() for number in p.detach().unique()}
    assert values == {-1.0 if loaded is None else float(loaded.step)}
    return (None if loaded is None else loaded.step), told


# --- harm -------------------------------------------------------------------------------------------------------------


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(1, path.stat().st_size))


HARM = {
    "flip": flip,
    "truncate": truncate,
    "zero": lambda path, chance: os.truncate(path, 0),
    "missing": lambda path, chance: path.unlink(),
}


def test_every_harm_is_refused_and_named_and_the_one_before_loaded(tmp_path: Path) -> None:
    keeper = Checkpointer(Where(folder=tmp_path), Team(), lambda event, **fields: None)
    for step in (1, 2):
        keeper.save(program(step), step, {"rank": 0}, wait=True)
    keeper.finish()
    newest, chance = tmp_path / "step-00000002", random.Random(3)
    names = sorted(path.name for path in newest.iterdir())
    assert len(names) == 3
    for number in range(HARMS):
        target = newest / chance.choice(names)
        whole = target.read_bytes()
        kind = list(HARM)[number % len(HARM)]
        HARM[kind](target, chance)
        step, told = load(tmp_path)
        assert step == 1, (kind, target)
        assert [event for event, _ in told] == ["CheckpointRefused", "RunResumed"]
        refused = told[0][1]["checkpoint"]
        assert refused["step"] == 2 and refused["problem"].startswith(target.name), (kind, refused)
        target.write_bytes(whole)
        manifest.mark(newest, "")
    assert load(tmp_path)[0] == 2


# --- kills ------------------------------------------------------------------------------------------------------------


@contextmanager
def savers(folder: Path, generation: int, world_size: int) -> Iterator[tuple[list[Any], Connection]]:
    near, far = context().Pipe(duplex=False)
    with store_port() as port:
        made = [
            context().Process(target=save_for_ever, args=(folder, generation, rank, world_size, port, far))
            for rank in range(world_size)
        ]
        for process in made:
            process.start()
        far.close()
        try:
            yield made, near
        finally:
            for process in made:
                process.kill()
                process.join(10)


@pytest.mark.parametrize(("world_size", "kills"), [(1, KILLS * 3 // 4), (2, KILLS // 4)])
def test_a_kill_at_any_instant_of_a_save_leaves_the_newest_published(
    tmp_path: Path, world_size: int, kills: int
) -> None:
    chance = random.Random(world_size)
    published = 0
    for generation in range(kills):
        with savers(tmp_path, generation, world_size) as (processes, told):
            assert told.poll(60), "nothing was saved"
            time.sleep(chance.random() * 0.15)
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)
            for process in processes:
                process.join(10)
            while told.poll():
                try:
                    word = told.recv()
                except EOFError:
                    break
                assert isinstance(word, int), word
                published = max(published, word)
        step, events = load(tmp_path, width=256)
        assert step is not None and step >= published, (generation, step, published)
        assert [event for event, _ in events] == ["RunResumed"], "nothing that was published is damaged"
        published = step


# --- a full disk ------------------------------------------------------------------------------------------------------

TRAIN = """
    import sys, time, torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from workbench.training import Run

    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, _ in Run.current().steps(range(100_000), {"model": model, "optimizer": optimizer}):
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.005)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """4 MiB; a checkpoint takes 1, a part of each rank 0.5."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(filler: Any, disk: Path) -> None:
    """Leave room for the part of one rank, not for both; anew, since old checkpoints make room when they go."""
    while os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize > 850_000:
        filler.write(bytes(65_536))
        filler.flush()


def test_a_full_disk_stops_no_training_and_costs_no_earlier_checkpoint(
    session: Session, small_disk: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    job = session.launch(
        script, nproc_per_node=2, checkpoint_every=10, checkpoint_dir=str(small_disk / "kept"), checkpoint_keep=1
    )

    def of(kind: Any, since: int = 0) -> list[Any]:
        return [event for event in job.events()[since:] if isinstance(event, kind)]

    def until(found: Any) -> Any:
        deadline = time.monotonic() + 40
        while not (value := found()):
            assert job.phase is JobPhase.HEALTHY or not job.phase.is_terminal, job.reason
            assert time.monotonic() < deadline, job.events()[-5:]
            time.sleep(0.02)
        return value

    until(lambda: of(CheckpointSaved))
    with (small_disk / "filler").open("wb") as filler:
        failed = until(lambda: fill(filler, small_disk) or of(CheckpointFailed))[0]
    assert failed.reason.startswith("disk full: "), failed
    (kept,) = [found for found in catalogue.scan(small_disk / "kept") if not found.problem][:1]
    assert manifest.find_problem(kept.path, manifest.read(kept.path)) == ""
    since = len(job.events())
    (small_disk / "filler").unlink()
    saved = until(lambda: of(CheckpointSaved, since))[0]
    assert saved.checkpoint.step > failed.step
    job.cancel(force=True)
    job.exception(20)
    assert not of(CheckpointFailed) or all(e.reason.startswith("disk full: ") for e in of(CheckpointFailed))

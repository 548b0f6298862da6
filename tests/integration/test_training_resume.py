"""50 steps straight are 20 steps, SIGKILL, and 30 more: the loss curve and the weights, bit for bit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).with_name("resumed_training.py")
ROOT = PROGRAM.parents[2]
STEPS = 50
EPOCH = 15  # steps


def train(folder: Path, kill_at: int, workers: int, how: str) -> Any:
    """What is there to resume from once the program has ended."""
    folder.mkdir(exist_ok=True)
    arguments = [str(folder), str(STEPS), str(kill_at), str(workers), how]
    with (folder / "stderr").open("w") as stderr:
        program = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments], stderr=stderr, cwd=ROOT, start_new_session=True
        )
        try:
            ended = program.wait(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # the workers: they look after their parent every 5 s
            program.wait(timeout=10)
    assert ended == (-signal.SIGKILL if kill_at else 0), (folder / "stderr").read_text()
    return torch.load(folder / "newest.pt", weights_only=True)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("workers", "how", "kills"),
    [
        (0, "", (20,)),
        (2, "", (20,)),
        (2, "persistent", (20,)),
        (2, "persistent", (EPOCH, 2 * EPOCH + 1, 2 * EPOCH + 4)),
    ],
    ids=["in the rank", "workers", "persistent workers", "thrice, at an epoch's end and twice in one"],
)
def test_straight_and_killed_are_the_same(tmp_path: Path, workers: int, how: str, kills: tuple[int, ...]) -> None:
    straight = train(tmp_path / "straight", 0, workers, how)
    for kill_at in kills:
        assert len(train(tmp_path / "killed", kill_at, workers, how)["losses"]) == kill_at
    resumed = train(tmp_path / "killed", 0, workers, how)
    assert len(straight["losses"]) == STEPS and resumed["losses"] == straight["losses"]
    for name, tensor in straight["model"].items():
        assert torch.equal(resumed["model"][name], tensor)
    assert torch.equal(resumed["rng"]["torch"], straight["rng"]["torch"])

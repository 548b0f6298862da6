"""replay-check on real jobs: same bits, or the first module whose output differs, with its cause."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from workbench import Session
from workbench.errors import RankFailedError, UsageError
from workbench.policy.replay import ReplayReport
from workbench.state import JobPhase

TRAIN = """
import os, random, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.drop = nn.Dropout(0.5 if DROPS else 0.0)
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.first(x))) * FACTOR)

DROPS = False
FACTOR = 1.0
ORDER = list(range(64))
SETUP
dist.init_process_group("gloo")
rank = dist.get_rank()
made = torch.Generator().manual_seed(rank)
data = TensorDataset(torch.randn(64, 16, generator=made)[ORDER], torch.randint(4, (64,), generator=made)[ORDER])
SEEDING
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(1000):
    for x, y in DataLoader(data, batch_size=8):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
SEEDED = "torch.manual_seed(0)"

pytestmark = pytest.mark.timeout(180)  # three jobs each, one of them in fresh interpreters


def program(tmp_path: Path, setup: str = "", seeding: str = SEEDED) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN.replace("SETUP", textwrap.dedent(setup)).replace("SEEDING", seeding))
    return str(path)


def checked(session: Session, path: str, **options: Any) -> ReplayReport:
    return session.replay_check(path, steps=3, timeout=100, nproc_per_node=2, **options)


def test_a_program_that_seeds_itself_has_the_same_bits(session: Session, tmp_path: Path) -> None:
    told: list[str] = []
    report = checked(session, program(tmp_path, "DROPS = True"), tell=told.append)
    assert report.is_same, report.lines()
    assert (report.steps, report.ranks) == (3, 2) and report.tensors > 100
    assert told == ["run 1 of train", "run 2 of train", "the run with slots swapped of train"]
    jobs = [session.attach(job_id) for job_id in report.job_ids]
    assert [job.phase for job in jobs] == [JobPhase.SUCCEEDED] * 3
    first, _, swapped = [[place.slot for place in job.state.placements] for job in jobs]
    assert swapped == [*first[1:], first[0]] and len(first) == 2


@pytest.mark.parametrize(
    ("setup", "seeding", "kind", "name", "cause"),
    [
        ("", "", "start", "first.weight", "not seeded"),
        ("ORDER = [hash(str(n)) % 64 for n in range(64)]", SEEDED, "batch", "DataLoader", "order of a set of strings"),
        ("FACTOR = 1 + time.time() % 1", SEEDED, "output", "last", "something besides its inputs"),
    ],
)
def test_what_differs_is_named_with_its_cause(
    session: Session, tmp_path: Path, setup: str, seeding: str, kind: str, name: str, cause: str
) -> None:
    randomized = {"PYTHONHASHSEED": "random"}  # also where the tests' own environment fixes it
    report = checked(session, program(tmp_path, setup, seeding), env=randomized)
    found, finding = report.divergence, report.finding
    assert found is not None and finding is not None
    assert (found.step, found.kind, found.name) == (0, kind, name), report.lines()
    assert cause in finding.cause, report.lines()


def test_dropout_without_a_seed_is_named_and_the_deterministic_mode_ends_it(session: Session, tmp_path: Path) -> None:
    seeding = "torch.manual_seed(0); Plain = Net; kept = Net().state_dict(); Net = lambda: seeded(Plain, kept)"
    setup = """
    DROPS = True
    def seeded(make, kept):
        made = make()
        made.load_state_dict(kept)
        if not torch.are_deterministic_algorithms_enabled():
            torch.seed()
        return made
    """
    path = program(tmp_path, setup, seeding)
    report = checked(session, path)
    assert report.divergence is not None and report.finding is not None
    assert (report.divergence.kind, report.divergence.name) == ("output", "drop"), report.lines()
    assert report.finding.cause == "dropout without a seed" and report.divergence.deviation > 0
    assert checked(session, path, deterministic=True).is_same


def test_a_job_is_replayed_from_its_spec(session: Session, tmp_path: Path) -> None:
    text = TRAIN.replace("SETUP", "").replace("SEEDING", SEEDED).replace("range(1000)", "range(1)")
    job = session.launch(source=text, nproc_per_node=1)
    job.wait(40)
    report = job.replay_check(steps=2, timeout=100)
    assert report.is_same and (report.steps, report.ranks) == (2, 1)
    assert report.skipped == "slots were not swapped: there is one rank"


def test_what_cannot_be_replayed_is_told(session: Session) -> None:
    with pytest.raises(UsageError, match="took no optimizer step"):
        session.replay_check(source="print('no training')", nproc_per_node=1, timeout=30)
    with pytest.raises(RankFailedError, match="ZeroDivisionError"):
        session.replay_check(source="1 / 0", nproc_per_node=1, timeout=30)
    with pytest.raises(UsageError, match="0 steps"):
        session.replay_check(source="pass", steps=0)

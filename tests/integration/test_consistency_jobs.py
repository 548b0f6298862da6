"""Jobs of a real pool whose replicas differ: stopped with all that is known, or taken back to where they agreed."""

from __future__ import annotations

import pytest

from workbench.errors import GradientMismatchError
from workbench.events import (
    CheckpointFailed,
    CheckpointRefused,
    CheckpointSaved,
    ConsistencyPaced,
    GradientMismatched,
    RunResumed,
)
from workbench.session import Job, Session
from workbench.state import Compared, JobPhase
from workbench.store.home import job_path
from workbench.store.jobfile import JobFile
from workbench.telemetry import ConsistencyReport

STEPS, SAVED, BAD = 12, 4, 6

# One bit of rank 1's momentum flips after step 6 of the first generation. It is seen before the next step.
PROGRAM = f"""
import os, time, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from workbench.training import Run

torch.set_num_threads(1)
SAVE = os.path.join(os.environ["DTRAIN_CHECKPOINT_DIR"], "step-{SAVED:08}")
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn({STEPS * 8}, 8))
model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(data, 4, sampler=DistributedSampler(data))
for step, (x,) in Run.current().steps(loader, {{"model": model, "optimizer": optimizer}}):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    while step == {SAVED} and os.environ.get("AWAIT") and not os.path.isdir(SAVE):
        time.sleep(0.01)  # it is saved in the background
    if step + 1 == {BAD} and dist.get_rank() == 1 and is_first and os.environ.get("SPOIL"):
        held = optimizer.state[model.module.weight]["momentum_buffer"]
        held.view(-1)[3:4].view(torch.int32).bitwise_xor_(1 << 20)
total = sum(float(value.double().sum()) for value in model.parameters())
print("sum", total.hex(), flush=True)
dist.destroy_process_group()
"""


def launch(session: Session, *, spoil: bool = True, **options: object) -> Job:
    env = ({"SPOIL": "1"} if spoil else {}) | ({"AWAIT": "1"} if "checkpoint_every" in options else {})
    return session.launch(source=PROGRAM, nproc_per_node=2, consistency_every=1, env=env, **options)


def mismatch(job: Job) -> GradientMismatched:
    (found,) = [event for event in job.events() if isinstance(event, GradientMismatched)]
    return found


def test_a_stopped_job_says_who_what_where_and_what_to_do(session: Session) -> None:
    job = launch(session, on_mismatch="stop")
    error = job.exception(60)
    assert isinstance(error, GradientMismatchError)
    assert (error.rank, error.step) == (1, BAD)
    for words in ("rank 1 deviates in optimizer state", "weight.momentum_buffer", "bit 20", "bits flipped"):
        assert words in str(error)
    found = mismatch(job)
    assert (found.mismatch.compared, found.mismatch.told_by, found.response) == (Compared.STATE, "own digest", "stop")
    assert found.finding is not None and found.finding.cause == "bits flipped"
    assert found.finding.line() in job.logs(rank=0)


def test_a_job_goes_back_to_the_checkpoint_in_which_its_ranks_agreed(session: Session) -> None:
    """And ends with the very numbers that it would have had."""
    clean = launch(session, spoil=False)
    assert clean.wait(60) is JobPhase.SUCCEEDED
    job = launch(session, on_mismatch="rollback", max_restarts=1, checkpoint_every=SAVED, snapshot_every=-1)
    assert job.wait(60) is JobPhase.SUCCEEDED
    saved = [event.checkpoint for event in job.events() if isinstance(event, CheckpointSaved)]
    assert (saved[0].step, saved[0].agreed) == (SAVED, True)
    (resumed,) = [event for event in job.events() if isinstance(event, RunResumed)]
    assert (resumed.step, resumed.is_proved) == (SAVED, True)
    assert mismatch(job).response == "rollback"
    sums = [
        next(line for line in logs.splitlines() if "sum" in line) for logs in (clean.logs(rank=0), job.logs(rank=0))
    ]
    assert sums[0] == sums[1]


# The weights of rank 1 are moved at a step, for good. Each rank would write some of them.
DRIFT = """
import os, sys, time, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workbench.training import Run

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step, _ in Run.current().steps(range(10**6), {"model": model, "optimizer": optimizer}):
    if step == int(sys.argv[1]) and is_first and dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)
    if step == (300 if is_first else 370):
        sys.exit(3 if is_first else 0)
"""


def drift(session: Session, at: int, **options: object) -> Job:
    """A job whose ranks differ from a step on, that saves, and fails at step 300."""
    return session.launch(
        source=DRIFT, args=[str(at)], nproc_per_node=2, on_mismatch="warn", checkpoint_every=20, snapshot_every=-1,
        **options,
    )  # fmt: skip


def test_a_job_that_was_only_warned_goes_on_from_where_its_ranks_agreed_and_says_what_it_leaves(
    session: Session,
) -> None:
    job = drift(session, at=110, max_restarts=1)
    assert job.wait(60) is JobPhase.SUCCEEDED
    first = [event for event in job.events() if getattr(event, "restart_count", 0) == 0]
    saved = {event.checkpoint.step: event.checkpoint for event in first if isinstance(event, CheckpointSaved)}
    failed = [event for event in first if isinstance(event, CheckpointFailed)]
    sound = max(step for step, checkpoint in saved.items() if checkpoint.agreed)
    assert "the ranks do not hold the same" in failed[0].reason, "it would be put together of both"
    doubtful = [step for step, checkpoint in saved.items() if checkpoint.agreed is False]
    assert len(doubtful) > 3, "more than are kept"
    assert min(doubtful) > failed[0].step > sound
    (resumed,) = [event for event in job.events() if isinstance(event, RunResumed)]
    assert (resumed.step, resumed.is_proved) == (sound, True)
    refused = [event.checkpoint for event in job.events() if isinstance(event, CheckpointRefused)]
    assert [one.step for one in refused] == doubtful[-3:]
    assert all(f"unlike those of step {sound}; --step {one.step} takes rank 0's" in one.problem for one in refused)
    assert "passed over" in job.logs(rank=0)


def test_what_ranks_did_not_agree_on_is_rank_0s_where_there_is_nothing_else(session: Session) -> None:
    job = drift(session, at=5, max_restarts=1)
    assert job.wait(60) is JobPhase.SUCCEEDED
    (resumed,) = [event for event in job.events() if isinstance(event, RunResumed)]
    assert resumed.is_proved and resumed.step >= 260, "rather than from the start"
    assert "goes on from what rank 0 had" in job.logs(rank=0)
    assert all(one.agreed for one in job.checkpoints), "the second generation's: its ranks began with the same"


def test_who_asks_for_what_ranks_did_not_agree_on_gets_rank_0s(session: Session) -> None:
    job = drift(session, at=110)
    assert job.exception(60) is not None
    wanted = max(one.step for one in job.checkpoints if one.agreed is False)
    job.resume(step=wanted)
    assert job.wait(60) is JobPhase.SUCCEEDED
    (resumed,) = [event for event in job.events() if isinstance(event, RunResumed)]
    assert (resumed.step, resumed.is_proved) == (wanted, True)


def test_a_repaired_job_goes_on_to_the_same_end(session: Session) -> None:
    clean, job = launch(session, spoil=False), launch(session, on_mismatch="repair")
    assert clean.wait(60) is job.wait(60) is JobPhase.SUCCEEDED
    assert job.state.restart_count == 0
    assert "bit for bit" in job.logs(rank=0)
    sums = [
        next(line for line in logs.splitlines() if "sum" in line) for logs in (clean.logs(rank=0), job.logs(rank=0))
    ]
    assert sums[0] == sums[1]


@pytest.mark.parametrize(("option", "is_checked"), [({}, True), ({"consistency_every": -1}, False)])
def test_ranks_are_compared_unless_that_is_switched_off(
    session: Session, option: dict[str, int], is_checked: bool
) -> None:
    job = session.launch(source=PROGRAM, nproc_per_node=2, **option)
    assert job.wait(60) is JobPhase.SUCCEEDED
    paced = [event for event in job.events() if isinstance(event, ConsistencyPaced)]
    assert bool(paced) is is_checked
    reports = job.follow(timeout=1).checks
    assert bool(reports) is is_checked
    told = [report for report in reports if isinstance(report, ConsistencyReport)]
    assert all(report.agreed == report.checked for report in told)
    statistics = job.view().gradients.statistics
    assert statistics.has_begun is is_checked
    if is_checked:
        assert [row.ranks for row in statistics.rows] == [(0,), (1,)]
        assert [layer.name for layer in statistics.layers] == ["weight", "bias"] or statistics.layers
        with JobFile.open(job_path(job.job_id), read_only=True) as record:
            assert record.checks()[0] == list(reports), "they are in the record"

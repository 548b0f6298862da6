"""Real jobs whose loss is in trouble: the finding is in the view, in the status and in its JSON."""

from __future__ import annotations

import time

import msgspec
import pytest

from workbench import Session
from workbench.findings import Finding
from workbench.session import Job
from workbench.views.text import render_status

# 50 steps a second, so that the record, which keeps a loss a second, has enough of them soon.
TRAIN = """
import itertools, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workbench.training import Run

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
teacher = torch.randn(16, 10, generator=torch.Generator().manual_seed(9))
model = DistributedDataParallel(nn.Linear(16, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.5)
run = Run.current()
for step in itertools.count():
    x = torch.randn(64, 16)
    y = (x @ teacher).argmax(1)
    if "labels" in sys.argv and rank == 1:
        y = torch.randint(10, (64,))
    if "rate" in sys.argv and step >= 400:  # on all ranks at once: else they drift apart
        optimizer.param_groups[0]["lr"] = 500.0
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.report(loss=loss.item())
    time.sleep(0.02)
"""


def await_finding(job: Job, timeout: float = 80.0) -> Finding:
    """About the loss."""
    deadline = time.monotonic() + timeout
    while not (found := [one for one in job.view().findings if "loss" in one.symptom]):
        assert time.monotonic() < deadline, job.view().series
        assert not job.phase.is_terminal, job.reason
        time.sleep(0.5)
    return found[0]


@pytest.mark.timeout(180)
def test_a_learning_rate_too_high_and_a_rank_with_bad_labels_are_told(session: Session) -> None:
    jobs = [session.launch(source=TRAIN, args=[what], nproc_per_node=2) for what in ("rate", "labels")]
    rate, labels = (await_finding(job) for job in jobs)
    assert rate.cause == "the learning rate is too high" and rate.rank is None and rate.symptom.startswith("the loss ")
    assert any(text.startswith("the losses of ranks differ by") for text in rate.evidence)
    assert labels.rank == 1 and "data or labels are wrong" in labels.cause
    view = jobs[1].view()
    assert f"likely cause: {labels.cause}" in render_status(view)
    assert msgspec.to_builtins(view)["findings"][0]["rank"] == 1

"""One rank of a DDP job whose ranks agree: what checks and looks say in many steps, which should be nothing.

python clean.py KIND STEPS      RANK, WORLD_SIZE and a rendezvous in the environment; prints JSON
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workbench.findings import Severity
from workbench.policy.data import explain_data
from workbench.policy.standing import Marks, advance
from workbench.state import DataDoubt
from workbench.telemetry import GradientStatistics
from workbench.training import guard
from workbench.training.consistency import reports, watch
from workbench.training.consistency.check import Checker

BATCH = 16
BUDGET = 0.5  # many looks
SOON = 0.2  # s between two reports
KINDS = (
    "fp32", "bf16 autocast", "GradScaler skips", "accumulation", "dropout", "BatchNorm", "unused parameters",
    "uneven last batch",
)  # fmt: skip


class Branches(nn.Module):
    """Of which each rank uses another at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 4) for _ in range(3))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        found: torch.Tensor = self.heads[(self.step + dist.get_rank()) % 3](self.body(x).relu())
        return found


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    more: list[nn.Module] = {"dropout": [nn.Dropout(0.5)], "BatchNorm": [nn.BatchNorm1d(16)]}.get(kind, [])
    if kind == "unused parameters":
        return Branches()
    return nn.Sequential(nn.Linear(8, 16), *more, nn.ReLU(), nn.Linear(16, 4))


def batches(kind: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    step = 0
    while True:
        step += 1
        is_short = kind == "uneven last batch" and step % 10 == 0 and dist.get_rank() == dist.get_world_size() - 1
        x = torch.randn(3 if is_short else BATCH, 8, generator=generator)
        yield x, (x[:, :4] + 0.5 * torch.randn(len(x), 4, generator=generator)).argmax(1)


def train(kind: str, steps: int) -> int:
    """Steps that a GradScaler skipped."""
    ddp = DistributedDataParallel(model_of(kind), find_unused_parameters=kind == "unused parameters")
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=20, enabled=kind == "GradScaler skips")
    source, skipped = batches(kind), 0
    for _ in range(steps):
        optimizer.zero_grad()
        for micro in range(4 if kind == "accumulation" else 1):
            x, y = next(source)
            quiet = ddp.no_sync() if kind == "accumulation" and micro < 3 else contextlib.nullcontext()
            with quiet, torch.autocast("cpu", torch.bfloat16, enabled="bf16" in kind):
                scaler.scale(4 * F.cross_entropy(ddp(x), y)).backward()  # type: ignore[no-untyped-call]
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    return skipped


def main(kind: str, steps: int) -> None:
    torch.set_num_threads(1)
    guard.install()
    reports.EVERY = SOON  # type: ignore[misc]
    facts: list[tuple[str, dict[str, Any]]] = []
    told: list[dict[str, Any]] = []
    to = reports.Reports(lambda event, **fields: facts.append((event, fields)), lambda **fields: told.append(fields))
    checker = Checker(to, lambda: 0, every=1, budget=BUDGET)
    watching = watch.Watch(checker)
    watching.origin.tell = lambda **fields: facts.append(("NonFiniteFound", fields))
    watch.install(watching)
    dist.init_process_group("gloo")
    skipped = train(kind, steps)
    watching.flush()
    checked = sum(one.get("checked", 0) for one in told)
    looks, marks = 0, Marks()
    for one in told:
        if "samples" in one:
            looks += one["samples"]
            report = msgspec.convert({**one, "job_id": "a", "restart_count": 0, "rank": 0}, GradientStatistics)
            marks, named = advance(marks, report)
            facts += [("GradientsStoodOut", {"symptom": standing.finding.symptom}) for standing in named]
    alarms = [fact for fact in facts if fact[0] != "ConsistencyPaced" and not is_hint(*fact)]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (alarms, checker.off))
    if dist.get_rank() == 0:
        off = next((reason for _, reason in everybody if reason), "")
        said = [str(alarm)[:300] for some, _ in everybody for alarm in some]
        print(json.dumps({"checked": checked, "looks": looks, "skipped": skipped, "alarms": said, "off": off}))
    dist.destroy_process_group()


def is_hint(event: str, fields: dict[str, Any]) -> bool:
    """What is said to be on purpose perhaps, such as batches that are uneven."""
    if event != "DataDoubted":
        return False
    return explain_data(msgspec.convert(fields["doubt"], DataDoubt), 0).severity is not Severity.ERROR


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

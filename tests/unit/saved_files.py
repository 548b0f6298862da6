"""Sessions to save without a pool: real records of the simulated one, made-up steps, and answers as a runner gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

from workbench.agent.logs import LogPage
from workbench.blackbox import StepRecord, pack_step
from workbench.collect import save
from workbench.controller import transition
from workbench.errors import PoolError
from workbench.events import CellSent, Event, OriginRecorded
from workbench.feed import BeatFrame, Bucket, Cursor, PoolStatus, StepPage, Update, WorkerStatus
from workbench.origin import Origin, Source
from workbench.spec import EntrypointKind, JobSpec
from workbench.state import JobState
from workbench.store.saved.document import Document
from workbench.telemetry import CellFinished, OutputWritten
from workbench.testing import FakePool
from workbench.views.buckets import OpenBuckets, fold_steps

START = 1000.0
CODE = "lr = 0.05\nprint(lr)\n"


def events_of(spec: JobSpec, origin: Origin | None = None, *, kills: bool = False) -> list[Event]:
    """The record of a job of this spec that ran to its end."""
    pool = FakePool({"tcp://a:1": max(spec.world_size, 1)}, start=START)
    job_id = pool.launch(spec, "trial-1")
    pool.run()
    pool.advance(10.0)
    if kills:
        pool.kill(job_id, rank=1)
        pool.run()
    else:
        for rank in range(spec.world_size):
            pool.exit(job_id, rank)
        pool.run()
    record = pool.record[job_id]
    return [record[0], OriginRecorded(time=START, origin=origin), *record[1:]] if origin else list(record)


def steps_of(rank: int, losses: list[float], *, seconds: float = 0.1) -> bytes:
    """One step a loss."""
    records = [
        StepRecord(k + 1, START + 1 + seconds * (k + 1), seconds, *[seconds / 8] * 6, 16.0, 0.0, loss)
        for k, loss in enumerate(losses)
    ]
    return b"".join(map(pack_step, records))


class FakeAsk:
    """What a runner would answer about one job."""

    def __init__(self, events: list[Event], steps: dict[int, bytes] | None = None, logs: dict[int, str] | None = None):
        self.events, self.steps, self.logs = events, steps or {}, logs
        self.output: tuple[OutputWritten, ...] = ()
        self.frames: tuple[BeatFrame, ...] = ()
        self.cells: tuple[CellFinished, ...] = ()
        self.checkpoints: list[Any] = []

    @property
    def state(self) -> JobState:
        folded = reduce(lambda state, event: transition(state, event)[0], self.events, None)
        assert folded is not None
        return folded

    def buckets(self) -> list[Bucket]:
        found: OpenBuckets = {}
        for rank, block in self.steps.items():
            fold_steps(found, rank, block)
        return [bucket for _, group in sorted(found.items()) for _, bucket in sorted(group.items())]

    def __call__(self, name: str, body: Any, kind: Any, timeout: float = 30.0) -> Any:
        return getattr(self, f"_{name}")(body)

    def _status(self, _: None) -> PoolStatus:
        worker = WorkerStatus(address="tls://w", host="h", pid=1, slots=4, free=2)
        return PoolStatus(name="default", version="0", address="tls://s", slots=4, free=4, workers=(worker,))

    def _follow(self, asked: Any) -> Update:
        buckets = tuple(self.buckets())
        cursor = Cursor(event=len(self.events), bucket=max((b.start + b.width for b in buckets), default=0.0))
        return Update(
            state=self.state, cursor=cursor, now=START + 100, events=tuple(self.events), buckets=buckets,
            output=self.output, cells=self.cells,
        )  # fmt: skip

    def _history(self, asked: Any) -> list[Bucket]:
        return self.buckets()

    def _frames(self, asked: Any) -> list[BeatFrame]:
        return list(self.frames)

    def _steps(self, asked: Any) -> StepPage:
        ranks = sorted(self.steps)
        page = tuple((rank, self.steps[rank]) for rank in ranks[asked.after : asked.after + 1])
        return StepPage(blocks=page, next=asked.after + 1 if asked.after + 1 < len(ranks) else None)

    def _log(self, asked: Any) -> LogPage:
        if self.logs is None:
            raise PoolError("no worker is there")
        text = self.logs.get(asked.rank, "")
        return LogPage(text=text, next=len(text.encode()))

    def _checkpoints(self, asked: Any) -> list[Any]:
        return self.checkpoints


SPEC = JobSpec(
    kind=EntrypointKind.SOURCE, entrypoint="trial", source=CODE, nproc_per_node=2, seed=0, name="trial",
    args=("--epochs", "2"),
)  # fmt: skip
LOSSES = [2.0 / (k + 1) for k in range(30)]


def fake(spec: JobSpec = SPEC, losses: list[float] = LOSSES, origin: Origin | None = None, **kw: Any) -> FakeAsk:
    logs = {rank: f"rank {rank}: accuracy 97.5%\n" for rank in range(spec.world_size)}
    steps = {rank: steps_of(rank, losses if rank == 0 else [math.nan] * len(losses)) for rank in range(2)}
    return FakeAsk(events_of(spec, origin, **kw), steps, logs)


def save_fake(path: Path, change: Callable[[FakeAsk], object] = lambda asked: None, **options: Any) -> Document:
    asked = options.pop("asked", None) or fake(origin=ORIGIN)
    change(asked)
    return save(path, asked, ["trial-1"], **options)


ORIGIN = Origin(
    root="/data/work",
    sources=(Source(path="digits.py", digest="0" * 64, text="import torch\n"),),
    packages={"torch": "2.13.0"},
    python="3.12.0",
)


def interactive() -> FakeAsk:
    spec = JobSpec(kind=EntrypointKind.INTERACTIVE, nproc_per_node=2)
    asked = fake(spec)
    sent = CellSent(time=START + 1, restart_count=0, cell_id="cell-1", ranks=(0, 1), source="x = 1\n")
    asked.events.insert(len(asked.events) - 1, sent)
    return asked

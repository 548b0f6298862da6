"""Jobs that never ran, for pages to show: what a pool would have said of them. `python scenes.py SOCKET` serves them.

`small`: 8 ranks of 2 hosts, one of them slow from its middle on. `large`: 1,024 ranks. `failed`: with a failure and a
checkpoint. `hung`: one rank has not entered the collective in which the others wait. `empty`: nothing has come yet.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workbench.blackbox import Traffic
from workbench.events import (
    CheckpointSaved,
    Event,
    FailureDetected,
    GradientsStoodOut,
    LaunchRequested,
    NonFiniteFound,
    OriginRecorded,
    PhaseChanged,
    RankExited,
    RankStarted,
    SlotsGranted,
    StepsBegan,
    StragglerDetected,
)
from workbench.feed import Bucket, Cursor, Total, Update
from workbench.origin import Origin
from workbench.policy.standing import Marks, Standing, advance
from workbench.spec import JobSpec
from workbench.state import (
    Checkpoint,
    Failure,
    FailureKind,
    JobPhase,
    JobState,
    Placement,
    RankPhase,
    RankState,
)
from workbench.telemetry import (
    Check,
    ConsistencyReport,
    GradientStatistics,
    Histogram,
    LayerStatistics,
    OutputWritten,
    RankBeat,
)
from workbench.views.buckets import across_ranks

EPOCH = 1_790_000_000.0
STEP = 0.25  # s
TRACEBACK = (
    'Traceback (most recent call last):\n  File "train.py", line 41, in main\n    loss = model(batch).mean()\n'
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.10 GiB of which "
    "1.20 GiB is free"
)


def place(rank: int) -> Placement:
    node = rank // 4 if rank < 8 else rank // 8
    worker = f"tls://10.0.0.{node % 250 + 1}:4000"
    return Placement(rank=rank, local_rank=rank % 8, node_rank=node, worker=worker, slot=rank % 8)


def bucket(rank: int, at: float, width: float, *, slow: float = 1.0, step: float = STEP) -> Bucket:
    """`width` s of one rank's steps, `slow` times as much work of its own."""
    own = step * 0.55 * slow * random.uniform(0.97, 1.06)
    whole = step * max(1.0, 0.55 * slow + 0.1) * random.uniform(0.99, 1.02)
    steps = max(1, round(width / whole))
    comm = max(0.02 * whole, whole - own)
    loss = 0.35 + 2.1 * math.exp(-at / 70) + random.gauss(0, 0.05)
    return Bucket(
        rank=rank, start=EPOCH + at, width=width, steps=steps, last_step=int((at + width) / step),
        duration=steps * whole, slowest=whole * 1.1, data=steps * own * 0.12, forward=steps * own * 0.3,
        backward=steps * own * 0.45, comm=steps * comm, optimizer=steps * own * 0.13, checkpoint=0.0,
        samples=steps * 32.0, tokens=0.0, loss=loss,
        learning_rate=1e-3 * min(1.0, (at + width) / 30) * 0.5 * (1 + math.cos(min(at / 400, 1.0) * math.pi)),
    )  # fmt: skip


def beat(
    rank: int, at: float, *, generation: int = 0, inside: bool = True, seq: int = 0, since: float = 0.1
) -> RankBeat:
    return RankBeat(
        job_id="scene", restart_count=generation, rank=rank, time=EPOCH + at, step=int(at / STEP),
        activity="COLLECTIVE" if inside else "BACKWARD", since=since, collective="all_reduce",
        collective_seq=seq or int(at / STEP) * 3, rss=int(2.1e9 + rank % 8 * 4e7 + at * 1e6),
        cpu=95 + rank % 8 * 2 + random.uniform(-4, 4), gpu=88 + random.uniform(-6, 4), gpu_memory=int(41e9),
        disk_read=abs(random.gauss(12e6, 3e6)), disk_write=abs(random.gauss(2e5, 2e5)), progress=(int(at / STEP), 1600),
        counted=int(at / STEP), hidden=0.78 - 0.02 * (rank % 8),
        traffic=(Traffic("all_reduce (DDP)", int(at * 16), int(at * 4.1e8)), Traffic("broadcast", 61, 48_000)),
    )  # fmt: skip


def state(ranks: int, phase: JobPhase = JobPhase.HEALTHY, **changes: object) -> JobState:
    rank_phase = RankPhase.HEALTHY if phase is JobPhase.HEALTHY else RankPhase.FAILED
    found = tuple(RankState(rank=k, phase=rank_phase, pid=4000 + k, worker=place(k).worker) for k in range(ranks))
    values = {
        "job_id": "scene", "spec": JobSpec(entrypoint="train.py", nproc_per_node=ranks, max_restarts=3),
        "submitted_at": EPOCH, "phase": phase, "reason": "all ranks run", "ranks": found,
        "placements": tuple(map(place, range(ranks))), **changes,
    }  # fmt: skip
    return JobState(**values)


def begin(ranks: int) -> list[Event]:
    spec = JobSpec(entrypoint="train.py", nproc_per_node=ranks, max_restarts=3)
    return [
        LaunchRequested(time=EPOCH, job_id="scene", spec=spec),
        OriginRecorded(time=EPOCH, origin=Origin(packages={"torch": "2.13.0", "numpy": "2.4.6"})),
        SlotsGranted(time=EPOCH + 0.1, placements=tuple(map(place, range(ranks)))),
        PhaseChanged(time=EPOCH + 0.1, phase=JobPhase.LAUNCHING, reason="", restart_count=0),
        *(RankStarted(time=EPOCH + 0.2, restart_count=0, rank=k, pid=4000 + k) for k in range(ranks)),
        PhaseChanged(time=EPOCH + 0.6, phase=JobPhase.HEALTHY, reason="all ranks run", restart_count=0),
        StepsBegan(time=EPOCH + 1.0, restart_count=0, step=1),
    ]


def update(now: float, of: JobState, **changes: object) -> Update:
    return Update(**{"state": of, "cursor": Cursor(), "now": EPOCH + now, **changes})


def output(rank: int, at: float, text: str) -> OutputWritten:
    return OutputWritten(job_id="scene", rank=rank, stream="stdout", text=text, time=EPOCH + at)


def checks(ranks: int, at: float, odd: int) -> tuple[Check, ...]:
    """Replicas agree; the own gradients of rank `odd` are not like the others'."""
    about: dict[str, Any] = {
        "job_id": "scene", "restart_count": 0, "rank": 0, "start": EPOCH + at - 2, "end": EPOCH + at,
        "first_step": int((at - 2) / STEP), "last_step": int(at / STEP), "ranks": tuple(range(ranks)),
    }  # fmt: skip
    random.seed(ranks)
    middle = [random.gauss(17.5, 0.3) for _ in range(ranks)]
    counts = [tuple(int(9000 * math.exp(-((k - at) ** 2) / 5)) for k in range(32)) for at in middle]
    counts[odd] = tuple(int(9000 * math.exp(-((k - 21) ** 2) / 8)) for k in range(32))
    norms = [random.lognormvariate(0.2, 0.1) for _ in range(ranks)]
    norms[odd] *= 30
    whole = tuple(sum(some) for some in zip(*counts, strict=True))
    few = [Histogram((k,), counts[k]) for k in range(ranks)] if ranks <= 16 else []
    yes = ConsistencyReport(checked=9, agreed=9, every=4, parts=8, share=0.016, tensors=28, digest="9f" * 8, **about)
    looked = GradientStatistics(
        samples=3, every=110, norms=tuple(norms), cosines=tuple(0.9 if k != odd else 0.97 for k in range(ranks)),
        zeros=(0.02,) * ranks, mean_norm=1.1, layers=tuple(
            LayerStatistics(f"blocks.{k}", 2e-3 / (k + 1), 0.04, 3e-3) for k in range(6)
        ), histograms=tuple(few or (Histogram(tuple(range(ranks)), whole), Histogram((odd,), counts[odd]))), **about,
    )  # fmt: skip
    return yes, looked


def running(ranks: int, length: float, width: float, slow: Callable[[int, float], float]) -> Iterator[Update]:
    """A job that has run for `length` s, in one update, with all its history by rank."""
    times = [1.0 + width * k for k in range(int(length / width))]
    buckets = tuple(bucket(k, at, width, slow=slow(k, at)) for at in times for k in range(ranks))
    totals: tuple[Total, ...] = tuple(across_ranks(buckets))
    said = tuple(
        output(rank, at, f"step {int(at / STEP):5d}  loss {0.35 + 2.1 * math.exp(-at / 70):.3f}\n")
        for at in times[::5]
        for rank in range(min(ranks, 8))
    )
    beats = tuple(beat(k, at) for at in times for k in range(min(ranks, 8))) + tuple(
        beat(k, length) for k in range(ranks)
    )
    yield update(length + 1, state(ranks), events=tuple(begin(ranks)), buckets=buckets, totals=totals, beats=beats,
                 output=said, checks=checks(ranks, length, min(5, ranks - 1)))  # fmt: skip


def small() -> Iterator[Update]:
    for one in running(8, 180, 1.0, lambda rank, at: 1.9 if rank == 5 and at > 90 else 1.0):
        told = StragglerDetected(
            time=EPOCH + 95, restart_count=0, rank=5, score=1.9, reason="rank 5 takes 1.9 times as long as the others"
        )
        saved = Checkpoint(step=400, path="/x/step400", world_size=8, saved_at=EPOCH + 100, size=48_000_000)
        save = CheckpointSaved(time=EPOCH + 100, restart_count=0, checkpoint=saved, seconds=1.2, stalled=0.04)
        (look,) = (check for check in one.checks if isinstance(check, GradientStatistics))
        marks, odd = Marks(), tuple[Standing, ...]()
        for _ in range(3):
            marks, odd = advance(marks, look)
        stands = GradientsStoodOut(
            time=EPOCH + 97, restart_count=0, step=look.last_step, ranks=odd[0].ranks, about=odd[0].about,
            score=odd[0].score, finding=odd[0].finding,
        )  # fmt: skip
        yield update(181, one.state, events=(*one.events, told, stands, save), buckets=one.buckets, totals=one.totals,
                     beats=one.beats, output=one.output, checks=one.checks)  # fmt: skip


def large() -> Iterator[Update]:
    yield from running(1024, 3600, 60.0, lambda rank, at: 1.9 if rank // 8 == 77 and at > 1500 else 1.0)


def failed() -> Iterator[Update]:
    (one,) = small()
    cause = Failure(
        kind=FailureKind.EXCEPTION, rank=3, reason=f"rank 3 raised {TRACEBACK.splitlines()[-1]}", time=EPOCH + 181,
        traceback=TRACEBACK, step=718,
    )  # fmt: skip
    ended = state(8, JobPhase.FAILED, reason=cause.reason, ended_at=EPOCH + 182, failure=cause, failures=(cause,))
    more: tuple[Event, ...] = (
        NonFiniteFound(time=EPOCH + 170, restart_count=0, rank=3, step=680, what="loss"),
        FailureDetected(time=EPOCH + 181, restart_count=0, failure=cause),
        *(RankExited(time=EPOCH + 181.5, restart_count=0, rank=k, signal=15) for k in range(8)),
        PhaseChanged(time=EPOCH + 182, phase=JobPhase.FAILED, reason=cause.reason, restart_count=0),
    )
    yield update(182, ended, events=(*one.events, *more), buckets=one.buckets, totals=one.totals, beats=one.beats,
                 output=one.output)  # fmt: skip


def hung() -> Iterator[Update]:
    (one,) = small()
    late = tuple(beat(k, 190, inside=k != 2, seq=2161 - (k == 2), since=9.0) for k in range(8))
    yield update(199, one.state, events=one.events, buckets=one.buckets, totals=one.totals, beats=(*one.beats, *late),
                 output=one.output)  # fmt: skip


def other() -> Iterator[Update]:
    """`small` with another learning rate on 4 ranks, and an older torch."""
    for one in running(4, 150, 1.0, lambda rank, at: 0.8):
        spec = JobSpec(entrypoint="train.py", args=("--lr", "0.3"), nproc_per_node=4, max_restarts=3)
        origin = OriginRecorded(time=EPOCH, origin=Origin(packages={"torch": "2.12.0", "numpy": "2.4.6"}))
        yield update(151, state(4, spec=spec), events=(*one.events, origin), buckets=one.buckets, totals=one.totals,
                     beats=one.beats, output=one.output)  # fmt: skip


SCENES: dict[str, Callable[[], Iterator[Update]]] = {
    "small": small, "large": large, "failed": failed, "hung": hung, "other": other, "empty": lambda: iter(()),
}  # fmt: skip


def serve(socket: Path) -> None:
    """The pages of all scenes, at a socket, until killed; the port's links are asked for as of a real server."""
    from tornado.ioloop import IOLoop
    from workbench_widgets.files import Made
    from workbench_widgets.follower import picture_of
    from workbench_widgets.pages import Pages
    from workbench_widgets.pools import Pools
    from workbench_widgets.server import make_server
    from workbench_widgets.source import Filter, LogTail, Picture

    from workbench.past import Past
    from workbench.views.job import ViewBuilder
    from workbench.views.logs import LogRing
    from workbench.views.panels import PanelBuilder

    class Scene:
        log_version = 1

        def __init__(self, name: str) -> None:
            self.job_id = name
            random.seed(name)
            builder, panels, self.ring = ViewBuilder(), PanelBuilder(), LogRing()
            self.picture, self.acts = Picture(), []
            self.past = Past()
            for one in SCENES[name]():
                self.past.add(one)
                builder.add(one)
                panels.add(one)
                self.ring.add(one.output)
                self.picture = Picture(builder.view(), more=panels.view())

        def log(self, wanted: Filter, most: int, until: float | None = None) -> LogTail:
            lines = self.ring.lines(ranks=wanted.ranks, level=wanted.level, text=wanted.text, until=until)
            return LogTail(tuple(lines[-most:]), "")

        def subscribe(self, changed: Callable[[], object]) -> Callable[[], None]:
            return lambda: None

        def travel(self, time: float, done: Callable[[Picture], object]) -> None:
            done(picture_of(self.past.at(time), self.picture.more))

        def act(self, act: object, done: Callable[[str], None], *, by: str) -> None:
            done(f"{act} was asked for")

        def make(self, what: str, done: Callable[[Made], None], *, with_code: bool) -> None:
            done(Made(f"{what} is made", "text/html", b"<p>made</p>"))

    class Scenes(dict):
        def get(self, name: str, default: object = None) -> object:
            if name not in self:
                self[name] = Scene(name if name in SCENES else "empty")
            return self[name]

    pages = Pages(Pools(socket.parent))
    pages._followers = Scenes()
    server, _ = make_server(pages, socket, socket.parent / "dashboard")
    server.start()
    IOLoop.current().start()


if __name__ == "__main__":
    began = time.monotonic()
    serve(Path(sys.argv[1]))

"""What a live page of a large job costs its server: 1,024 ranks that have run for an hour, a second more of them.

Folding is done once for all pages; drawing, and what is sent, is for each page. Limits: 100 ms an update.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from workbench.events import LaunchRequested, RankStarted, SlotsGranted
from workbench.feed import Bucket, Cursor, Update
from workbench.past import Past
from workbench.spec import JobSpec
from workbench.state import JobPhase, JobState, Placement, RankPhase, RankState
from workbench.telemetry import RankBeat
from workbench.views.buckets import across_ranks
from workbench.views.job import ViewBuilder
from workbench.views.panels import PanelBuilder

Row = tuple[str, str, str]
T = TypeVar("T")
EPOCH = 1_790_000_000.0
RANKS, HOUR, WIDTH = 1024, 3600, 15  # history as it is once merged: columns of 15 s
TRIES = 7


def bucket(rank: int, at: float, width: float) -> Bucket:
    steps = int(width * 4)
    slow = 1.3 if rank // 8 == 77 and at > HOUR / 2 else 1.0 + rank % 7 / 100
    return Bucket(
        rank=rank, start=EPOCH + at, width=width, steps=steps, last_step=int(at + width) * 4, duration=width * slow,
        slowest=0.3, data=width * 0.1, forward=width * 0.2, backward=width * 0.3, comm=width * 0.3,
        optimizer=width * 0.1, checkpoint=0.0, samples=steps * 32.0, tokens=0.0, loss=2.0 / (1 + at),
    )  # fmt: skip


def beat(rank: int, at: float) -> RankBeat:
    return RankBeat(
        job_id="bench", restart_count=0, rank=rank, time=EPOCH + at, step=int(at * 4), activity="COLLECTIVE",
        since=0.01, collective="all_reduce", collective_seq=int(at * 12), rss=2 * 10**9, cpu=100.0 + rank % 9,
        gpu=90.0, gpu_memory=40 * 10**9, disk_read=1e6, disk_write=1e5, progress=(int(at * 4), 100_000),
    )  # fmt: skip


def state() -> JobState:
    places = tuple(
        Placement(rank=k, local_rank=k % 8, node_rank=k // 8, worker=f"tls://10.0.0.{k // 8}:1", slot=k)
        for k in range(RANKS)
    )
    return JobState(
        job_id="bench", spec=JobSpec(entrypoint="train.py", nproc_per_node=RANKS), phase=JobPhase.HEALTHY,
        reason="", submitted_at=EPOCH, placements=places,
        ranks=tuple(RankState(rank=p.rank, worker=p.worker, phase=RankPhase.HEALTHY, pid=1) for p in places),
    )  # fmt: skip


def update(at: float, of: JobState, buckets: tuple[Bucket, ...], **changes: Any) -> Update:
    totals = tuple(across_ranks(buckets))  # the pool's part
    beats = tuple(beat(rank, at) for rank in range(RANKS))
    return Update(state=of, cursor=Cursor(), now=EPOCH + at + 1, buckets=buckets, totals=totals, beats=beats, **changes)


def best(times: list[float]) -> str:
    return f"{min(times) * 1000:.1f} ms"


def timed(call: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    made = call()
    return made, time.process_time() - began


class Page:
    """A dashboard whose browser answers at once, in a document that counts what would be sent."""

    def __init__(self, picture: Any) -> None:
        import panel as pn
        from bokeh.document import Document
        from workbench_widgets.dashboard import Dashboard

        self.job_id, self.picture, self.log_version = "bench", picture, 0
        self.events: list[Any] = []
        self.document = Document()
        self.dashboard = Dashboard(self, "light", lambda seconds, call: None)  # type: ignore[arg-type]
        for root in self.dashboard.roots.values():
            root.server_doc(self.document, location=False)
        self.document.on_change(self.events.append)
        pn.state.curdoc = None

    def log(self, wanted: Any, most: int, until: float | None = None) -> Any:
        from workbench_widgets.source import LogTail

        return LogTail((), "")

    def subscribe(self, changed: Any) -> Callable[[], None]:
        return lambda: None

    def act(self, act: Any, done: Any, *, by: str) -> None: ...

    def travel(self, time: float, done: Any) -> None: ...

    def draw(self, picture: Any) -> tuple[float, int]:
        """Seconds of processor time, and bytes of the message."""
        from bokeh.events import Event
        from bokeh.protocol import Protocol

        self.picture = picture
        self.dashboard._then = picture if picture.at is not None else None
        self.events.clear()
        _, took = timed(self.dashboard.draw)
        sent = [event for event in self.events if not isinstance(event, Event)]
        message = Protocol().create("PATCH-DOC", sent)
        size = len(message.content_json) + sum(len(buffer.to_bytes()) for buffer in message.buffers)
        return took, size


def main() -> list[Row]:
    from workbench_widgets.follower import picture_of
    from workbench_widgets.source import Picture

    of = state()
    history = tuple(bucket(k, at, WIDTH) for at in range(0, HOUR, WIDTH) for k in range(RANKS))
    begun = (
        LaunchRequested(time=EPOCH, job_id="bench", spec=of.spec),
        SlotsGranted(time=EPOCH, placements=of.placements),
        *(RankStarted(time=EPOCH + 1, restart_count=0, rank=k, pid=k + 1) for k in range(RANKS)),
    )
    first = update(HOUR, of, history, events=begun)
    view, panels = ViewBuilder(), PanelBuilder()
    _, attach = timed(lambda: (view.add(first), panels.add(first), panels.view()))
    folds, shows, quick, draws, idle, sizes = [], [], [], [], [], []
    page = Page(Picture(view.view(), more=panels.view()))
    for second in range(TRIES):
        more = update(HOUR + second, of, tuple(bucket(k, HOUR + second, 1.0) for k in range(RANKS)))
        folds.append(timed(lambda more=more: (view.add(more), panels.add(more)))[1])
        made, took = timed(view.view)
        shows.append(took)
        drawn, size = page.draw(Picture(made, more=panels.view()))
        draws.append(drawn)
        sizes.append(size)
        beats = update(HOUR + second + 0.5, of, ())
        quick.append(timed(lambda beats=beats: (view.add(beats), panels.add(beats)))[1])
        idle.append(page.draw(Picture(view.view(), more=panels.view()))[0])
    past, found, shown = Past(), [], []
    past.add(first)
    for place in range(TRIES):
        at = HOUR * (place + 1) / (TRIES + 1)
        fine = [bucket(k, at - 3 + 1.5 * part, 1.5) for part in range(2) for k in range(RANKS)]  # the pool's part
        then, took = timed(lambda at=at, fine=fine: picture_of(past.at(EPOCH + at, fine), panels.view()))
        found.append(took)
        shown.append(page.draw(then)[0])
    whole = [a + b + c for a, b, c in zip(folds, shows, draws, strict=True)]
    what = f"{RANKS:,} ranks × 1 h"
    return [
        ("an hour's history folded at once, when a page is opened", f"{attach:.2f} s", what),
        ("a second more: folded, for all pages", best(folds), what),
        ("the job's view made of it", best(shows), what),
        ("all panels of one page drawn", best(draws), what),
        ("in all, an update with a second more", best(whole), "limit 100 ms"),
        ("only beats: folded", best(quick), what),
        ("only beats: all panels drawn", best(idle), what),
        ("a moment of the past: found out, but for what the pool adds", best(found), what),
        (
            "a moment of the past: in all, with all panels drawn",
            best([a + b for a, b in zip(found, shown, strict=True)]),
            "limit 100 ms",
        ),
        ("sent to the browser in an update", f"{max(sizes) / 1000:.0f} kB", "once a second"),
    ]


if __name__ == "__main__":
    for row in main():
        print("{:62} {:>12}  {}".format(*row))

"""What a timeline costs: to fold a large record, to add one update to it, to tell it; and how large it gets.

1,024 ranks × 100 generations, each ended by another rank; and a month with a checkpoint every 10 minutes in which
something fails every 2 hours.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

import msgspec

from workbench.events import (
    CheckpointSaved,
    Event,
    FailureDetected,
    LaunchRequested,
    PhaseChanged,
    RankExited,
    RankStarted,
    RecoveryStarted,
    RunResumed,
    SlotsGranted,
    StepsBegan,
)
from workbench.feed import Total
from workbench.spec import JobSpec
from workbench.state import Checkpoint, CheckpointTier, Failure, FailureKind, JobPhase, Placement
from workbench.views.lane_rows import rows_of
from workbench.views.timeline import TimelineBuilder

Row = tuple[str, str, str]
T = TypeVar("T")
EPOCH = 1_790_000_000.0


def record(ranks: int, generations: int, lasts: float, save_every: float) -> list[Event]:
    """A job of that many generations of `lasts` s, a step a second, of which each but the last loses a rank."""
    places = tuple(Placement(rank=k, local_rank=k % 8, node_rank=k // 8, worker="w", slot=k) for k in range(ranks))
    spec = JobSpec(entrypoint="train.py", nproc_per_node=ranks, max_restarts=generations)
    events: list[Event] = [LaunchRequested(time=EPOCH, job_id="bench", spec=spec)]
    now, step = EPOCH, 0
    for count in range(generations):
        events += [SlotsGranted(time=now + 0.1, placements=places), phase(now + 0.1, JobPhase.LAUNCHING, count)]
        events += [RankStarted(time=now + 0.2 + k / 1e4, restart_count=count, rank=k, pid=k) for k in range(ranks)]
        events.append(phase(now + 0.4, JobPhase.HEALTHY, count))
        if count:
            events.append(RunResumed(time=now + 0.5, restart_count=count, step=step, tier=CheckpointTier.MEMORY))
        events.append(StepsBegan(time=now + 1, restart_count=count, step=step + 1))
        for k in range(1, int(lasts / save_every) + 1):
            point = Checkpoint(
                step=step + int(k * save_every), path=f"c{k}", world_size=ranks, saved_at=now + k * save_every
            )
            at = now + k * save_every
            events.append(CheckpointSaved(time=at, restart_count=count, checkpoint=point, seconds=2.0, stalled=0.5))
        now, step = now + lasts, step + int(lasts) - 1
        events += fall(count, ranks, now, step)
        now += 0.2
    return events


def phase(at: float, name: JobPhase, count: int) -> PhaseChanged:
    return PhaseChanged(time=at, phase=name, reason="", restart_count=count)


def fall(count: int, ranks: int, now: float, step: int) -> list[Event]:
    rank = count * 7 % ranks
    cause = Failure(kind=FailureKind.SIGNAL, rank=rank, reason=f"rank {rank} killed by SIGKILL", time=now, step=step)
    others = [k for k in range(ranks) if k != rank]
    after = tuple(
        Failure(kind=FailureKind.COLLECTIVE, rank=k, reason="connection reset", time=now) for k in others[:64]
    )
    exits = [
        RankExited(time=now + 0.1, restart_count=count, rank=k, signal=15, stop_signal=15, step=step) for k in others
    ]
    return [
        RankExited(time=now, restart_count=count, rank=rank, signal=9, step=step),
        phase(now, JobPhase.RECOVERING, count),
        *exits,
        FailureDetected(time=now + 0.2, restart_count=count, failure=cause, consequences=after),
        RecoveryStarted(time=now + 0.2, restart_count=count + 1, reason=f"restart {count + 1}: {cause.reason}"),
    ]


def totals(seconds: float, ranks: int) -> list[Total]:
    """A history as a client gets it: 600 buckets."""
    width = seconds / 600
    return [
        Total(
            start=EPOCH + k * width, width=width, ranks=ranks, steps=int(width) * ranks,
            last_step=int((k + 1) * width), duration=width * ranks, fastest=1.0, slowest=1.0, data=0.0, forward=0.0,
            backward=0.0, comm=0.0, optimizer=0.0, checkpoint=0.0, samples=0.0, tokens=0.0, loss=0.0,
        )
        for k in range(600)
    ]  # fmt: skip


def timed(what: Callable[[], T], times: int = 1) -> tuple[T, float]:
    """What it gives, and the quickest of so many runs, in s of processor time."""
    best, given = float("inf"), None
    for _ in range(times):
        before = time.process_time()
        given = what()
        best = min(best, time.process_time() - before)
    return given, best  # type: ignore[return-value]


def measure(name: str, events: list[Event], history: list[Total]) -> list[Row]:
    now = history[-1].start + history[-1].width
    tracemalloc.start()
    builder = TimelineBuilder()
    builder.add(events)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    def fold() -> None:
        TimelineBuilder().add(events)

    _, folding = timed(fold, 3)
    told, telling = timed(lambda: builder.timeline(history, now), 5)
    _, rows = timed(lambda: rows_of(told.spans), 3)
    last = max(g.count for g in builder._open)
    news = [StepsBegan(time=now, restart_count=last, step=1)] * 100
    _, adding = timed(lambda: builder.add(news))
    size = len(msgspec.json.encode(told))
    per_event = folding / len(events) * 1e6
    return [
        (f"{name}: {len(events):,} events folded", f"{folding:.2f} s ({per_event:.1f} µs an event)", ""),
        ("… one more event", f"{adding / 100 * 1e6:.0f} µs", "what is new, not the history"),
        ("… told", f"{telling * 1e3:.1f} ms", "≤ 100 ms: an update of the page"),
        ("… as rows", f"{rows * 1e3:.1f} ms", ""),
        ("… spans, marks, attempts", f"{len(told.spans):,}, {len(told.marks):,}, {len(told.attempts):,}", "bounded"),
        ("… held, as JSON", f"{held / 1e6:.1f} MB, {size / 1e3:.0f} kB", ""),
    ]


def main() -> list[Row]:
    """Rows of (what, measured, bar)."""
    month = 30 * 86_400.0
    wide = record(1024, 100, 60.0, 30.0)
    long = record(8, int(month / 7200), 7200.0, 600.0)
    return [
        *measure("1,024 ranks × 100 generations", wide, totals(6000.0, 1024)),
        *measure("a month of 8 ranks", long, totals(month, 8)),
    ]


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))

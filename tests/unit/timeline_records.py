"""Records of jobs for tests of timelines: a simulated pool whose ranks take steps, and the steps themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.blackbox import StepRecord, pack_step
from workbench.events import (
    CheckpointSaved,
    Event,
    FaultInjected,
    RankExited,
    RunResumed,
    StepsBegan,
)
from workbench.feed import Bucket, Total
from workbench.spec import JobSpec
from workbench.state import Checkpoint, CheckpointTier
from workbench.testing import FakePool
from workbench.views.buckets import OpenBuckets, across_ranks, fold_steps
from workbench.views.spans import Span, Timeline, has_rank
from workbench.views.timeline import TimelineBuilder

JOB = "train-1a2b"
START = 1_790_000_000.0


@dataclass
class Story:
    """A job in a `FakePool` of one host that takes steps of `step_time` s; times pass only by its methods."""

    ranks: int = 2
    max_restarts: int = 3
    step_time: float = 0.1
    slots: int = 0
    step: int = 0
    saved: int = 0
    steps: list[tuple[int, int, StepRecord]] = field(default_factory=list)  # generation, rank, record

    def __post_init__(self) -> None:
        self.pool = FakePool({"tcp://a:1": self.slots or self.ranks}, start=START)
        spec = JobSpec(entrypoint="train.py", nproc_per_node=self.ranks, max_restarts=self.max_restarts)
        self.pool.launch(spec, JOB)

    @property
    def count(self) -> int:
        return self.pool.states[JOB].restart_count

    @property
    def events(self) -> list[Event]:
        return self.pool.record[JOB]

    def launch(self, seconds: float = 0.15) -> None:
        """Slots, processes, and the first step of all."""
        self.pool.settle()
        self.pool.advance(seconds)
        if self.count:
            tier = CheckpointTier.MEMORY
            self.tell(RunResumed(time=self.pool.now, restart_count=self.count, step=self.saved, tier=tier))
        self.step = self.saved
        self.take(1)
        self.tell(StepsBegan(time=self.pool.now, restart_count=self.count, step=self.step))

    def take(self, count: int, *, step_time: float | None = None, paused: float = 0.0) -> None:
        """Steps of all ranks; for `paused` s before the first of them training has stood still."""
        for _ in range(count):
            own = self.step_time if step_time is None else step_time
            self.pool.advance(own)
            self.step += 1
            timed = (self.step, self.pool.now, own + paused, 0.0, 0.0, 0.0, 0.0, 0.0, paused, 1.0, 0.0, math.nan)
            self.steps += [(self.count, rank, StepRecord(*timed)) for rank in range(self.world)]
            paused = 0.0

    def save(self, stalled: float = 0.0, tier: CheckpointTier = CheckpointTier.DISK) -> None:
        """A checkpoint of the last step; training stands still for `stalled` s, then takes another step."""
        saved, self.saved = self.step, self.step
        self.pool.advance(stalled)
        now = self.pool.now
        point = Checkpoint(step=saved, path="/c", world_size=self.world, saved_at=now, size=10**9, tier=tier)
        self.tell(
            CheckpointSaved(time=now, restart_count=self.count, checkpoint=point, seconds=stalled, stalled=stalled)
        )
        if stalled:
            self.take(1, paused=stalled)

    def kill(self, rank: int, *, injected: bool = True, after: float = 0.0) -> None:
        """SIGKILL, as `inject` does it; the pool then does what follows of itself."""
        self.pool.advance(after)
        if injected:
            self.tell(FaultInjected(time=self.pool.now, fault="kill", rank=rank))
        self.pool.advance(0.01)
        self.tell_exit(rank)
        self.pool.settle()

    def tell_exit(self, rank: int) -> None:
        """The rank's exit with its last step, as an agent tells it."""
        agent, process = self.pool._find(JOB, rank)
        agent.ranks.remove(process)
        gone = RankExited(time=self.pool.now, restart_count=self.count, rank=rank, signal=9, step=self.step)
        self.pool.feed(JOB, gone)

    def finish(self) -> None:
        for rank in range(self.world):
            self.pool.exit(JOB, rank)
        self.pool.run()

    def tell(self, event: Event) -> None:
        self.pool.feed(JOB, event)

    @property
    def world(self) -> int:
        return self.pool.states[JOB].world_size

    # --- what a client gets ---

    def buckets(self) -> list[Bucket]:
        found: OpenBuckets = {}
        for rank in range(self.ranks):
            own = sorted((s for _, r, s in self.steps if r == rank), key=lambda s: s.end)
            fold_steps(found, rank, b"".join(map(pack_step, own)))
        return [bucket for _, ranks in sorted(found.items()) for bucket in ranks.values()]

    def totals(self) -> list[Total]:
        return across_ranks(self.buckets())

    def timeline(self) -> Timeline:
        return timeline_of(self.events, self.totals(), self.pool.now)

    def useful(self) -> tuple[float, float]:
        """From the steps themselves: time in those that count, mean over ranks, and in those that do not."""
        begins: dict[int, int] = {}
        for generation, _, record in self.steps:
            begins[generation] = min(begins.get(generation, record.step), record.step)
        useful = redone = 0.0
        for generation, _, record in self.steps:
            later = [first for count, first in begins.items() if count > generation]
            counts = record.step < min(later, default=record.step + 1)
            useful += record.duration * counts / self.world
            redone += record.duration * (not counts) / self.world
        return useful, redone


def timeline_of(events: Sequence[Event], totals: Sequence[Total] = (), now: float = 0.0) -> Timeline:
    builder = TimelineBuilder()
    builder.add(events)
    return builder.timeline(totals, now or max(event.time for event in events))


def of_rank(timeline: Timeline, rank: int) -> list[Span]:
    """The spans of one rank, in order of time."""
    return sorted((s for s in timeline.spans if has_rank(s.ranks, rank)), key=lambda s: s.start)


def words(timeline: Timeline, rank: int) -> list[str]:
    """What a rank did, one after the other."""
    return [span.kind.value for span in of_rank(timeline, rank)]

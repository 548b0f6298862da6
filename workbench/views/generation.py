"""One generation of ranks as its events tell it, gathered while it lasts; `attempt_of` is what is known of it.

Bounded: of pauses for checkpoints and of stalls that ended by themselves the longest are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from workbench.events import (
    CheckpointSaved,
    FailureDetected,
    FaultHappened,
    FaultInjected,
    RankExited,
    RunResumed,
    StallDetected,
    StallEnded,
    StepsBegan,
)
from workbench.state import Checkpoint, Failure, FailureKind, Stall
from workbench.views.goodput import Course
from workbench.views.spans import Attempt

TICK: Final = 0.1  # s to which the ends of ranks are rounded down, so that those of one moment fold together
KEPT: Final = 256  # pauses, and stalls
INJECTED: Final = 64
_Timed = TypeVar("_Timed")


class Pause(NamedTuple):
    """Training stood still for a checkpoint."""

    start: float
    end: float
    checkpoint: Checkpoint


class Injection(NamedTuple):
    """A fault on purpose: when it was done, or asked for while no more is known."""

    time: float
    fault: str
    rank: int


class Halt(NamedTuple):
    """A stall; `ended` None: until its generation's end."""

    stall: Stall
    detected: float
    ended: float | None = None


@dataclass
class Generation:
    """See the module. `end` None: it goes on. `is_over`: the job ended with it."""

    count: int
    start: float
    decision: str
    world: int
    is_first: bool = False
    awaited: float | None = None
    granted: float | None = None
    started: float | None = None
    began: float | None = None
    began_step: int = 0
    resumed: RunResumed | None = None
    leaving: float | None = None  # when the job began to end it
    leaving_reason: str = ""
    is_recovering: bool = False  # another is to follow it
    failure: Failure | None = None
    consequences: tuple[Failure, ...] = ()
    told: float | None = None
    halts: list[Halt] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    finished: dict[float, list[int]] = field(default_factory=dict)
    injected: list[Injection] = field(default_factory=list)
    last: int | None = None
    end: float | None = None
    is_over: bool = False
    outcome: str = ""

    # --- what its events tell ---

    def leave(self, time: float, reason: str, *, is_recovering: bool) -> None:
        if self.leaving is None:
            self.leaving, self.leaving_reason = time, reason
        self.is_recovering = is_recovering

    def close(self, time: float) -> None:
        if self.end is None:
            self.end = max(time, self.start)
            self.leave(time, "", is_recovering=self.is_recovering)

    def finish(self, time: float, outcome: str) -> None:
        """The job ends with it."""
        self.is_over, self.is_recovering, self.outcome = True, False, outcome
        self.close(time)

    def inject(self, event: FaultInjected) -> None:
        self.injected = [*self.injected, Injection(event.time, event.fault, event.rank)][-INJECTED:]

    def happen(self, event: FaultHappened) -> None:
        """What was asked for has been done now, or cannot be."""
        asked = [i for i in self.injected if (i.fault, i.rank) == (event.fault, event.rank)]
        if asked:
            self.injected.remove(asked[-1])
        if not event.problem:
            self.injected = [*self.injected, Injection(event.time, event.fault, event.rank)][-INJECTED:]

    def exit(self, event: RankExited) -> None:
        self.reach(event.step)
        if event.exit_code == 0 and event.stop_signal is None:
            self.finished.setdefault(math.floor(event.time / TICK) * TICK, []).append(event.rank)

    def begin(self, event: StepsBegan) -> None:
        self.began, self.began_step = event.time, event.step
        self.reach(event.step)

    def resume(self, event: RunResumed) -> None:
        self.resumed = event

    def fail(self, event: FailureDetected) -> None:
        self.failure, self.consequences, self.told = event.failure, event.consequences, event.time
        self.reach(event.failure.step)

    def halt(self, event: StallDetected) -> None:
        if self.halts and self.halts[-1].ended is None:  # told before, when it was to be patient with
            self.halts[-1] = self.halts[-1]._replace(stall=event.stall)
        else:
            self.halts.append(Halt(event.stall, event.time))
        self.reach(event.stall.step)
        if len(self.halts) > 2 * KEPT:
            self.halts = _longest(self.halts, _halt_length, lambda halt: halt.stall.since)

    def go_on(self, event: StallEnded) -> None:
        if self.halts and self.halts[-1].ended is None:
            self.halts[-1] = self.halts[-1]._replace(ended=event.time)

    def save(self, event: CheckpointSaved) -> None:
        self.reach(event.checkpoint.step)
        if event.stalled > 0:
            start = event.time - event.seconds
            self.pauses.append(Pause(start, start + event.stalled, event.checkpoint))
        if len(self.pauses) > 2 * KEPT:
            self.pauses = _longest(self.pauses, lambda pause: pause.end - pause.start, lambda pause: pause.start)

    def reach(self, step: int | None) -> None:
        if step is not None:
            self.last = max(step, self.last or 0)

    # --- what follows from them ---

    @property
    def first(self) -> int | None:
        """Steps that were behind it when it began."""
        if self.resumed is not None:
            return self.resumed.step
        if self.began is not None:
            return self.began_step - 1
        return 0 if self.is_first else None

    @property
    def injected_at(self) -> float | None:
        """When the fault that ended it was injected, if it was."""
        if self.failure is None or self.detected is None:
            return None
        blamed = {self.failure.rank, *(self.failure.stall.ranks if self.failure.stall else ())}
        if self.failure.kind is FailureKind.WORKER_LOST:
            blamed |= {other.rank for other in self.consequences}
            blamed |= {f.rank for f in self.injected if self.failure.rank is None and f.fault == "kill-scheduler"}
        times = [f.time for f in self.injected if f.rank in blamed and f.time <= self.detected]
        return times[-1] if times else None

    @property
    def fault(self) -> float | None:
        if self.failure is None:
            return None
        own = self.failure.stall.since if self.failure.stall else self.failure.time
        return self.injected_at if self.injected_at is not None else own

    @property
    def detected(self) -> float | None:
        """When the job began to act on what ended it."""
        times = [t for t in (self.leaving, self.told) if t is not None]
        return min(times) if self.failure is not None and times else None

    @property
    def diagnosed(self) -> float | None:
        last = self.halts[-1] if self.halts else None
        return last.detected if last and self.failure and self.failure.stall and last.ended is None else None

    def dead(self) -> Iterable[Failure]:
        """Failures that left a rank without a process before the generation was ended."""
        told = (self.failure, *self.consequences) if self.failure is not None else ()
        return (f for f in told if f is not None and f.stall is None and f.kind in _DEADLY)

    def course(self, now: float) -> Course:
        """What counting its steps needs."""
        end = now if self.end is None else self.end
        ended = None if self.leaving is None else min(end, *(t for t in (self.fault, self.leaving) if t is not None))
        return Course(self.start, end, self.world, self.first, self.began, self.began_step, last=self.last, ended=ended)


def _halt_length(halt: Halt) -> float:
    return math.inf if halt.ended is None else halt.ended - halt.stall.since


_DEADLY: Final = frozenset(FailureKind) - {FailureKind.COLLECTIVE, FailureKind.TIMEOUT, FailureKind.DIVERGED}


def attempt_of(generation: Generation) -> Attempt:
    """What it shows for itself; what later ones add to it is `timeline`'s."""
    g, resumed = generation, generation.resumed
    return Attempt(
        restart_count=g.count,
        decision=g.decision,
        start=g.start,
        end=g.end,
        world_size=g.world,
        first_step=None if g.first is None else g.first + 1,
        last_step=g.last,
        resumed_step=resumed.step if resumed else None,
        resumed_tier=resumed.tier if resumed else None,
        began_at=g.began,
        outcome=g.outcome,
        cause=g.failure,
        consequences=len(g.consequences),
        injected_at=g.injected_at,
        fault_at=g.fault,
        detected_at=g.detected,
        diagnosed_at=g.diagnosed,
    )


def _longest(items: list[_Timed], length: Callable[[_Timed], float], start: Callable[[_Timed], float]) -> list[_Timed]:
    """The longest of them, in order of time."""
    return sorted(sorted(items, key=lambda item: (-length(item), start(item)))[:KEPT], key=start)

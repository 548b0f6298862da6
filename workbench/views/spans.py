"""The words of a timeline: lanes of ranks over time, marks on them, attempts. Values only; `timeline` makes them.

Times are epoch seconds. Ranks are runs, each as its first and last, so that 1,024 ranks in the same state are one pair.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from workbench.state import CheckpointTier, Failure

Runs = tuple[tuple[int, int], ...]


class SpanKind(enum.Enum):
    """What ranks do for a while; each value is what a person reads."""

    SLOTS = "waiting for slots"
    LAUNCHING = "launching"
    RUNNING = "running"  # processes that have finished no optimizer step: cells, programs without one
    STEPPING = "stepping"
    CHECKPOINTING = "checkpointing"
    WAITING = "waiting in a collective"
    STALLED = "stalled"
    DEAD = "dead"
    FINISHED = "finished"
    RECOVERING = "recovering"
    STOPPING = "stopping"


class MarkKind(enum.Enum):
    """What happened at a moment; each value is what a person reads. What leads to the other comes first."""

    REQUESTED = "asked for"
    INJECTED = "fault injected"
    FAILED = "failure detected"
    STALLED = "stall diagnosed"
    STALL_ENDED = "goes on by itself"
    DECIDED = "decision"
    RECOVERED = "steps again"
    SAVED = "checkpoint saved"
    SAVE_FAILED = "checkpoint not saved"
    REFUSED = "checkpoint refused"
    STRAGGLER = "straggler"
    NON_FINITE = "not a number"
    MISMATCH = "ranks differ"
    REPAIRED = "repaired"
    STANDS_OUT = "gradients stand out"
    ENDED = "ended"


# A mark never speaks by colour alone: this letter goes with it, and what it stands for is in the legend.
LETTERS: Final[Mapping[MarkKind, str]] = {
    MarkKind.REQUESTED: "A",
    MarkKind.INJECTED: "I",
    MarkKind.FAILED: "F",
    MarkKind.STALLED: "S",
    MarkKind.STALL_ENDED: "G",
    MarkKind.DECIDED: "D",
    MarkKind.RECOVERED: "R",
    MarkKind.SAVED: "C",
    MarkKind.SAVE_FAILED: "X",
    MarkKind.REFUSED: "B",
    MarkKind.STRAGGLER: "L",
    MarkKind.NON_FINITE: "N",
    MarkKind.MISMATCH: "M",
    MarkKind.REPAIRED: "P",
    MarkKind.STANDS_OUT: "O",
    MarkKind.ENDED: "E",
}


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Of a folded span: how often ranks did this, and for how many s in all (the mean of its ranks)."""

    kind: SpanKind
    seconds: float
    count: int


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Some ranks do one thing from `start` to `end`. `title` says what, `cause` why, in words.

    `parts`: what was folded into it where there was no room for all; `kind` is then what took the most time.
    """

    kind: SpanKind
    ranks: Runs
    start: float
    end: float
    title: str
    cause: str = ""
    parts: tuple[Part, ...] = ()


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened at `time`, to these ranks (none: to the job). `count`: so many alike up to `until`, as one."""

    kind: MarkKind
    time: float
    title: str
    restart_count: int
    ranks: Runs = ()
    step: int | None = None
    count: int = 1
    until: float = 0.0


class Attempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generation of ranks, from when it was decided on to its end. None: not known, or not yet.

    Steps are counts of finished optimizer steps: it began at `first_step` - 1 and got to `last_step`. `lost_steps`: how
    many of them a later attempt had to do again. `cause`: what ended it; `decision`: why it was begun, in words.

    `fault_at`: when what ended it happened (when it was injected; of a stall, when the job last got on; else when the
    rank ended). `detected_at`: when the job began to act on it. `recovered_at`: when all ranks of a later attempt had
    finished a step. `time_to_detect` and `time_to_recover` are both from `fault_at`.
    """

    restart_count: int
    decision: str
    start: float
    end: float | None = None
    world_size: int = 0
    first_step: int | None = None
    last_step: int | None = None
    resumed_step: int | None = None
    resumed_tier: CheckpointTier | None = None
    began_at: float | None = None
    lost_steps: int | None = None
    outcome: str = ""
    cause: Failure | None = None
    consequences: int = 0
    injected_at: float | None = None
    fault_at: float | None = None
    detected_at: float | None = None
    diagnosed_at: float | None = None
    recovered_at: float | None = None

    @property
    def time_to_detect(self) -> float | None:
        return _between(self.fault_at, self.detected_at)

    @property
    def time_to_recover(self) -> float | None:
        return _between(self.fault_at, self.recovered_at)


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """What the job's time was spent on. A step counts unless a later attempt began before it and had to do it again.

    `goodput`: time of steps that count / time since the first step began. `ettr`, the effective training time ratio:
    the same time / all time since the job was submitted, launch, waits for slots and recoveries included (Kokolis et
    al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025; Wan et al.,
    "ByteRobust", SOSP 2025). What training stood still for checkpoints is part of the steps it fell into, as it is of
    their measured times; `checkpoints` tells it apart, since the former of the two papers counts it as lost. Time
    between a job's end and a resume is in neither. Step times are means over the ranks. None before the first step.
    """

    goodput: float | None = None
    ettr: float | None = None
    useful: float = 0.0  # s in steps that count
    redone: float = 0.0  # s in steps that do not
    checkpoints: float = 0.0  # s of `useful` that training stood still for checkpoints
    wall: float = 0.0  # s since it was submitted, without the time between an end and a resume
    since_first_step: float = 0.0  # s of it since the first step began


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """A job's life. `attempts` are the newest; `earlier` others are left out. Spans of a rank do not overlap."""

    start: float
    end: float
    is_over: bool = False
    attempts: tuple[Attempt, ...] = ()
    earlier: int = 0
    spans: tuple[Span, ...] = ()
    marks: tuple[Mark, ...] = ()
    goodput: Goodput = Goodput()
    lost_steps: int = 0


def runs_of(ranks: Iterable[int]) -> Runs:
    """`(0, 1, 2, 5)` → `((0, 2), (5, 5))`."""
    return join_runs((rank, rank) for rank in ranks)


def join_runs(runs: Iterable[tuple[int, int]]) -> Runs:
    """Runs in order, those that touch as one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return tuple(joined)


def size_of(runs: Runs) -> int:
    """How many ranks."""
    return sum(last - first + 1 for first, last in runs)


def has_rank(runs: Runs, rank: int) -> bool:
    return any(first <= rank <= last for first, last in runs)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)

"""What a client gets from the runner: a summary a job, and updates that a cursor asks for.

A client that asks again with the cursor it was given misses nothing that is durable and sees no event twice.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from workbench.events import Event
from workbench.state import JobPhase, JobState
from workbench.telemetry import CellFinished, Check, OutputWritten, RankBeat


class JobSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the job list. Times are epoch seconds, `throughput` is samples/s over all ranks."""

    job_id: str
    label: str
    phase: JobPhase
    reason: str
    world_size: int
    submitted_at: float
    ended_at: float | None = None
    step: int = 0
    throughput: float = 0.0
    restart_count: int = 0
    progress: tuple[int, int] | None = None  # (steps done, steps in all) of the rank behind, where the ranks said so

    @classmethod
    def of(
        cls,
        state: JobState,
        *,
        step: int = 0,
        throughput: float = 0.0,
        progress: tuple[int, int] | None = None,
    ) -> JobSummary:
        """The line of a job in this state."""
        return cls(
            job_id=state.job_id,
            label=state.spec.label,
            phase=state.phase,
            reason=state.reason,
            world_size=state.world_size,
            submitted_at=state.submitted_at,
            ended_at=state.ended_at,
            step=step,
            throughput=throughput,
            restart_count=state.restart_count,
            progress=progress,
        )


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The pool as its scheduler counts it: live workers, not remembered ones. `waiting`: job id and reason."""

    name: str
    version: str
    address: str
    slots: int
    free: int
    workers: tuple[WorkerStatus, ...] = ()
    waiting: tuple[tuple[str, str], ...] = ()
    running: tuple[str, ...] = ()


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker with its agent; `accelerator` is "GPU" or "CPU"."""

    address: str
    host: str
    pid: int
    slots: int
    free: int
    accelerator: str = "CPU"


class Bucket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one rank did in `[start, start + width)`: sums (s) over the steps that ended there, extremes, last loss."""

    rank: int
    start: float
    width: float
    steps: int
    last_step: int
    duration: float  # sum of step times
    slowest: float  # longest step time
    data: float
    forward: float
    backward: float
    comm: float
    optimizer: float
    checkpoint: float
    samples: float
    tokens: float
    loss: float  # NaN: not reported
    learning_rate: float | None = None  # the last one seen


class Total(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What all ranks did in `[start, start + width)`: sums over ranks and steps, and how far the ranks lie apart.

    The history of many ranks at the price of one: `Update.totals` goes far back where `Update.buckets` must be coarse.
    """

    start: float
    width: float
    ranks: int  # that finished a step
    steps: int  # of all of them together
    last_step: int
    duration: float  # sum of step times
    fastest: float  # mean step time of the rank that took the fewest s a step
    slowest: float  # mean step time of the rank that took the most
    data: float
    forward: float
    backward: float
    comm: float
    optimizer: float
    checkpoint: float
    samples: float
    tokens: float
    loss: float  # mean over the ranks' last; NaN: not reported
    learning_rate: float | None = None  # the highest of the ranks' last


class Spread(NamedTuple):
    """Over ranks and a while: sum and number tell the mean."""

    least: float
    total: float
    most: float
    number: int

    @property
    def mean(self) -> float:
        return self.total / self.number


class Moment(NamedTuple):
    """What all ranks used from `start` on, by the name of a `RankBeat`'s field; what was not measured is not there."""

    start: float
    spreads: dict[str, Spread]


class BeatFrame(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The beats of all ranks at a time (epoch s), as `store.beats.unpacked` reads them."""

    time: float
    data: bytes


class StepPage(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of `blackbox.STEP` records by rank, in the order in which they came; `next` None: there are no more."""

    blocks: tuple[tuple[int, bytes], ...]
    next: int | None


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """Where a client has got to. `output` counts chunks, `beat` beats, `cells` answers, `checks` reports of
    replicas compared, all since the job came into the memory that `memory` names; `bucket` is a point in time.
    """

    event: int = 0
    beat: int = 0
    output: int = 0
    cells: int = 0
    checks: int = 0
    bucket: float = 0.0
    memory: int = 0


class CellStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A cell is on its way to its ranks; what comes of it lies behind `cursor`."""

    cell_id: str
    cursor: Cursor
    ranks: tuple[int, ...]


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What is new since a cursor. `beats` holds the newest of each rank that changed; `now`: the scheduler's clock."""

    state: JobState
    cursor: Cursor
    now: float
    events: tuple[Event, ...] = ()
    beats: tuple[RankBeat, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    usage: tuple[Moment, ...] = ()  # before `beats`, coarser the longer ago; only to one who knows nothing yet
    totals: tuple[Total, ...] = ()  # the same time as `buckets`, all ranks folded; empty: fold `buckets`
    output: tuple[OutputWritten, ...] = ()
    cells: tuple[CellFinished, ...] = ()
    checks: tuple[Check, ...] = ()  # how replicas compared; the older ones are dropped first
    output_dropped: int = 0  # bytes of output left out of display before `output`; the log files have them
    telemetry_dropped: int = 0  # steps that were not read in time
    problems: tuple[str, ...] = ()  # what is wrong with the record on disk, in words

"""What a job says of itself while it runs: many, cheap, may be dropped, never decides. Facts are in `events`."""

from __future__ import annotations

import msgspec

from workbench.blackbox import Traffic


class _Report(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="report", omit_defaults=True):
    job_id: str


class StepsTaken(_Report, frozen=True, kw_only=True):
    """Steps one rank finished since the last report: `block` is consecutive `blackbox.STEP` records, oldest first."""

    restart_count: int
    rank: int
    block: bytes
    dropped: int = 0  # steps that the ring overwrote before they were read
    learning_rate: float | None = None  # of the optimizer's first parameter group, as last looked at


class RankBeat(_Report, frozen=True, kw_only=True):
    """What a rank's black box and process look like now; `time` is seconds since the epoch.

    `activity` is a `blackbox.Activity` name, `since` how long it has lasted in s, `collective` the last one entered.
    """

    restart_count: int
    rank: int
    time: float
    step: int
    activity: str
    since: float
    collective: str = ""
    collective_seq: int = 0
    rss: int = 0  # bytes, the process and its children
    cpu: float = 0.0  # percent of one core since the last beat
    disk_read: float | None = None  # bytes/s that came from a disk since the last measurement; None: not known
    disk_write: float | None = None
    gpu: float | None = None  # percent
    gpu_memory: int | None = None  # bytes used by this process' device
    progress: tuple[int, int] | None = None  # (steps done, steps in all) where the rank said so
    age: float = 0.0  # s since anything in the box last changed, in the agent's own looks: clocks that jump add nothing
    gap: float = 0.0  # s, the longest such time that ended since the last beat, where it was noticeable
    gap_in: str = ""  # what the rank was doing: an activity, "EVALUATION"; "STARTING": its first step
    is_evaluating: bool = False  # its model was put into evaluation and not out again
    expected: float = 0.0  # s that the program said its next step may take; 0: nothing
    counted: int = 0  # steps that this process has finished
    hidden: float | None = None  # share of DDP's communication that backward hides; None: not measured
    traffic: tuple[Traffic, ...] = ()  # since this process began
    state: str = ""  # the process' letter in /proc where it stands still ("T": stopped, "D": in I/O, "S", "R")


class OutputWritten(_Report, frozen=True, kw_only=True):
    """New output of one rank for display, decoded; the file has all of it.

    `offset` is the position in the rank's output (bytes from its start) where `text` begins; `dropped` bytes before it
    were left out of display.
    """

    rank: int
    stream: str  # "stdout" | "stderr"
    text: str
    time: float
    offset: int = 0
    dropped: int = 0


class CellFinished(_Report, frozen=True, kw_only=True):
    """One rank's answer to one cell. `data` is the last expression's MIME bundle, empty when it has none."""

    cell_id: str
    rank: int
    ok: bool
    data: dict[str, str] = {}
    error: str = ""  # "ValueError: bad batch"
    traceback: str = ""
    payload: bytes = b""
    seconds: float = 0.0


class _OfReplicas(_Report, frozen=True, kw_only=True):
    """What is said of `ranks`, the replicas of one optimizer, and of a stretch of steps, by the lowest of them."""

    restart_count: int
    rank: int
    start: float  # epoch s
    end: float
    first_step: int
    last_step: int
    ranks: tuple[int, ...]
    optimizer: int = 0  # in the order in which they first stepped


class ConsistencyReport(_OfReplicas, frozen=True, kw_only=True):
    """What checking has found since the last report, of one optimizer.

    The verdicts are those of all `ranks`. `share`: CPU time of the check over that of a step, of the rank where it is
    largest. A step that was not checked is in no figure but `last_step - first_step + 1`.
    """

    checked: int = 0  # steps
    agreed: int = 0
    deviating: tuple[tuple[int, int], ...] = ()  # (rank, checks in which it deviated)
    unclear: int = 0  # checks in which ranks differed and none could be named
    repaired: int = 0
    every: int = 1  # steps between two checks
    parts: int = 1  # checks over which parameters, state and buffers are spread
    share: float = 0.0
    tensors: int = 0
    digest: str = ""  # of the gradients at the last check, 16 hexadecimal digits


class Histogram(msgspec.Struct, frozen=True, array_like=True):
    """Of the absolute values of gradients, zeros left out: `counts[k]` of those in [4**(k-24), 4**(k-23)).

    The first count holds what is smaller too, the last what is larger. `ranks`: whose gradients, all put together.
    """

    ranks: tuple[int, ...]
    counts: tuple[int, ...]


class LayerStatistics(msgspec.Struct, frozen=True, array_like=True):
    """Of one module's parameters: RMS of the mean gradient and of the weights, and of the step over the weights'."""

    name: str
    gradient: float
    weight: float
    update: float  # RMS of what the optimizer added, over `weight`; 0: not measured


class GradientStatistics(_OfReplicas, frozen=True, kw_only=True):
    """What gradients looked like in the steps that were looked at since the last such report, of one optimizer.

    By place in `ranks`, of a rank's own gradients before the all-reduce, medians over the steps: L2 norm, cosine to the
    mean of all ranks, and the share that is zero. None: not measured, or not finite. `missing` says why there is
    nothing by rank. Norms are over all elements; the rest is over some hundred thousand of them, others at each look.
    """

    samples: int = 0  # steps that were looked at
    every: int = 0  # steps between two looks
    norms: tuple[float | None, ...] = ()
    cosines: tuple[float | None, ...] = ()
    zeros: tuple[float | None, ...] = ()
    broken: tuple[tuple[int, int, int], ...] = ()  # (rank, NaN, infinite) where a rank's own gradients had such
    mean_norm: float | None = None  # of what the optimizer used
    histograms: tuple[Histogram, ...] = ()  # by rank where there are few; else of all, and of those that are far off
    layers: tuple[LayerStatistics, ...] = ()
    missing: str = ""


Check = ConsistencyReport | GradientStatistics
Report = StepsTaken | RankBeat | OutputWritten | CellFinished | ConsistencyReport | GradientStatistics

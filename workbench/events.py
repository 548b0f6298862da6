"""Facts about a job, past tense, durable and in order: the record is a list of these and nothing else decides.

Each carries `time` (seconds since the epoch, read where it happened). Facts about one generation of ranks carry its
`restart_count`; when that is not the job's current one, the fact is recorded and changes nothing.
"""

from __future__ import annotations

from typing import Final, get_args

import msgspec

from workbench.findings import Finding, Severity
from workbench.origin import Origin
from workbench.spec import JobSpec
from workbench.state import (
    Checkpoint,
    CheckpointTier,
    DataAbout,
    DataDoubt,
    Failure,
    JobPhase,
    Mismatch,
    Placement,
    Stall,
)


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event", omit_defaults=True):
    time: float


class LaunchRequested(_Event, frozen=True, kw_only=True):
    job_id: str
    spec: JobSpec


class SlotsAwaited(_Event, frozen=True, kw_only=True):
    """The job stays in the queue; `reason` says what it waits for."""

    reason: str


class SlotsGranted(_Event, frozen=True, kw_only=True):
    """Gang placement: a slot for every rank, at once."""

    placements: tuple[Placement, ...]


class LaunchRefused(_Event, frozen=True, kw_only=True):
    """The job can never run here."""

    reason: str


class StoreStarted(_Event, frozen=True, kw_only=True):
    """The generation's rendezvous store listens."""

    restart_count: int
    host: str
    port: int


class StoreAwaited(_Event, frozen=True, kw_only=True):
    """The generation's rendezvous store cannot listen yet, for a reason that may pass."""

    restart_count: int
    reason: str


class LaunchFailed(_Event, frozen=True, kw_only=True):
    """A worker could not start its ranks (all of them, or `rank`)."""

    restart_count: int
    worker: str
    reason: str
    rank: int | None = None


class RankStarted(_Event, frozen=True, kw_only=True):
    restart_count: int
    rank: int
    pid: int
    log_path: str = ""
    cold: str = ""  # empty: forked from the warm zygote; else why it was not


class RankRaised(_Event, frozen=True, kw_only=True):
    """An exception left the rank's program; its exit follows as `RankExited`."""

    restart_count: int
    rank: int
    error: str  # "ValueError: bad batch"
    traceback: str
    is_collective: bool = False  # raised by a collective because a peer went away
    step: int | None = None
    collective: str = ""  # the last numbered one that it had entered, by its black box
    collective_seq: int = 0


class RankExited(_Event, frozen=True, kw_only=True):
    """Exactly one of `exit_code` and `signal` is set; neither when only the death, not its manner, could be seen."""

    restart_count: int
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    step: int | None = None  # last step the rank had finished, from its black box
    doing: str = ""  # what it was doing then, in words
    detail: str = ""  # what else is known: "out of memory", "lost with its zygote", "in train.py:41 in load"
    traceback: str = ""  # of a crash in native code: faulthandler's, most recent call first
    stop_signal: int | None = None  # the last signal that the agent itself had sent to end it
    log_path: str = ""
    collective: str = ""  # the last numbered one that it had entered
    collective_seq: int = 0


class WorkerLost(_Event, frozen=True, kw_only=True):
    worker: str
    reason: str = ""


class PoolLost(_Event, frozen=True, kw_only=True):
    """The scheduler that ran the job is gone, and every rank with it.

    `since`: when it died, where that is known. `comes_back`: the pool was brought back at once, and goes on.
    """

    reason: str
    since: float | None = None
    comes_back: bool = False


class CancelRequested(_Event, frozen=True, kw_only=True):
    """`force` ends the ranks at once, without their grace."""

    force: bool = False
    by: str = ""


class FaultInjected(_Event, frozen=True, kw_only=True):
    """Somebody asked for this fault, on purpose."""

    fault: str
    rank: int


class FaultHappened(_Event, frozen=True, kw_only=True):
    """It was done, at `time`; or `problem` says why it could not be. `detail`: to what: "DataLoader worker 1"."""

    restart_count: int
    fault: str
    rank: int
    step: int | None = None  # the last one that the rank had finished
    detail: str = ""
    problem: str = ""


class ResumeRequested(_Event, frozen=True, kw_only=True):
    """Somebody wants an ended job to go on, from checkpoint `path` (empty: the newest that is whole; or THE_START).

    `step` is that checkpoint's. `ranks`: how many from now on, None: as before.
    """

    step: int | None = None
    path: str = ""
    ranks: int | None = None
    by: str = ""


class ResizeRequested(_Event, frozen=True, kw_only=True):
    """Somebody wants the running job to go on with that many ranks, from a checkpoint made for it."""

    ranks: int
    by: str = ""


class SlotsReturned(_Event, frozen=True, kw_only=True):
    """An elastic job that runs on fewer ranks than it wants could have `ranks` now."""

    ranks: int


class StallDetected(_Event, frozen=True, kw_only=True):
    """The job has stopped getting on, and why is known as far as it can be."""

    restart_count: int
    stall: Stall


class StallEnded(_Event, frozen=True, kw_only=True):
    """It gets on again by itself, `seconds` after it last had."""

    restart_count: int
    seconds: float


class CheckpointSaved(_Event, frozen=True, kw_only=True):
    """Committed. `seconds`: from its request to its commit; `stalled`: how long training stood still for it."""

    restart_count: int
    checkpoint: Checkpoint
    seconds: float = 0.0
    stalled: float = 0.0


class CheckpointFailed(_Event, frozen=True, kw_only=True):
    """It could not be saved; training goes on and it is tried again."""

    restart_count: int
    step: int
    reason: str
    rank: int | None = None


class RunResumed(_Event, frozen=True, kw_only=True):
    """The generation goes on from a checkpoint: `step` optimizer steps are behind it."""

    restart_count: int
    step: int
    tier: CheckpointTier
    path: str = ""
    seconds: float = 0.0  # that loading took
    is_proved: bool = False  # what was loaded has the digest of what was saved


class NonFiniteFound(_Event, frozen=True, kw_only=True):
    """NaN or inf; `what` names the first place: "loss", "gradient of layer2.weight".

    `module`: whose output, or gradient, was the first, where that is known.
    """

    restart_count: int
    rank: int
    step: int
    what: str
    module: str = ""


class _Explained(_Event, frozen=True, kw_only=True):
    """What it most likely comes of is said in `finding`, when the agent hears of it: the same words everywhere.

    Records of earlier versions have it in four fields of their own, which become a finding as they are read.
    """

    step: int
    finding: Finding | None = None
    cause: str = ""
    sentence: str = ""
    evidence: tuple[str, ...] = ()
    fix: str = ""

    def __post_init__(self) -> None:
        if self.finding is None and (self.sentence or self.cause):
            found = Finding(
                symptom=self.sentence.removeprefix(f"step {self.step}: "), cause=self.cause, advice=self.fix,
                evidence=self.evidence, severity=self._severity, step=self.step,
            )  # fmt: skip
            msgspec.structs.force_setattr(self, "finding", found)
        for name, none in (("cause", ""), ("sentence", ""), ("evidence", ()), ("fix", "")):
            msgspec.structs.force_setattr(self, name, none)

    @property
    def _severity(self) -> Severity:
        return Severity.ERROR


class GradientMismatched(_Explained, frozen=True, kw_only=True):
    """Replicas differ. `step`: optimizer steps finished when that was seen, just before the next.

    `response`: what the ranks do about it, a word of `MismatchPolicy`; "repair" only where it is possible. The finding
    is `policy.consistency`'s.
    """

    restart_count: int
    mismatch: Mismatch
    response: str = "warn"


class ReplicasRepaired(_Event, frozen=True, kw_only=True):
    """The ranks that deviated have what `source` has again, bit for bit, and all digests agree."""

    restart_count: int
    step: int
    ranks: tuple[int, ...]
    source: int
    tensors: int
    size: int  # bytes that were sent


class GradientsStoodOut(_Event, frozen=True, kw_only=True):
    """The own gradients of a rank, before the all-reduce, are not like the others'; of two ranks both are named."""

    restart_count: int
    step: int
    ranks: tuple[int, ...]
    about: str  # "norm" or "direction"
    score: float  # robust z-score; see `policy.standing`
    finding: Finding


class DataDoubted(_Explained, frozen=True, kw_only=True):
    """Something is odd about the data that ranks read; each kind is told once. `step`: optimizer steps finished then.

    The finding is `policy.data`'s.
    """

    restart_count: int
    doubt: DataDoubt
    is_certain: bool = True  # of earlier versions' records; now it is the finding's severity

    @property
    def _severity(self) -> Severity:
        if self.is_certain:
            return Severity.ERROR
        return Severity.NOTICE if self.doubt.about is DataAbout.RANDOM else Severity.WARNING


class ConsistencyPaced(_Event, frozen=True, kw_only=True):
    """What is checked from now on, and how often; `every` 0: nothing is, and `reason` says why.

    `parts`: checks over which parameters, optimizer state and buffers are spread.
    """

    restart_count: int
    step: int
    every: int
    parts: int = 1
    tensors: int = 0
    reason: str = ""


class Ticked(_Event, frozen=True, kw_only=True):
    """A deadline that the state asked for has come."""


# --- told by the controller or the runner, read by people; they change no state --------------------------------------


class PhaseChanged(_Event, frozen=True, kw_only=True):
    phase: JobPhase
    reason: str
    restart_count: int


class FailureDetected(_Event, frozen=True, kw_only=True):
    """The first cause of a generation's end, with what followed from it."""

    restart_count: int
    failure: Failure
    consequences: tuple[Failure, ...] = ()


class OriginRecorded(_Event, frozen=True, kw_only=True):
    """What the launch or resume before this was made of."""

    origin: Origin


class CellSent(_Event, frozen=True, kw_only=True):
    """A cell on its way to ranks of an interactive job; `source` is empty where it was too long to be kept."""

    restart_count: int
    cell_id: str
    ranks: tuple[int, ...]
    source: str = ""


class RecoveryStarted(_Event, frozen=True, kw_only=True):
    restart_count: int  # of the generation to come
    reason: str


class RecoveryFinished(_Event, frozen=True, kw_only=True):
    restart_count: int


class StepsBegan(_Event, frozen=True, kw_only=True):
    """Every rank of the generation has finished its first step, the last of them at `time`; `step` is that one."""

    restart_count: int
    step: int


class CheckpointRefused(_Event, frozen=True, kw_only=True):
    """A checkpoint was passed over: it is not what was saved, or its ranks differed, unlike those of an older one."""

    restart_count: int
    checkpoint: Checkpoint  # with its `problem`


class StragglerDetected(_Event, frozen=True, kw_only=True):
    """A rank takes `score` times as long as the others for its own part of a step."""

    restart_count: int
    rank: int
    score: float
    reason: str


class StragglerGone(_Event, frozen=True, kw_only=True):
    restart_count: int
    rank: int


Event = (
    LaunchRequested
    | SlotsAwaited
    | SlotsGranted
    | LaunchRefused
    | StoreStarted
    | StoreAwaited
    | LaunchFailed
    | RankStarted
    | RankRaised
    | RankExited
    | WorkerLost
    | PoolLost
    | CancelRequested
    | FaultInjected
    | FaultHappened
    | ResumeRequested
    | ResizeRequested
    | SlotsReturned
    | StallDetected
    | StallEnded
    | CheckpointSaved
    | CheckpointFailed
    | RunResumed
    | NonFiniteFound
    | GradientMismatched
    | GradientsStoodOut
    | ReplicasRepaired
    | ConsistencyPaced
    | DataDoubted
    | Ticked
    | PhaseChanged
    | FailureDetected
    | OriginRecorded
    | CellSent
    | RecoveryStarted
    | RecoveryFinished
    | StepsBegan
    | CheckpointRefused
    | StragglerDetected
    | StragglerGone
)
EVENT_TYPES: Final[tuple[type[_Event], ...]] = get_args(Event)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """One event as JSON, the form it is kept in."""
    return _encoder.encode(event)


def decode_event(data: bytes | str) -> Event:
    """The inverse of `encode_event`; raises `msgspec.ValidationError` on what is no event."""
    return _decoder.decode(data)

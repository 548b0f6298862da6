"""Facts about a job, past tense, durable and in order: the record is a list of these and nothing else decides.

Each carries `time` (seconds since the epoch, read where it happened). Facts about one generation of ranks carry its
`restart_count`; when that is not the job's current one, the fact is recorded and changes nothing.
"""

from __future__ import annotations

from typing import Final, get_args

import msgspec

from workbench.spec import JobSpec
from workbench.state import Failure, JobPhase, Placement


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


class RankExited(_Event, frozen=True, kw_only=True):
    """Exactly one of `exit_code` and `signal` is set; neither when only the death, not its manner, could be seen."""

    restart_count: int
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    step: int | None = None  # last step the rank had finished, from its black box
    doing: str = ""  # what it was doing then, in words
    detail: str = ""  # what else is known: "out of memory", "lost with its zygote"
    stop_signal: int | None = None  # the last signal that the agent itself had sent to end it
    log_path: str = ""


class WorkerLost(_Event, frozen=True, kw_only=True):
    worker: str
    reason: str = ""


class PoolLost(_Event, frozen=True, kw_only=True):
    """The scheduler that ran the job is gone, and every rank with it."""

    reason: str


class CancelRequested(_Event, frozen=True, kw_only=True):
    """`force` ends the ranks at once, without their grace."""

    force: bool = False
    by: str = ""


class FaultInjected(_Event, frozen=True, kw_only=True):
    """Somebody asked for this fault, on purpose."""

    fault: str
    rank: int


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


class RecoveryStarted(_Event, frozen=True, kw_only=True):
    restart_count: int  # of the generation to come
    reason: str


class RecoveryFinished(_Event, frozen=True, kw_only=True):
    restart_count: int


Event = (
    LaunchRequested
    | SlotsAwaited
    | SlotsGranted
    | LaunchRefused
    | StoreStarted
    | LaunchFailed
    | RankStarted
    | RankRaised
    | RankExited
    | WorkerLost
    | PoolLost
    | CancelRequested
    | FaultInjected
    | Ticked
    | PhaseChanged
    | FailureDetected
    | RecoveryStarted
    | RecoveryFinished
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

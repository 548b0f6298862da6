"""What the end of a rank means: whether it is a failure, in which words, and which failure explains the others.

Pure. A rank that we end is no failure, whatever its last words are; a rank that ends of itself is, also when we were
about to end it. Times are those of the events: seconds since the epoch where it happened.
"""

from __future__ import annotations

import re
import signal
from typing import Final

from msgspec.structs import replace

from workbench.events import (
    GradientMismatched,
    LaunchFailed,
    NonFiniteFound,
    RankExited,
    RankRaised,
    StallDetected,
    WorkerLost,
)
from workbench.evidence import RankEvidence
from workbench.policy.consistency import summary
from workbench.policy.diagnosis import as_stall, mismatch_of
from workbench.state import Failure, FailureKind, JobPhase, JobState, RankPhase, RankState, Stall, StallKind

SETTLE: Final = 0.2  # s in which failures count as simultaneous, and a first one waits for one that outranks it
SAID: Final = (FailureKind.COLLECTIVE, FailureKind.EXCEPTION)  # what a rank itself tells of its end
LISTED: Final = 8  # ranks named in one reason
NAMES: Final = {"MemoryError": "out of memory", "KeyboardInterrupt": "interrupted"}
NOISE: Final = re.compile(r"\[/\S+\.(?:cc|cpp|h):\d+\]\s*|\s*This is typically caused by .*", re.DOTALL)
PEER_LOST: Final = (
    "Watchdog caught collective operation timeout",
    "NCCL communicator was aborted",
    "remote process exited",
    "Connection closed by peer",
    "Connection reset by peer",
)


def first_cause(failures: tuple[Failure, ...], ranks: tuple[RankState, ...] = ()) -> Failure:
    """The failure that explains the others.

    A collective error only ever follows from something else, where anything else is known. Of what happened within
    `SETTLE` of the earliest it is the highest kind, among equals the earliest, then the lowest rank. Ranks that failed
    in one collective and had entered different ones failed of that: with gloo an innocent rank aborts. `ranks` tells of
    those that were stopped in it meanwhile.
    """
    if mismatch := find_mismatch(failures, ranks):
        return mismatch
    own = [f for f in failures if f.kind is not FailureKind.COLLECTIVE] or failures
    latest = min(f.time for f in own) + SETTLE
    return min((f for f in own if f.time <= latest), key=lambda f: (-f.kind, f.time, -1 if f.rank is None else f.rank))


def find_mismatch(failures: tuple[Failure, ...], ranks: tuple[RankState, ...]) -> Failure | None:
    """A failure that says who entered another collective than the others; None where that explains nothing."""
    newest = max((f.collective_seq for f in failures if f.collective and f.rank is not None), default=0)
    if not newest:  # point-to-point calls and those of other groups have no number by which to compare
        return None
    inside = [f for f in failures if f.collective and f.rank is not None and f.collective_seq == newest]
    entered = {r.rank: r.collective for r in ranks if r.collective and r.collective_seq == newest}
    entered.update({f.rank: f.collective for f in inside if f.rank is not None})
    known = [
        RankEvidence(rank=rank, activity="COLLECTIVE", collective=name, collective_seq=newest)
        for rank, name in entered.items()
    ]
    verdict = mismatch_of(known)
    if verdict is None or not any(f.kind in (FailureKind.COLLECTIVE, FailureKind.SIGNAL) for f in inside):
        return None
    first = min(inside, key=lambda f: f.time)
    return Failure(
        kind=FailureKind.EXCEPTION,
        rank=verdict.culprits[0] if verdict.culprits else None,
        reason=f"{verdict.reason}; {first.reason}",
        time=first.time,
        traceback=next((f.traceback for f in inside if f.traceback), ""),
        step=first.step,
        log_path=next((f.log_path for f in inside if f.rank in verdict.culprits[:1]), first.log_path),
        stall=replace(as_stall(verdict, known, since=first.time), step=first.step),
    )


def was_stopped(state: JobState, event: RankExited) -> bool:
    """Whether the rank ended because we ended it, and not of itself at the same moment."""
    if event.stop_signal is None or not _is_ending(state):
        return False
    if event.signal in (None, signal.SIGTERM, event.stop_signal) or _is_late(state, event.time):
        return True
    # Training programs that catch SIGTERM often abort as they unwind. That explains nothing that is known already.
    is_crash = event.signal != signal.SIGKILL
    return is_crash and any(f.kind is not FailureKind.COLLECTIVE for f in state.failures)


def exit_phase(state: JobState, event: RankExited) -> RankPhase:
    """What the rank is after this exit."""
    if was_stopped(state, event):
        return RankPhase.STOPPED
    return RankPhase.SUCCEEDED if event.exit_code == 0 else RankPhase.FAILED


def exit_failure(state: JobState, event: RankExited, rank: RankState) -> Failure | None:
    """What the exit says that is not known yet; None for a good end, ours, or one that the rank explained before."""
    if _left_others(state, event):
        return _returned(state, event)
    has_said = any(f.rank == event.rank and f.kind in SAID for f in state.failures)
    if has_said or exit_phase(state, event) is not RankPhase.FAILED or _is_too_late(state, event):
        return None
    name = _signal_name(event.signal)
    how = f"killed by {name}" if name else f"exited with code {event.exit_code}" if event.exit_code else "ended"
    # A rank that left with an exit code was doing just that.
    doing = f" while {event.doing}" if event.doing and event.exit_code is None else ""
    detail = f": {event.detail}" if event.detail else ""
    return Failure(
        kind=_exit_kind(event),
        rank=event.rank,
        reason=f"rank {event.rank} {how}{_at(event.step)}{doing}{detail}",
        time=event.time,
        traceback=event.traceback,
        step=event.step,
        log_path=event.log_path or rank.log_path,
        collective=event.collective,
        collective_seq=event.collective_seq,
    )


def _left_others(state: JobState, event: RankExited) -> bool:
    """Whether it ended well at the moment in which collectives of others failed, and nothing else explains that."""
    is_known = any(f.kind is not FailureKind.COLLECTIVE for f in state.failures)
    is_good = exit_phase(state, event) is RankPhase.SUCCEEDED and bool(state.failures)
    return is_good and not is_known and not _is_late(state, event.time)


def _returned(state: JobState, event: RankExited) -> Failure:
    reason = f"rank {event.rank} ended{_at(event.step)} while the others go on"
    return Failure(
        kind=FailureKind.EXIT,
        rank=event.rank,
        reason=f"{reason}; {state.failures[0].reason}",
        time=event.time,
        step=event.step,
        log_path=event.log_path,
        stall=_return_stall((event.rank,), reason, event.time, event.step, state.failures[0]),
    )


def _return_stall(ranks: tuple[int, ...], reason: str, time: float, step: int | None, failure: Failure) -> Stall:
    return Stall(
        kind=StallKind.RETURNED,
        ranks=ranks,
        reason=reason,
        since=time,
        step=step,
        collective=failure.collective,
        collective_seq=failure.collective_seq,
    )


def _exit_kind(event: RankExited) -> FailureKind:
    """NCCL's watchdog ends the ranks that wait for another one: that says no more than a collective's error does."""
    if event.signal is None and event.exit_code is not None:
        return FailureKind.EXIT
    is_waiting = event.signal == signal.SIGABRT and any(words in event.detail for words in PEER_LOST)
    return FailureKind.COLLECTIVE if is_waiting else FailureKind.SIGNAL


def raise_failure(state: JobState, event: RankRaised, rank: RankState) -> Failure | None:
    """The exception as a failure; None for one that came of our stopping the rank."""
    if _is_too_late(state, event):
        return None
    failure = Failure(
        kind=FailureKind.COLLECTIVE if event.is_collective else FailureKind.EXCEPTION,
        rank=event.rank,
        reason=f"rank {event.rank} raised {_plain(event.error)}{_at(event.step)}{_name(event.error)}",
        time=event.time,
        traceback=event.traceback,
        step=event.step,
        log_path=rank.log_path,
        collective=event.collective,
        collective_seq=event.collective_seq,
    )
    gone = tuple(r.rank for r in state.ranks if r.phase is RankPhase.SUCCEEDED)
    if not event.is_collective or not gone or state.failures:
        return failure
    reason = f"{_names(list(gone))} ended while the others go on"
    stall = _return_stall(gone, reason, event.time, event.step, failure)
    return replace(failure, reason=f"{reason}; {failure.reason}", stall=stall)


def _plain(error: str) -> str:
    """Without where in torch's own sources it was raised, and what it guesses; the traceback has all of it."""
    return NOISE.sub("", error).rstrip(" .") or error


def launch_failure(event: LaunchFailed) -> Failure:
    """A rank, or all that a worker was to start, could not be started."""
    who = "" if event.rank is None else f"rank {event.rank} did not start: "
    return Failure(kind=FailureKind.LAUNCH, rank=event.rank, reason=f"{who}{event.reason}", time=event.time)


def loss_failure(event: WorkerLost, rank: RankState) -> Failure:
    """A rank went with its worker."""
    why = f": {event.reason}" if event.reason else ""
    return Failure(
        kind=FailureKind.WORKER_LOST,
        rank=rank.rank,
        reason=f"rank {rank.rank} was lost with its worker {event.worker}{why}",
        time=event.time,
        log_path=rank.log_path,
    )


def silence_failure(state: JobState, time: float) -> Failure:
    """The store, or ranks, did not start in time."""
    waiting = [r.rank for r in state.ranks if r.phase is RankPhase.INIT]
    who = "the rendezvous store" if state.master is None else _names(waiting)
    return Failure(
        kind=FailureKind.TIMEOUT,
        rank=None if state.master is None else waiting[0],
        reason=f"{who} did not start within {state.spec.startup_timeout:g} s",
        time=time,
    )


def _name(error: str) -> str:
    """What an exception is called that has no words of its own."""
    return next((f": {name}" for kind, name in NAMES.items() if error in (kind, f"{kind}: ")), "")


def stall_failure(state: JobState, event: StallDetected) -> Failure:
    """Ranks that stopped getting on; the first culprit stands for them, where one is known."""
    stall = event.stall
    rank = stall.ranks[0] if stall.ranks else None
    return Failure(
        kind=FailureKind.TIMEOUT,
        rank=rank,
        reason=stall.reason,
        time=event.time,
        traceback=next((group.text for group in stall.stacks if rank in group.ranks), ""),
        step=stall.step,
        log_path="" if rank is None or rank >= len(state.ranks) else state.ranks[rank].log_path,
        stall=stall,
    )


def divergence_failure(state: JobState, event: NonFiniteFound) -> Failure:
    """A number that is none, in a job that is not to go on with it."""
    return Failure(
        kind=FailureKind.DIVERGED,
        rank=event.rank,
        reason=f"rank {event.rank}: {event.what} is not finite{_at(event.step)}",
        time=event.time,
        step=event.step,
        log_path=state.ranks[event.rank].log_path if event.rank < len(state.ranks) else "",
    )


def mismatch_failure(state: JobState, event: GradientMismatched) -> Failure:
    """Replicas differ in a job that is not to go on with that; the first that deviates stands for them, if any."""
    rank = event.mismatch.ranks[0] if event.mismatch.ranks else None
    return Failure(
        kind=FailureKind.MISMATCH,
        rank=rank,
        reason=summary(event.mismatch, event.step),
        time=event.time,
        step=event.step,
        log_path="" if rank is None or rank >= len(state.ranks) else state.ranks[rank].log_path,
        mismatch=event.mismatch,
    )


def _is_ending(state: JobState) -> bool:
    return state.phase in (JobPhase.RECOVERING, JobPhase.STOPPING)


def _is_too_late(state: JobState, event: RankRaised | RankExited) -> bool:
    """Whether a program's own end came too late to be a cause; a signal from elsewhere may be one all the same."""
    is_own = isinstance(event, RankRaised) or (event.signal is None and event.exit_code is not None)
    return is_own and _is_ending(state) and _is_late(state, event.time)


def _is_late(state: JobState, time: float) -> bool:
    """Whether this came so long after the generation's end was ordered that it cannot have led to it."""
    return time > state.phase_since + SETTLE


def _names(ranks: list[int]) -> str:
    more = f" and {len(ranks) - LISTED} more" if len(ranks) > LISTED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:LISTED]))}{more}"


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def _signal_name(number: int | None) -> str:
    if number is None:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

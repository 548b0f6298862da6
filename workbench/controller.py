"""The job state machine: `transition(state, event) -> (state, commands)`, the one door through which a job changes.

Pure: no clock, file, process or random number; time arrives in the event. Folding `transition` over a job's recorded
events gives its live state again, exactly. Rules kept here:

- an event of another generation (`restart_count`) changes nothing;
- no generation starts before every process of the old one has exited;
- a terminal job never changes again, and has no rank left;
- of several failures the first cause is the highest `FailureKind`, among equals the earliest.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from workbench.commands import Announce, Command, ReleaseSlots, RequestSlots, StartRanks, StartStore, StopRanks
from workbench.errors import InvalidTransitionError
from workbench.events import (
    CancelRequested,
    Event,
    FailureDetected,
    LaunchFailed,
    LaunchRefused,
    LaunchRequested,
    PoolLost,
    RankExited,
    RankRaised,
    RankStarted,
    RecoveryFinished,
    RecoveryStarted,
    SlotsAwaited,
    SlotsGranted,
    StoreStarted,
    Ticked,
    WorkerLost,
)
from workbench.spec import EntrypointKind
from workbench.state import Failure, FailureKind, JobPhase, JobState, RankPhase, RankState

SETTLE: Final = 0.2  # s that a first failure waits for one that outranks it before it is told

Outcome = tuple[JobState, tuple[Command, ...]]


def transition(state: JobState | None, event: Event) -> Outcome:
    """Apply one event. `state` is None before the job's `LaunchRequested` and never after.

    Raises `InvalidTransitionError` when the first event is not `LaunchRequested` or a second one comes.
    """
    if isinstance(event, LaunchRequested) is not (state is None):
        raise InvalidTransitionError(f"{type(event).__name__} cannot come here", [state, event])
    if isinstance(event, LaunchRequested):
        return _launch(event)
    assert state is not None
    handler = _HANDLERS.get(type(event))
    if handler is None or state.phase.is_terminal or _is_stale(state, event):
        return state, ()
    return handler(state, event)


def _is_stale(state: JobState, event: Event) -> bool:
    return getattr(event, "restart_count", state.restart_count) != state.restart_count


def _enter(state: JobState, phase: JobPhase, reason: str, time: float, **changes: Any) -> JobState:
    """The state in another phase; the deadline of the old phase goes with it."""
    return replace(state, **{"phase": phase, "reason": reason, "phase_since": time, "deadline": None} | changes)


def _launch(event: LaunchRequested) -> Outcome:
    state = JobState(
        job_id=event.job_id,
        spec=event.spec,
        reason="waiting for slots",
        submitted_at=event.time,
        phase_since=event.time,
    )
    return state, (RequestSlots(job_id=event.job_id),)


# --- slots and start --------------------------------------------------------------------------------------------------


def _await_slots(state: JobState, event: SlotsAwaited) -> Outcome:
    return replace(state, reason=event.reason), ()


def _grant(state: JobState, event: SlotsGranted) -> Outcome:
    if state.phase not in (JobPhase.INIT, JobPhase.RECOVERING):
        return state, ()
    first = event.placements[0]
    ranks = tuple(RankState(rank=p.rank, worker=p.worker) for p in event.placements)
    launched = _enter(
        state,
        JobPhase.LAUNCHING,
        f"starting {len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'}",
        event.time,
        placements=event.placements,
        ranks=ranks,
        master=None,
        deadline=event.time + state.spec.startup_timeout,
    )
    start = StartStore(
        job_id=state.job_id,
        restart_count=state.restart_count,
        worker=first.worker,
        host=first.host,
        port=state.spec.master_port,
    )
    return launched, (start,)


def _refuse(state: JobState, event: LaunchRefused) -> Outcome:
    failure = Failure(kind=FailureKind.LAUNCH, rank=None, reason=event.reason, time=event.time)
    return _end(replace(state, failures=(failure,), failure=failure), JobPhase.FAILED, event.reason, event.time)


def _store_started(state: JobState, event: StoreStarted) -> Outcome:
    if state.phase is not JobPhase.LAUNCHING:
        return state, ()
    master = (event.host, event.port)
    nnodes = len({p.node_rank for p in state.placements})
    spec = replace(state.spec, nproc_per_node=len(state.placements) // nnodes)
    commands = tuple(
        StartRanks(
            job_id=state.job_id,
            restart_count=state.restart_count,
            worker=worker,
            spec=spec,
            placements=tuple(p for p in state.placements if p.worker == worker),
            world_size=len(state.placements),
            nnodes=nnodes,
            master=master,
        )
        for worker in _workers(state)
    )
    return replace(state, master=master), commands


def _rank_started(state: JobState, event: RankStarted) -> Outcome:
    started = _with_rank(state, event.rank, phase=RankPhase.HEALTHY, pid=event.pid, log_path=event.log_path)
    if started.phase is not JobPhase.LAUNCHING or any(r.phase is RankPhase.INIT for r in started.ranks):
        return started, ()
    healthy = _enter(started, JobPhase.HEALTHY, _running_text(started), event.time)
    if state.restart_count == 0:
        return healthy, ()
    finished = RecoveryFinished(time=event.time, restart_count=state.restart_count)
    return healthy, (Announce(job_id=state.job_id, event=finished),)


def _running_text(state: JobState) -> str:
    count = len(state.ranks)
    ready = "ready for cells" if state.spec.kind is EntrypointKind.INTERACTIVE else "running"
    restarts = f", restart {state.restart_count} of {state.spec.max_restarts}" if state.restart_count else ""
    return f"{count} of {count} ranks {ready}{restarts}"


# --- ends and failures ------------------------------------------------------------------------------------------------


def _rank_raised(state: JobState, event: RankRaised) -> Outcome:
    failure = Failure(
        kind=FailureKind.COLLECTIVE if event.is_collective else FailureKind.EXCEPTION,
        rank=event.rank,
        reason=f"rank {event.rank} raised {event.error}{_at(event.step)}",
        time=event.time,
        traceback=event.traceback,
        step=event.step,
        log_path=_rank(state, event.rank).log_path,
    )
    return _fail(state, (failure,), event.time)


def _rank_exited(state: JobState, event: RankExited) -> Outcome:
    rank = _rank(state, event.rank)
    if rank.phase.has_exited:
        return state, ()
    failure = _exit_failure(state, event)
    phase = (
        RankPhase.STOPPED if _was_stopped(event) else RankPhase.SUCCEEDED if event.exit_code == 0 else RankPhase.FAILED
    )
    exited = _with_rank(state, event.rank, phase=phase, exit_code=event.exit_code, signal=event.signal)
    if failure is not None:
        return _fail(exited, (failure,), event.time)
    return _settle(exited, event.time)


def _was_stopped(event: RankExited) -> bool:
    """Whether the rank ended because the agent ended it, and not of itself at the same moment."""
    if event.stop_signal is None:
        return False
    return event.signal in (None, signal.SIGTERM, event.stop_signal)


def _exit_failure(state: JobState, event: RankExited) -> Failure | None:
    """What the exit says that is not known yet; None for a good end, ours, or one that the rank explained before."""
    has_said = any(f.rank == event.rank for f in state.failures)
    if event.exit_code == 0 or _was_stopped(event) or (has_said and event.signal is None):
        return None
    name = _signal_name(event.signal)
    how = f"killed by {name}" if name else f"exited with code {event.exit_code}" if event.exit_code else "ended"
    doing = f" while {event.doing}" if event.doing else ""
    detail = f": {event.detail}" if event.detail else ""
    return Failure(
        kind=FailureKind.EXIT if event.signal is None and event.exit_code is not None else FailureKind.SIGNAL,
        rank=event.rank,
        reason=f"rank {event.rank} {how}{_at(event.step)}{doing}{detail}",
        time=event.time,
        step=event.step,
        log_path=event.log_path or _rank(state, event.rank).log_path,
    )


def _launch_failed(state: JobState, event: LaunchFailed) -> Outcome:
    gone = tuple(
        replace(r, phase=RankPhase.FAILED)
        if r.phase is RankPhase.INIT and r.worker == event.worker and (event.rank is None or event.rank == r.rank)
        else r
        for r in state.ranks
    )
    failure = Failure(kind=FailureKind.LAUNCH, rank=event.rank, reason=event.reason, time=event.time)
    return _fail(replace(state, ranks=gone), (failure,), event.time)


def _worker_lost(state: JobState, event: WorkerLost) -> Outcome:
    lost = [r for r in state.ranks if r.worker == event.worker and not r.phase.has_exited]
    if not lost:
        return state, ()
    names = [r.rank for r in lost]
    gone = tuple(replace(r, phase=RankPhase.FAILED) if r.rank in names else r for r in state.ranks)
    why = f": {event.reason}" if event.reason else ""
    failures = tuple(
        Failure(
            kind=FailureKind.WORKER_LOST,
            rank=rank,
            reason=f"rank {rank} was lost with its worker {event.worker}{why}",
            time=event.time,
        )
        for rank in names
    )
    return _fail(replace(state, ranks=gone), failures, event.time)


def _fail(state: JobState, failures: tuple[Failure, ...], time: float) -> Outcome:
    """Note failures; the first of a generation ends it."""
    noted = replace(state, failures=(*state.failures, *failures))
    if state.phase not in (JobPhase.LAUNCHING, JobPhase.HEALTHY):
        return _settle(noted, time)
    cause = first_cause(noted.failures)
    phase = JobPhase.RECOVERING if _may_restart(noted) else JobPhase.STOPPING
    stopping = _enter(noted, phase, cause.reason, time, deadline=time + SETTLE)
    settled, commands = _settle(stopping, time)
    return settled, (*_stop(stopping, stopping.spec.stop_grace), *commands)


def _may_restart(state: JobState) -> bool:
    """A launch that cannot be carried out would fail again; all else may be tried again while restarts are left."""
    launchable = all(f.kind is not FailureKind.LAUNCH for f in state.failures)
    return launchable and state.restart_count < state.spec.max_restarts


def first_cause(failures: tuple[Failure, ...]) -> Failure:
    """The failure that explains the others: the highest kind, among equals the earliest, then the lowest rank."""
    return min(failures, key=lambda f: (-f.kind, f.time, -1 if f.rank is None else f.rank))


def _settle(state: JobState, time: float) -> Outcome:
    """When every process of the generation is gone: the next one, or the end."""
    if not _all_gone(state):
        return state, ()
    match state.phase:
        case JobPhase.RECOVERING:
            return _restart(state, time)
        case JobPhase.STOPPING if state.cancelled or not state.failures:
            return _end(state, JobPhase.STOPPED, state.reason, time)
        case JobPhase.STOPPING:
            told, commands = _tell(state, time)
            ended, more = _end(told, JobPhase.FAILED, _final_reason(told), time)
            return ended, (*commands, *more)
        case JobPhase.HEALTHY | JobPhase.LAUNCHING:
            reason = f"all {len(state.ranks)} ranks finished" if len(state.ranks) > 1 else "the rank finished"
            return _end(state, JobPhase.SUCCEEDED, reason, time)
    return state, ()


def _all_gone(state: JobState) -> bool:
    """Whether no process of the generation is left. Before the store is up, no rank has been asked for."""
    is_stopping = state.phase in (JobPhase.RECOVERING, JobPhase.STOPPING)
    return all(
        r.phase.has_exited or (is_stopping and state.master is None and r.phase is RankPhase.INIT) for r in state.ranks
    )


def _final_reason(state: JobState) -> str:
    assert state.failure is not None
    if not state.spec.max_restarts or state.failure.kind is FailureKind.LAUNCH:
        return state.failure.reason
    return f"{state.failure.reason}; no restart left of {state.spec.max_restarts}"


def _tell(state: JobState, time: float) -> Outcome:
    """Announce the generation's first cause, once."""
    cause = first_cause(state.failures)
    if state.failure is cause or state.failure == cause:
        return replace(state, deadline=None), ()
    rest = tuple(f for f in state.failures if f is not cause)
    told = FailureDetected(time=time, restart_count=state.restart_count, failure=cause, consequences=rest)
    return (
        replace(state, failure=cause, reason=cause.reason, deadline=None),
        (Announce(job_id=state.job_id, event=told),),
    )


def _restart(state: JobState, time: float) -> Outcome:
    told, commands = _tell(state, time)
    assert told.failure is not None
    count = told.restart_count + 1
    reason = f"restart {count} of {told.spec.max_restarts}: {told.failure.reason}"
    fresh = _enter(told, JobPhase.RECOVERING, reason, time, restart_count=count, ranks=(), failures=(), master=None)
    started = RecoveryStarted(time=time, restart_count=count, reason=reason)
    return fresh, (
        *commands,
        *_stop(state, 0.0),
        Announce(job_id=state.job_id, event=started),
        RequestSlots(job_id=state.job_id),
    )


def _end(state: JobState, phase: JobPhase, reason: str, time: float) -> Outcome:
    ended = _enter(state, phase, reason, time, ended_at=time)
    # The store, and whatever the ranks left in their process groups, goes as well.
    return ended, (*_stop(state, 0.0), ReleaseSlots(job_id=state.job_id))


def _cancel(state: JobState, event: CancelRequested) -> Outcome:
    grace = 0.0 if event.force else state.spec.stop_grace
    by = f" by {event.by}" if event.by else ""
    if state.phase is JobPhase.STOPPING:
        return state, _stop(state, grace) if event.force else ()
    stopping = _enter(state, JobPhase.STOPPING, f"cancelled{by}", event.time, cancelled=True)
    settled, commands = _settle(stopping, event.time)
    return settled, (*(() if settled.phase.is_terminal else _stop(state, grace)), *commands)


def _pool_lost(state: JobState, event: PoolLost) -> Outcome:
    failure = Failure(kind=FailureKind.WORKER_LOST, rank=None, reason=event.reason, time=event.time)
    gone = tuple(r if r.phase.has_exited else replace(r, phase=RankPhase.FAILED) for r in state.ranks)
    lost = replace(state, ranks=gone, failures=(*state.failures, failure), failure=failure)
    return _end(lost, JobPhase.FAILED, event.reason, event.time)


def _tick(state: JobState, event: Ticked) -> Outcome:
    if state.deadline is None or event.time < state.deadline:
        return state, ()
    if state.phase is JobPhase.LAUNCHING:
        return _fail(state, (_late(state, event.time),), event.time)
    if state.failures:
        return _tell(state, event.time)
    return replace(state, deadline=None), ()


def _late(state: JobState, time: float) -> Failure:
    waiting = [r.rank for r in state.ranks if r.phase is RankPhase.INIT]
    what = "the rendezvous store" if state.master is None else f"rank {', '.join(map(str, waiting[:8]))}"
    more = f" and {len(waiting) - 8} more" if state.master is not None and len(waiting) > 8 else ""
    reason = f"{what}{more} did not start within {state.spec.startup_timeout:g} s"
    return Failure(kind=FailureKind.TIMEOUT, rank=waiting[0] if waiting else None, reason=reason, time=time)


# --- small parts ------------------------------------------------------------------------------------------------------


def _workers(state: JobState) -> tuple[str, ...]:
    """The workers of the generation, each once, in rank order."""
    return tuple(dict.fromkeys(p.worker for p in state.placements))


def _stop(state: JobState, grace: float) -> tuple[Command, ...]:
    return tuple(
        StopRanks(job_id=state.job_id, restart_count=state.restart_count, worker=worker, grace=grace)
        for worker in _workers(state)
    )


def _rank(state: JobState, rank: int) -> RankState:
    if not 0 <= rank < len(state.ranks):
        raise InvalidTransitionError(f"{state.job_id} has no rank {rank}", [state])
    return state.ranks[rank]


def _with_rank(state: JobState, rank: int, **changes: Any) -> JobState:
    """The state with one rank changed; a rank that has exited never changes."""
    old = _rank(state, rank)
    if old.phase.has_exited:
        return state
    return replace(state, ranks=(*state.ranks[:rank], replace(old, **changes), *state.ranks[rank + 1 :]))


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def _signal_name(number: int | None) -> str:
    if number is None:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_HANDLERS: Final[Mapping[type, Callable[[JobState, Any], Outcome]]] = {
    SlotsAwaited: _await_slots,
    SlotsGranted: _grant,
    LaunchRefused: _refuse,
    StoreStarted: _store_started,
    LaunchFailed: _launch_failed,
    RankStarted: _rank_started,
    RankRaised: _rank_raised,
    RankExited: _rank_exited,
    WorkerLost: _worker_lost,
    PoolLost: _pool_lost,
    CancelRequested: _cancel,
    Ticked: _tick,
}

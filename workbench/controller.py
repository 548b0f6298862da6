"""The job state machine: `transition(state, event) -> (state, commands)`, the one door through which a job changes.

Pure: no clock, file, process or random number; time arrives in the event. Folding `transition` over a job's recorded
events gives its live state again, exactly. Rules kept here:

- an event of another generation (`restart_count`) changes nothing;
- no generation starts before every process of the old one has exited;
- a terminal job never changes again, and has no rank left;
- which end of a rank is a failure, and which failure is the first cause, is `policy.failure`.
"""

from __future__ import annotations

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
from workbench.policy.failure import (
    SETTLE,
    exit_failure,
    exit_phase,
    first_cause,
    launch_failure,
    loss_failure,
    raise_failure,
    silence_failure,
)
from workbench.spec import EntrypointKind
from workbench.state import Failure, FailureKind, JobPhase, JobState, RankPhase, RankState

Outcome = tuple[JobState, tuple[Command, ...]]


def transition(state: JobState | None, event: Event) -> Outcome:
    """Apply one event. `state` is None before the job's `LaunchRequested` and never after.

    Raises `InvalidTransitionError` when the first event is not `LaunchRequested`, when a second one comes, and when a
    current event is of a rank that the generation does not have.
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


def _awaits_slots(state: JobState) -> bool:
    """Whether slots were asked for; while an old generation is still on its way out they were not."""
    return state.phase is JobPhase.INIT or (state.phase is JobPhase.RECOVERING and not state.ranks)


def _await_slots(state: JobState, event: SlotsAwaited) -> Outcome:
    return (replace(state, reason=event.reason), ()) if _awaits_slots(state) else (state, ())


def _grant(state: JobState, event: SlotsGranted) -> Outcome:
    if not _awaits_slots(state):
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
    if not _awaits_slots(state):
        return state, ()
    if state.failure is not None:  # it ran before, and what ended it then is still the first cause
        reason = f"{state.failure.reason}; it cannot restart: {event.reason}"
        return _end(state, JobPhase.FAILED, reason, event.time)
    failure = Failure(kind=FailureKind.LAUNCH, rank=None, reason=event.reason, time=event.time)
    return _end_failed(replace(state, failures=(failure,)), event.time)


def _store_started(state: JobState, event: StoreStarted) -> Outcome:
    if state.phase is not JobPhase.LAUNCHING or state.master is not None:
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
    return _running(started, event.time)


def _running(state: JobState, time: float) -> Outcome:
    """A generation of which something is alive: HEALTHY once every rank has started."""
    if state.phase is JobPhase.HEALTHY:
        return replace(state, reason=_running_text(state)), ()
    if state.phase is not JobPhase.LAUNCHING or any(r.phase is RankPhase.INIT for r in state.ranks):
        return state, ()
    healthy = _enter(state, JobPhase.HEALTHY, _running_text(state), time)
    if state.restart_count == 0:
        return healthy, ()
    finished = RecoveryFinished(time=time, restart_count=state.restart_count)
    return healthy, (Announce(job_id=state.job_id, event=finished),)


def _running_text(state: JobState) -> str:
    alive = sum(not r.phase.has_exited for r in state.ranks)
    ready = "ready for cells" if state.spec.kind is EntrypointKind.INTERACTIVE else "running"
    finished = f", {len(state.ranks) - alive} finished" if alive < len(state.ranks) else ""
    restarts = f", restart {state.restart_count} of {state.spec.max_restarts}" if state.restart_count else ""
    return f"{alive} of {len(state.ranks)} {'rank' if len(state.ranks) == 1 else 'ranks'} {ready}{finished}{restarts}"


# --- ends and failures ------------------------------------------------------------------------------------------------


def _rank_raised(state: JobState, event: RankRaised) -> Outcome:
    failure = raise_failure(state, event, _rank(state, event.rank))
    return (state, ()) if failure is None else _fail(state, (failure,), event.time)


def _rank_exited(state: JobState, event: RankExited) -> Outcome:
    rank = _rank(state, event.rank)
    if rank.phase.has_exited:
        return state, ()
    failure = exit_failure(state, event, rank)
    phase = exit_phase(state, event)
    exited = _with_rank(state, event.rank, phase=phase, exit_code=event.exit_code, signal=event.signal)
    return _settle(exited, event.time) if failure is None else _fail(exited, (failure,), event.time)


def _launch_failed(state: JobState, event: LaunchFailed) -> Outcome:
    if not state.ranks:
        return state, ()
    gone = tuple(
        replace(r, phase=RankPhase.FAILED)
        if r.phase is RankPhase.INIT and r.worker == event.worker and (event.rank is None or event.rank == r.rank)
        else r
        for r in state.ranks
    )
    return _fail(replace(state, ranks=gone), (launch_failure(event),), event.time)


def _worker_lost(state: JobState, event: WorkerLost) -> Outcome:
    lost = [r for r in state.ranks if r.worker == event.worker and not r.phase.has_exited]
    if not lost:
        return state, ()
    names = {r.rank for r in lost}
    gone = tuple(replace(r, phase=RankPhase.FAILED) if r.rank in names else r for r in state.ranks)
    failures = tuple(loss_failure(event, rank) for rank in lost)
    return _fail(replace(state, ranks=gone), failures, event.time)


def _fail(state: JobState, failures: tuple[Failure, ...], time: float) -> Outcome:
    """Note failures; the first of a generation ends it."""
    news = tuple(f for f in failures if f not in state.failures)
    noted = replace(state, failures=(*state.failures, *news))
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


def _settle(state: JobState, time: float) -> Outcome:
    """When every process of the generation is gone: the next one, or the end."""
    if not _all_gone(state):
        return _running(state, time)
    match state.phase:
        case JobPhase.RECOVERING:
            return _restart(state, time)
        case JobPhase.STOPPING if state.cancelled:
            return _end(state, JobPhase.STOPPED, state.reason, time)
        case JobPhase.STOPPING:
            return _end_failed(state, time)
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
    if not 0 < state.spec.max_restarts <= state.restart_count:
        return state.failure.reason
    return f"{state.failure.reason}; no restart left of {state.spec.max_restarts}"


def _tell(state: JobState, time: float) -> Outcome:
    """Announce the generation's first cause: once, and again only when a later word shows that it was another."""
    cause = first_cause(state.failures)
    if state.failure == cause:
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


def _end_failed(state: JobState, time: float) -> Outcome:
    told, commands = _tell(state, time)
    ended, more = _end(told, JobPhase.FAILED, _final_reason(told), time)
    return ended, (*commands, *more)


def _cancel(state: JobState, event: CancelRequested) -> Outcome:
    grace = 0.0 if event.force else state.spec.stop_grace
    by = f" by {event.by}" if event.by else ""
    if state.phase is JobPhase.STOPPING:
        return state, _stop(state, grace) if event.force else ()
    stopping = _enter(state, JobPhase.STOPPING, f"cancelled{by}", event.time, cancelled=True)
    settled, commands = _settle(stopping, event.time)
    return settled, (*(() if settled.phase.is_terminal else _stop(state, grace)), *commands)


def _pool_lost(state: JobState, event: PoolLost) -> Outcome:
    gone = tuple(r if r.phase.has_exited else replace(r, phase=RankPhase.FAILED) for r in state.ranks)
    if state.phase is JobPhase.STOPPING:  # it was to end, for a reason that stands
        return _settle(replace(state, ranks=gone), event.time)
    failure = Failure(kind=FailureKind.WORKER_LOST, rank=None, reason=event.reason, time=event.time)
    told = FailureDetected(
        time=event.time, restart_count=state.restart_count, failure=failure, consequences=state.failures
    )
    lost = replace(state, ranks=gone, failures=(*state.failures, failure), failure=failure)
    ended, commands = _end(lost, JobPhase.FAILED, event.reason, event.time)
    return ended, (Announce(job_id=state.job_id, event=told), *commands)


def _tick(state: JobState, event: Ticked) -> Outcome:
    if state.deadline is None or event.time < state.deadline:
        return state, ()
    if state.phase is JobPhase.LAUNCHING:
        return _fail(state, (silence_failure(state, event.time),), event.time)
    if state.failures:
        return _tell(state, event.time)
    return replace(state, deadline=None), ()


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

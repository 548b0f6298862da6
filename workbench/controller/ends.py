"""How ranks, generations and jobs end: which failure ends a generation, when the next begins, when all is over."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from workbench.commands import Announce, ForgetCopies, ReleaseSlots, StopRanks
from workbench.controller.parts import (
    Outcome,
    all_gone,
    awaits_slots,
    enter,
    go_back,
    rank_of,
    request_slots,
    running,
    stop,
    with_rank,
)
from workbench.events import (
    CancelRequested,
    FailureDetected,
    LaunchFailed,
    PoolLost,
    RankExited,
    RankRaised,
    RecoveryStarted,
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
)
from workbench.policy.recovery import Action, Decision, count_fault, decide, least_ranks
from workbench.state import THE_START, Failure, FailureKind, JobPhase, JobState, RankPhase

STALL_GRACE: Final = 0.5  # s: a rank that hangs in C++ never gets to a handler of SIGTERM
FEWER_AFTER: Final = 10.0  # s that an elastic job waits for all its slots
GIVE_UP_AFTER: Final = 600.0  # s that a job which ran waits for slots to come back


def rank_raised(state: JobState, event: RankRaised) -> Outcome:
    failure = raise_failure(state, event, rank_of(state, event.rank))
    return (state, ()) if failure is None else fail(state, (failure,), event.time)


def rank_exited(state: JobState, event: RankExited) -> Outcome:
    rank = rank_of(state, event.rank)
    if rank.phase.has_exited:
        return state, ()
    failure = exit_failure(state, event, rank)
    phase = exit_phase(state, event)
    exited = with_rank(
        state,
        event.rank,
        phase=phase,
        exit_code=event.exit_code,
        signal=event.signal,
        collective=event.collective,
        collective_seq=event.collective_seq,
    )
    return settle(exited, event.time) if failure is None else fail(exited, (failure,), event.time)


def launch_failed(state: JobState, event: LaunchFailed) -> Outcome:
    if not state.ranks:
        return state, ()
    gone = tuple(
        replace(r, phase=RankPhase.FAILED)
        if r.phase is RankPhase.INIT and r.worker == event.worker and (event.rank is None or event.rank == r.rank)
        else r
        for r in state.ranks
    )
    return fail(replace(state, ranks=gone), (launch_failure(event),), event.time)


def worker_lost(state: JobState, event: WorkerLost) -> Outcome:
    lost = [r for r in state.ranks if r.worker == event.worker and not r.phase.has_exited]
    if not lost:
        return state, ()
    names = {r.rank for r in lost}
    gone = tuple(replace(r, phase=RankPhase.FAILED) if r.rank in names else r for r in state.ranks)
    failures = tuple(loss_failure(event, rank) for rank in lost)
    return fail(replace(state, ranks=gone), failures, event.time)


def fail(state: JobState, failures: tuple[Failure, ...], time: float) -> Outcome:
    """Note failures; the first of a generation ends it."""
    news = tuple(f for f in failures if f not in state.failures)
    noted = replace(state, failures=(*state.failures, *news))
    if state.phase not in (JobPhase.LAUNCHING, JobPhase.HEALTHY):
        return settle(noted, time)
    cause = first_cause(noted.failures)
    phase = JobPhase.STOPPING if _decide(noted, cause).action is Action.STOP else JobPhase.RECOVERING
    stopping = enter(noted, phase, cause.reason, time, deadline=time + SETTLE, stall=None)
    settled, commands = settle(stopping, time)
    grace = min(STALL_GRACE, state.spec.stop_grace) if cause.stall else state.spec.stop_grace
    return settled, (*stop(stopping, grace), *commands)


def _decide(state: JobState, cause: Failure) -> Decision:
    return decide(replace(state, faults=count_fault(state, cause)), cause)


def settle(state: JobState, time: float) -> Outcome:
    """When every process of the generation is gone: the next one, or the end."""
    if not all_gone(state):
        return running(state, time)
    match state.phase:
        case JobPhase.RECOVERING if _has_finished(state):
            return _succeed(state, time)
        case JobPhase.RECOVERING:
            return _restart(state, time) if state.failures else _reform(state, time)
        case JobPhase.STOPPING if state.cancelled:
            return end(state, JobPhase.STOPPED, state.reason, time)
        case JobPhase.STOPPING:
            return end_failed(state, time)
        case JobPhase.HEALTHY | JobPhase.LAUNCHING:
            return _succeed(state, time)
    return state, ()


def _has_finished(state: JobState) -> bool:
    """It was to be started anew on other ranks, and was done before that."""
    return not state.failures and bool(state.ranks) and all(r.phase is RankPhase.SUCCEEDED for r in state.ranks)


def _succeed(state: JobState, time: float) -> Outcome:
    reason = f"all {len(state.ranks)} ranks finished" if len(state.ranks) > 1 else "the rank finished"
    return end(state, JobPhase.SUCCEEDED, reason, time)


def tell(state: JobState, time: float) -> Outcome:
    """Announce the generation's first cause: once, and again only when a later word shows that it was another."""
    cause = first_cause(state.failures, state.ranks)
    if state.failure == cause:
        return replace(state, deadline=None), ()
    rest = tuple(f for f in state.failures if f is not cause)
    told = FailureDetected(time=time, restart_count=state.restart_count, failure=cause, consequences=rest)
    return (
        replace(state, failure=cause, reason=cause.reason, deadline=None),
        (Announce(job_id=state.job_id, event=told),),
    )


def _restart(state: JobState, time: float) -> Outcome:
    """After a failure. What came to light meanwhile may have made it the end."""
    told, commands = tell(state, time)
    assert told.failure is not None
    counted = replace(told, faults=count_fault(told, told.failure))
    decision = decide(counted, told.failure)
    if decision.action is Action.STOP:
        ended, more = end(told, JobPhase.FAILED, _final_reason(told, decision), time)
        return ended, (*commands, *more)
    fresh = replace(counted, restart_count=told.restart_count + 1, fruitless=told.fruitless + 1)
    if decision.action is Action.FALL_BACK:
        first = state.spec.resume_from or THE_START
        fresh = go_back(fresh, first if decision.resume == THE_START else decision.resume, decision.step)
    reason = f"{fresh.restarts}: {told.failure.reason}{_also(decision)}"
    begun, more = begin_again(fresh, reason, time)
    older = (ForgetCopies(job_id=state.job_id),) if decision.action is Action.FALL_BACK else ()
    return begun, (*commands, *stop(state, 0.0), *older, *more)


def _also(decision: Decision) -> str:
    return f"; {decision.reason}" if decision.reason else ""


def _reform(state: JobState, time: float) -> Outcome:
    """Not for a failure, but to run on other ranks."""
    fresh = replace(state, restart_count=state.restart_count + 1, failure=None)
    begun, commands = begin_again(fresh, state.reason, time)
    return begun, (*stop(state, 0.0), *commands)


def begin_again(state: JobState, reason: str, time: float) -> Outcome:
    """The next generation, `state.restart_count`, once there are slots for it."""
    deadline = time + (FEWER_AFTER if least_ranks(state) else GIVE_UP_AFTER)
    fresh = enter(
        state,
        JobPhase.RECOVERING,
        reason,
        time,
        ranks=(),
        failures=(),
        master=None,
        stall=None,
        reform="",
        reform_is_asked=False,
        deadline=deadline,
    )
    started = RecoveryStarted(time=time, restart_count=fresh.restart_count, reason=reason)
    return fresh, (Announce(job_id=state.job_id, event=started), request_slots(fresh))


def end(state: JobState, phase: JobPhase, reason: str, time: float) -> Outcome:
    ended = enter(state, phase, reason, time, ended_at=time, stall=None, reform="", reform_is_asked=False)
    # The store, and whatever the ranks left in their process groups, goes as well.
    return ended, (*stop(state, 0.0), ReleaseSlots(job_id=state.job_id))


def end_failed(state: JobState, time: float) -> Outcome:
    told, commands = tell(state, time)
    assert told.failure is not None
    ended, more = end(told, JobPhase.FAILED, _final_reason(told, _decide(told, told.failure)), time)
    return ended, (*commands, *more)


def _final_reason(state: JobState, decision: Decision) -> str:
    assert state.failure is not None
    is_known = decision.action is not Action.STOP or state.failure.kind is FailureKind.LAUNCH
    return state.failure.reason if is_known else f"{state.failure.reason}{_also(decision)}"


def cancel(state: JobState, event: CancelRequested) -> Outcome:
    grace = 0.0 if event.force else state.spec.stop_grace
    by = f" by {event.by}" if event.by else ""
    if state.phase is JobPhase.STOPPING:
        return state, stop(state, grace) if event.force else ()
    stopping = enter(state, JobPhase.STOPPING, f"cancelled{by}", event.time, cancelled=True)
    settled, commands = settle(stopping, event.time)
    return settled, (*(() if settled.phase.is_terminal else stop(state, grace)), *commands)


def pool_lost(state: JobState, event: PoolLost) -> Outcome:
    gone = tuple(r if r.phase.has_exited else replace(r, phase=RankPhase.FAILED) for r in state.ranks)
    left = replace(state, ranks=gone)
    if state.phase is JobPhase.STOPPING:  # it was to end, for a reason that stands
        return settle(left, event.time)
    when = event.time if event.since is None else event.since
    failure = Failure(kind=FailureKind.WORKER_LOST, rank=None, reason=event.reason, time=when)
    if event.comes_back:
        return _outlive(left, failure, event.time)
    told = FailureDetected(
        time=event.time, restart_count=state.restart_count, failure=failure, consequences=state.failures
    )
    lost = replace(left, failures=(*state.failures, failure), failure=failure)
    ended, commands = end(lost, JobPhase.FAILED, event.reason, event.time)
    return ended, (Announce(job_id=state.job_id, event=told), *commands)


def _outlive(state: JobState, failure: Failure, time: float) -> Outcome:
    """The pool is back, without a rank. What waited for slots waits again, what ran has failed like any other."""
    if awaits_slots(state):
        return state, (replace(request_slots(state), is_patient=True),)  # its workers are yet to come back
    lost, commands = settle(state, time) if state.phase is JobPhase.RECOVERING else fail(state, (failure,), time)
    return lost, tuple(c for c in commands if not isinstance(c, StopRanks))  # nobody is there to hear of it

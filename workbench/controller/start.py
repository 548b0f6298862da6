"""From the wish for a job, or for another generation of it, to ranks that run."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from workbench.commands import StartRanks, StartStore
from workbench.controller.ends import FEWER_AFTER, GIVE_UP_AFTER, end, end_failed
from workbench.controller.parts import (
    Outcome,
    awaits_slots,
    enter,
    ranks_text,
    request_slots,
    running,
    with_rank,
    workers,
)
from workbench.events import (
    LaunchRefused,
    LaunchRequested,
    RankStarted,
    SlotsAwaited,
    SlotsGranted,
    StoreAwaited,
    StoreStarted,
)
from workbench.policy.recovery import least_ranks
from workbench.state import Failure, FailureKind, JobPhase, JobState, RankPhase, RankState

PORT_PATIENCE: Final = 60.0  # s: who restarts had its port before, and may have it again; at first it is a mistake


def launch(event: LaunchRequested) -> Outcome:
    state = JobState(
        job_id=event.job_id,
        spec=event.spec,
        reason="waiting for slots",
        submitted_at=event.time,
        phase_since=event.time,
        resume=event.spec.resume_from,
    )
    deadline = event.time + FEWER_AFTER if least_ranks(state) else None
    return replace(state, deadline=deadline), (request_slots(state),)


def await_slots(state: JobState, event: SlotsAwaited) -> Outcome:
    return (replace(state, reason=event.reason), ()) if awaits_slots(state) else (state, ())


def grant(state: JobState, event: SlotsGranted) -> Outcome:
    if not awaits_slots(state):
        return state, ()
    first = event.placements[0]
    ranks = tuple(RankState(rank=p.rank, worker=p.worker) for p in event.placements)
    launched = enter(
        state,
        JobPhase.LAUNCHING,
        f"starting {ranks_text(len(ranks))}",
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
        patience=min(PORT_PATIENCE, state.spec.startup_timeout / 2) if state.restart_count else 0.0,
    )
    return launched, (start,)


def refuse(state: JobState, event: LaunchRefused) -> Outcome:
    if not awaits_slots(state):
        return state, ()
    return without_slots(state, event.reason, event.time)


def without_slots(state: JobState, reason: str, time: float) -> Outcome:
    """The end of a job that gets none."""
    if state.failure is not None:  # it ran before, and what ended it then is still the first cause
        return end(state, JobPhase.FAILED, f"{state.failure.reason}; it cannot restart: {reason}", time)
    failure = Failure(kind=FailureKind.LAUNCH, rank=None, reason=reason, time=time)
    return end_failed(replace(state, failures=(failure,)), time)


def waited_for_slots(state: JobState, time: float) -> Outcome:
    """A deadline has come while the job waits: first for all of its slots, then for any."""
    if least_ranks(state) and time < state.phase_since + GIVE_UP_AFTER:
        later = state.phase_since + GIVE_UP_AFTER if state.phase is JobPhase.RECOVERING else None
        return replace(state, deadline=later), (request_slots(state, fewer=True),)
    if state.phase is JobPhase.RECOVERING:
        why = state.reason.removeprefix("waiting: ")
        return without_slots(state, f"no slots came back within {GIVE_UP_AFTER:g} s: {why}", time)
    return replace(state, deadline=None), ()


def store_awaited(state: JobState, event: StoreAwaited) -> Outcome:
    if state.phase is not JobPhase.LAUNCHING or state.master is not None:
        return state, ()
    return replace(state, reason=f"starting {ranks_text(len(state.ranks))}: {event.reason}"), ()


def store_started(state: JobState, event: StoreStarted) -> Outcome:
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
            resume=state.resume,
        )
        for worker in workers(state)
    )
    return replace(state, master=master), commands


def rank_started(state: JobState, event: RankStarted) -> Outcome:
    started = with_rank(state, event.rank, phase=RankPhase.HEALTHY, pid=event.pid, log_path=event.log_path)
    return running(started, event.time)

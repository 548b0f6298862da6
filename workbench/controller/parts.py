"""What all handlers are made of: entering a phase, a rank's new state, the commands to every worker."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from workbench.commands import Announce, Command, RequestCheckpoint, RequestSlots, StopRanks
from workbench.errors import InvalidTransitionError
from workbench.events import RecoveryFinished
from workbench.policy.recovery import avoided, least_ranks
from workbench.spec import EntrypointKind
from workbench.state import JobPhase, JobState, RankPhase, RankState

Outcome = tuple[JobState, tuple[Command, ...]]


def enter(state: JobState, phase: JobPhase, reason: str, time: float, **changes: Any) -> JobState:
    """The state in another phase; the deadline of the old phase goes with it."""
    return replace(state, **{"phase": phase, "reason": reason, "phase_since": time, "deadline": None} | changes)


def awaits_slots(state: JobState) -> bool:
    """Whether slots were asked for; while an old generation is still on its way out they were not."""
    return state.phase is JobPhase.INIT or (state.phase is JobPhase.RECOVERING and not state.ranks)


def request_slots(state: JobState, *, fewer: bool = False) -> RequestSlots:
    """What the job wants now; `fewer`: an elastic one is content with its least."""
    return RequestSlots(
        job_id=state.job_id,
        ranks=state.ranks_wanted,
        at_least=least_ranks(state) if fewer else 0,
        avoid=avoided(state),
        is_patient=state.restart_count > 0,
    )


def running(state: JobState, time: float) -> Outcome:
    """A generation of which something is alive: HEALTHY once every rank has started."""
    if state.phase is JobPhase.HEALTHY:
        return replace(state, reason=running_text(state)), ()
    if state.phase is not JobPhase.LAUNCHING or any(r.phase is RankPhase.INIT for r in state.ranks):
        return state, ()
    healthy = enter(state, JobPhase.HEALTHY, running_text(state), time)
    if state.restart_count == 0:
        return healthy, ()
    finished = RecoveryFinished(time=time, restart_count=state.restart_count)
    return healthy, (Announce(job_id=state.job_id, event=finished),)


def running_text(state: JobState) -> str:
    """The reason of a HEALTHY job."""
    if state.stall is not None:
        return f"{'kept waiting' if state.stall.patience else 'stalled'}: {state.stall.reason}"
    alive = sum(not r.phase.has_exited for r in state.ranks)
    ready = "ready for cells" if state.spec.kind is EntrypointKind.INTERACTIVE else "running"
    finished = f", {len(state.ranks) - alive} finished" if alive < len(state.ranks) else ""
    restarts = f", {state.restarts}" if state.restarts else ""
    saving = f"; {state.reform} after its next checkpoint" if state.reform else ""
    return f"{alive} of {ranks_text(len(state.ranks))} {ready}{finished}{restarts}{saving}"


def ranks_text(count: int) -> str:
    return f"{count} {'rank' if count == 1 else 'ranks'}"


def go_back(state: JobState, path: str, step: int) -> JobState:
    """To go on from the checkpoint of `step` at `path` (THE_START: from none): what came after it is left behind."""
    kept = tuple(known for known in state.checkpoints if known.step <= step)
    return replace(state, resume=path, resumed_step=step, checkpoints=kept)


def workers(state: JobState) -> tuple[str, ...]:
    """The workers of the generation, each once, in rank order."""
    return tuple(dict.fromkeys(p.worker for p in state.placements))


def stop(state: JobState, grace: float) -> tuple[Command, ...]:
    return tuple(
        StopRanks(job_id=state.job_id, restart_count=state.restart_count, worker=worker, grace=grace)
        for worker in workers(state)
    )


def request_checkpoint(state: JobState) -> tuple[Command, ...]:
    return tuple(
        RequestCheckpoint(job_id=state.job_id, restart_count=state.restart_count, worker=worker)
        for worker in workers(state)
    )


def rank_of(state: JobState, rank: int) -> RankState:
    if not 0 <= rank < len(state.ranks):
        raise InvalidTransitionError(f"{state.job_id} has no rank {rank}", [state])
    return state.ranks[rank]


def with_rank(state: JobState, rank: int, **changes: Any) -> JobState:
    """The state with one rank changed; a rank that has exited never changes."""
    old = rank_of(state, rank)
    if old.phase.has_exited:
        return state
    return replace(state, ranks=(*state.ranks[:rank], replace(old, **changes), *state.ranks[rank + 1 :]))


def all_gone(state: JobState) -> bool:
    """Whether no process of the generation is left. Before the store is up, no rank has been asked for."""
    is_stopping = state.phase in (JobPhase.RECOVERING, JobPhase.STOPPING)
    return all(
        r.phase.has_exited or (is_stopping and state.master is None and r.phase is RankPhase.INIT) for r in state.ranks
    )

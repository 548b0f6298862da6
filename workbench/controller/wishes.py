"""What people and the job itself wish for while it runs, or after it has ended; and what deadlines bring."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from workbench.controller.ends import begin_again, fail, tell
from workbench.controller.parts import (
    Outcome,
    awaits_slots,
    enter,
    go_back,
    ranks_text,
    request_checkpoint,
    request_slots,
    running_text,
    stop,
)
from workbench.controller.start import waited_for_slots
from workbench.events import (
    CheckpointRefused,
    CheckpointSaved,
    GradientMismatched,
    NonFiniteFound,
    ResizeRequested,
    ResumeRequested,
    RunResumed,
    SlotsReturned,
    StallDetected,
    StallEnded,
    Ticked,
)
from workbench.policy.failure import SETTLE, divergence_failure, mismatch_failure, silence_failure, stall_failure
from workbench.policy.recovery import count_corruption
from workbench.spec import EntrypointKind, JobSpec, NanPolicy
from workbench.state import THE_START, Checkpoint, CheckpointTier, JobPhase, JobState

KEPT: Final = 8  # checkpoints that the state knows of, unless the spec has more of the newest kept
SAVE_WITHIN: Final = 30.0  # s that a resize waits for a checkpoint
NONE_YET: Final = 5.0  # s where the job has never saved one: it may be a program that does not


# --- an ended job goes on ---------------------------------------------------------------------------------------------


def resume(state: JobState, event: ResumeRequested) -> Outcome:
    """A job that has ended goes on; one that runs does so already, so that a second click does nothing."""
    if not state.phase.is_terminal:
        return state, ()
    by = f" by {event.by}" if event.by else ""
    # Where none is known there may be one on disk all the same; the ranks say later where they went on from.
    newest = " from the newest checkpoint" if state.checkpoints or state.spec.resume_from else ""
    step = newest if event.step is None else f" from step {event.step}"
    where = " from the start" if event.path == THE_START else step
    on = "" if event.ranks is None else f" on {ranks_text(event.ranks)}"
    chosen = replace(state, resume="") if event.step is None else go_back(state, event.path, event.step)
    begun_from = "" if state.checkpoints or event.step is not None else state.spec.resume_from
    fresh = replace(
        chosen,
        restart_count=state.restart_count + 1,
        resume=event.path or begun_from,
        ranks_wanted=state.ranks_wanted if event.ranks is None else event.ranks,
        fruitless=0,
        furthest=0,
        faults=(),
        failure=None,
        cancelled=False,
        ended_at=None,
        placements=(),
    )
    return begin_again(fresh, f"resumed{by}{where}{on}", event.time)


# --- other ranks ------------------------------------------------------------------------------------------------------


def resize(state: JobState, event: ResizeRequested) -> Outcome:
    by = f" by {event.by}" if event.by else ""
    wanted = replace(state, ranks_wanted=event.ranks)
    if awaits_slots(state):
        return wanted, (request_slots(wanted),)
    if state.phase is not JobPhase.HEALTHY:
        return wanted, ()  # the next generation gets them
    return _await_checkpoint(wanted, f"resized to {ranks_text(event.ranks)}{by}", event.time, is_asked=True)


def grow(state: JobState, event: SlotsReturned) -> Outcome:
    """An elastic job that had to go on with fewer ranks; only from a checkpoint, as nothing forces it."""
    if state.phase is not JobPhase.HEALTHY or state.reform or event.ranks <= len(state.ranks):
        return state, ()
    return _await_checkpoint(state, f"grows to {ranks_text(event.ranks)}", event.time, is_asked=False)


def _await_checkpoint(state: JobState, reason: str, time: float, *, is_asked: bool) -> Outcome:
    asking = replace(state, reform=reason, reform_is_asked=is_asked, deadline=time + _patience(state))
    return replace(asking, reason=running_text(asking)), request_checkpoint(state)


def _patience(state: JobState) -> float:
    return SAVE_WITHIN if state.checkpoints or state.resumed_step else NONE_YET


def _reform(state: JobState, time: float) -> Outcome:
    reforming = enter(state, JobPhase.RECOVERING, state.reform, time)
    return reforming, stop(state, state.spec.stop_grace)


# --- what the ranks say -----------------------------------------------------------------------------------------------


def checkpoint_saved(state: JobState, event: CheckpointSaved) -> Outcome:
    """One on disk."""
    saved = event.checkpoint
    if saved.tier is not CheckpointTier.DISK:
        return state, ()
    others = [known for known in state.checkpoints if known.step < saved.step]  # a branch left behind goes
    kept = _thinned_out([*others, saved], state.spec)
    known = _got_to(replace(state, checkpoints=kept, resume=""), saved.step)
    if state.phase is not JobPhase.HEALTHY:
        return known, ()
    if state.reform:
        return _reform(known, event.time)
    return replace(known, reason=running_text(known)), ()


def _thinned_out(known: list[Checkpoint], spec: JobSpec) -> tuple[Checkpoint, ...]:
    """Those that are still there, oldest first: the rule by which ranks remove them is `catalogue.superfluous`."""
    newest, every = max(1, spec.checkpoint_keep), spec.checkpoint_keep_every
    sound = next((one for one in reversed(known) if one.agreed is not False), None)
    older = [one for one in known[:-newest] if every and one.step % every == 0]
    kept = [*older, *known[-newest:]][-max(KEPT, newest) :]
    return tuple(kept) if sound is None or sound in kept else (sound, *kept)


def _got_to(state: JobState, step: int) -> JobState:
    """Further than ever is progress: the restarts that led there were not in vain."""
    return replace(state, furthest=step, fruitless=0) if step > state.furthest else state


def checkpoint_refused(state: JobState, event: CheckpointRefused) -> Outcome:
    """It is not what was saved: nobody is to go back to it."""
    return replace(state, checkpoints=tuple(c for c in state.checkpoints if c.path != event.checkpoint.path)), ()


def run_resumed(state: JobState, event: RunResumed) -> Outcome:
    """What is newer was passed over, and is left behind."""
    resumed = _got_to(go_back(state, state.resume, event.step), event.step)
    return (replace(resumed, reason=running_text(resumed)) if state.phase is JobPhase.HEALTHY else resumed), ()


def stalled(state: JobState, event: StallDetected) -> Outcome:
    """With restarts, or a limit that somebody set, it is a failure, once patience is over; else it is only told."""
    if state.phase is not JobPhase.HEALTHY:
        return state, ()
    spec = state.spec
    is_left_alone = spec.kind is EntrypointKind.INTERACTIVE or not (spec.max_restarts or spec.progress_timeout)
    if is_left_alone or event.stall.patience > 0.0:
        told = replace(state, stall=event.stall)
        return replace(told, reason=running_text(told)), ()
    return fail(state, (stall_failure(state, event),), event.time)


def stall_ended(state: JobState, event: StallEnded) -> Outcome:
    if state.stall is None:
        return state, ()
    told = replace(state, stall=None)
    return replace(told, reason=running_text(told)), ()


def non_finite(state: JobState, event: NonFiniteFound) -> Outcome:
    if state.spec.on_nan is NanPolicy.WARN or state.phase is not JobPhase.HEALTHY:
        return state, ()
    return fail(state, (divergence_failure(state, event),), event.time)


def mismatched(state: JobState, event: GradientMismatched) -> Outcome:
    """Replicas that differ. What looks like a fault of a device counts against its slot, also when training goes on.

    The ranks that are to stop raise as soon as they have said so: one of them may be heard of before this.
    """
    going_on = event.response in ("warn", "repair") or state.spec.kind is EntrypointKind.INTERACTIVE
    if going_on:
        return replace(state, faults=count_corruption(state, event.mismatch)), ()
    is_ending = state.phase in (JobPhase.RECOVERING, JobPhase.STOPPING)
    if not state.ranks or (is_ending and event.time > state.phase_since + SETTLE):
        return state, ()
    return fail(state, (mismatch_failure(state, event),), event.time)


# --- deadlines --------------------------------------------------------------------------------------------------------


def tick(state: JobState, event: Ticked) -> Outcome:
    if state.deadline is None or event.time < state.deadline:
        return state, ()
    if awaits_slots(state):
        return waited_for_slots(state, event.time)
    if state.phase is JobPhase.LAUNCHING:
        return fail(state, (silence_failure(state, event.time),), event.time)
    if state.reform:
        return _no_checkpoint_came(state, event.time)
    if state.failures:
        return tell(state, event.time)
    return replace(state, deadline=None), ()


def _no_checkpoint_came(state: JobState, time: float) -> Outcome:
    if state.reform_is_asked:
        reason = f"{state.reform}; no checkpoint was saved within {_patience(state):g} s"
        return _reform(replace(state, reform=reason), time)
    rest = replace(state, reform="", deadline=None)
    return replace(rest, reason=running_text(rest)), ()

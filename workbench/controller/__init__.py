"""The job state machine: `transition(state, event) -> (state, commands)`, the one door through which a job changes.

Pure: no clock, file, process or random number; time arrives in the event. Folding `transition` over a job's recorded
events gives its live state again, exactly. Rules kept here:

- an event of another generation (`restart_count`) changes nothing;
- no generation starts before every process of the old one has exited;
- a terminal job has no rank left, and changes only when somebody resumes it;
- which end of a rank is a failure, and which failure is the first cause, is `policy.failure`; what is done about it is
  `policy.recovery`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from workbench.controller import ends, start, wishes
from workbench.controller.parts import Outcome
from workbench.errors import InvalidTransitionError
from workbench.events import (
    CancelRequested,
    CheckpointRefused,
    CheckpointSaved,
    Event,
    GradientMismatched,
    LaunchFailed,
    LaunchRefused,
    LaunchRequested,
    NonFiniteFound,
    PoolLost,
    RankExited,
    RankRaised,
    RankStarted,
    ResizeRequested,
    ResumeRequested,
    RunResumed,
    SlotsAwaited,
    SlotsGranted,
    SlotsReturned,
    StallDetected,
    StallEnded,
    StoreAwaited,
    StoreStarted,
    Ticked,
    WorkerLost,
)
from workbench.state import JobState


def transition(state: JobState | None, event: Event) -> Outcome:
    """Apply one event. `state` is None before the job's `LaunchRequested` and never after.

    Raises `InvalidTransitionError` when the first event is not `LaunchRequested`, when a second one comes, and when a
    current event is of a rank that the generation does not have.
    """
    if isinstance(event, LaunchRequested) is not (state is None):
        raise InvalidTransitionError(f"{type(event).__name__} cannot come here", [state, event])
    if isinstance(event, LaunchRequested):
        return start.launch(event)
    assert state is not None
    handler = HANDLERS.get(type(event))
    if handler is None or _is_stale(state, event):
        return state, ()
    if state.phase.is_terminal and not isinstance(event, ResumeRequested):
        return state, ()
    return handler(state, event)


def _is_stale(state: JobState, event: Event) -> bool:
    return getattr(event, "restart_count", state.restart_count) != state.restart_count


HANDLERS: Final[Mapping[type, Callable[[JobState, Any], Outcome]]] = {
    SlotsAwaited: start.await_slots,
    SlotsGranted: start.grant,
    LaunchRefused: start.refuse,
    StoreStarted: start.store_started,
    StoreAwaited: start.store_awaited,
    LaunchFailed: ends.launch_failed,
    RankStarted: start.rank_started,
    RankRaised: ends.rank_raised,
    RankExited: ends.rank_exited,
    WorkerLost: ends.worker_lost,
    PoolLost: ends.pool_lost,
    CancelRequested: ends.cancel,
    ResumeRequested: wishes.resume,
    ResizeRequested: wishes.resize,
    SlotsReturned: wishes.grow,
    CheckpointSaved: wishes.checkpoint_saved,
    CheckpointRefused: wishes.checkpoint_refused,
    RunResumed: wishes.run_resumed,
    StallDetected: wishes.stalled,
    StallEnded: wishes.stall_ended,
    NonFiniteFound: wishes.non_finite,
    GradientMismatched: wishes.mismatched,
    Ticked: wishes.tick,
}

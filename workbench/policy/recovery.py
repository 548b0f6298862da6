"""What becomes of a job whose generation has failed: a restart, and from where, or the end.

Pure, and a table: the first rule that applies decides, and says why in words that a person reads. A learning rate, a
batch size or anything else that changes what is computed is never touched.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

import msgspec

from workbench.policy.consistency import is_corruption
from workbench.spec import MismatchPolicy, NanPolicy
from workbench.state import THE_START, Checkpoint, Failure, FailureKind, JobState, Mismatch, SlotFaults

UNLUCKY: Final = 2  # a slot whose rank was the first cause so often is avoided
STUCK: Final = 2  # so many restarts in a row that got no further: perhaps it is the checkpoint
OF_A_SLOT: Final = (FailureKind.SIGNAL, FailureKind.TIMEOUT, FailureKind.WORKER_LOST)  # what a bad device looks like


class Action(enum.Enum):
    """What is done about a failure."""

    STOP = "stop"
    FALL_BACK = "fall back"  # restart from an older checkpoint
    EXCLUDE = "exclude"  # restart elsewhere
    RESTART = "restart"


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """`resume`: the path of the checkpoint to go back to, or THE_START; empty: nothing is gone back to.

    `step` is that checkpoint's. `reason` adds to the failure's own.
    """

    action: Action
    reason: str = ""
    resume: str = ""
    step: int = 0


class Rule(msgspec.Struct, frozen=True):
    applies: Callable[[JobState, Failure], bool]
    action: Action
    reason: str


def decide(state: JobState, cause: Failure) -> Decision:
    """`state` is that of the generation which failed of `cause`, its faults counted (`count_fault`)."""
    rule = next(rule for rule in RULES if rule.applies(state, cause))
    if rule.action is not Action.FALL_BACK:
        return Decision(action=rule.action, reason=_fill(rule.reason, state, cause, None))
    older = _older(state, cause)
    reason = _fill(rule.reason, state, cause, older)
    if older is None:
        return Decision(action=rule.action, reason=reason, resume=THE_START)
    return Decision(action=rule.action, reason=reason, resume=older.path, step=older.step)


def count_fault(state: JobState, cause: Failure) -> tuple[SlotFaults, ...]:
    """The job's slots and how often their ranks were to blame, with this failure."""
    if cause.mismatch is not None:
        return count_corruption(state, cause.mismatch)
    return _counted(state, cause.rank) if cause.kind in OF_A_SLOT else state.faults


def count_corruption(state: JobState, mismatch: Mismatch) -> tuple[SlotFaults, ...]:
    """The same, with a difference of replicas that looks like a device's fault."""
    return _counted(state, mismatch.ranks[0]) if is_corruption(mismatch) else state.faults


def _counted(state: JobState, rank: int | None) -> tuple[SlotFaults, ...]:
    place = next((p for p in state.placements if p.rank == rank), None)
    if place is None:
        return state.faults
    known = {(f.worker, f.slot): f.count for f in state.faults}
    known[place.worker, place.slot] = known.get((place.worker, place.slot), 0) + 1
    return tuple(SlotFaults(worker, slot, count) for (worker, slot), count in known.items())


def avoided(state: JobState) -> tuple[tuple[str, int], ...]:
    """Slots that the job is not to get again while there are others."""
    return tuple((fault.worker, fault.slot) for fault in state.faults if fault.count >= UNLUCKY)


def least_ranks(state: JobState) -> int:
    """How few ranks an elastic job goes on with; 0: it is not elastic."""
    return 0 if state.ranks_wanted else state.spec.least_ranks


def _is_hopeless(state: JobState, cause: Failure) -> bool:
    return any(f.kind is FailureKind.LAUNCH for f in (*state.failures, cause))


def _has_diverged(state: JobState, cause: Failure) -> bool:
    return cause.kind is FailureKind.DIVERGED


def _differs(state: JobState, cause: Failure) -> bool:
    return cause.kind is FailureKind.MISMATCH


def _is_spent(state: JobState, cause: Failure) -> bool:
    return state.fruitless >= state.spec.max_restarts


def _is_stuck(state: JobState, cause: Failure) -> bool:
    return state.fruitless >= STUCK and state.resumed_step > 0 and _older(state, cause) is not None


def _is_unlucky(state: JobState, cause: Failure) -> bool:
    place = next(((p.worker, p.slot) for p in state.placements if p.rank == cause.rank), None)
    return place in avoided(state)


def _older(state: JobState, cause: Failure) -> Checkpoint | None:
    """The newest checkpoint from before the trouble: before the NaN, and before the one that leads nowhere."""
    if _differs(state, cause):
        return _agreed(state, cause)
    limits = [cause.step] if _has_diverged(state, cause) and cause.step is not None else []
    if not limits or state.fruitless >= STUCK:
        limits.append(state.resumed_step)
    limit = min(limits)
    return max((c for c in state.checkpoints if c.step < limit), key=lambda c: c.step, default=None)


def _agreed(state: JobState, cause: Failure) -> Checkpoint | None:
    """The newest checkpoint in which all ranks agreed; where none was compared, the newest from before they differed.

    One of the step at which it was seen was compared as it was saved, before that.
    """
    limit = state.resumed_step - 1 if state.fruitless >= STUCK else cause.step or 0
    agreed = [c for c in state.checkpoints if c.step <= limit and c.agreed]
    unknown = [c for c in state.checkpoints if c.step < limit and c.agreed is None]
    return max(agreed or unknown, key=lambda c: c.step, default=None)


def _fill(reason: str, state: JobState, cause: Failure, older: Checkpoint | None) -> str:
    place = next((f"slot {p.slot} of {p.worker}" for p in state.placements if p.rank == cause.rank), "")
    step = f"step {older.step}" if older else "the start"
    return reason.format(limit=state.spec.max_restarts, step=step, place=place, count=state.fruitless)


RULES: Final = (
    Rule(_is_hopeless, Action.STOP, "it would fail again"),
    Rule(
        lambda state, cause: _has_diverged(state, cause) and state.spec.on_nan is not NanPolicy.ROLLBACK,
        Action.STOP,
        "the job was to stop then",
    ),
    Rule(
        lambda state, cause: _differs(state, cause) and state.spec.on_mismatch is not MismatchPolicy.ROLLBACK,
        Action.STOP,
        "the job was to stop then",
    ),
    Rule(lambda state, cause: state.spec.max_restarts == 0, Action.STOP, ""),
    Rule(_is_spent, Action.STOP, "no restart left of {limit}"),
    Rule(_has_diverged, Action.FALL_BACK, "back to {step}, before it"),
    Rule(_differs, Action.FALL_BACK, "back to {step}, where all ranks agreed"),
    Rule(_is_stuck, Action.FALL_BACK, "back to {step}, as {count} restarts got no further"),
    Rule(_is_unlucky, Action.EXCLUDE, "{place} failed twice and is avoided"),
    Rule(lambda state, cause: True, Action.RESTART, ""),
)

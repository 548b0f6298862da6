"""Which events are marked on a timeline, and in which words; a table, so that what is told can be read at one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from workbench.events import (
    CancelRequested,
    CheckpointFailed,
    CheckpointRefused,
    CheckpointSaved,
    Event,
    FailureDetected,
    FaultHappened,
    FaultInjected,
    GradientMismatched,
    GradientsStoodOut,
    NonFiniteFound,
    PhaseChanged,
    RecoveryStarted,
    ReplicasRepaired,
    ResizeRequested,
    ResumeRequested,
    SlotsReturned,
    StallDetected,
    StallEnded,
    StepsBegan,
    StragglerDetected,
    StragglerGone,
)
from workbench.state import THE_START, Checkpoint
from workbench.views.found import finding_of
from workbench.views.spans import Mark, MarkKind, runs_of
from workbench.views.wording import plural, seconds, size, span


class _Told(NamedTuple):
    kind: MarkKind
    title: str
    ranks: tuple[int, ...] = ()
    step: int | None = None


def mark_of(event: Event, restart_count: int) -> Mark | None:
    """The event as a mark, None when it is none; `restart_count` of the generation that was current then."""
    tell = _TELL.get(type(event))
    told = tell(event) if tell is not None else None
    if told is None:
        return None
    return Mark(
        kind=told.kind,
        time=event.time,
        title=told.title,
        restart_count=getattr(event, "restart_count", restart_count),
        ranks=runs_of(told.ranks),
        step=told.step,
    )


def _stalled(event: StallDetected) -> _Told:
    stall = event.stall
    more = f"; it has not begun, and may take {span(stall.patience)} more" if stall.patience else ""
    return _Told(MarkKind.STALLED, f"{stall.reason}{more}", stall.ranks, stall.step)


def _failed(event: FailureDetected) -> _Told:
    more = f"; {plural(len(event.consequences), 'error')} followed from it" if event.consequences else ""
    cause = event.failure
    ranks = (cause.rank,) if cause.rank is not None else ()
    return _Told(MarkKind.FAILED, cause.reason + more, ranks, cause.step)


def _recovered(event: StepsBegan) -> _Told | None:
    if event.restart_count == 0:
        return None
    return _Told(MarkKind.RECOVERED, f"all ranks step again, from step {event.step:,}", step=event.step)


def _happened(event: FaultHappened) -> _Told:
    what = f"{event.fault} {'could not be ' if event.problem else ''}done to rank {event.rank} on purpose"
    more = f": {event.problem or event.detail}" if event.problem or event.detail else ""
    return _Told(MarkKind.INJECTED, what + more, (event.rank,), event.step)


def _saved(event: CheckpointSaved) -> _Told:
    saved = event.checkpoint
    took = f", took {_brief(event.seconds)}" if event.seconds else ""
    stood = f", training stood still for {_brief(event.stalled)}" if event.stalled else ""
    return _Told(MarkKind.SAVED, f"{_checkpoint(saved)} saved{took}{stood}", step=saved.step)


def _brief(value: float) -> str:
    return seconds(value) if value < 1 else span(value)


def _save_failed(event: CheckpointFailed) -> _Told:
    who = () if event.rank is None else (event.rank,)
    return _Told(MarkKind.SAVE_FAILED, f"step {event.step:,} was not saved: {event.reason}", who, event.step)


def _refused(event: CheckpointRefused) -> _Told:
    bad = event.checkpoint
    return _Told(MarkKind.REFUSED, f"{_checkpoint(bad)} passed over: {bad.problem or 'it is damaged'}", step=bad.step)


def _checkpoint(checkpoint: Checkpoint) -> str:
    how_large = f"{size(checkpoint.size)}, " if checkpoint.size else ""
    return f"checkpoint of step {checkpoint.step:,} ({how_large}{checkpoint.tier.value})"


def _differed(event: GradientMismatched) -> _Told:
    return _Told(MarkKind.MISMATCH, finding_of(event).dated(), event.mismatch.ranks, event.step)


def _stood_out(event: GradientsStoodOut) -> _Told:
    """Who, by how much, and what is likely behind it; of two ranks both, and no score."""
    found = event.finding
    score = f" (robust z {event.score:+.3g})" if event.score else ""
    return _Told(MarkKind.STANDS_OUT, f"{found.dated()}{score}; likely cause: {found.cause}", event.ranks, event.step)


def _ranks(ranks: tuple[int, ...]) -> str:
    return plural(len(ranks), "rank") if len(ranks) != 1 else f"rank {ranks[0]}"


def _resume(event: ResumeRequested) -> _Told:
    step = "the newest checkpoint" if event.step is None else f"step {event.step:,}"
    where = "the start" if event.path == THE_START else step
    on = "" if event.ranks is None else f" on {plural(event.ranks, 'rank')}"
    return _Told(MarkKind.REQUESTED, f"resume from {where}{on}{_by(event.by)}", step=event.step)


def _resize(event: ResizeRequested) -> _Told:
    return _Told(MarkKind.REQUESTED, f"resize to {plural(event.ranks, 'rank')}{_by(event.by)}")


def _cancel(event: CancelRequested) -> _Told:
    return _Told(MarkKind.REQUESTED, f"{'cancel at once' if event.force else 'cancel'}{_by(event.by)}")


def _ended(event: PhaseChanged) -> _Told | None:
    return _Told(MarkKind.ENDED, f"{event.phase.value}: {event.reason}") if event.phase.is_terminal else None


def _by(who: str) -> str:
    return f", asked for by {who}" if who else ""


_TELL: Final[Mapping[type, Callable[[Any], _Told | None]]] = {
    FaultInjected: lambda e: _Told(MarkKind.REQUESTED, f"{e.fault} asked for on rank {e.rank}", (e.rank,)),
    FaultHappened: _happened,
    FailureDetected: _failed,
    StallDetected: _stalled,
    StallEnded: lambda e: _Told(MarkKind.STALL_ENDED, f"the job goes on by itself after {span(e.seconds)}"),
    RecoveryStarted: lambda e: _Told(MarkKind.DECIDED, e.reason),
    StepsBegan: _recovered,
    CheckpointSaved: _saved,
    CheckpointFailed: _save_failed,
    CheckpointRefused: _refused,
    StragglerDetected: lambda e: _Told(MarkKind.STRAGGLER, e.reason, (e.rank,)),
    StragglerGone: lambda e: _Told(MarkKind.STRAGGLER, f"rank {e.rank} is as fast as the others again", (e.rank,)),
    NonFiniteFound: lambda e: _Told(
        MarkKind.NON_FINITE, f"{e.what} of rank {e.rank} is not finite at step {e.step:,}", (e.rank,), e.step
    ),
    GradientMismatched: _differed,
    GradientsStoodOut: _stood_out,
    ReplicasRepaired: lambda e: _Told(
        MarkKind.REPAIRED, f"{_ranks(e.ranks)} given what rank {e.source} has, bit for bit", e.ranks, e.step
    ),
    ResumeRequested: _resume,
    ResizeRequested: _resize,
    SlotsReturned: lambda e: _Told(MarkKind.REQUESTED, f"there are slots for {plural(e.ranks, 'rank')} again"),
    CancelRequested: _cancel,
    PhaseChanged: _ended,
}

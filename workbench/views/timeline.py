"""A job's life folded from its record: attempts, what every rank did when, what happened, and what the time went into.

Add events as they come; `timeline` may be asked at any time. Two generations are kept open, since word of one may come
when the next has begun; older ones are frozen and folded, so that an update costs what is new and a record of any
length takes a bounded room. Nothing here is known but what was recorded: times are those of the events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from workbench.events import (
    CheckpointSaved,
    Event,
    FailureDetected,
    FaultHappened,
    FaultInjected,
    LaunchRequested,
    PhaseChanged,
    RankExited,
    RecoveryStarted,
    ResizeRequested,
    ResumeRequested,
    RunResumed,
    SlotsAwaited,
    SlotsGranted,
    StallDetected,
    StallEnded,
    StepsBegan,
)
from workbench.feed import Total
from workbench.state import Failure, JobPhase
from workbench.views.folding import Marks, folded_slabs, slabs_of
from workbench.views.generation import Generation, attempt_of
from workbench.views.goodput import Counted, Course, count, known_until
from workbench.views.lanes import spans_of
from workbench.views.marks import mark_of
from workbench.views.spans import Attempt, Goodput, Timeline

ATTEMPTS: Final = 200  # the newest that are told singly
COURSES: Final = 1000  # older ones of which their steps are still told apart
TRACEBACKS: Final = 3  # newest attempts whose causes keep traceback and stacks
OPEN: Final = 2


class _Closed(NamedTuple):
    attempt: Attempt
    course: Course


class TimelineBuilder:
    """See the module."""

    def __init__(self) -> None:
        self._open: list[Generation] = []
        self._closed: list[_Closed] = []
        self._earlier: list[Course] = []
        self._earlier_count = self._earlier_lost = 0
        self._spans, self._marks = folded_slabs(), Marks()
        self._submitted: float | None = None
        self._began: _Began | None = None
        self._idle = 0.0  # s between an end and a resume
        self._world = 0  # ranks that somebody asked for

    # --- events ---

    def add(self, events: Iterable[Event]) -> None:
        """Take in events, in the order of the record."""
        for event in events:
            kind = type(event)
            if not self._open and kind is not LaunchRequested:
                continue  # nothing can be told of a job whose beginning is not known
            if kind in _OF_THE_JOB:
                _OF_THE_JOB[kind](self, event)
            elif kind in _OF_A_GENERATION:
                self._tell(event)
            mark = mark_of(event, self._open[-1].count if self._open else 0)
            if mark is not None:
                self._marks.add(mark)

    def _tell(self, event: Any) -> None:
        generation = next((g for g in self._open if g.count == event.restart_count), None)
        if generation is not None:
            _OF_A_GENERATION[type(event)](generation, event)
            if isinstance(event, StepsBegan) and self._began is None:
                self._began = _Began(event.time, generation.granted or generation.start, self._idle)

    def _launch(self, event: LaunchRequested) -> None:
        self._submitted = event.time
        self._open.append(Generation(0, event.time, "", event.spec.world_size, is_first=True))

    def _again(self, event: RecoveryStarted) -> None:
        if not self._open or event.restart_count <= self._open[-1].count:
            return
        old = self._open[-1]
        if old.end is not None:
            self._idle += max(0.0, event.time - old.end)
        old.close(event.time)
        start = max(event.time, old.end or event.time)
        self._open.append(Generation(event.restart_count, start, event.reason, self._world or old.world))
        self._world = 0
        while len(self._open) > OPEN:
            self._close(self._open.pop(0))

    def _close(self, generation: Generation) -> None:
        self._spans.extend(slabs_of(spans_of(generation, generation.start)))
        self._closed.append(_Closed(attempt_of(generation), generation.course(generation.start)))
        if len(self._closed) > TRACEBACKS:
            attempt, course = self._closed[-TRACEBACKS - 1]
            self._closed[-TRACEBACKS - 1] = _Closed(replace(attempt, cause=_short(attempt.cause)), course)
        if len(self._closed) > ATTEMPTS:
            self._forget(self._closed.pop(0))

    def _forget(self, closed: _Closed) -> None:
        """Of an attempt that is too long ago, what counting steps needs is kept."""
        following = next((c.course.first for c in self._closed if c.course.first is not None), None)
        self._earlier_count += 1
        self._earlier_lost += _lost(closed.course.last, following) or 0
        self._earlier.append(closed.course)
        if len(self._earlier) > COURSES:
            self._earlier = [a if b is None else a.joined(b) for a, b in _pairs(self._earlier)]

    def _wish(self, event: ResumeRequested | ResizeRequested) -> None:
        self._world = event.ranks or 0

    def _await(self, event: SlotsAwaited) -> None:
        current = self._open[-1]
        if current.granted is None and current.awaited is None and current.end is None:
            current.awaited = event.time

    def _grant(self, event: SlotsGranted) -> None:
        current = self._open[-1]
        if current.end is None:
            current.granted, current.world = event.time, len(event.placements)

    def _inject(self, event: FaultInjected) -> None:
        self._open[-1].inject(event)

    def _phase(self, event: PhaseChanged) -> None:
        current = self._open[-1]
        if current.end is not None or event.restart_count < current.count:
            return
        match event.phase:
            case JobPhase.HEALTHY if current.started is None:
                current.started = event.time
            case JobPhase.RECOVERING | JobPhase.STOPPING:
                current.leave(event.time, event.reason, is_recovering=event.phase is JobPhase.RECOVERING)
            case phase if phase.is_terminal:
                current.finish(event.time, f"{phase.value}: {event.reason}")

    # --- what it comes to ---

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to tell."""
        return self._submitted is not None

    def timeline(self, totals: Sequence[Total], now: float) -> Timeline:
        """All up to `now`; `totals`: what ranks did, in order of time. Raises `ValueError` before the first event."""
        if self._submitted is None:
            raise ValueError("no event has been added yet")
        newest = self._open[-1]
        end = max(now, newest.start) if newest.end is None else newest.end
        kept = [*self._closed, *(_Closed(attempt_of(g), g.course(end)) for g in self._open)]
        courses = [dataclasses.replace(c, anchors=[]) for c in (*self._earlier, *(k.course for k in kept))]
        counted = count(courses, totals)
        attempts = _resolved([k.attempt for k in kept], courses[len(self._earlier) :])
        spans = [one for slab in self._spans.items for one in slab.spans]
        return Timeline(
            start=self._submitted,
            end=end,
            is_over=newest.is_over,
            attempts=attempts,
            earlier=self._earlier_count,
            spans=(*spans, *(one for g in self._open for one in spans_of(g, end))),
            marks=self._marks.all(),
            goodput=self._goodput(counted, totals, end, is_over=newest.is_over),
            lost_steps=self._earlier_lost + sum(attempt.lost_steps or 0 for attempt in attempts),
        )

    def _goodput(self, counted: Counted, totals: Sequence[Total], end: float, *, is_over: bool) -> Goodput:
        assert self._submitted is not None
        until = end if is_over else known_until(totals, end)
        wall = max(0.0, until - self._submitted - self._idle)
        stepping = 0.0
        if totals:
            stepping = max(0.0, until - self._first_step(totals[0]) - (self._idle - (self._began or _NEVER).idle))
        return Goodput(
            goodput=min(1.0, counted.useful / stepping) if stepping else None,
            ettr=min(1.0, counted.useful / wall) if wall and totals else None,
            useful=counted.useful,
            redone=counted.redone,
            checkpoints=counted.checkpoints,
            wall=wall,
            since_first_step=stepping,
        )

    def _first_step(self, total: Total) -> float:
        """When the job's first step began: one step before its end, but not before it had slots."""
        if self._began is None:
            return total.start
        mean = total.duration / total.steps if total.steps else 0.0
        return max(self._began.time - mean, self._began.granted)


class _Began(NamedTuple):
    """The end of the job's first step, when it had got its slots, and s of idleness before."""

    time: float
    granted: float
    idle: float


_NEVER: Final = _Began(0.0, 0.0, 0.0)


def _resolved(attempts: Sequence[Attempt], courses: Sequence[Course]) -> tuple[Attempt, ...]:
    """Each attempt with what later ones, and the totals, add to it."""
    made: list[Attempt] = []
    first: int | None = None
    recovered: float | None = None
    for attempt, course in zip(reversed(attempts), reversed(courses), strict=True):
        if attempt.outcome:
            recovered = None  # the job ended here: what came after was a resume
        told = replace(
            attempt,
            last_step=course.last,
            lost_steps=_lost(course.last, first),
            recovered_at=recovered if attempt.cause is not None else None,
        )
        made.append(told)
        first = course.first if course.first is not None else first
        recovered = attempt.began_at if attempt.began_at is not None else recovered
    return tuple(reversed(made))


def _lost(last: int | None, following: int | None) -> int | None:
    """Steps to do again when a later attempt begins after `following` steps."""
    return None if following is None else max(0, (last or 0) - following)


def _short(cause: Failure | None) -> Failure | None:
    """Without what is long; the record has it."""
    if cause is None:
        return None
    return replace(cause, traceback="", stall=cause.stall and replace(cause.stall, stacks=()))


def _pairs(courses: Sequence[Course]) -> list[tuple[Course, Course | None]]:
    second: list[Course | None] = [*courses[1::2]]
    return list(zip(courses[::2], [*second, None] if len(courses) % 2 else second, strict=True))


_OF_THE_JOB: Final[Mapping[type, Callable[[TimelineBuilder, Any], None]]] = {
    LaunchRequested: TimelineBuilder._launch,
    RecoveryStarted: TimelineBuilder._again,
    ResumeRequested: TimelineBuilder._wish,
    ResizeRequested: TimelineBuilder._wish,
    SlotsAwaited: TimelineBuilder._await,
    SlotsGranted: TimelineBuilder._grant,
    FaultInjected: TimelineBuilder._inject,
    PhaseChanged: TimelineBuilder._phase,
}
_OF_A_GENERATION: Final[Mapping[type, Callable[[Generation, Any], None]]] = {
    RankExited: Generation.exit,
    FaultHappened: Generation.happen,
    StepsBegan: Generation.begin,
    RunResumed: Generation.resume,
    FailureDetected: Generation.fail,
    StallDetected: Generation.halt,
    StallEnded: Generation.go_on,
    CheckpointSaved: Generation.save,
}

"""How a job stood at any time of its life, from its record. Pure: what was recorded goes in, an `Update` comes out.

Folded by the views like any other, that update gives what a follower saw at the time, as finely as the record is kept:
of a stretch that had begun by then, the part up to then; of what ranks were doing, the last look at all of them.

Bounded: points in time by merging, events and reports by number. Output is not kept here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from workbench.controller import transition
from workbench.events import Event
from workbench.feed import Bucket, Cursor, Total, Update
from workbench.state import JobState
from workbench.telemetry import Check, RankBeat
from workbench.views.buckets import across_ranks, merge, merge_totals
from workbench.views.job import RANKS_WITH_SERIES, WINDOW
from workbench.views.series import History

EVENTS: Final = 100_000  # the newest that can be gone back to
REPORTS: Final = 2_000
KEYFRAME: Final = 64  # events between two states that are kept
LEAST: Final = WINDOW + 1.0  # s before a moment that its numbers are taken from; more where steps are long
LEAST_OF_MANY: Final = 3.0  # the same for more ranks than have a history of their own here: it costs the pool
STEPS: Final = 4.0
FINEST: Final = 1.0  # s
FRESH: Final = 10.0  # s after a beat in which its rank may be taken to be at the same
_SUMS: Final = ("duration", "data", "forward", "backward", "comm", "optimizer", "checkpoint", "samples", "tokens")
T = TypeVar("T", Bucket, Total)


WIDER: Final = (10.0, 60.0, 600.0)  # s: as the past is kept when it is long ago


class Wanted(NamedTuple):
    """Buckets that start in `[since, until)`, folded to `width` s."""

    since: float
    until: float
    width: float


class Past:
    """Add every update of a job in turn, beginning with one from an empty cursor; `at` may be asked at any time."""

    def __init__(self) -> None:
        self.cursor = Cursor()
        self._events: list[Event] = []
        self._times: list[float] = []  # of events, each no less than the one before
        self._states: list[JobState] = []  # after each `KEYFRAME` events
        self._before: tuple[Event, JobState] | None = None  # the launch, and the state before the first event kept
        self._state: JobState | None = None
        self._totals = History[Total](merge_totals)
        self._by_rank: dict[int, History[Bucket]] = {}
        self._beats: dict[int, RankBeat] = {}
        self._reports: deque[Check] = deque(maxlen=REPORTS)

    def add(self, update: Update) -> None:
        self.cursor = update.cursor
        for event in update.events:
            self._add_event(event)
        self._totals.extend(list(update.totals) or across_ranks(update.buckets))
        if update.state.world_size <= RANKS_WITH_SERIES:
            for rank, buckets in by_rank(update.buckets).items():
                self._by_rank.setdefault(rank, History(merge)).extend(buckets)
        self._beats.update((beat.rank, beat) for beat in update.beats)
        self._reports.extend(update.checks)

    def _add_event(self, event: Event) -> None:
        self._state, _ = transition(self._state, event)
        self._events.append(event)
        self._times.append(max(event.time, self._times[-1] if self._times else event.time))
        if len(self._events) % KEYFRAME == 0:
            self._states.append(self._state)
        if len(self._events) > EVENTS:
            self._forget(EVENTS // 2 // KEYFRAME)

    def _forget(self, keyframes: int) -> None:
        launch = self._before[0] if self._before is not None else self._events[0]
        self._before = launch, self._states[keyframes - 1]
        del self._states[:keyframes]
        del self._events[: keyframes * KEYFRAME], self._times[: keyframes * KEYFRAME]

    # --- what can be asked ---

    @property
    def begin(self) -> float:
        """The earliest time that can be gone back to, epoch s. Raises `ValueError` before the first update."""
        if not self._times:
            raise ValueError("no update has been added yet")
        return self._times[0]

    def wanted(self, time: float) -> tuple[Wanted, ...]:
        """What would tell more of `time` than is kept here: the first of these that there is."""
        total = next((one for one in reversed(self._totals.items) if one.start <= time), None)
        if total is None:
            return ()
        least = LEAST if self._by_rank else LEAST_OF_MANY
        reach = max(least, STEPS * total.duration / total.steps if total.steps else 0.0)
        since = max(self.begin, time - reach)
        if not self._by_rank:  # of many ranks: two or three a rank will do
            first = Wanted(since, time, max(FINEST, float(math.ceil(reach / 2))))
            return first, *(Wanted(since - width, time + width, max(first.width, width)) for width in WIDER)
        near = (one for one in self._totals.items if since < one.start + one.width and one.start < time)
        is_fine = all(one.width <= FINEST for one in near)
        return () if is_fine else (Wanted(since, time, FINEST),)

    def at(self, time: float, fine: Iterable[Bucket] = (), beats: Iterable[RankBeat] = ()) -> Update:
        """What a follower would have been told by `time` (epoch s), from an empty cursor.

        `fine`: finer buckets of the time before, as `wanted` says; each replaces what is kept here of its time.
        `beats`: as the record has them of the time before.
        Raises `ValueError` before the first update.
        """
        time = max(time, self.begin)
        recent = [part for bucket in fine if (part := until(bucket, time)) is not None]
        known = until_all([b for history in self._by_rank.values() for b in history.items], time)
        if recent:
            start = min(bucket.start for bucket in recent)
            known = until_all(known, start) + sorted(recent, key=lambda bucket: bucket.start)
        number = max(1, bisect_right(self._times, time))
        state = self._state_after(number)
        return Update(
            state=state,
            cursor=Cursor(event=number),
            now=time,
            events=(*([self._before[0]] if self._before else []), *self._events[:number]),
            beats=tuple(as_of(state.restart_count, time, [*beats, *self._beats.values()])),
            buckets=tuple(known),
            totals=tuple(until_all(self._totals.items, time)),
            checks=tuple(report for report in self._reports if report.end <= time),
        )

    def _state_after(self, number: int) -> JobState:
        """As the controller makes it of the first `number` events."""
        index = number // KEYFRAME
        state = self._states[index - 1] if index else self._before[1] if self._before else None
        for event in self._events[index * KEYFRAME : number]:
            state, _ = transition(state, event)
        assert state is not None
        return state


def as_of(restart_count: int, time: float, beats: Iterable[RankBeat]) -> list[RankBeat]:
    """The newest of each rank by `time`, of that generation; what is too long ago does not say what it was doing."""
    newest: dict[int, RankBeat] = {}
    for beat in beats:
        known = newest.get(beat.rank)
        if beat.time <= time and beat.restart_count == restart_count and (known is None or known.time < beat.time):
            newest[beat.rank] = beat
    return [
        beat
        if time - beat.time <= FRESH
        else msgspec.structs.replace(beat, activity="", collective="", collective_seq=0)
        for beat in newest.values()
    ]


def until(part: T, time: float) -> T | None:
    """The part of a stretch that had passed by `time`, its steps spread evenly over it; None: none had ended."""
    if part.start + part.width <= time:
        return part
    kept = round(part.steps * (time - part.start) / part.width) if time > part.start else 0
    if kept <= 0:
        return None
    share = kept / part.steps
    ranks = part.ranks if isinstance(part, Total) else 1
    return msgspec.structs.replace(
        part,
        width=time - part.start,
        steps=kept,
        last_step=part.last_step - round((part.steps - kept) / max(1, ranks)),
        **{name: getattr(part, name) * share for name in _SUMS},
    )


def until_all(parts: Sequence[T], time: float) -> list[T]:
    """Of each the part that had passed by `time`."""
    return [made for part in parts if (made := until(part, time)) is not None]


def by_rank(buckets: Iterable[Bucket]) -> dict[int, list[Bucket]]:
    found: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        found.setdefault(bucket.rank, []).append(bucket)
    return found

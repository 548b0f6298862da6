"""How much of a job's time went into steps that count, from the totals of all ranks and what is known of each attempt.

A total may hold steps of several attempts, and steps on both sides of the one at which a later attempt began. Its time
is divided by numbers of steps: how far an attempt had got at a time is known where it began and ended and at the end of
each total that is its alone, and interpolated between.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from workbench.feed import Total

LIVE: Final = 3.0  # s without a total that are taken for its delay and not for time without steps


@dataclass
class Course:
    """How one attempt got on: from `first` finished steps at `began` to `last` at `ended`; None: not known.

    `redone`: steps within that do not count, of attempts that were folded into it.
    """

    start: float
    end: float
    world: int
    first: int | None = None
    began: float | None = None
    began_step: int = 0
    last: int | None = None
    ended: float | None = None
    redone: int = 0
    anchors: list[tuple[float, float]] = field(default_factory=list)
    cutoff: float = math.inf  # steps above do not count

    def settle(self) -> None:
        """Put what is known of its steps in order of time, never falling."""
        if self.began is not None:
            self.anchors += [(self.began, self.first or 0), (self.began, self.began_step)]
        if self.last is not None and self.ended is not None:
            self.anchors = [(t, min(s, self.last)) for t, s in self.anchors if t < self.ended]
            self.anchors.append((self.ended, self.last))
        self.anchors.sort()
        highest = float(self.first or 0)
        for index, (time, step) in enumerate(self.anchors):
            highest = max(highest, step)
            self.anchors[index] = (time, highest)

    def step_at(self, time: float) -> float:
        """Finished steps then."""
        at = bisect_right(self.anchors, (time, math.inf))
        if at == 0:
            return float(self.first or 0)
        if at == len(self.anchors):
            return self.anchors[-1][1]
        (t0, s0), (t1, s1) = self.anchors[at - 1], self.anchors[at]
        return s0 + (s1 - s0) * (time - t0) / (t1 - t0)

    def joined(self, later: Course) -> Course:
        """This attempt and the one after it as one."""
        again = 0 if self.last is None or later.first is None else max(0, self.last - later.first)
        return replace(
            self,
            end=later.end,
            world=later.world or self.world,
            last=later.last if later.last is not None else self.last,
            ended=later.ended if later.ended is not None else self.ended,
            redone=self.redone + later.redone + again,
        )

    @property
    def waste(self) -> float:
        """Steps done for each that counts, of the attempts folded into this one."""
        done = (self.last or 0) - (self.first or 0)
        return 1 + self.redone / done if done > 0 else 1.0


class Counted(NamedTuple):
    """Mean over the ranks, s: in steps that count, in others, and, of the first, standing still for checkpoints."""

    useful: float
    redone: float
    checkpoints: float


def count(courses: Sequence[Course], totals: Sequence[Total]) -> Counted:
    """The time of all totals, divided. `courses` are in order of time; they are filled in as the totals tell."""
    starts = [course.start for course in courses]
    for total, (course, *others) in _over(courses, starts, totals):
        if not others:
            course.anchors.append((total.start + total.width, total.last_step))
            course.last = max(course.last or 0, total.last_step)
    cutoff = math.inf
    for course in reversed(courses):
        course.cutoff = cutoff
        if course.first is not None:
            cutoff = min(cutoff, course.first)
        course.settle()
    useful = redone = checkpoints = 0.0
    for total, own in _over(courses, starts, totals):
        time, share, ranks = _share(total, own)
        useful += time * share
        redone += time * (1 - share)
        checkpoints += total.checkpoint / ranks * share
    return Counted(useful, redone, checkpoints)


def _over(
    courses: Sequence[Course], starts: Sequence[float], totals: Sequence[Total]
) -> Iterator[tuple[Total, Sequence[Course]]]:
    """Each total with the attempts that its time touches, at least one."""
    for total in totals if courses else ():
        first = max(0, bisect_right(starts, total.start) - 1)
        last = max(first + 1, bisect_right(starts, math.nextafter(total.start + total.width, -math.inf)))
        yield total, [c for c in courses[first:last] if c.end > total.start] or courses[last - 1 : last]


def _share(total: Total, courses: Sequence[Course]) -> tuple[float, float, float]:
    """The mean rank's time in it, which share of that counts, and how many ranks it is the mean of."""
    done = counted = weighted = 0.0
    for course in courses:
        low = course.step_at(max(total.start, course.start))
        high = course.step_at(min(total.start + total.width, course.end))
        done += (high - low) * course.waste
        counted += max(0.0, min(high, course.cutoff) - min(low, course.cutoff))
        weighted += (high - low) * course.waste * max(1, course.world)
    if done > 0:
        return total.duration * done / weighted, counted / done, weighted / done
    world = max(1, *(course.world for course in courses))
    return total.duration / world, float(total.last_step <= max(c.cutoff for c in courses)), world


def known_until(totals: Sequence[Total], now: float) -> float:
    """Until when the totals tell all: now, but for the moment that the newest of them takes to come."""
    end = totals[-1].start + totals[-1].width if totals else -math.inf
    return min(now, end) if now - end < LIVE else now

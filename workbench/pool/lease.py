"""Whether the other side can still be reached: for hosts that are cut off, whose connections do not close.

A worker says hello once a second, and the scheduler answers each with the hello's own stamp. So a worker knows that it
was heard of at that time, whichever way packets vanish. `LEASE` after the newest hello that was answered it ends its
ranks; the scheduler gives it up `LOST_AFTER` the newest that came, which is later: no two generations of a job live at
once on the two sides of a cut. When the ranks are gone the worker says hello in the next epoch, and only then does the
scheduler take it back; one that has been given up and does not know is told so. What was sent to an earlier epoch and
arrives late starts nothing.

Time counts only while this process runs: of a longer gap between two looks (a suspended machine, a loop that was held
up) no more than `GAP` is counted, so that nobody is given up for time in which nobody could have been heard. On one
host connections close when a process dies, and silence means only that it is busy: there none of this applies.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

HELLO_EVERY: Final = 1.0  # s; a scheduler plugin that came after the worker learns of it by this
LOOK_EVERY: Final = 0.25
GAP: Final = 1.0
UNHEARD: Final = 2.0  # from then on it may be that a host is cut off
LEASE: Final = 7.0
LOST_AFTER: Final = 10.0

K = TypeVar("K", bound=Hashable)


class Silence(Generic[K]):
    """When each of several others was last heard of, by a clock of this process' own that stands while it does."""

    def __init__(self, now: float) -> None:
        """`now` here and in `look`: seconds of a monotonic clock."""
        self._looked = now
        self._heard: dict[K, float] = {}
        self.time = 0.0

    def heard(self, who: K, time: float | None = None) -> None:
        """Of somebody, now or at an earlier `time` of this clock."""
        self._heard[who] = self.time if time is None else max(time, self._heard.get(who, time))

    def forget(self, who: K) -> None:
        self._heard.pop(who, None)

    def of(self, who: K) -> float:
        """For how long; 0 of somebody who never said anything."""
        return self.time - self._heard.get(who, self.time)

    def look(self, now: float, limit: float) -> list[K]:
        """Those that have been silent for longer than `limit` s; to be called every `LOOK_EVERY` s."""
        self.time += min(max(0.0, now - self._looked), GAP)
        self._looked = now
        return [who for who, heard in tuple(self._heard.items()) if self.time - heard > limit]


class Lease:
    """A worker's side: until when its ranks may run. From the scheduler's first answer on there is one.

    `is_ending`: it has run out, and ranks may be left. `is_over`: no hello of this epoch has been answered yet.
    """

    def __init__(self, now: float) -> None:
        self._silence = Silence[str](now)
        self._is_void = self.is_ending = self.is_over = False
        self.epoch = 0  # how often it has run out

    @property
    def stamp(self) -> float:
        """For a hello that is sent now."""
        return self._silence.time

    def answered(self, epoch: int, stamp: float) -> None:
        """The scheduler has heard the hello with that stamp; one of an earlier epoch renews nothing."""
        if epoch == self.epoch and not self.is_ending:
            self.is_over = False
            self._silence.heard("scheduler", stamp)

    def given_up(self, epoch: int) -> None:
        """The scheduler has given up the worker as it was in that epoch."""
        self._is_void = self._is_void or epoch == self.epoch

    def look(self, now: float) -> None:
        """Note whether it has run out; to be called every `LOOK_EVERY` s."""
        is_silent = bool(self._silence.look(now, LEASE))
        if is_silent or self._is_void:
            self._silence.forget("scheduler")
            self._is_void, self.is_ending, self.is_over = False, True, True

    def ended(self) -> None:
        """Nothing is left of what ran under it."""
        self.epoch += 1
        self.is_ending = False

"""Whether the other side can still be reached: for hosts that are cut off, whose connections do not close.

Time counts only while this process runs: of a longer gap between two looks (a suspended machine, a loop that was held
up) no more than `LOOK_EVERY` is counted, so that nobody is given up for time in which nobody could have been heard.

A worker that hears nothing of its scheduler ends its ranks after `LEASE`; the scheduler gives a worker up after
`LOST_AFTER`, which is later, so that no two generations of a job live at once on the two sides of a cut. On one host
connections close when a process dies, and silence means only that it is busy: there none of this applies.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

LOOK_EVERY: Final = 1.0  # s
LEASE: Final = 7.0
LOST_AFTER: Final = 10.0

K = TypeVar("K", bound=Hashable)


class Silence(Generic[K]):
    """For how long each of several others has not been heard of. Times are those of a monotonic clock."""

    def __init__(self, now: float) -> None:
        self._looked = now
        self._silent: dict[K, float] = {}

    def heard(self, who: K) -> None:
        self._silent[who] = 0.0

    def forget(self, who: K) -> None:
        self._silent.pop(who, None)

    def look(self, now: float, limit: float) -> list[K]:
        """Those that have been silent for longer than `limit` s; to be called every `LOOK_EVERY` s."""
        passed = min(max(0.0, now - self._looked), LOOK_EVERY)
        self._looked = now
        for who in self._silent:
            self._silent[who] += passed
        return [who for who, silent in self._silent.items() if silent > limit]

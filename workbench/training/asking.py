"""How all ranks come to save after the same step when rank 0 wants it, without waiting for each other at each step.

The ranks look up only now and then, after steps that rank 0 has named one look before: so what is to happen at a look
has been told about `INTERVAL` earlier, and a rank that is ahead finds it there. Rank 0 names them so that looks come at
about that interval whatever a step takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

from workbench.training.council import Council

INTERVAL: Final = 0.25  # s between two looks
KEPT: Final = 500  # looks that are not forgotten: more than a rank that is behind may lack
PATIENCE: Final = 30.0  # s that a rank may be ahead of rank 0


class Asking:
    """One rank's side. `wants` is asked in rank 0 only, and that is a wish granted: it must be false the next time."""

    def __init__(self, council: Council | None, wants: Callable[[], bool], clock: Callable[[], float] = time.monotonic):
        self._council, self._wants, self._clock = council, wants, clock
        self._count = 0  # steps since the ranks began together
        self._look = 0  # the next one's number, and the step it comes after
        self._at, self._told_at, self._told = 1, 2, False
        self._gap, self._since = 1, clock()
        self._is_off = False

    def step(self) -> bool:
        """A step has ended, on every rank: whether to save now."""
        if self._council is None:
            return self._wants()
        self._count += 1
        if self._count < self._at or self._is_off:
            return False
        try:
            return self._look_up(self._council)
        except TimeoutError:
            self._is_off = True
            sys.stderr.write("dtrain: the ranks do not step together; no checkpoint is made at a time or on request\n")
            return False

    def _look_up(self, council: Council) -> bool:
        """At look k: act on what was told of it, and (rank 0) tell of look k + 1 and when look k + 2 will be."""
        look, self._look = self._look, self._look + 1
        is_due, after = False, self._told_at
        if look:
            is_due, after = (self._told, self._told_at) if not council.rank else self._hear(council, look)
        if not council.rank:
            self._tell(council, look, after)
        self._at = after
        return is_due

    @staticmethod
    def _hear(council: Council, look: int) -> tuple[bool, int]:
        is_due, after = council.fetch(f"look/{look}", PATIENCE)
        return bool(is_due), int(after)

    def _tell(self, council: Council, look: int, after: int) -> None:
        """`after`: the step of look + 1, which all know; what is told is whether to save there, and look + 2's."""
        now = self._clock()
        if look:
            pace = (now - self._since) / self._gap
            self._gap = max(1, min(2 * self._gap, int(INTERVAL / pace) if pace > 0 else 2 * self._gap))
        self._since = now
        self._told, self._told_at = self._wants(), after + self._gap
        council.post(f"look/{look + 1}", [self._told, self._told_at])
        if look >= KEPT:
            council.forget(f"look/{look - KEPT}")

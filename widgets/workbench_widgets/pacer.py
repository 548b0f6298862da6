"""When a page draws: soon after a change, at most every `interval` s, and not before the browser drew the last.

A hidden tab does not answer and gets nothing until it is shown again; a slow one gets what it can take; a page to which
nothing happens costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

INTERVAL: Final = 0.1  # s


class Pacer:
    """`draw` is called through `later(seconds, call)`; all methods belong to one thread."""

    def __init__(
        self,
        draw: Callable[[], None],
        later: Callable[[float, Callable[[], None]], object],
        now: Callable[[], float],
        interval: float = INTERVAL,
    ) -> None:
        self._draw, self._later, self._now, self._interval = draw, later, now, interval
        self._drawn_at = float("-inf")
        self._is_due = self._is_closed = False
        self._is_wanted = True  # once, however little happens
        self._is_shown = False  # the browser has drawn the last; what is sent before it is ready could be lost

    def want(self) -> None:
        """Something has changed."""
        self._is_wanted = True
        self._plan()

    def shown(self) -> None:
        """The browser is ready, or has drawn the last."""
        self._is_shown = True
        self._plan()

    def close(self) -> None:
        """Never draw again."""
        self._is_closed = True

    def _plan(self) -> None:
        if self._is_wanted and self._is_shown and not self._is_due and not self._is_closed:
            self._is_due = True
            self._later(max(0.0, self._drawn_at + self._interval - self._now()), self._due)

    def _due(self) -> None:
        self._is_due = False
        if self._is_closed:
            return
        self._is_wanted = self._is_shown = False
        self._drawn_at = self._now()
        self._draw()

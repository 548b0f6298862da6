"""How often copies are taken: each step while that costs little, else as often as it does.

Pure, but that it is told the times. Costs and steps are medians of the last few: a first copy takes new memory, and a
first step compiles.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

SHARE: Final = 0.03  # of the time of the steps between two copies
LAST: Final = 16


def every(cost: float, step: float) -> int:
    """Steps from one copy to the next, so that a copy of `cost` s stays within its share of steps of `step` s."""
    return max(1, math.ceil(cost / (SHARE * step) - 1e-9)) if step > 0 else 1


class Pace:
    """The measured times of one rank, in s."""

    def __init__(self) -> None:
        self._costs: deque[float] = deque(maxlen=LAST)
        self._steps: deque[float] = deque(maxlen=LAST)

    def took(self, cost: float) -> None:
        """A copy, from what was not to the step that could go on."""
        self._costs.append(cost)

    def stepped(self, seconds: float) -> None:
        """A step without its copy."""
        self._steps.append(seconds)

    def every(self) -> int:
        """1 until something is known."""
        if not self._costs or not self._steps:
            return 1
        return every(statistics.median_low(self._costs), statistics.median_low(self._steps))

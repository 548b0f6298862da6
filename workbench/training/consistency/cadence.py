"""How often to check, and over how many checks to spread what is dear. Pure."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

FIRST: Final = 3  # checks, of every step and everything, before anything is chosen: most mistakes show at once
MOST_EVERY: Final = 10_000
MOST_PARTS: Final = 64
WORTH: Final = 2.0  # a wish that differs by less is not followed


class Costs(NamedTuple):
    """Seconds: of a step without its check; of a check's gradients and exchange; of all parameters and state."""

    step: float
    light: float
    dear: float


class Pace(NamedTuple):
    """A check each `every` steps, each with one of `parts` of parameters and state."""

    every: int
    parts: int


def choose(costs: Costs, budget: float, parts_at_most: int = MOST_PARTS) -> Pace:
    """The most frequent checks that cost no more than `budget`, a share of a step's time.

    Parameters and state are spread so that they cost a check half of what its gradients do: what is wrong with them
    stays wrong until it is seen, a gradient is gone after its step.
    """
    if costs.step <= 0:
        return Pace(1, 1)
    parts = 1 if costs.dear <= 0 else math.ceil(2 * costs.dear / max(costs.light, 1e-9))
    parts = max(1, min(parts, MOST_PARTS, parts_at_most))
    every = math.ceil((costs.light + costs.dear / parts) / (budget * costs.step) - 1e-9)
    every = max(1, min(every, MOST_EVERY))
    if every == 1:  # what is left of the budget is spent on covering more at a time
        room = budget * costs.step - costs.light
        parts = min(parts, max(1, math.ceil(costs.dear / room))) if room > 0 else parts
    return Pace(every, parts)


def share(costs: Costs, pace: Pace) -> float:
    """Of a step's time, on average."""
    return (costs.light + costs.dear / pace.parts) / pace.every / costs.step if costs.step > 0 else 0.0


def is_worth(old: Pace, new: Pace) -> bool:
    """Whether to change: times scatter."""
    return not (1 / WORTH < new.every / old.every < WORTH and 1 / WORTH < new.parts / old.parts < WORTH)

"""How often to check, over how many checks to spread what is dear, and how often to look closer. Pure."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

FIRST: Final = 3  # checks, of every step and everything, before anything is chosen: most mistakes show at once
MOST_EVERY: Final = 10_000
MOST_PARTS: Final = 64
LOOKS: Final = 0.25  # of the budget, for looks at what gradients are like
WORTH: Final = 2.0  # a wish that differs by less is not followed


class Costs(NamedTuple):
    """Seconds: of a step without its check; of a check's gradients and exchange; of all it holds; of a look."""

    step: float
    light: float
    dear: float
    look: float = 0.0


class Pace(NamedTuple):
    """A check each `every` steps, each with one of `parts` of what is held; a look each `look` steps."""

    every: int
    parts: int
    look: int = 0


def choose(costs: Costs, budget: float, parts_at_most: int = MOST_PARTS) -> Pace:
    """The most frequent checks that cost no more than `budget`, a share of a step's time.

    Parameters and state are spread so that they cost a check half of what its gradients do: what is wrong with them
    stays wrong until it is seen, a gradient is gone after its step.
    """
    if costs.step <= 0:
        return Pace(1, 1)
    look = look_every(costs, budget) if costs.look > 0 else 0
    budget *= 1 - LOOKS if look else 1
    parts = 1 if costs.dear <= 0 else math.ceil(2 * costs.dear / max(costs.light, 1e-9))
    parts = max(1, min(parts, MOST_PARTS, parts_at_most))
    every = math.ceil((costs.light + costs.dear / parts) / (budget * costs.step) - 1e-9)
    every = max(1, min(every, MOST_EVERY))
    if every == 1:  # what is left of the budget is spent on covering more at a time
        room = budget * costs.step - costs.light
        parts = min(parts, max(1, math.ceil(costs.dear / room))) if room > 0 else parts
    return Pace(every, parts, look)


def look_every(costs: Costs, budget: float) -> int:
    """Steps between two looks, so that they cost their part of the budget; as often as there are checks until known."""
    if costs.step <= 0 or costs.look <= 0:
        return 1
    return max(1, min(math.ceil(costs.look / (LOOKS * budget * costs.step) - 1e-9), MOST_EVERY))


def share(costs: Costs, pace: Pace) -> float:
    """Of a step's time, on average."""
    if costs.step <= 0:
        return 0.0
    looks = costs.look / max(pace.look, pace.every) if pace.look else 0.0
    return ((costs.light + costs.dear / pace.parts) / pace.every + looks) / costs.step


def is_worth(old: Pace, new: Pace) -> bool:
    """Whether to change: times scatter."""
    return not (1 / WORTH < new.every / old.every < WORTH and 1 / WORTH < new.parts / old.parts < WORTH)

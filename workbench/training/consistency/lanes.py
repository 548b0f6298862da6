"""What ranks compare at a checked step: a short row of 64-bit numbers, as long on every rank and for every model.

One all-reduce of `[value, ~value]` with MAX tells every rank the same: where the largest value is not the least, ranks
differ. The last numbers are not compared: of these the largest is wanted. Who adds a lane adds a name here, and sets it
where the others are set (`check`); ranks of one job always run the same version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

# Of what is compared, in the order in which a difference is looked into: what explains the others comes first.
COMPARED: Final = (
    "steps",  # checks of this optimizer so far, and which one it is
    "structure",  # names, order, shapes and types of what it steps
    "settings",  # learning rates and the other options of its groups
    "absent",  # which gradients are None
    "parameters",
    "state",  # the optimizer's
    "buffers",  # as they were when the last forward began
    "gradients",  # as the optimizer will use them
    "data",  # of who compares what the ranks read
    "scale",  # a GradScaler's
)
LARGEST: Final = (
    "share",  # what checking costs, in millionths of a step's time
    "every",  # steps between two checks that a rank wants
    "parts",  # checks over which it wants to spread parameters and state
    "broken",  # 1: a gradient is not finite
    "rows",  # 1: a rank has a row to tell of what it reads
    "looks",  # 1: it has looked at the gradients of this step
    "look",  # steps between two looks that it wants
)
SIZE: Final = 2 * len(COMPARED) + len(LARGEST)


class Reading(NamedTuple):
    """What all ranks know after the exchange. `differing` is in the order of `COMPARED`."""

    differing: tuple[str, ...]
    largest: Mapping[str, int]


def row(values: Mapping[str, int], out: torch.Tensor | None = None) -> torch.Tensor:
    """The numbers to be reduced with MAX; a lane that is not given is 0."""
    compared = [values.get(name, 0) for name in COMPARED]
    numbers = [*compared, *(~value for value in compared), *(values.get(name, 0) for name in LARGEST)]
    made = torch.tensor(numbers, dtype=torch.int64)
    return made if out is None else out.copy_(made)


def read(reduced: torch.Tensor) -> Reading:
    numbers = reduced.tolist()
    count = len(COMPARED)
    differing = [name for name, high, low in zip(COMPARED, numbers, numbers[count:], strict=False) if high != ~low]
    return Reading(tuple(differing), dict(zip(LARGEST, numbers[2 * count :], strict=True)))


def signed(value: int) -> int:
    """An unsigned 64-bit number as a lane takes it."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value

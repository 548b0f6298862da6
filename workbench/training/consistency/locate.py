"""After a difference: who deviates, in which tensor, element and bit. What all ranks have gathered goes in, the same
comes out on all of them; no rank is ever blamed without a majority against it, or its own digest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from workbench.training.consistency.lanes import COMPARED

TENSORS: Final = ("parameters", "state", "buffers", "gradients")  # lanes that are about tensors
NAMED: Final = 8  # tensors
SIDES: Final = 16
LARGEST: Final = 2**27  # elements of a tensor that is sent to be compared
FINITE: Final = 3e38
Account = Mapping[str, Any]  # what one rank says of itself: see `Checker.account`


class Sides(NamedTuple):
    """Places of ranks that agree with each other, the most first; `deviating` are places."""

    groups: list[list[int]]
    deviating: tuple[int, ...]
    told_by: str


class Verdict(NamedTuple):
    """`reference`: the place whose tensors the others are held against. `names`: that differ, in order."""

    lane: str
    sides: Sides
    names: list[str]
    of: int
    reference: int


def decide(accounts: Sequence[Account], differing: Sequence[str]) -> Verdict | None:
    """None: what differed does so no more. Who is a step behind brings another step's numbers: that comes first."""
    for lane in (name for name in COMPARED if name in differing or name == "steps"):
        values = [value_of(account, lane) for account in accounts]
        sides = divide(values, [bool(account["changed"].get(lane)) for account in accounts])
        if len(sides.groups) > 1:
            right = [place for group in sides.groups for place in group if place not in sides.deviating]
            reference = right[0]  # of the largest group that has one
            names, of = different(values, sides.deviating, reference) if lane in TENSORS else ([], 0)
            return Verdict(lane, sides, names, of, reference)
    return None


def value_of(account: Account, lane: str) -> Any:
    found = account["items"].get(lane)
    return tuple(found) if isinstance(found, list) else found


def divide(values: Sequence[Any], changed: Sequence[bool] = ()) -> Sides:
    """Who agrees with whom. More than half of all are right; of two, the one that is as it was itself before."""
    places: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value, []).append(place)
    groups = sorted(places.values(), key=lambda group: (-len(group), group[0]))
    if 2 * len(groups[0]) > len(values):
        return Sides(groups, tuple(sorted(place for group in groups[1:] for place in group)), "majority")
    own = tuple(place for place, has_changed in enumerate(changed) if has_changed)
    if len(values) == 2 and len(own) == 1:
        return Sides(groups, own, "own digest")
    return Sides(groups, (), "")


def different(values: Sequence[Any], deviating: Sequence[int], reference: int) -> tuple[list[str], int]:
    """Names of tensors that somebody who deviates (where nobody is known to: anybody) has otherwise; and of how many.

    Values are pairs of a name and a digest; what only one side has differs as well.
    """
    known = [dict(value or ()) for value in values]
    names = list(dict.fromkeys(name for one in known for name in one))
    others = [known[place] for place in deviating or range(len(known)) if place != reference]
    mine = known[reference]
    return [name for name in names if any(one.get(name) != mine.get(name) for one in others)], len(names)


# --- one tensor -------------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """How a rank's tensor differs from the reference's; of `state.Mismatch` the fields of these names."""

    elements: int = 0
    element: int | None = None
    bits: tuple[int, ...] = ()
    deviation: float = 0.0
    relative: float = 0.0
    ratio: float = 0.0
    size: int = 0


def compare(own: torch.Tensor, reference: torch.Tensor) -> Comparison:
    """Both on the CPU, of one shape and type."""
    own, reference = own.detach().reshape(-1), reference.detach().reshape(-1)
    if own.is_complex():
        own, reference = torch.view_as_real(own).reshape(-1), torch.view_as_real(reference).reshape(-1)
    changed = bits_of(own) ^ bits_of(reference)
    places = changed.nonzero().reshape(-1)
    if not len(places):
        return Comparison(size=own.numel())
    first = int(places[0])
    width = 8 * own.element_size()
    pattern = int(changed[first]) & (2**width - 1)
    bits = tuple(bit for bit in range(width) if pattern >> bit & 1)
    deviation, relative, ratio = measure(own.double(), reference.double(), len(places))
    return Comparison(len(places), first, bits, deviation, relative, ratio, own.numel())


def bits_of(values: torch.Tensor) -> torch.Tensor:
    types = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(types[values.element_size()])


def measure(own: torch.Tensor, reference: torch.Tensor, count: int) -> tuple[float, float, float]:
    """The largest difference, the same over the reference's root mean square, and the ratio where all have one."""
    largest = float((own - reference).abs().nan_to_num(FINITE, FINITE, FINITE).max())
    square = float(reference.square().mean())
    relative = largest / math.sqrt(square) if 0 < square < math.inf else 0.0
    ratio = 0.0
    if 2 * count > own.numel() and 0 < square < math.inf and bool(own.isfinite().all()):
        factor = float((own * reference).sum() / reference.square().sum())
        rest = float((own - factor * reference).abs().max())
        ratio = factor if rest <= 1e-3 * float(own.abs().max()) else 0.0
    return min(largest, FINITE), min(relative, FINITE), min(ratio, FINITE)

"""What looks at gradients say together, of all ranks: the fields of a `telemetry.GradientStatistics`. Pure.

Of each rank medians over the looks: one batch that is odd does not stand for a rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Final

from workbench.training.consistency.looks import (
    BINS,
    MEASURED,
    REDUCED,
    SHARDED,
    STRANGE,
    UNSEEN,
    Numbers,
)

SINGLY: Final = 16  # ranks up to which each has a histogram
ODD: Final = 8  # of more, those that have one besides all together
KEPT: Final = 64  # looks that a summary is made of
MISSING: Final = {
    UNSEEN: "no backward that reduces was seen",
    SHARDED: "fully_shard reduces gradients before a rank has all of its own",
    REDUCED: "the program reduces before its last backward",
    STRANGE: "gradients are sparse, complex, or gone before they are reduced",
}
Layer = tuple[str, float, float, float]


class Summary:
    """Of the looks since the last report."""

    def __init__(self, start: float, first: int) -> None:
        self.start, self.first, self.last = start, first, first
        self.looks: list[list[Numbers]] = []
        self.count = 0

    def add(self, rows: list[Numbers], step: int) -> None:
        self.looks.append(rows)
        del self.looks[:-KEPT]
        self.count += 1
        self.last = step

    def fields(self, ranks: Sequence[int], layers: Sequence[Layer] = ()) -> dict[str, Any]:
        """As JSON takes them."""
        columns = [list(rows) for rows in zip(*self.looks, strict=True)]
        norms = [median([root(row.square) for row in column if row.state == MEASURED]) for column in columns]
        states = {column[-1].state for column in columns}
        is_missing = MEASURED not in states
        return {
            "start": self.start, "first_step": self.first, "last_step": self.last, "ranks": list(ranks),
            "samples": self.count,
            "norms": [] if is_missing else norms,
            "cosines": [] if is_missing else [of(column, "cosine") for column in columns],
            "zeros": [] if is_missing else [of(column, "zeros") for column in columns],
            "broken": broken(columns, ranks),
            "mean_norm": median([root(row.mean_square) for row in columns[0]]),
            "histograms": histograms(columns, norms, ranks),
            "layers": [[name, *(rounded(value) or 0.0 for value in values)] for name, *values in layers],
            "missing": MISSING[int(min(states))] if is_missing else "",
        }  # fmt: skip


def of(column: Sequence[Numbers], name: str) -> float | None:
    return median([getattr(row, name) for row in column if row.state == MEASURED])


def median(values: Sequence[float]) -> float | None:
    """Of those that are finite; None where most are not."""
    finite = [value for value in values if math.isfinite(value)]
    return rounded(statistics.median(finite)) if 2 * len(finite) > len(values) else None


def rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def broken(columns: Sequence[Sequence[Numbers]], ranks: Sequence[int]) -> list[list[int]]:
    found = []
    for rank, column in zip(ranks, columns, strict=True):
        mine = [row for row in column if row.state == MEASURED]
        nans, infinite = (int(sum(getattr(row, name) for row in mine)) for name in ("nans", "infinite"))
        if nans or infinite:
            found.append([rank, nans, infinite])
    return found


def histograms(
    columns: Sequence[Sequence[Numbers]], norms: Sequence[float | None], ranks: Sequence[int]
) -> list[list[list[int]]]:
    """By rank where there are few; else of all together, then of those whose norm is furthest from the median."""
    is_missing = all(row.state != MEASURED for column in columns for row in column)
    if is_missing:  # what was counted is the mean, the same on all of them
        return [[list(ranks), counts_of(columns[0])]]
    counts = [counts_of([row for row in column if row.state == MEASURED]) for column in columns]
    if len(ranks) <= SINGLY:
        return [[[rank], mine] for rank, mine in zip(ranks, counts, strict=True)]
    whole = [sum(mine[k] for mine in counts) for k in range(BINS)]
    known = [norm for norm in norms if norm is not None]
    middle = statistics.median(known) if known else 0.0
    odd = sorted(range(len(ranks)), key=lambda place: -far(norms[place], middle))[:ODD]
    return [[list(ranks), whole], *([[ranks[place]], counts[place]] for place in odd)]


def counts_of(rows: Sequence[Numbers]) -> list[int]:
    return [int(sum(row.counts[k] for row in rows)) for k in range(BINS)]


def far(norm: float | None, middle: float) -> float:
    """By which factor, in logarithms; what is not finite is the furthest."""
    if norm is None:
        return math.inf
    return abs(math.log(max(norm, 1e-300) / max(middle, 1e-300)))

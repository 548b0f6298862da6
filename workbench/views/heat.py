"""Ranks × time: what a step took each rank, in columns of equal width. Bounded: at most `COLUMNS` × `ROWS` cells.

When there are too many columns, the width doubles and neighbours are added up. Of more than `ROWS` ranks, neighbours
share a row, which shows the slowest of them: a mean would hide the one that matters.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from workbench.feed import Bucket

COLUMNS: Final = 240
ROWS: Final = 128
NARROWEST: Final = 1.0  # s
METRICS: Final = ("step time", "own work", "wait for others")


class HeatColumn(NamedTuple):
    """One moment. Each of `cells`, one a metric, holds float32 s a step by row; NaN where no step ended."""

    start: float
    cells: tuple[bytes, ...]


class HeatView(NamedTuple):
    """Columns of `width` s in order of time, with gaps where nothing happened. A row is `fold` ranks."""

    width: float = NARROWEST
    ranks: int = 0
    fold: int = 1
    columns: tuple[HeatColumn, ...] = ()

    @property
    def rows(self) -> int:
        return math.ceil(self.ranks / self.fold)


class _Sums:
    """One column as it is being filled, by rank."""

    def __init__(self, ranks: int) -> None:
        self.steps, self.duration, self.comm = (array("d", bytes(8 * ranks)) for _ in range(3))

    def add(self, rank: int, steps: float, duration: float, comm: float) -> None:
        self.steps[rank] += steps
        self.duration[rank] += duration
        self.comm[rank] += comm

    def join(self, other: _Sums) -> None:
        for mine, its in ((self.steps, other.steps), (self.duration, other.duration), (self.comm, other.comm)):
            mine[: len(its)] = array("d", map(float.__add__, mine[: len(its)], its))

    def grow(self, ranks: int) -> None:
        for values in (self.steps, self.duration, self.comm):
            values.extend([0.0] * (ranks - len(values)))


class HeatBuilder:
    """Add buckets as they come; `view` may be asked at any time and is made anew only where something changed."""

    def __init__(self) -> None:
        self._width, self._ranks = NARROWEST, 0
        self._open: dict[int, _Sums] = {}
        self._made: dict[int, HeatColumn] = {}

    def add(self, buckets: Sequence[Bucket]) -> None:
        self._make_room(buckets)
        for bucket in buckets:
            if bucket.rank >= self._ranks:
                self._grow(bucket.rank + 1)
            first = math.floor(bucket.start / self._width)
            # A coarse one, of a long history, reaches over several columns: each gets its share.
            last = max(first, math.ceil((bucket.start + bucket.width) / self._width) - 1)
            share = 1 / (last - first + 1)
            for cell in range(first, last + 1):
                sums = self._open.get(cell)
                if sums is None:
                    sums = self._open[cell] = _Sums(self._ranks)
                sums.add(bucket.rank, bucket.steps * share, bucket.duration * share, bucket.comm * share)
                self._made.pop(cell, None)

    def _make_room(self, buckets: Sequence[Bucket]) -> None:
        """Columns wide enough for what there is and what comes."""
        starts = [bucket.start for bucket in buckets] + [cell * self._width for cell in self._open]
        ends = [bucket.start + bucket.width for bucket in buckets] + [(c + 1) * self._width for c in self._open]
        if starts:
            first, last = min(starts), max(ends)
            while math.ceil(last / self._width) - math.floor(first / self._width) > COLUMNS:
                self._coarsen()

    def view(self) -> HeatView:
        for cell, sums in self._open.items():
            if cell not in self._made:
                self._made[cell] = _column(cell * self._width, sums, self._fold)
        return HeatView(self._width, self._ranks, self._fold, tuple(self._made[cell] for cell in sorted(self._open)))

    @property
    def _fold(self) -> int:
        return max(1, math.ceil(self._ranks / ROWS))

    def _grow(self, ranks: int) -> None:
        self._ranks = ranks
        self._made.clear()
        for sums in self._open.values():
            sums.grow(ranks)

    def _coarsen(self) -> None:
        joined: dict[int, _Sums] = {}
        for cell in sorted(self._open):
            half = cell // 2
            if half in joined:
                joined[half].join(self._open[cell])
            else:
                joined[half] = self._open[cell]
        self._open, self._width = joined, self._width * 2
        self._made.clear()


def _column(start: float, sums: _Sums, fold: int) -> HeatColumn:
    step = [d / n if n else math.nan for n, d in zip(sums.steps, sums.duration, strict=True)]
    wait = [c / n if n else math.nan for n, c in zip(sums.steps, sums.comm, strict=True)]
    own = [max(0.0, s - w) if s == s else s for s, w in zip(step, wait, strict=True)]
    return HeatColumn(start, tuple(array("f", _folded(values, fold)).tobytes() for values in (step, own, wait)))


def _folded(values: list[float], fold: int) -> list[float]:
    """The largest of each group; NaN only where all are."""
    if fold == 1:
        return values
    groups = (values[k : k + fold] for k in range(0, len(values), fold))
    return [max((value for value in group if value == value), default=math.nan) for group in groups]

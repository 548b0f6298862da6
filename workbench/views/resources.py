"""What a job's processes use, over time: all ranks folded to the least, the mean and the most. Bounded by merging."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from workbench.telemetry import RankBeat

POINTS: Final = 300
NARROWEST: Final = 2.0  # s
MEASURES: Final = ("cpu", "rss", "gpu", "gpu_memory", "disk_read", "disk_write")  # fields of a `RankBeat`


class Spread(NamedTuple):
    """Over ranks and a while: sum and number tell the mean."""

    least: float
    total: float
    most: float
    number: int

    @property
    def mean(self) -> float:
        return self.total / self.number


class Moment(NamedTuple):
    """All ranks from `start` on, by measure; what was not measured is not there."""

    start: float
    spreads: dict[str, Spread]


class ResourceBuilder:
    """Add beats as they come."""

    def __init__(self) -> None:
        self._width = NARROWEST
        self._moments: dict[int, dict[str, Spread]] = {}
        self._shown: tuple[Moment, ...] | None = ()

    def add(self, beats: Iterable[RankBeat]) -> None:
        for beat in beats:
            if not beat.rss:
                continue  # not measured yet
            self._shown = None
            spreads = self._moments.setdefault(math.floor(beat.time / self._width), {})
            for name in MEASURES:
                value = getattr(beat, name)
                if value is not None:
                    one = Spread(float(value), float(value), float(value), 1)
                    spreads[name] = _joined(spreads[name], one) if name in spreads else one
        while len(self._moments) > POINTS:
            self._coarsen()

    def view(self) -> tuple[Moment, ...]:
        if self._shown is None:
            self._shown = tuple(Moment(k * self._width, dict(s)) for k, s in sorted(self._moments.items()))
        return self._shown

    def _coarsen(self) -> None:
        joined: dict[int, dict[str, Spread]] = {}
        for cell, spreads in sorted(self._moments.items()):
            held = joined.setdefault(cell // 2, {})
            for name, spread in spreads.items():
                held[name] = _joined(held[name], spread) if name in held else spread
        self._moments, self._width = joined, self._width * 2


def _joined(a: Spread, b: Spread) -> Spread:
    return Spread(min(a.least, b.least), a.total + b.total, max(a.most, b.most), a.number + b.number)

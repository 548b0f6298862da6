"""What a job's processes use, over time: all ranks folded to the least, the mean and the most. Bounded by merging."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from workbench.feed import Moment, Spread
from workbench.telemetry import RankBeat

POINTS: Final = 300
NARROWEST: Final = 2.0  # s
MEASURES: Final = ("cpu", "rss", "gpu", "gpu_memory", "disk_read", "disk_write")  # fields of a `RankBeat`
Usage: TypeAlias = tuple[Moment, ...]


class ResourceBuilder:
    """Add what is known of the time before, then beats as they come."""

    def __init__(self) -> None:
        self._width = NARROWEST
        self._moments: dict[int, dict[str, Spread]] = {}
        self._shown: Usage | None = ()

    def extend(self, moments: Iterable[Moment]) -> None:
        """In the order of time."""
        for moment in moments:
            self._join(moment.start, moment.spreads)

    def add(self, beats: Iterable[RankBeat]) -> None:
        for beat in beats:
            self._join(beat.time, used(beat))

    def _join(self, time: float, spreads: Mapping[str, Spread]) -> None:
        if not spreads:
            return
        self._shown = None
        cell = math.floor(time / self._width)
        self._moments[cell] = joined(self._moments.get(cell, {}), spreads)
        while len(self._moments) > POINTS:
            self._coarsen()

    def view(self) -> Usage:
        if self._shown is None:
            self._shown = tuple(Moment(k * self._width, dict(s)) for k, s in sorted(self._moments.items()))
        return self._shown

    def _coarsen(self) -> None:
        wider: dict[int, dict[str, Spread]] = {}
        for cell, spreads in sorted(self._moments.items()):
            wider[cell // 2] = joined(wider.get(cell // 2, {}), spreads)
        self._moments, self._width = wider, self._width * 2


def used(beat: RankBeat) -> dict[str, Spread]:
    """What one rank uses; nothing before it was first measured."""
    values = {name: getattr(beat, name) for name in MEASURES} if beat.rss else {}
    return {name: Spread(float(v), float(v), float(v), 1) for name, v in values.items() if v is not None}


def joined(a: Mapping[str, Spread], b: Mapping[str, Spread]) -> dict[str, Spread]:
    """Both together, by measure."""
    found = dict(a)
    for name, other in b.items():
        one = a.get(name)
        found[name] = other if one is None else Spread(
            min(one.least, other.least), one.total + other.total, max(one.most, other.most), one.number + other.number
        )  # fmt: skip
    return found

"""Curves over time: points for charts, and their history, bounded by merging neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from workbench.feed import Bucket, Total

POINTS: Final = 600


class SeriesPoint(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks in `[start, start + width)`; step times in s: of the fastest rank, the mean, of the slowest."""

    start: float
    width: float
    step: int
    samples_per_s: float
    tokens_per_s: float
    fastest: float
    step_time: float
    slowest: float
    loss: float | None
    learning_rate: float | None = None


class RankPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One rank in `[start, start + width)`."""

    start: float
    width: float
    step: int
    samples_per_s: float
    step_time: float
    loss: float | None


T = TypeVar("T", Bucket, Total)


class History(Generic[T]):
    """Buckets or totals in time, merged to coarser ones when there are too many."""

    def __init__(self, coarsen: Callable[[list[T], float], list[T]]) -> None:
        self.items: list[T] = []
        self._coarsen: Callable[[list[T], float], list[T]] = coarsen
        self._width = 1.0

    def extend(self, items: list[T]) -> None:
        self.items += items
        while len(self.items) > POINTS:
            self._width *= 2
            self.items = self._coarsen(self.items, self._width)


def point_of(total: Total, ranks: int) -> SeriesPoint:
    duration = total.duration or math.inf
    return SeriesPoint(
        start=total.start,
        width=total.width,
        step=total.last_step,
        samples_per_s=ranks * total.samples / duration,
        tokens_per_s=ranks * total.tokens / duration,
        fastest=total.fastest,
        step_time=total.duration / total.steps if total.steps else 0.0,
        slowest=total.slowest,
        loss=known(total.loss),
        learning_rate=total.learning_rate,
    )


def rank_point_of(bucket: Bucket) -> RankPoint:
    return RankPoint(
        start=bucket.start,
        width=bucket.width,
        step=bucket.last_step,
        samples_per_s=per_second(bucket, "samples"),
        step_time=bucket.duration / bucket.steps if bucket.steps else 0.0,
        loss=known(bucket.loss),
    )


def per_second(bucket: Bucket | None, name: str) -> float:
    return float(getattr(bucket, name)) / bucket.duration if bucket is not None and bucket.duration > 0 else 0.0


def known(value: float) -> float | None:
    return None if math.isnan(value) else value

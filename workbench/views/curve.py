"""What a loss curve does, told apart from noise: medians and median absolute deviations over windows, never means, so
that a single odd batch moves nothing. Pure; `views.loss` says what it comes of.

Rules, each of which clean curves must not meet:

- **grows**: the level of the last window lies above that of the first by `SURE` times the noise and by `NOTICED` of
  the level;
- **jumps**: it lies above the best level so far by `SURE` times the noise, by `NOTICED` of the level, and by `UNDONE`
  of what had been gained, and what lies between is short: a step, not a slope;
- **oscillates**: it swings, over the last windows, `WIDER` times as far as over the calmest earlier ones of the same
  length, by `SWING` of what had been gained, and gains nothing meanwhile; or it has swung by more than `ALL` of its
  level from the beginning, and gained nothing.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec

FEW: Final = 12  # points below which nothing is said
MOST: Final = 120  # points; more are merged, by medians
NORMAL: Final = 1.4826  # of a median absolute deviation, to be a standard deviation
SURE: Final = 8.0
NOTICED: Final = 0.1
UNDONE: Final = 0.5
WIDER: Final = 4.0
SWING: Final = 0.5
ALL: Final = 1.0
ENOUGH: Final = 60  # points by which a swing can be judged
SHORT: Final = 0.15  # of all points, in which a jump comes about


class LossPoint(msgspec.Struct, frozen=True):
    """The mean of all ranks' losses at a step, and those of ranks where they are known."""

    step: int
    loss: float
    ranks: Mapping[int, float] = {}


class Shape(enum.Enum):
    JUMPS = "jumped"
    GROWS = "grows"
    OSCILLATES = "oscillates"


class Anomaly(msgspec.Struct, frozen=True, kw_only=True):
    """`step`: since when. `before`, `now`: levels; of an oscillation, how far it swung and swings."""

    shape: Shape
    step: int
    before: float
    now: float
    noise: float


def find_anomaly(points: Sequence[LossPoint]) -> Anomaly | None:
    """The curve as it ends: what has been recovered from is no trouble any more."""
    kept = thinned(points)
    if len(kept) < FEW:
        return None
    values = [point.loss for point in kept]
    size = max(4, len(values) // 8)
    levels = [statistics.median(values[at : at + size]) for at in range(len(values) - size + 1)]
    noise = noise_of(values)
    return _jump(kept, levels, noise) or _growth(kept, levels, noise) or _oscillation(kept, values, levels, noise)


def thinned(points: Sequence[LossPoint], most: int = MOST) -> list[LossPoint]:
    """At most so many, each with the median of those that it stands for."""
    every = -(-len(points) // most)
    if every <= 1:
        return list(points)
    groups = [points[at : at + every] for at in range(0, len(points), every)]
    return [LossPoint(group[0].step, statistics.median(p.loss for p in group), _by_rank(group)) for group in groups]


def _by_rank(points: Sequence[LossPoint]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for point in points:
        for rank, loss in point.ranks.items():
            found.setdefault(rank, []).append(loss)
    return {rank: statistics.median(losses) for rank, losses in found.items()}


def noise_of(values: Sequence[float]) -> float:
    """Of one point, from differences of neighbours, so that a slope adds nothing."""
    steps = [b - a for a, b in pairwise(values)]
    return spread(steps) / 2**0.5


def spread(values: Sequence[float]) -> float:
    """A standard deviation that outliers do not move."""
    middle = statistics.median(values)
    return NORMAL * statistics.median(abs(value - middle) for value in values)


def _jump(points: Sequence[LossPoint], levels: Sequence[float], noise: float) -> Anomaly | None:
    best = min(range(len(levels)), key=levels.__getitem__)
    low, now = levels[best], levels[-1]
    needed = max(SURE * noise, NOTICED * abs(low), UNDONE * (levels[0] - low))
    if now - low <= needed:
        return None
    # Where it left the low level for good, and where it came to what it has now.
    bar = low + needed / 4
    left = next(at for at in range(len(points) - 1, -1, -1) if points[at].loss <= bar or at == 0)
    there = next((at for at in range(left, len(points)) if points[at].loss >= low + needed), len(points))
    if there - left > max(3, SHORT * len(points)) or left == 0:
        return None
    return Anomaly(shape=Shape.JUMPS, step=points[min(there, len(points) - 1)].step, before=low, now=now, noise=noise)


def _growth(points: Sequence[LossPoint], levels: Sequence[float], noise: float) -> Anomaly | None:
    first, now = levels[0], levels[-1]
    if now - first <= max(SURE * noise, NOTICED * abs(first)):
        return None
    best = min(range(len(levels)), key=levels.__getitem__)
    return Anomaly(shape=Shape.GROWS, step=points[best].step, before=levels[best], now=now, noise=noise)


def _oscillation(
    points: Sequence[LossPoint], values: Sequence[float], levels: Sequence[float], noise: float
) -> Anomaly | None:
    if len(values) < ENOUGH:
        return None
    length = len(values) // 3
    swings = [_swing(values[at : at + length]) for at in range(len(values) - length + 1)]
    earlier = max(1, len(swings) - length)
    calm, now = min(swings[:earlier]), swings[-1]
    gained, level = max(levels[0] - min(levels), 0.0), abs(levels[-1])
    is_wider = now > WIDER * calm and now > SWING * gained and now > NOTICED * level
    if is_wider and statistics.median(values[-length:]) >= min(levels[:earlier]) - now / 6:
        step = points[len(values) - length].step
        return Anomaly(shape=Shape.OSCILLATES, step=step, before=calm, now=now, noise=noise)
    if min(now, _swing(values)) > ALL * level and levels[-1] >= levels[0] - now / 6:
        return Anomaly(shape=Shape.OSCILLATES, step=points[0].step, before=now, now=now, noise=noise)
    return None


def _swing(values: Sequence[float]) -> float:
    """How far most of it lies apart, whatever its slope."""
    ordered = sorted(b - a for a, b in pairwise(values))
    return ordered[int(0.8 * (len(ordered) - 1))] - ordered[int(0.2 * (len(ordered) - 1))]

"""Which stored rows answer a question: pure choices over rows' keys (start, width), no database.

Every row of a wider tier repeats what rows of narrower tiers say, for as long as these are kept. An answer covers its
time once, as finely as asked where that is still there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

TIERS: Final = (1.0, 10.0, 60.0, 600.0, 3600.0, 86_400.0)  # widths kept, in s; each divides the next
_WIDER: Final = (*TIERS, 10 * 86_400.0, 100 * 86_400.0, 1e5 * 86_400.0)  # merged when asked, not kept
WORK: Final = 500_000  # buckets that one answer may unpack: some tenths of a second
FINE: Final = 10  # newest seconds that stay at 1 s where there is room


class Key(NamedTuple):
    """One stored row; `ranks` is how many buckets it holds."""

    start: float
    width: float
    ranks: int


class Plan(NamedTuple):
    """Fetch `keys`; fold what starts before `fine_from` to `width`, leave the rest as it is."""

    keys: list[Key]
    width: float
    fine_from: float


def choose(keys: Sequence[Key], width: float, until: float = math.inf) -> list[Key]:
    """Rows that cover the time of `keys` (sorted by start) once: the widest up to `width`, else wider ones.

    A wider row is taken only when it ends before the first of the finer ones: older ones have been deleted by then.
    """
    finest = min((key.start for key in keys if key.width <= width), default=math.inf)
    fitting = [
        key
        for key in keys
        if key.start + key.width <= until and (key.width <= width or key.start + key.width <= finest)
    ]
    fitting.sort(key=lambda key: (key.start, key.width > width, -key.width if key.width <= width else key.width))
    chosen: list[Key] = []
    reached = -math.inf
    for key in fitting:
        if key.start >= reached:
            chosen.append(key)
            reached = key.start + key.width
    return chosen


def plan(keys: Sequence[Key], *, ranks: int | None, most: int) -> Plan:
    """The finest answer of at most `most` buckets, but at least one a rank: recent seconds fine, the rest wider.

    Rows hold all ranks and are read whole: an answer about one of many ranks is as coarse as keeps that work bounded.

    `ranks`: how many ranks are asked for, None for all that there are.
    """
    if not keys:
        return Plan([], TIERS[0], math.inf)
    stored = max(key.ranks for key in keys)
    each = max(1, stored if ranks is None else ranks)
    everything = choose(keys, TIERS[0])
    if len(everything) * each <= most and len(everything) * stored <= WORK:
        return Plan(everything, TIERS[0], -math.inf)
    end = max(key.start + key.width for key in keys)
    newest = end - min(FINE, most // 2 // each)
    recent = [key for key in everything if key.start >= newest and key.width == TIERS[0]]
    fine_from = min((key.start for key in recent), default=math.inf)
    room = most - len(recent) * each
    for width in _WIDER:
        older = choose(keys, width, until=fine_from)
        spans = len({math.floor(key.start / width) for key in older})
        if spans * each <= room and len(older) * stored <= WORK:
            break
    return Plan(older + recent, width, fine_from)

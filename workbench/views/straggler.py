"""Where a rank's step time goes, and which rank keeps the others waiting.

In synchronous training every rank's step takes equally long, since the fast ones wait for the slow one inside the
collective. So ranks are compared by their *own work*: the step time less the wait for communication. A rank is named
when its own work takes at least `SLOWER` times the median of the other ranks' and the difference is worth `NOTICED` of
a step. Where waiting was not measured all ranks look alike, and nobody is named.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Final

from workbench.feed import Bucket
from workbench.views.buckets import PHASES
from workbench.views.wording import seconds

SLOWER: Final = 1.2
NOTICED: Final = 0.05
OWN: Final = tuple(name for name in PHASES if name != "comm")


def own_time(window: Bucket) -> float | None:
    """Seconds a step that the rank itself worked: all but waiting for communication. None without a step."""
    return max(0.0, window.duration - window.comm) / window.steps if window.steps else None


def shares(window: Bucket) -> dict[str, float]:
    """What part of the step time went where; what no probe saw is "other"."""
    parts = {name: float(getattr(window, name)) for name in PHASES}
    whole = max(window.duration, sum(parts.values()))
    if whole <= 0:
        return {}
    return {name: part / whole for name, part in parts.items()} | {"other": max(0.0, 1 - sum(parts.values()) / whole)}


def find_slowest(window: Mapping[int, Bucket], *, is_over: bool = False) -> tuple[int | None, str]:
    """The rank that keeps the others waiting, and why; see the module for the rule. `window`: recent steps by rank."""
    own = {rank: time for rank, bucket in window.items() if (time := own_time(bucket)) is not None}
    if len(own) < 2:
        return None, ""
    rank = max(own, key=lambda k: own[k])
    others = [k for k in own if k != rank]
    median = statistics.median(own[k] for k in others)
    step = statistics.fmean(window[k].duration / window[k].steps for k in own)
    if own[rank] < SLOWER * median or own[rank] - median < NOTICED * step:
        return None, ""
    more = {
        name: getattr(window[rank], name) / window[rank].steps
        - statistics.median(getattr(window[k], name) / window[k].steps for k in others)
        for name in OWN
    }
    name, excess = max(more.items(), key=lambda item: item[1])
    where = f", most of it in {name}" if excess > (own[rank] - median) / 2 else ""
    rest = "the other" if len(others) == 1 else "the others"
    works = "worked" if is_over else "works"
    return rank, f"rank {rank} {works} {seconds(own[rank])} a step by itself, {rest} {seconds(median)}{where}"

"""Which rank is so slow that it is to be named. Pure; it is told, and never ended for it.

Ranks are compared by their own part of a step: all but what they waited for others (see `views.straggler`). A window is
a second, or a step where that takes longer. A rank is named once its own part was `SLOWER` times the others' for `HELD`
windows more than it was not, so that a moment's noise, or a core that something else takes, names nobody.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Final

import msgspec

SLOWER: Final = 3.0
RECOVERED: Final = 2.0  # below so much it counts as being as fast as the others
NOTICED: Final = 0.05  # of the step that the difference must be worth
LEAST: Final = 0.002  # s: shorter differences are the scheduler's
HELD: Final = 5  # windows


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that takes `score` times the others' time for its own part of a step."""

    rank: int
    score: float
    reason: str


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """How many windows each rank was slow, less those in which it was not; who is named."""

    counts: dict[int, int] = {}
    named: tuple[int, ...] = ()


def advance(
    marks: Marks, own: Mapping[int, float], step: float, hosts: Mapping[int, str]
) -> tuple[Marks, tuple[Straggler, ...], tuple[int, ...]]:
    """One window more: new marks, who is to be named now, whose name is to be taken back.

    `own`: each rank's own part of a step in this window, s; `step`: the whole step, s; `hosts`: where each rank runs.
    """
    counts, named, gone = {}, [], []
    for rank, time in own.items():
        usual = _usual(own, rank, hosts)
        is_slow = time >= SLOWER * usual and time - usual >= max(LEAST, NOTICED * step)
        is_fast = time < RECOVERED * usual
        count = marks.counts.get(rank, 0) + (1 if is_slow else -1 if is_fast or rank not in marks.named else 0)
        counts[rank] = min(HELD, max(0, count))
        if counts[rank] == HELD and rank not in marks.named:
            named.append(Straggler(rank=rank, score=time / usual if usual else SLOWER, reason=""))
        elif counts[rank] == 0 and rank in marks.named:
            gone.append(rank)
    now_named = tuple(sorted({*marks.named, *(one.rank for one in named)} - set(gone)))
    told = tuple(_worded(one, own, hosts, now_named) for one in named)
    return Marks(counts=counts, named=now_named), told, tuple(gone)


def _usual(own: Mapping[int, float], rank: int, hosts: Mapping[int, str]) -> float:
    """The others' median: of other hosts where there are, since all of one host may be slow together."""
    elsewhere = [time for other, time in own.items() if hosts.get(other) != hosts.get(rank)]
    others = elsewhere or [time for other, time in own.items() if other != rank]
    if len({hosts.get(other) for other in own}) > 1:
        others = [min(statistics.median(elsewhere), _here(own, rank, hosts))]
    return statistics.median(others) if others else float("inf")


def _here(own: Mapping[int, float], rank: int, hosts: Mapping[int, str]) -> float:
    """The median of the other ranks of its host; infinite where it is alone there."""
    here = [time for other, time in own.items() if other != rank and hosts.get(other) == hosts.get(rank)]
    return statistics.median(here) if here else float("inf")


def _worded(one: Straggler, own: Mapping[int, float], hosts: Mapping[int, str], named: tuple[int, ...]) -> Straggler:
    here = [rank for rank in own if hosts.get(rank) == hosts.get(one.rank)]
    is_host = len(here) > 1 and len(here) < len(own) and set(here) <= set(named)
    where = f"; so do all ranks of host {hosts[one.rank]}" if is_host else ""
    reason = f"rank {one.rank} takes {one.score:.1f} times as long as the others for its own part of a step{where}"
    return Straggler(rank=one.rank, score=one.score, reason=reason)

"""Which ranks are slow: each against the fastest, and against itself at its best; and whether it is a host's doing.

A score of 1 is as fast as can be, 2 takes twice as long for its own part of a step (all but waiting for others).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from workbench.views.job import RankRow
from workbench.views.wording import ranks_text

SLOW: Final = 1.2  # a score from which a rank is pointed out
LEAST: Final = 0.001  # s that it must be worth


class Ranked(NamedTuple):
    """One rank. `to_fastest` and `to_itself` are scores; None: nothing to compare with."""

    rank: int
    host: str
    own_time: float
    to_fastest: float | None
    to_itself: float | None
    is_slow: bool


def ranking(rows: Sequence[RankRow], best: Mapping[int, float]) -> tuple[Ranked, ...]:
    """The ranks that have taken steps, the slowest first."""
    own = {row.rank: row.own_time for row in rows if row.own_time}
    if not own:
        return ()
    fastest, in_order = min(own.values()), sorted(own.values())
    made = [
        Ranked(
            rank=row.rank,
            host=host_of(row.worker),
            own_time=own[row.rank],
            to_fastest=own[row.rank] / fastest if len(own) > 1 else None,
            to_itself=own[row.rank] / best[row.rank] if best.get(row.rank) else None,
            is_slow=_is_slow(own[row.rank], in_order),
        )
        for row in rows
        if row.rank in own
    ]
    return tuple(sorted(made, key=lambda one: (-one.own_time, one.rank)))


def _is_slow(time: float, in_order: Sequence[float]) -> bool:
    """Against the median of the others: of two ranks, that of both lies between them and would point out neither."""
    own, (middle, is_odd) = bisect_left(in_order, time), divmod(len(in_order) - 1, 2)
    if len(in_order) < 2:
        return False
    last, first = (in_order[k + (k >= own)] for k in (middle, middle if is_odd else middle - 1))
    median = (first + last) / 2
    return time >= SLOW * median and time - median >= LEAST


def pattern(ranked: Sequence[Ranked], *, is_over: bool = False) -> str:
    """What the slow ones have in common, in a sentence."""
    slow = [one for one in ranked if one.is_slow]
    one_is, all_are = ("was", "were") if is_over else ("is", "are")
    if len(ranked) < 2:
        return f"There {one_is} no other rank to compare with." if ranked else ""
    if not slow:
        return f"No rank {'stood' if is_over else 'stands'} out."
    by_host: dict[str, list[Ranked]] = {}
    for one in ranked:
        by_host.setdefault(one.host, []).append(one)
    whole = [host for host, ranks in by_host.items() if len(ranks) > 1 and all(one.is_slow for one in ranks)]
    if len(by_host) > 1 and whole and all(one.host in whole for one in slow):
        return f"All ranks of {', '.join(whole)} {all_are} slow, and no others: look at that host."
    on = {one.host for one in slow}
    where = f" on {next(iter(on))}" if len(on) == 1 and len(by_host) > 1 else ""
    verb, rest = (one_is if len(slow) == 1 else all_are), "its other ranks" if where else "the others"
    return f"{ranks_text(one.rank for one in slow).capitalize()} {verb} slow{where}, {rest} {all_are} not."


def host_of(worker: str) -> str:
    """Of a worker's address; what is none is its own name."""
    return (urlsplit(worker).hostname or worker) if "://" in worker else worker

"""How well ranks scale: how much of their time is work of their own, and what takes the rest.

After the POP project's multiplicative metrics (pop-coe.eu, "POP Standard Metrics"): with each rank's own work for a
step (all but communication and waiting in it), load balance = mean / longest, communication efficiency = longest / step
time, and parallel efficiency = their product, mean / step time. It is what ranks reach of a throughput that grows with
their number; what a single rank would do is not measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from workbench.views.job import RankRow
from workbench.views.wording import percent


class Efficiency(NamedTuple):
    """Shares from 0 to 1."""

    parallel: float
    balance: float
    communication: float


def efficiency(rows: Sequence[RankRow]) -> Efficiency | None:
    """Of the ranks' last seconds; None for fewer than two ranks, or where communication was not seen."""
    known = [(row.own_time, row.step_time) for row in rows if row.own_time and row.step_time]
    if len(known) < 2 or not any(row.shares.get("comm") for row in rows):
        return None
    own = [time for time, _ in known if time]
    mean, longest = statistics.fmean(own), max(own)
    step = max(longest, statistics.fmean(time for _, time in known if time))
    return Efficiency(mean / step, mean / longest, longest / step)


def efficiency_text(found: Efficiency | None) -> str:
    """In a sentence; empty: not known."""
    if found is None:
        return ""
    return (
        f"scaling efficiency {percent(found.parallel)} = load balance {percent(found.balance)} × communication "
        f"{percent(found.communication)}"
    )

"""What ranks communicate: which collective each entered last (ranks in the same one are one line, and who is behind is
pointed out), how much by each kind of call, and how much of it the backward hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.views.job import RankRow
from workbench.views.wording import ranks_text, span


class Entered(NamedTuple):
    """Ranks whose last collective is the same. `seq`: its number in the default group, 0: it has none.

    `inside`: how many of them are in it now; `since`: the longest of those, s. `behind`: how many collectives they have
    still to enter before they are where the furthest are.
    """

    collective: str
    seq: int
    ranks: tuple[int, ...]
    inside: int
    since: float
    behind: int


class Sent(NamedTuple):
    """Calls of one kind: those of the mean rank in a step, and of all ranks since they began. Bytes as in `Traffic`."""

    name: str
    calls_per_step: float
    bytes_per_step: float
    bytes: int


def sent(rows: Sequence[RankRow]) -> tuple[Sent, ...]:
    """What was counted, the most bytes first."""
    steps = sum(row.counted for row in rows if row.traffic)
    totals: dict[str, tuple[int, int]] = {}
    for row in rows:
        for one in row.traffic:
            calls, size = totals.get(one.name, (0, 0))
            totals[one.name] = calls + one.calls, size + one.bytes
    made = [Sent(name, calls / max(steps, 1), size / max(steps, 1), size) for name, (calls, size) in totals.items()]
    return tuple(sorted(made, key=lambda one: (-one.bytes, one.name)))


def hidden(rows: Sequence[RankRow]) -> dict[int, float]:
    """By rank, the share of DDP's communication in which its backward still computes, where that was measured."""
    return {row.rank: row.hidden for row in rows if row.hidden is not None}


def entered(rows: Sequence[RankRow]) -> tuple[Entered, ...]:
    """The ranks that run, those behind first."""
    groups: dict[tuple[str, int], list[RankRow]] = {}
    for row in rows:
        if row.collective:
            groups.setdefault((row.collective, row.collective_seq), []).append(row)
    furthest = max((seq for _, seq in groups), default=0)
    made = [
        Entered(
            collective=name,
            seq=seq,
            ranks=tuple(row.rank for row in group),
            inside=sum(row.activity == "COLLECTIVE" for row in group),
            since=max((row.since for row in group if row.activity == "COLLECTIVE"), default=0.0),
            behind=furthest - seq if seq else 0,
        )
        for (name, seq), group in groups.items()
    ]
    return tuple(sorted(made, key=lambda one: (-one.behind, one.ranks)))


def odd_ones(found: Sequence[Entered], *, patience: float = 1.0) -> str:
    """Who keeps the others waiting in a collective for `patience` s, in a sentence; empty: nobody."""
    waiting = [one for one in found if one.inside and one.since >= patience and not one.behind]
    late = [one for one in found if one.behind]
    if not waiting or not late:
        return ""
    who = tuple(rank for one in late for rank in one.ranks)
    held = waiting[0]
    where = f"{held.collective} #{held.seq}" if held.seq else held.collective
    verb = "has" if len(who) == 1 else "have"
    return (
        f"{ranks_text(who).capitalize()} {verb} not entered {where}, in which {ranks_text(held.ranks)} "
        f"{'has' if len(held.ranks) == 1 else 'have'} waited for {span(held.since)}."
    )

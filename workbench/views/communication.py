"""Which collective each rank entered last: ranks in the same one are one line, and who is behind is pointed out."""

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

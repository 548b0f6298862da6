"""Many ranks' stacks as few groups: the same stack once, with the ranks that have it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from workbench.evidence import RankEvidence
from workbench.state import StackGroup

GROUPS: Final = 16
TEXT: Final = 6_000  # characters of one
WHOLE: Final = 40_000  # of all together: it becomes part of an event
OWN: Final = re.compile(r"^(Thread )\S+( \(.*\))", re.MULTILINE)  # a thread's number and how busy it was


def fold(ranks: Iterable[RankEvidence], culprits: tuple[int, ...]) -> tuple[StackGroup, ...]:
    """Groups with a culprit first, then the larger ones; what does not fit is left out."""
    groups: dict[str, list[RankEvidence]] = {}
    for rank in ranks:
        if rank.stack:
            groups.setdefault(OWN.sub(r"\1", rank.stack), []).append(rank)
    ordered = sorted(groups.values(), key=lambda group: (not _has(group, culprits), -len(group), group[0].rank))
    folded, left = [], WHOLE
    for group in ordered[:GROUPS]:
        text = _text(group)[: min(TEXT, left)]
        left -= len(text)
        if text:
            folded.append(StackGroup(ranks=tuple(sorted(rank.rank for rank in group)), text=text))
    return tuple(folded)


def _has(group: list[RankEvidence], culprits: tuple[int, ...]) -> bool:
    return any(rank.rank in culprits for rank in group)


def _text(group: list[RankEvidence]) -> str:
    children = [
        f"process {child.pid}, started by rank {rank.rank}:\n{child.stack}" for rank in group for child in rank.children
    ]
    return "\n".join([group[0].stack, *children[:2]])

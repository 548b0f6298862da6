"""Who waits for whom: which ranks are in which collective of which group, and who has not entered it. Pure.

By torch's Flight Recorder where the ranks answer, else by their black boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from workbench.evidence import Entered, GroupEvidence, RankEvidence

SHAPED: Final = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "allreduce")  # every rank gives as much
LISTED: Final = 8  # ranks named in one sentence


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """All that a rule may look at. `limit`: the job's patience in s, `finished`: ranks that have ended well."""

    ranks: tuple[RankEvidence, ...]  # that still run, in order
    limit: float
    finished: tuple[int, ...] = ()

    def of(self, numbers: Iterable[int]) -> tuple[RankEvidence, ...]:
        wanted = set(numbers)
        return tuple(rank for rank in self.ranks if rank.rank in wanted)


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """One collective that ranks wait in, and the group's members that have not entered it."""

    group: str = ""
    collective: str = ""
    seq: int = 0
    where: str = ""  # of which group, in words
    waiting: tuple[RankEvidence, ...] = ()
    absent: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return f"{self.collective} (collective {self.seq}{self.where})" if self.collective else "a collective"

    @property
    def clause(self) -> str:
        if not self.waiting:
            return ""
        return f"; {names(self.waiting)} {'waits' if len(self.waiting) == 1 else 'wait'} in {self.text}"

    @property
    def evidence(self) -> tuple[str, ...]:
        if not self.waiting:
            return ()
        return (f"{names(self.waiting)} entered {self.text} {self.waiting[0].age:.1f} s ago",)


def waited_for(case: Case, blamed: set[int] | None) -> Waits:
    """The collective that most ranks wait in, of those with someone absent where there is one."""
    found = all_waits(case)
    if blamed is not None:
        found = [waits for waits in found if blamed & set(waits.absent)] or found
    return max(found, key=lambda waits: (bool(waits.absent), len(waits.waiting)), default=Waits())


def all_waits(case: Case) -> list[Waits]:
    by_group = [_group_waits(case, name, members) for name, members in groups_of(case).items()]
    found = [waits for waits in by_group if waits is not None]
    return found or _box_waits(case)


def _group_waits(case: Case, name: str, members: dict[int, GroupEvidence]) -> Waits | None:
    pending = {number: group.completed + 1 for number, group in members.items() if group.entered > group.completed}
    if not pending:
        return None
    seq = min(pending.values())
    waiting = case.of(number for number, first in pending.items() if first == seq)
    known = next((group.ranks for group in members.values() if group.ranks), ())
    everyone = known or tuple(sorted({*numbers(case.ranks), *case.finished}))
    silent = {rank.rank for rank in case.ranks if rank.missing}
    # One that cannot answer, since it holds the interpreter, is not inside: a collective lets go of it.
    entered = {number for number, group in members.items() if group.entered >= seq} | silent
    text = next(
        (
            one.text
            for number in pending
            for one in members[number].last
            if one.seq == seq and number in numbers(waiting)
        ),
        waiting[0].collective if waiting else "",
    )
    return Waits(
        group=name,
        collective=text,
        seq=seq,
        where=group_text(name, members),
        waiting=waiting,
        absent=tuple(number for number in everyone if number not in entered),
    )


def _box_waits(case: Case) -> list[Waits]:
    waiting = [rank for rank in case.ranks if waits_by_box(rank)]
    if not waiting:
        return []
    seq = max(rank.collective_seq for rank in waiting)
    inside = [rank for rank in waiting if rank.collective_seq == seq]
    absent = [
        rank.rank for rank in case.ranks if rank not in inside and not rank.missing and rank.collective_seq <= seq
    ]
    return [
        Waits(
            collective=inside[0].collective,
            seq=seq,
            waiting=tuple(inside),
            absent=tuple(sorted({*absent, *case.finished})),
        )
    ]


def waits_by_box(rank: RankEvidence) -> bool:
    """In a collective of the default group: others have no number by which ranks could be compared."""
    return rank.activity == "COLLECTIVE" and rank.collective_seq > 0 and not is_stopped(rank)


def groups_of(case: Case) -> dict[str, dict[int, GroupEvidence]]:
    """What each rank that answered says of each group, by the group's name."""
    found: dict[str, dict[int, GroupEvidence]] = {}
    for rank in case.ranks:
        for group in rank.groups:
            found.setdefault(f"{group.name} {group.ranks}", {})[rank.rank] = group
    return found


def group_text(name: str, members: dict[int, GroupEvidence]) -> str:
    number, ranks = name.partition(" ")[0], next(iter(members.values())).ranks
    return "" if number == "0" else f" of the group of ranks {', '.join(map(str, ranks[:LISTED]))}"


def shape(one: Entered) -> tuple[str, int, str]:
    """What must be the same on every rank."""
    return (one.op, one.numel, one.dtype) if one.op in SHAPED else (one.op, 0, "")


def parse(text: str, seq: int) -> Entered:
    """`all_reduce[1024 float32]` of a black box."""
    op, _, given = text.rstrip("]").partition("[")
    numel, _, dtype = given.partition(" ")
    return Entered(seq, op, int(numel) if numel.isdecimal() else 0, dtype)


def is_stopped(rank: RankEvidence) -> bool:
    return rank.state in ("T", "t")


def numbers(ranks: Iterable[RankEvidence]) -> tuple[int, ...]:
    return tuple(rank.rank for rank in ranks)


def names(ranks: Sequence[RankEvidence], known: tuple[int, ...] = ()) -> str:
    several = known or numbers(ranks)
    more = f" and {len(several) - LISTED} more" if len(several) > LISTED else ""
    return f"{'rank' if len(several) == 1 else 'ranks'} {', '.join(map(str, several[:LISTED]))}{more}"

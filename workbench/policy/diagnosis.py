"""Why a job does not get on: which rank is to blame, where, in which collective. Pure: evidence in, a `Stall` out.

In a collective every rank stops, so who stands still says little. The culprit is the rank that did not do what the
others wait for, told from who has entered which collective of which group (torch's Flight Recorder where the rank
answers, else its black box); what that rank does instead tells the kind. The rules are a table, tried in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec

from workbench.evidence import Entered, RankEvidence
from workbench.policy.doing import at_line, at_step, child_words, doing_now, instead, main_thread
from workbench.policy.waits import (
    LISTED,
    Case,
    Waits,
    all_waits,
    group_text,
    groups_of,
    is_stopped,
    names,
    numbers,
    parse,
    shape,
    waited_for,
    waits_by_box,
)
from workbench.state import Stall, StallKind

JOINING: Final = ("init_process_group", "new_group", "split_group")
CHECK: Final = "training/consistency/room.py"  # in the stack of a rank that is compared with the others
EXCUSES: Final = (  # what a rank may take its time for in the middle of a run: frame, what it is, s
    ("/pdb.py:", "it is in a debugger", float("inf")),
    ("/bdb.py:", "it is in a debugger", float("inf")),
    ("torch/_dynamo/", "torch.compile compiles", 300.0),
    ("torch/_inductor/", "torch.compile compiles", 300.0),
    ("torch/distributed/checkpoint/", "it saves or loads a checkpoint", 120.0),
    ("torch/serialization.py:", "it saves or loads a file", 120.0),
    ("safetensors/", "it saves or loads a file", 120.0),
    ("huggingface_hub/", "it loads from a hub", 120.0),
    ("torch/hub.py:", "it loads from a hub", 120.0),
)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A rule's finding. `culprits`: ranks to blame; `suspects`: those among which it cannot tell."""

    kind: StallKind
    reason: str
    culprits: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()
    collective: str = ""
    seq: int = 0
    evidence: tuple[str, ...] = ()


Rule: TypeAlias = Callable[[Case], Verdict | None]


def diagnose(
    ranks: Sequence[RankEvidence], *, limit: float, finished: tuple[int, ...] = (), blamed_only: bool = False
) -> Verdict | None:
    """The first rule that fits; None when the job gets on after all, or may take its time.

    `limit`: how long a rank may stand still, s. `blamed_only`: nothing is said unless a rank can be blamed.
    """
    case = Case(ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)), limit=limit, finished=finished)
    if not any(rank.age >= limit for rank in case.ranks):
        return None
    verdict = next(verdict for rule in RULES if (verdict := rule(case)) is not None)
    if blamed_only and not (verdict.culprits or verdict.suspects):
        return None
    return None if is_excused(case, verdict) else verdict


def mismatch_of(ranks: Sequence[RankEvidence]) -> Verdict | None:
    """Who entered another collective than the others, where they did."""
    return _mismatch(Case(ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)), limit=0.0))


def is_excused(case: Case, verdict: Verdict) -> bool:
    """Whether those to blame get on, or do what may take long; the others have not waited too long for them yet."""
    blamed = case.of(verdict.culprits or verdict.suspects)
    waited = max(rank.age for rank in case.ranks)
    if blamed and all(rank.age < case.limit / 2 and not (rank.missing or is_stopped(rank)) for rank in blamed):
        return waited < max(30.0, 10.0 * case.limit)
    return any(waited < seconds for rank in blamed for frame, _, seconds in EXCUSES if frame in main_thread(rank.stack))


_ORDER: Final = (StallKind.DATA, StallKind.BUSY, StallKind.RETURNED, StallKind.ABSENT)


# --- the rules --------------------------------------------------------------------------------------------------------


def _stopped(case: Case) -> Verdict | None:
    stopped = [rank for rank in case.ranks if is_stopped(rank)]
    if not stopped:
        return None
    waits = waited_for(case, {rank.rank for rank in stopped})
    return Verdict(
        kind=StallKind.STOPPED,
        culprits=numbers(stopped),
        reason=f"{names(stopped)} stopped by a signal (SIGSTOP){at_step(stopped[0])}{waits.clause}",
        collective=waits.collective,
        seq=waits.seq,
        evidence=tuple(f"/proc says that process {rank.pid} of rank {rank.rank} is stopped" for rank in stopped),
    )


def _not_started(case: Case) -> Verdict | None:
    joining = [rank for rank in case.ranks if rank.activity == "COLLECTIVE" and rank.collective in JOINING]
    others = [rank for rank in case.ranks if rank not in joining and not rank.missing]
    away = (
        [rank for rank in others if not rank.groups and rank.collective_seq <= joining[0].collective_seq]
        if joining
        else []
    )
    if not away or joining[0].collective != JOINING[0]:
        return None
    return Verdict(
        kind=StallKind.NOT_STARTED,
        culprits=numbers(away),
        reason=f"{names(away)} did not join the process group{at_line(away[0])}, {names(joining)} "
        f"{'waits' if len(joining) == 1 else 'wait'} in init_process_group",
        collective=JOINING[0],
        seq=joining[0].collective_seq,
        evidence=(*map(doing_now, away),),
    )


def _mismatch(case: Case) -> Verdict | None:
    """Ranks that have given the same number of a group to different collectives."""
    for name, members in groups_of(case).items():
        entered = {number: {one.seq: one for one in group.last} for number, group in members.items()}
        for seq in sorted({seq for several in entered.values() for seq in several}):
            here = {number: several[seq] for number, several in entered.items() if seq in several}
            if len({shape(one) for one in here.values()}) > 1:
                return _odd_one(case, here, seq, group_text(name, members), _skipped(entered, here, seq))
    return _mismatch_by_box(case)


def _mismatch_by_box(case: Case) -> Verdict | None:
    """By the black boxes, where ranks do not answer."""
    waiting = [rank for rank in case.ranks if waits_by_box(rank) and not rank.groups]
    if len(waiting) < 2 or len({rank.collective_seq for rank in waiting}) > 1:
        return None
    here = {rank.rank: parse(rank.collective, rank.collective_seq) for rank in waiting}
    if len({shape(one) for one in here.values()}) < 2:
        return None
    return _odd_one(case, here, waiting[0].collective_seq, "", ())


def _odd_one(case: Case, here: dict[int, Entered], seq: int, group: str, skipped: tuple[int, ...]) -> Verdict:
    """The majority is right; where there is none it cannot be told who is."""
    shapes = Counter(shape(one) for one in here.values())
    (most, count), *rest = shapes.most_common()
    is_tie = bool(rest) and rest[0][1] == count
    odd = tuple(number for number, one in here.items() if shape(one) != most)
    usual = next(one for one in here.values() if shape(one) == most)
    evidence = tuple(
        f"rank {number} gave {one.text} as collective {seq}{group}{_line(case, number)}" for number, one in here.items()
    )
    if is_tie:
        texts = " and ".join(f"{one.text} by rank {number}" for number, one in list(here.items())[:LISTED])
        which = "which of the two is wrong" if len(here) == 2 else "who is wrong"
        return Verdict(
            kind=StallKind.MISMATCH,
            suspects=tuple(here),
            reason=f"the ranks disagree on collective {seq}{group}: {texts}; it cannot be told {which}",
            collective=usual.text,
            seq=seq,
            evidence=evidence,
        )
    what = f"skipped {usual.text}" if set(odd) <= set(skipped) else f"entered {here[odd[0]].text}"
    return Verdict(
        kind=StallKind.ABSENT if set(odd) <= set(skipped) else StallKind.MISMATCH,
        culprits=odd,
        reason=f"{names(case.of(odd), odd)} {what}, the others entered {usual.text} (collective {seq}{group})"
        + _where_of(case, odd),
        collective=usual.text,
        seq=seq,
        evidence=evidence,
    )


def _skipped(entered: dict[int, dict[int, Entered]], here: dict[int, Entered], seq: int) -> tuple[int, ...]:
    """Ranks whose collectives from `seq` on are those that some other rank entered one later."""
    found = []
    for number in here:
        mine = [shape(one) for at, one in sorted(entered[number].items()) if at >= seq]
        for other in here:
            theirs = [shape(one) for at, one in sorted(entered[other].items()) if at > seq]
            overlap = min(len(mine), len(theirs))
            if other != number and overlap and mine[:overlap] == theirs[:overlap]:
                found.append(number)
                break
    return tuple(found)


def _absent(case: Case) -> Verdict | None:
    """Ranks that have not entered a collective in which others of its group wait."""
    waits = waited_for(case, None)
    if not waits.absent:
        return None
    here = set(numbers(case.ranks))
    gone = tuple(number for number in waits.absent if number not in here and number in case.finished)
    if gone:
        return _returned(case, gone, waits)
    away = case.of(waits.absent)
    if not away:
        return None
    crossed = _crossed(case, waits)
    if crossed:
        return crossed
    kind, doing = instead(away[0])
    return Verdict(
        kind=kind,
        culprits=numbers(away),
        reason=f"{names(away)} did not enter {waits.text}{at_step(away[0])}: {doing}{at_line(away[0])}"
        f"; {names(waits.waiting)} {'waits' if len(waits.waiting) == 1 else 'wait'} in it",
        collective=waits.collective,
        seq=waits.seq,
        evidence=(*map(doing_now, away), *child_words(away), *waits.evidence),
    )


def _returned(case: Case, gone: tuple[int, ...], waits: Waits) -> Verdict:
    return Verdict(
        kind=StallKind.RETURNED,
        culprits=gone,
        reason=f"{names((), gone)} ended while the others go on: {names(waits.waiting)} "
        f"{'waits' if len(waits.waiting) == 1 else 'wait'} in {waits.text}",
        collective=waits.collective,
        seq=waits.seq,
        evidence=(f"{names((), gone)} ended with exit code 0", *waits.evidence),
    )


def _crossed(case: Case, waits: Waits) -> Verdict | None:
    """Ranks that are absent from one group's collective because they wait in another's, where these are absent."""
    held = [other for other in all_waits(case) if other.group != waits.group]
    for other in held:
        mine, theirs = set(numbers(waits.waiting)), set(numbers(other.waiting))
        if theirs & set(waits.absent) and mine & set(other.absent):
            for ahead, behind in ((other, waits), (waits, other)):
                if all(map(_is_compared, ahead.waiting)) and not any(map(_is_compared, behind.waiting)):
                    return _left_out(ahead, behind)
            both = case.of(mine | theirs)
            return Verdict(
                kind=StallKind.DEADLOCK,
                culprits=numbers(both),
                reason=f"deadlock of two process groups: {names(waits.waiting)} in {waits.text}, "
                f"{names(other.waiting)} in {other.text}; each waits for the other{at_line(both[0])}",
                collective=waits.collective,
                seq=waits.seq,
                evidence=(*waits.evidence, *other.evidence),
            )
    return None


def _is_compared(rank: RankEvidence) -> bool:
    """It is in the check of replicas, which comes when all gradients of a step have been reduced."""
    return CHECK in rank.stack


def _left_out(ahead: Waits, behind: Waits) -> Verdict:
    """Ranks that are compared already wait for some that still reduce: each of their collectives met a later one."""
    return Verdict(
        kind=StallKind.ABSENT,
        culprits=numbers(ahead.waiting),
        reason=f"{names(ahead.waiting)} skipped a collective since replicas were last compared, and has reduced with "
        f"another step's gradients of the others from then on: it has all of this step's, and {names(behind.waiting)} "
        f"{'waits' if len(behind.waiting) == 1 else 'wait'} in {behind.text}{at_line(behind.waiting[0])}",
        collective=behind.collective,
        seq=behind.seq,
        evidence=(*behind.evidence, *ahead.evidence),
    )


def _alone(case: Case) -> Verdict | None:
    """Nobody waits in a numbered collective: those that stand still do so by themselves, or wait point to point."""
    old = [rank for rank in case.ranks if rank.age >= case.limit and not rank.missing]
    if not old or waited_for(case, None).waiting:
        return None
    waiting = [rank for rank in old if rank.activity == "COLLECTIVE"]
    mine = [rank for rank in case.ranks if rank not in waiting and not rank.missing] if waiting else old
    if not mine:
        return _waiting_in_a_ring(waiting)
    kind, doing = min((instead(rank) for rank in mine), key=lambda found: _ORDER.index(found[0]))
    mine = [rank for rank in mine if instead(rank)[0] is kind]
    if kind is StallKind.ABSENT and not waiting:
        kind = StallKind.UNKNOWN
    theirs = (
        f"; {names(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in {waiting[0].collective}" if waiting else ""
    )
    does = "does" if len(mine) == 1 else "do"
    return Verdict(
        kind=kind,
        culprits=numbers(mine),
        reason=f"{names(mine)} {does} not get on{at_step(mine[0])}: {doing}{at_line(mine[0])}{theirs}",
        collective=waiting[0].collective if waiting else "",
        evidence=(*map(doing_now, mine), *child_words(mine)),
    )


def _waiting_in_a_ring(waiting: Sequence[RankEvidence]) -> Verdict:
    """Each in a call of its own that has no number: sends and receives, collectives of other groups."""
    calls = ", ".join(f"rank {rank.rank} in {rank.collective}" for rank in waiting[:LISTED])
    is_alone = len(waiting) == 1
    return Verdict(
        kind=StallKind.UNKNOWN if is_alone else StallKind.DEADLOCK,
        culprits=numbers(waiting),
        reason=f"{calls}, which does not end" if is_alone else f"the ranks wait for each other: {calls}",
        collective=waiting[0].collective,
        evidence=tuple(map(doing_now, waiting)),
    )


def _all_inside(case: Case) -> Verdict | None:
    """All wait in the same collective, and nothing is wrong that could be seen."""
    waits = waited_for(case, None)
    unknown = [rank for rank in case.ranks if rank.missing]
    if unknown:
        reason = f"{names(unknown)} cannot be looked at: {unknown[0].missing}"
    elif waits.waiting:
        reason = f"all ranks are in {waits.text}, which does not end: the network, or a transport, may be to blame"
    else:
        reason = "the ranks do not get on, and nothing shows why"
    return Verdict(
        kind=StallKind.UNKNOWN,
        culprits=numbers(unknown),
        reason=reason,
        collective=waits.collective,
        seq=waits.seq,
        evidence=tuple(map(doing_now, case.ranks[:LISTED])),
    )


RULES: Final[tuple[Rule, ...]] = (_stopped, _not_started, _mismatch, _absent, _alone, _all_inside)


# --- what the others need ---------------------------------------------------------------------------------------------


def _line(case: Case, number: int) -> str:
    where = next((rank.where for rank in case.of((number,))), "")
    return f", {where}" if where else ""


def _where_of(case: Case, numbers: tuple[int, ...]) -> str:
    return _line(case, numbers[0]) if numbers else ""


def where_to_look(verdict: Verdict, ranks: Sequence[RankEvidence]) -> str:
    """The first blamed rank's line: `train.py:41 in load`."""
    blamed = verdict.culprits or verdict.suspects
    first = next((rank for rank in ranks if rank.rank in blamed[:1]), None)
    return at_line(first).removeprefix(" at ") if first is not None else ""


def as_stall(verdict: Verdict, ranks: Sequence[RankEvidence], *, since: float) -> Stall:
    """The verdict with its place and step; `since`: epoch s when the job last got on. Stacks are the caller's."""
    blamed = verdict.culprits or verdict.suspects
    steps = [rank.step for rank in ranks if rank.rank in blamed] or [rank.step for rank in ranks if not rank.missing]
    return Stall(
        kind=verdict.kind,
        ranks=verdict.culprits,
        reason=verdict.reason,
        since=since,
        step=min(steps, default=0) or None,
        collective=verdict.collective,
        collective_seq=verdict.seq,
        where=where_to_look(verdict, ranks),
        evidence=verdict.evidence,
    )

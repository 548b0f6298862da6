"""What was found about replicas, one thing at a time, as it is shown: from the events that tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from workbench.events import DataDoubted, GradientMismatched, GradientsStoodOut, ReplicasRepaired
from workbench.findings import Finding, Severity
from workbench.state import Side
from workbench.views.wording import plural, ranks_text

TOLD: Final = 3  # at a time, the newest
UNKNOWN: Final = ("", "look at what ranks do differently")  # cause and advice in a record that has none


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was told. `is_good`: it tells that something is right again. `ranks`: who are meant, if known."""

    finding: Finding
    time: float
    restart_count: int
    ranks: tuple[int, ...] = ()
    sides: tuple[Side, ...] = ()
    is_good: bool = False

    @property
    def step(self) -> int | None:
        return self.finding.step


def of_mismatch(event: GradientMismatched) -> Found:
    return Found(
        finding=finding_of(event), time=event.time, restart_count=event.restart_count, ranks=event.mismatch.ranks,
        sides=event.mismatch.sides,
    )  # fmt: skip


def finding_of(event: GradientMismatched | DataDoubted) -> Finding:
    """The event's; of a record that has none, what the event itself says."""
    if event.finding is not None:
        return event.finding
    if isinstance(event, DataDoubted):
        text = f"something is odd about the data that {ranks_text(event.doubt.ranks)} read: {event.doubt.about.value}"
    else:
        who = ranks_text(event.mismatch.ranks) if event.mismatch.ranks else "ranks"
        text = f"{who} differ in {event.mismatch.compared.value}"
    cause, advice = UNKNOWN
    return Finding(symptom=text, cause=cause, advice=advice, severity=Severity.ERROR, step=event.step)


def of_repair(event: ReplicasRepaired) -> Found:
    what = f"{ranks_text(event.ranks)}: {plural(event.tensors, 'tensor')} put right, bit for bit"
    finding = Finding(
        symptom=f"{what}, with what rank {event.source} has", cause="", advice="", severity=Severity.NOTICE,
        step=event.step,
    )  # fmt: skip
    return Found(finding=finding, time=event.time, restart_count=event.restart_count, ranks=event.ranks, is_good=True)


def of_doubt(event: DataDoubted) -> Found:
    finding = finding_of(event)
    return Found(finding=finding, time=event.time, restart_count=event.restart_count, ranks=event.doubt.ranks)


def of_standing(event: GradientsStoodOut) -> Found:
    return Found(finding=event.finding, time=event.time, restart_count=event.restart_count, ranks=event.ranks)


def current(found: Sequence[Found], restart_count: int) -> list[Found]:
    """Of `found`, the newest first: what is to be told of this generation, each cause once a rank, the newest time.

    Notices are for those who look for them; what was put right afterwards is a warning, not an error.
    """
    told: dict[tuple[str, tuple[int, ...]], Found] = {}
    repaired = -1
    for one in found:
        if one.restart_count != restart_count:
            continue
        key = one.finding.cause, one.ranks
        if one.is_good:
            repaired = max(repaired, one.step or 0)
        elif one.finding.severity is not Severity.NOTICE and key not in told:
            is_right = one.sides and (one.step or 0) <= repaired
            told[key] = _put_right(one) if is_right else one
    return list(told.values())[:TOLD]


def _put_right(one: Found) -> Found:
    evidence = (*one.finding.evidence, "it was repaired: all ranks have the same again")
    finding = msgspec.structs.replace(one.finding, severity=Severity.WARNING, evidence=evidence)
    return msgspec.structs.replace(one, finding=finding)

"""What was found about replicas, one thing at a time, as it is shown: from the events that tell it."""

from __future__ import annotations

import msgspec

from workbench.events import DataDoubted, GradientsStoodOut, ReplicasRepaired
from workbench.state import DataAbout, Side
from workbench.views.wording import plural, ranks_text


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was told. `tone`: "bad", "warn", "good" or "muted"; `kind`: a few words."""

    step: int
    time: float
    tone: str
    kind: str
    sentence: str
    evidence: tuple[str, ...] = ()
    fix: str = ""
    sides: tuple[Side, ...] = ()


def of_repair(event: ReplicasRepaired) -> Found:
    what = f"{ranks_text(event.ranks)}: {plural(event.tensors, 'tensor')} put right, bit for bit"
    return Found(
        step=event.step, time=event.time, tone="good", kind="repaired",
        sentence=f"step {event.step}: {what}, with what rank {event.source} has",
    )  # fmt: skip


def of_doubt(event: DataDoubted) -> Found:
    """The same random numbers are so common, and so often meant, that only who looks for it is told."""
    quiet = event.doubt.about is DataAbout.RANDOM
    tone = "bad" if event.is_certain else "muted" if quiet else "warn"
    return Found(
        step=event.step, time=event.time, tone=tone, kind=event.cause, sentence=event.sentence,
        evidence=event.evidence, fix=event.fix,
    )  # fmt: skip


def of_standing(event: GradientsStoodOut) -> Found:
    found = event.finding
    return Found(
        step=event.step, time=event.time, tone="warn",
        kind="a rank stands out" if event.score else "ranks are not alike",
        sentence=f"step {event.step}: {found.symptom}; likely {found.cause}", evidence=found.evidence,
        fix=found.advice,
    )  # fmt: skip


def found_text(found: Found) -> str:
    """A finding with its advice, in one line."""
    return f"{found.sentence}; {found.fix}" if found.fix else found.sentence

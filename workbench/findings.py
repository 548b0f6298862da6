"""A finding: what was seen, what speaks for it, what is likely behind it, and what to do. Data only."""

from __future__ import annotations

import enum
import re

import msgspec


class Severity(enum.Enum):
    """`NOTICE`: may be on purpose. `WARNING`: results suffer. `ERROR`: what comes of it is wrong or lost."""

    NOTICE = "notice"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Each text is one sentence without its full stop; `evidence` may hold several, the most telling first.

    `step`, `rank`: where it was seen first, where that can be told.
    """

    symptom: str
    cause: str
    advice: str
    evidence: tuple[str, ...] = ()
    severity: Severity = Severity.WARNING
    step: int | None = None
    rank: int | None = None

    def dated(self) -> str:
        """The symptom with its step, where it does not say that itself."""
        says = self.step is None or re.search(rf"\bstep {self.step}\b", self.symptom)
        return self.symptom if says else f"step {self.step}: {self.symptom}"

    def lines(self) -> list[str]:
        """As a person reads it."""
        evidence = [f"evidence: {'; '.join(self.evidence)}"] if self.evidence else []
        return [self.dated(), *evidence, *self.remedy()]

    def line(self) -> str:
        """The same in one, without the evidence."""
        return "; ".join([self.dated(), *self.remedy()])

    def remedy(self) -> list[str]:
        """The same where symptom and evidence stand already."""
        told = (("likely cause", self.cause), ("what to do", self.advice))
        return [f"{name}: {text}" for name, text in told if text]

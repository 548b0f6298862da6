"""Whether replicas agreed, folded from a job's record: ranks by time, what was found, what is checked how often.

Bounded, whatever the job's length: columns of time are joined two by two when they are too many, and of a column only
those ranks are kept that did not agree. Ranks with the same story share a lane when there are many.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from workbench.events import (
    ConsistencyPaced,
    DataDoubted,
    Event,
    GradientMismatched,
    GradientsStoodOut,
    ReplicasRepaired,
)
from workbench.state import Mismatch, Side
from workbench.telemetry import Check, ConsistencyReport
from workbench.views.found import Found, of_doubt, of_mismatch, of_repair, of_standing
from workbench.views.statistics import StatisticsBuilder, StatisticsView
from workbench.views.wording import count, percent, plural, ranks_text

COLUMNS: Final = 96
FINDINGS: Final = 20
WORST: Final = 8
SINGLY: Final = 32  # ranks up to which each has a lane
LANES: Final = 12  # of ranks with the same story


class Agreement(enum.Enum):
    """What a rank's replica was in a stretch of time. The value is the mark that stands for it in text."""

    UNCHECKED = "·"
    AGREES = "✓"
    REPAIRED = "↻"
    UNCLEAR = "?"
    DEVIATES = "✗"


WORDS: Final[Mapping[Agreement, str]] = {
    Agreement.UNCHECKED: "not checked",
    Agreement.AGREES: "agrees",
    Agreement.REPAIRED: "deviated, repaired",
    Agreement.UNCLEAR: "ranks differ, nobody can be named",
    Agreement.DEVIATES: "deviates",
}
_ORDER: Final = tuple(Agreement)  # the last outweighs the others


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """A column: steps and epoch s. `others`: those of `ranks` that did not just agree."""

    start: float
    end: float
    first_step: int
    last_step: int
    checked: int
    ranks: tuple[int, ...]
    others: dict[int, Agreement] = {}

    def of(self, rank: int) -> Agreement:
        usual = Agreement.AGREES if self.checked and rank in self._known else Agreement.UNCHECKED
        return self.others.get(rank, usual)

    @property
    def _known(self) -> range | tuple[int, ...]:
        ranks = self.ranks
        is_run = bool(ranks) and ranks[-1] - ranks[0] + 1 == len(ranks)
        return range(ranks[0], ranks[-1] + 1) if is_run else ranks


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """What a column of the lanes stands for: epoch s, steps, and how many checks were made."""

    start: float
    end: float
    first_step: int
    last_step: int
    checked: int


class AgreementLane(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks whose replicas had the same story, one state a column."""

    ranks: tuple[int, ...]
    states: tuple[Agreement, ...]

    @property
    def label(self) -> str:
        return ranks_text(self.ranks)

    @property
    def worst(self) -> Agreement:
        return max(self.states, key=_ORDER.index, default=Agreement.UNCHECKED)


class WorstTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter, or another tensor, that differed. `times`: differences that named it first."""

    name: str
    times: int
    step: int  # of the last
    ranks: tuple[int, ...]
    deviation: float  # the largest absolute difference; 0: not measured
    relative: float  # the same over the tensor's RMS


class GradientsView(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a job's replicas. `share`: what checks cost of a step's time; `why_not`: why none are made."""

    checked: int = 0
    agreed: int = 0
    mismatches: int = 0
    repairs: int = 0
    doubts: int = 0
    odd: int = 0  # times that a rank's gradients stood out
    last_step: int = 0
    every: int = 0
    parts: int = 1
    tensors: int = 0
    share: float = 0.0
    why_not: str = ""
    digest: str = ""  # that all ranks had of their gradients at the last check
    sides: tuple[Side, ...] = ()  # who had which, at the last difference
    columns: tuple[Moment, ...] = ()
    lanes: tuple[AgreementLane, ...] = ()
    found: tuple[Found, ...] = ()  # the newest first
    worst: tuple[WorstTensor, ...] = ()
    statistics: StatisticsView = StatisticsView()

    @property
    def has_begun(self) -> bool:
        return bool(self.checked or self.found)


class GradientsBuilder:
    """Add a job's events and reports in order; `view` may be asked at any time."""

    def __init__(self) -> None:
        self._columns: list[Stretch] = []
        self._newest: dict[int, ConsistencyReport] = {}  # by optimizer
        self._paced: ConsistencyPaced | None = None
        self._found: list[Found] = []
        self._worst: dict[str, WorstTensor] = {}
        self._sides: tuple[Side, ...] = ()
        self._counts = dict.fromkeys(("checked", "agreed", "mismatches", "repairs", "doubts", "odd"), 0)
        self._statistics = StatisticsBuilder()

    # --- what comes in ---

    def add(self, events: Iterable[Event], reports: Iterable[Check] = ()) -> None:
        for event in events:
            match event:
                case GradientMismatched():
                    self._mismatched(event)
                case ReplicasRepaired():
                    self._counts["repairs"] += 1
                    self._tell(of_repair(event))
                case DataDoubted():
                    self._counts["doubts"] += 1
                    self._tell(of_doubt(event))
                case GradientsStoodOut():
                    self._counts["odd"] += 1
                    self._tell(of_standing(event))
                case ConsistencyPaced():
                    self._paced = event
        for report in reports:
            if isinstance(report, ConsistencyReport):
                self._report(report)
            else:
                self._statistics.add(report)

    def _mismatched(self, event: GradientMismatched) -> None:
        self._counts["mismatches"] += 1
        mismatch = event.mismatch
        self._sides = mismatch.sides
        self._tell(of_mismatch(event))
        for name in mismatch.tensors[:1]:
            self._worst[name] = _worse(self._worst.get(name), name, mismatch, event.step)
        if len(self._worst) > 4 * WORST:
            self._worst = {one.name: one for one in self._ranked()[: 2 * WORST]}

    def _tell(self, found: Found) -> None:
        self._found.append(found)
        del self._found[:-FINDINGS]

    def _report(self, report: ConsistencyReport) -> None:
        self._newest[report.optimizer] = report
        if len(self._newest) > COLUMNS:
            self._newest.pop(next(iter(self._newest)))
        self._counts["checked"] += report.checked
        self._counts["agreed"] += report.agreed
        made, last = stretch_of(report), self._columns[-1] if self._columns else None
        if last is not None and report.start < last.end and last.start < report.end:  # of another optimizer
            self._columns[-1] = join(last, made)
        else:
            self._columns.append(made)
        if len(self._columns) > COLUMNS:
            self._columns = halved(self._columns)

    # --- what it says ---

    def view(self) -> GradientsView:
        newest = max(self._newest.values(), key=lambda report: report.end, default=None)
        paced = self._paced
        every = newest.every if newest is not None else paced.every if paced is not None else 0
        return GradientsView(
            **self._counts,
            last_step=newest.last_step if newest is not None else 0,
            every=every,
            parts=newest.parts if newest is not None else paced.parts if paced is not None else 1,
            tensors=sum(report.tensors for report in self._newest.values()),
            share=sum(report.share for report in self._newest.values()),
            why_not=paced.reason if paced is not None and paced.every == 0 else "",
            digest=newest.digest if newest is not None and not newest.deviating and not newest.unclear else "",
            sides=self._sides,
            columns=tuple(Moment(c.start, c.end, c.first_step, c.last_step, c.checked) for c in self._columns),
            lanes=lanes_of(self._columns),
            found=tuple(reversed(self._found)),
            worst=tuple(self._ranked()[:WORST]),
            statistics=self._statistics.view(),
        )

    def _ranked(self) -> list[WorstTensor]:
        return sorted(self._worst.values(), key=lambda one: (-one.times, -one.relative, one.name))


# --- columns ----------------------------------------------------------------------------------------------------------


def stretch_of(report: ConsistencyReport) -> Stretch:
    state = Agreement.REPAIRED if report.repaired else Agreement.DEVIATES
    others = {rank: state for rank, _ in report.deviating}
    if report.unclear:
        others = {**dict.fromkeys(report.ranks, Agreement.UNCLEAR), **others}
    return Stretch(
        start=report.start, end=report.end, first_step=report.first_step, last_step=report.last_step,
        checked=report.checked, ranks=report.ranks, others=others,
    )  # fmt: skip


def join(one: Stretch, other: Stretch) -> Stretch:
    """Both as one; of a rank the worse of its two states."""
    others = dict(one.others)
    for rank, state in other.others.items():
        others[rank] = max(others.get(rank, state), state, key=_ORDER.index)
    ranks = one.ranks if one.ranks == other.ranks else tuple(sorted({*one.ranks, *other.ranks}))
    return Stretch(
        start=min(one.start, other.start), end=max(one.end, other.end),
        first_step=min(one.first_step, other.first_step), last_step=max(one.last_step, other.last_step),
        checked=one.checked + other.checked, ranks=ranks, others=others,
    )  # fmt: skip


def halved(columns: list[Stretch]) -> list[Stretch]:
    """Two by two; the newest stays as it is where they are odd."""
    pairs = [join(one, other) for one, other in zip(columns[::2], columns[1::2], strict=False)]
    return pairs + columns[2 * len(pairs) :]


def lanes_of(columns: list[Stretch]) -> tuple[AgreementLane, ...]:
    """A lane a rank; of many ranks those with the same story share one, the worst first, the rest in one lane."""
    ranks = sorted({rank for column in columns for rank in column.ranks})
    if len(ranks) <= SINGLY:
        return tuple(AgreementLane(ranks=(rank,), states=tuple(c.of(rank) for c in columns)) for rank in ranks)
    told = {rank for column in columns for rank in column.others}
    is_same = len({column.ranks for column in columns}) == 1
    stories: dict[tuple[Agreement, ...], list[int]] = {}
    usual = tuple(Agreement.AGREES if column.checked else Agreement.UNCHECKED for column in columns)
    for rank in ranks:
        story = usual if is_same and rank not in told else tuple(column.of(rank) for column in columns)
        stories.setdefault(story, []).append(rank)
    lanes = [AgreementLane(ranks=tuple(some), states=story) for story, some in stories.items()]
    lanes.sort(key=lambda lane: (-_ORDER.index(lane.worst), -lane.states.count(lane.worst), lane.ranks))
    if len(lanes) <= LANES:
        return tuple(lanes)
    kept, rest = lanes[: LANES - 1], lanes[LANES - 1 :]
    states = tuple(max((lane.states[n] for lane in rest), key=_ORDER.index) for n in range(len(columns)))
    return (*kept, AgreementLane(ranks=tuple(sorted(r for lane in rest for r in lane.ranks)), states=states))


def _worse(known: WorstTensor | None, name: str, mismatch: Mismatch, step: int) -> WorstTensor:
    return WorstTensor(
        name=name,
        times=(known.times if known else 0) + 1,
        step=step,
        ranks=tuple(sorted({*(known.ranks if known else ()), *mismatch.ranks})),
        deviation=max(known.deviation if known else 0.0, mismatch.deviation),
        relative=max(known.relative if known else 0.0, mismatch.relative),
    )


# --- in words ---------------------------------------------------------------------------------------------------------


def agreement_line(view: GradientsView) -> str:
    """One line for a status; empty: nothing is known yet."""
    if view.why_not and not view.checked:
        return f"gradients: not checked, {view.why_not}"
    if not view.has_begun:
        return ""
    parts = [f"gradients: {count(view.agreed)} of {plural(view.checked, 'check')} agreed"]
    if view.checked and view.agreed == view.checked:
        parts = [f"gradients: ranks agreed at all of {plural(view.checked, 'check')}"]
    if not view.checked:
        parts = ["gradients"]
    if view.mismatches:
        parts.append(plural(view.mismatches, "difference"))
    if view.repairs:
        parts.append(f"{count(view.repairs)} repaired")
    if view.doubts:
        parts.append(f"{plural(view.doubts, 'doubt')} about the data")
    if view.odd:
        parts.append("a rank stands out" if view.odd == 1 else f"ranks stood out {count(view.odd)} times")
    return " · ".join([*parts, *([cadence_text(view)] if view.every else [])])


def cadence_text(view: GradientsView) -> str:
    """What is checked how often, and what it costs: "gradients each 3 steps, parameters and state each 24, 1.2%"."""
    each = "each step" if view.every == 1 else f"each {count(view.every)} steps"
    held = view.every * view.parts
    also = "all else too" if view.parts == 1 else f"parameters and state all within {count(held)} steps"
    cost = f", for {percent(view.share)} of a step's time" if view.share >= 0.0005 else ""
    return f"checked {each}, {also}{cost}"


def strip(view: GradientsView, width: int = 40) -> list[str]:
    """A line a lane, the newest columns last: `rank 1  ✓✓✗↻✓`. Only where something is to be seen."""
    if all(lane.worst in (Agreement.AGREES, Agreement.UNCHECKED) for lane in view.lanes):
        return []
    room = max(len(lane.label) for lane in view.lanes)
    return [f"{lane.label:<{room}}  {''.join(state.value for state in lane.states[-width:])}" for lane in view.lanes]

"""What the ranks of a generation did, when: spans that cover its time, ranks in the same state as one.

A rank has a span of its own only where it differs: it died, stalled, waited for one that stalled, or was done early.
Once a generation is being ended, the ranks that were not its cause end together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from workbench.state import Failure
from workbench.views.generation import TICK, Generation, Halt
from workbench.views.spans import Runs, Span, SpanKind, join_runs
from workbench.views.wording import plural, ranks_text, size

NOBODY: frozenset[int] = frozenset()


class Stretch(NamedTuple):
    """One thing for a while, of whichever ranks."""

    start: float
    end: float
    kind: SpanKind
    title: str
    cause: str = ""


class Overlay(NamedTuple):
    """A stretch that goes over what the ranks did else: of these ranks, or of all but them."""

    stretch: Stretch
    ranks: frozenset[int]
    is_others: bool = False

    def is_of(self, rank: int) -> bool:
        return (rank in self.ranks) is not self.is_others


def spans_of(generation: Generation, now: float) -> list[Span]:
    """The generation's spans in order of time, up to `now` while it lasts."""
    end = max(generation.start, now if generation.end is None else generation.end)
    base = list(_base(generation, end))
    overlays = [o for o in _overlays(generation, end) if o.stretch.end > o.stretch.start]
    named = sorted(NOBODY.union(*(overlay.ranks for overlay in overlays)) & frozenset(range(generation.world)))
    lanes: dict[Stretch, list[tuple[int, int]]] = {}
    for rank in named:
        for stretch in _overlaid(base, [o.stretch for o in overlays if o.is_of(rank)]):
            lanes.setdefault(stretch, []).append((rank, rank))
    others = _all_but(named, generation.world)
    for stretch in _overlaid(base, [o.stretch for o in overlays if o.is_others]) if others else ():
        lanes.setdefault(stretch, []).extend(others)
    made = (
        Span(kind=s.kind, ranks=join_runs(runs), start=s.start, end=s.end, title=s.title, cause=s.cause)
        for s, runs in lanes.items()
    )
    return sorted(made, key=lambda s: (s.start, s.ranks))


# --- what a rank did to which nothing happened ------------------------------------------------------------------------


def _base(g: Generation, end: float) -> Iterator[Stretch]:
    starting, why = (SpanKind.LAUNCHING, "") if g.is_first else (SpanKind.RECOVERING, g.decision)
    leaving = end if g.leaving is None else g.leaving
    cuts: list[tuple[float | None, SpanKind, str, str]] = [
        (g.start, SpanKind.SLOTS if g.is_first else starting, g.decision or "waiting for slots", why),
        (None if g.is_first else g.awaited, SpanKind.SLOTS, "waiting for slots", why),
        (g.granted, starting, g.decision or f"launching {plural(g.world, 'rank')}", why),
        (g.started if g.began is None else g.began, *_at_work(g), ""),
    ]
    cause = g.failure.reason if g.failure else ""
    stretches = [Stretch(t, end, kind, title, why) for t, kind, title, why in cuts if t is not None and t < leaving]
    stretches.append(Stretch(leaving, end, *_at_the_end(g), cause))
    at = g.start
    for stretch, following in zip(stretches, [*(s.start for s in stretches[1:]), end], strict=True):
        upto = min(following, end)
        if upto > at:
            yield stretch._replace(start=at, end=upto)
            at = upto


def _at_work(g: Generation) -> tuple[SpanKind, str]:
    if g.began is None:
        return SpanKind.RUNNING, "running, no step finished" if g.end is not None else "running, no step finished yet"
    first = g.began_step if g.first is None else g.first + 1
    is_known = g.end is not None and g.last is not None
    return SpanKind.STEPPING, f"steps {first:,} to {g.last:,}" if is_known else f"stepping from step {first:,}"


def _at_the_end(g: Generation) -> tuple[SpanKind, str]:
    kind = SpanKind.RECOVERING if g.is_recovering else SpanKind.STOPPING
    return kind, f"being ended: {g.leaving_reason}" if g.leaving_reason else "being ended"


# --- what happened to some --------------------------------------------------------------------------------------------


def _overlays(g: Generation, end: float) -> Iterator[Overlay]:
    """In rising precedence."""
    leaving = end if g.leaving is None else min(end, g.leaving)
    for pause in g.pauses if g.began is not None else ():
        title = f"saving step {pause.checkpoint.step:,} ({size(pause.checkpoint.size)}, {pause.checkpoint.tier.value})"
        at = max(pause.start, g.began or pause.start)
        yield Overlay(Stretch(at, min(pause.end, leaving), SpanKind.CHECKPOINTING, title), NOBODY, is_others=True)
    for halt in _halts(g):
        at = max(g.start, halt.stall.since)
        yield from _stalled(halt, at, leaving if halt.ended is None else min(leaving, halt.ended))
    for time, done in sorted(g.finished.items()):
        yield Overlay(Stretch(max(time, g.start), end, SpanKind.FINISHED, "finished"), frozenset(done))
    for failure in g.dead():
        ranks = frozenset(range(g.world)) if failure.rank is None else frozenset((failure.rank,))
        yield Overlay(Stretch(_death(g, failure), end, SpanKind.DEAD, _manner(failure)), ranks)


def _halts(g: Generation) -> Iterable[Halt]:
    stall = g.failure.stall if g.failure else None
    if stall is None or any(halt.stall == stall for halt in g.halts):
        return g.halts
    return [*g.halts, Halt(stall, g.detected or stall.since)]


def _stalled(halt: Halt, start: float, end: float) -> Iterator[Overlay]:
    stall = halt.stall
    guilty = frozenset(stall.ranks)
    yield Overlay(
        Stretch(start, end, SpanKind.STALLED, stall.reason, stall.where), guilty, is_others=not guilty
    )  # where nobody can be blamed all have stalled
    if guilty:
        where = (
            f"in {stall.collective}{f' #{stall.collective_seq}' if stall.collective_seq else ''} "
            if stall.collective
            else ""
        )
        title = f"waiting {where}for {ranks_text(stall.ranks)}"
        yield Overlay(Stretch(start, end, SpanKind.WAITING, title, stall.reason), guilty, is_others=True)


def _death(g: Generation, failure: Failure) -> float:
    """When it was; of all but the first cause to a tick, so that those of one moment fold together."""
    time = failure.time if failure == g.failure else math.floor(failure.time / TICK) * TICK
    return max(time, g.start)


def _manner(failure: Failure) -> str:
    return failure.reason.removeprefix(f"rank {failure.rank} ")


# --- small parts ------------------------------------------------------------------------------------------------------


def _overlaid(base: Sequence[Stretch], over: Sequence[Stretch]) -> list[Stretch]:
    """The base with each of the others laid over what was there before."""
    made = list(base)
    for new in over:
        if not made or new.start >= made[-1].end or new.end <= made[0].start:
            continue
        fitted = new._replace(start=max(new.start, made[0].start), end=min(new.end, made[-1].end))
        before = [s._replace(end=min(s.end, fitted.start)) for s in made if s.start < fitted.start]
        after = [s._replace(start=max(s.start, fitted.end)) for s in made if s.end > fitted.end]
        made = [*before, fitted, *after]
    return made


def _all_but(named: Sequence[int], world: int) -> Runs:
    """The runs of a world's ranks between the named ones."""
    edges = [-1, *named, world]
    return tuple((a + 1, b - 1) for a, b in pairwise(edges) if b - a > 1)

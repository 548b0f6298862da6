"""A long record in little room: spans and marks that are too close together for its width become one.

Spans are folded only between moments at which all ranks' spans begin or end, so that no rank's time is lost or told
twice. The width doubles until there is room; what is folded tells what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from workbench.views.spans import Mark, MarkKind, Part, Runs, Span, SpanKind, join_runs, size_of
from workbench.views.wording import span as span_text

SPANS: Final = 1200
MARKS: Final = 100  # of a kind
NARROWEST: Final = 1 / 64  # s
WIDEST: Final = 2.0**40
T = TypeVar("T")


class Slab(NamedTuple):
    """All that some ranks did between two moments at which nothing reaches over."""

    start: float
    end: float
    ranks: Runs
    spans: tuple[Span, ...]


class Folded(Generic[T]):
    """Items in order of `start`. Once their `weight` is over `most`, they are kept as `fold` makes them of a width.

    Adding one at a time gives what adding all at once does.
    """

    def __init__(
        self,
        fold: Callable[[Sequence[T], float], list[T]],
        most: int,
        *,
        start: Callable[[T], float],
        weight: Callable[[T], int] = lambda _: 1,
    ) -> None:
        self.items: list[T] = []
        self._fold, self._most, self._start, self._weight = fold, most, start, weight
        self._held, self._width = 0, 0.0

    def extend(self, items: Iterable[T]) -> None:
        news = list(items)
        if self._width and news:
            news = self._fold([*self._reopened(news[0]), *news], self._width)
        self.items += news
        self._held += sum(map(self._weight, news))
        while self._held > self._most and self._width < WIDEST:
            self._width = self._width * 2 or NARROWEST
            self.items = self._fold(self.items, self._width)
            self._held = sum(map(self._weight, self.items))

    def _reopened(self, first: T) -> list[T]:
        """Take back the items that the first of the new ones may be folded with."""
        cell = math.floor(self._start(first) / self._width)
        at = len(self.items)
        while at and math.floor(self._start(self.items[at - 1]) / self._width) >= cell:
            at -= 1
        tail = self.items[at:]
        del self.items[at:]
        self._held -= sum(map(self._weight, tail))
        return tail


def folded_slabs() -> Folded[Slab]:
    return Folded(fold_slabs, SPANS, start=lambda slab: slab.start, weight=lambda slab: len(slab.spans))


def folded_marks() -> Folded[Mark]:
    return Folded(fold_marks, MARKS, start=lambda mark: mark.time)


# --- spans ------------------------------------------------------------------------------------------------------------


def slabs_of(spans: Iterable[Span]) -> Iterator[Slab]:
    """Spans, cut where none of them reaches over."""
    group: list[Span] = []
    end = -math.inf
    for one in sorted(spans, key=lambda s: s.start):
        if group and one.start >= end:
            yield _slab(group)
            group = []
        group.append(one)
        end = max(end, one.end)
    if group:
        yield _slab(group)


def _slab(spans: Sequence[Span]) -> Slab:
    ranks = join_runs(run for one in spans for run in one.ranks)
    return Slab(min(s.start for s in spans), max(s.end for s in spans), ranks, tuple(spans))


def fold_slabs(slabs: Sequence[Slab], width: float) -> list[Slab]:
    """Neighbours that are shorter than `width` and begin in the same multiple of it as one span each."""

    def cell(item: tuple[int, Slab]) -> tuple[object, ...]:
        index, slab = item
        is_short = slab.end - slab.start < width
        return (math.floor(slab.start / width), slab.ranks) if is_short else (index,)

    runs = (run for _, group in groupby(enumerate(slabs), key=cell) for run in _unbroken(slab for _, slab in group))
    return [_one(run) if len(run) > 1 else run[0] for run in runs]


def _unbroken(slabs: Iterable[Slab]) -> list[list[Slab]]:
    runs: list[list[Slab]] = []
    for slab in slabs:
        if runs and runs[-1][-1].end == slab.start:
            runs[-1].append(slab)
        else:
            runs.append([slab])
    return runs


def _one(slabs: Sequence[Slab]) -> Slab:
    first, last = slabs[0], slabs[-1]
    parts = _parts([one for slab in slabs for one in slab.spans], size_of(first.ranks))
    title = ", ".join(map(_part_text, parts))
    whole = Span(
        kind=parts[0].kind, ranks=first.ranks, start=first.start, end=last.end, title=title, parts=tuple(parts)
    )
    return Slab(first.start, last.end, first.ranks, (whole,))


def _parts(spans: Sequence[Span], ranks: int) -> list[Part]:
    """Time and number of each kind, the longest first."""
    found: dict[SpanKind, tuple[float, int]] = {}
    for one in spans:
        share = size_of(one.ranks) / ranks
        for part in one.parts or (Part(one.kind, (one.end - one.start) * share, 1),):
            held, count = found.get(part.kind, (0.0, 0))
            found[part.kind] = held + part.seconds, count + part.count
    order = list(SpanKind)
    made = [Part(kind, held, count) for kind, (held, count) in found.items()]
    return sorted(made, key=lambda part: (-part.seconds, order.index(part.kind)))


def _part_text(part: Part) -> str:
    return f"{part.kind.value} {span_text(part.seconds)}{f' ({part.count:,} times)' if part.count > 1 else ''}"


# --- marks ------------------------------------------------------------------------------------------------------------


def fold_marks(marks: Sequence[Mark], width: float) -> list[Mark]:
    """Those of one kind that are less than a multiple of `width` apart as one."""
    groups = groupby(marks, key=lambda mark: math.floor(mark.time / width))
    return [_join_marks(list(group)) for _, group in groups]


def _join_marks(marks: Sequence[Mark]) -> Mark:
    if len(marks) == 1:
        return marks[0]
    return replace(
        marks[0],
        count=sum(mark.count for mark in marks),
        until=max(max(mark.time, mark.until) for mark in marks),
        ranks=join_runs(run for mark in marks for run in mark.ranks),
    )


class Marks:
    """Marks by kind, each kind bounded by itself: checkpoints must not hide a failure."""

    def __init__(self) -> None:
        self._by_kind: dict[MarkKind, Folded[Mark]] = {}

    def add(self, mark: Mark) -> None:
        self._by_kind.setdefault(mark.kind, folded_marks()).extend([mark])

    def all(self) -> tuple[Mark, ...]:
        """In order of time; of one moment the cause first."""
        kinds = [kind for kind in MarkKind if kind in self._by_kind]
        return tuple(sorted((m for kind in kinds for m in self._by_kind[kind].items), key=lambda m: m.time))

"""The lanes of a timeline as rows to draw: ranks that always did the same share one, and there are never too many."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from workbench.views.spans import Runs, Span, SpanKind, join_runs, size_of
from workbench.views.wording import plural, ranks_text

ROWS: Final = 16
# What goes over what where there is room for one: the worst is seen.
SEVERITY: Final = (
    SpanKind.FINISHED,
    SpanKind.RUNNING,
    SpanKind.STEPPING,
    SpanKind.SLOTS,
    SpanKind.CHECKPOINTING,
    SpanKind.LAUNCHING,
    SpanKind.WAITING,
    SpanKind.STOPPING,
    SpanKind.RECOVERING,
    SpanKind.STALLED,
    SpanKind.DEAD,
)
ALWAYS_SEEN: Final = frozenset(SEVERITY[SEVERITY.index(SpanKind.STOPPING) :])  # however short
TROUBLE: Final = (SpanKind.DEAD, SpanKind.STALLED)


class Row(NamedTuple):
    """Ranks that are drawn as one; of a `mixed` row the spans overlap, since its ranks did not all do the same."""

    ranks: Runs
    spans: tuple[Span, ...]
    is_mixed: bool = False

    @property
    def label(self) -> str:
        if self.is_mixed:
            return f"{plural(size_of(self.ranks), 'other rank')}"
        return ranks_text((rank for first, last in self.ranks for rank in range(first, last + 1)), most=3)


def rows_of(spans: Sequence[Span], most: int = ROWS) -> list[Row]:
    """At most `most` rows, in order of their first rank; those with the latest trouble stay apart."""
    edges = sorted({edge for one in spans for first, last in one.ranks for edge in (first, last + 1)})
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for (first, following), signature in zip(pairwise(edges), _signatures(spans, edges), strict=True):
        if signature:
            found.setdefault(tuple(signature), []).append((first, following - 1))
    rows = [Row(join_runs(runs), tuple(spans[k] for k in signature)) for signature, runs in found.items()]
    if len(rows) > most:
        rows = _fewer(rows, most)
    return sorted(rows, key=lambda row: (row.is_mixed, row.ranks))


def _signatures(spans: Sequence[Span], edges: Sequence[int]) -> list[list[int]]:
    """Of each run of ranks between two edges the numbers of its spans."""
    made: list[list[int]] = [[] for _ in edges[1:]]
    for number, one in enumerate(spans):
        for first, last in one.ranks:
            for at in range(bisect_left(edges, first), bisect_left(edges, last + 1)):
                made[at].append(number)
    return made


def _fewer(rows: Sequence[Row], most: int) -> list[Row]:
    """The largest row and those with the latest trouble; the rest in one."""
    largest = max(rows, key=lambda row: size_of(row.ranks))
    others = sorted((row for row in rows if row is not largest), key=_latest_trouble, reverse=True)
    rest = others[most - 2 :]
    spans = sorted({id(one): one for row in rest for one in row.spans}.values(), key=lambda one: one.start)
    mixed = Row(join_runs(run for row in rest for run in row.ranks), tuple(spans), is_mixed=True)
    return [largest, *others[: most - 2], mixed]


def _latest_trouble(row: Row) -> float:
    return max((one.start for one in row.spans if one.kind in TROUBLE), default=0.0)


def worst_first(spans: Iterable[Span]) -> list[Span]:
    """In the order in which they are to be painted, reversed: what may cover others comes first."""
    return sorted(spans, key=lambda one: -SEVERITY.index(one.kind))

"""Reports of replicas compared, told with fewer: two of one optimizer that follow each other say together what they
said. What is old is told in longer stretches; nothing of who deviated is lost, of statistics the later ones stand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from workbench.telemetry import Check, ConsistencyReport

NEWEST: Final = 64  # reports that stay as they are


def merge(one: Check, other: Check) -> Check:
    """`other` is the later one, of the same kind, optimizer, generation and ranks."""
    if isinstance(one, ConsistencyReport) and isinstance(other, ConsistencyReport):
        return _merge(one, other)
    return replace(other, start=one.start, first_step=one.first_step)


def _merge(one: ConsistencyReport, other: ConsistencyReport) -> ConsistencyReport:
    deviating = dict(one.deviating)
    for rank, times in other.deviating:
        deviating[rank] = deviating.get(rank, 0) + times
    return replace(
        other,
        start=min(one.start, other.start),
        end=max(one.end, other.end),
        first_step=min(one.first_step, other.first_step),
        last_step=max(one.last_step, other.last_step),
        checked=one.checked + other.checked,
        agreed=one.agreed + other.agreed,
        deviating=tuple(sorted(deviating.items())),
        unclear=one.unclear + other.unclear,
        repaired=one.repaired + other.repaired,
    )


def thinned(reports: Sequence[Check], limit: int, size: Callable[[Check], int]) -> list[Check]:
    """At most `limit` of what `size` measures, as long as the newest alone are no more; by time."""
    kept = list(reports)
    while sum(map(size, kept)) > limit:
        fewer = [*halved(kept[:-NEWEST]), *kept[-NEWEST:]]
        if len(fewer) == len(kept):
            break
        kept = fewer
    return kept


def halved(reports: Sequence[Check]) -> list[Check]:
    """Those that belong together two by two."""
    alike: dict[tuple[object, ...], list[Check]] = {}
    for report in reports:
        alike.setdefault((type(report), report.optimizer, report.restart_count, report.ranks), []).append(report)
    found = [one for some in alike.values() for one in _in_pairs(some)]
    return sorted(found, key=lambda report: report.start)


def _in_pairs(reports: Sequence[Check]) -> list[Check]:
    pairs = [merge(one, other) for one, other in zip(reports[::2], reports[1::2], strict=False)]
    return pairs + list(reports[2 * len(pairs) :])

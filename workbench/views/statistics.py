"""What gradients look like, folded from a job's record: by rank before the all-reduce, by module, and as histograms.

Bounded: the newest report of each optimizer, and of many ranks those that are furthest off, the rest in one row.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from workbench.telemetry import GradientStatistics, Histogram, LayerStatistics
from workbench.views.wording import count, number, percent, plural, ranks_text

SINGLY: Final = 32  # ranks up to which each has a row
ODD: Final = 8  # of more, those that have one
BLOCKS: Final = " ▁▂▃▄▅▆▇█"
FIRST: Final = -24  # of a histogram: its first bin begins at 4 to this
FACTOR: Final = 4.0


class RankStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank's own gradients, or medians of several. None: not measured, or not finite."""

    ranks: tuple[int, ...]
    norm: float | None = None
    times: float | None = None  # the norm over the median of all ranks'
    cosine: float | None = None  # to the mean of all ranks
    zeros: float | None = None  # share of the elements
    nans: int = 0
    infinite: int = 0

    @property
    def label(self) -> str:
        return ranks_text(self.ranks) if len(self.ranks) == 1 else f"the other {count(len(self.ranks))}, medians"

    @property
    def is_broken(self) -> bool:
        return bool(self.nans or self.infinite)


class StatisticsView(msgspec.Struct, frozen=True, kw_only=True):
    """`every`: steps between two looks; `missing`: why nothing is known by rank."""

    samples: int = 0
    first_step: int = 0
    last_step: int = 0
    every: int = 0
    mean_norm: float | None = None  # of what the optimizer used
    rows: tuple[RankStatistics, ...] = ()  # in rank order; of many the furthest off first
    histograms: tuple[Histogram, ...] = ()
    layers: tuple[LayerStatistics, ...] = ()
    missing: str = ""

    @property
    def has_begun(self) -> bool:
        return self.samples > 0


class StatisticsBuilder:
    """Add reports in order; `view` is of the optimizer that was looked at last."""

    def __init__(self) -> None:
        self._newest: GradientStatistics | None = None
        self._samples: dict[int, int] = {}  # by optimizer

    def add(self, report: GradientStatistics) -> None:
        self._newest = report
        self._samples[report.optimizer] = self._samples.get(report.optimizer, 0) + report.samples

    def view(self) -> StatisticsView:
        report = self._newest
        if report is None:
            return StatisticsView()
        return StatisticsView(
            samples=self._samples[report.optimizer],
            first_step=report.first_step,
            last_step=report.last_step,
            every=report.every,
            mean_norm=report.mean_norm,
            rows=rows_of(report),
            histograms=report.histograms,
            layers=report.layers,
            missing=report.missing,
        )


def rows_of(report: GradientStatistics) -> tuple[RankStatistics, ...]:
    if not report.norms:
        return ()
    known = [norm for norm in report.norms if norm is not None]
    usual = statistics.median(known) if known else 0.0
    broken = {rank: (nans, infinite) for rank, nans, infinite in report.broken}
    rows = [
        RankStatistics(
            ranks=(rank,), norm=norm, times=norm / usual if norm is not None and usual else None, cosine=cosine,
            zeros=zeros, nans=broken.get(rank, (0, 0))[0], infinite=broken.get(rank, (0, 0))[1],
        )
        for rank, norm, cosine, zeros in zip(report.ranks, report.norms, report.cosines, report.zeros, strict=True)
    ]  # fmt: skip
    if len(rows) <= SINGLY:
        return tuple(rows)
    middle = _median([row.cosine for row in rows]) or 0.0
    rows.sort(key=lambda row: -_oddness(row, middle))
    return (*rows[:ODD], _together(rows[ODD:]))


def _oddness(row: RankStatistics, cosine: float) -> float:
    """How far off: in the logarithm of the norm, and in the cosine."""
    if row.is_broken or row.times is None:
        return math.inf
    turned = 0.0 if row.cosine is None else abs(row.cosine - cosine)
    return abs(math.log(max(row.times, 1e-30))) + turned


def _together(rows: Sequence[RankStatistics]) -> RankStatistics:
    """The rest, with the medians of what they have."""
    return RankStatistics(
        ranks=tuple(sorted(rank for row in rows for rank in row.ranks)),
        norm=_median([row.norm for row in rows]),
        times=_median([row.times for row in rows]),
        cosine=_median([row.cosine for row in rows]),
        zeros=_median([row.zeros for row in rows]),
        nans=sum(row.nans for row in rows),
        infinite=sum(row.infinite for row in rows),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# --- in words ---------------------------------------------------------------------------------------------------------


def statistics_line(view: StatisticsView) -> str:
    """One line for a status; empty: nothing is known."""
    if not view.has_begun:
        return ""
    every = "each step" if view.every == 1 else f"each {count(view.every)} steps"
    parts = [f"gradients looked at {every}: norm {number(view.mean_norm, 3)}"]
    if view.missing:
        return f"{parts[0]}; by rank not measured: {view.missing}"
    parts.append(f"of single ranks {_between([row.norm for row in view.rows])}")
    parts.append(f"cosine to the mean {_between([row.cosine for row in view.rows])}")
    broken = [rank for row in view.rows if row.is_broken for rank in row.ranks]
    return " · ".join([*parts, *([f"not finite on {ranks_text(broken)}"] if broken else [])])


def _between(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "not known"
    low, high = number(min(known), 3), number(max(known), 3)
    return low if low == high else f"{low} to {high}"


def shown_bins(histograms: Sequence[Histogram]) -> range:
    """The bins in which any has something."""
    used = [k for one in histograms for k, amount in enumerate(one.counts) if amount]
    return range(min(used), max(used) + 1) if used else range(0)


def bin_start(k: int) -> float:
    return FACTOR ** (FIRST + k)


def bars(histogram: Histogram, bins: range) -> str:
    """`▁▂▅█▅▁`, a block a bin; what is there at all is never blank."""
    most = max((histogram.counts[k] for k in bins), default=0)
    return "".join(
        BLOCKS[max(1, round(8 * histogram.counts[k] / most))] if histogram.counts[k] else BLOCKS[0] for k in bins
    )


def histogram_words(histogram: Histogram) -> str:
    """`half of 11,000 between 0.0039 and 0.25`."""
    total = sum(histogram.counts)
    if not total:
        return "nothing that is not zero"
    low, high = (_quantile(histogram, share) for share in (0.25, 0.75))
    return f"half of {count(total)} between {number(bin_start(low), 2)} and {number(bin_start(high + 1), 2)}"


def _quantile(histogram: Histogram, share: float) -> int:
    left = share * sum(histogram.counts)
    for k, amount in enumerate(histogram.counts):
        left -= amount
        if left <= 0:
            return k
    return len(histogram.counts) - 1


def zeros_text(share: float | None) -> str:
    return "–" if share is None else percent(share) if share else "none"


def broken_text(row: RankStatistics) -> str:
    parts = [text for amount, text in ((row.nans, "NaN"), (row.infinite, "infinite")) if amount]
    amounts = [amount for amount in (row.nans, row.infinite) if amount]
    return ", ".join(f"{count(a)} {t}" for a, t in zip(amounts, parts, strict=True)) or "none"


def looks_text(view: StatisticsView) -> str:
    return f"{plural(view.samples, 'look')}, the last at step {count(view.last_step)}"

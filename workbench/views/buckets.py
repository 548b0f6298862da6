"""Steps folded by time: `blackbox.STEP` records into `Bucket`s, buckets into wider ones, all ranks into `Total`s.

Pure folds that the record (as it writes) and the views (as they read) share. Sums are kept, never averages, so that
folding twice loses nothing. A rate is samples over *step time*, not over the bucket's width: with steps of 2 s every
other bucket of 1 s would show nothing and the next one double.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

from workbench.blackbox import STEP
from workbench.feed import Bucket, Total

OpenBuckets = dict[float, dict[int, Bucket]]  # by start, then rank
PHASES: Final = ("data", "forward", "backward", "comm", "optimizer", "checkpoint")
_END: Final = 1  # where a record has the time of its end


def fold_steps(
    buckets: OpenBuckets,
    rank: int,
    block: bytes,
    width: float = 1.0,
    *,
    earliest: float = -math.inf,
    latest: float = math.inf,
    learning_rate: float | None = None,
) -> None:
    """Add a block of records, oldest first, to `buckets`, each to the bucket in which it ended.

    Steps that ended outside `[earliest, latest]` (both starts of buckets: a late report, another host's clock) count
    in the nearest bucket inside, so that no step is lost. `learning_rate` is what was seen when they came. Raises
    `ValueError`, `OverflowError` or `struct.error` on what are no step records.
    """

    def start_of(record: tuple[float, ...]) -> float:
        return min(max(math.floor(record[_END] / width) * width, earliest), latest)

    records = list(STEP.iter_unpack(block))
    if not records:
        return
    if start_of(records[0]) == start_of(records[-1]):
        _put(buckets, start_of(records[0]), _bucket(rank, start_of(records[0]), width, records, learning_rate))
        return
    for start, group in groupby(records, key=start_of):
        _put(buckets, start, _bucket(rank, start, width, list(group), learning_rate))


def _bucket(
    rank: int, start: float, width: float, records: Sequence[tuple[float, ...]], learning_rate: float | None
) -> Bucket:
    columns = tuple(zip(*records, strict=True))
    return Bucket(
        rank=rank,
        start=start,
        width=width,
        steps=len(records),
        last_step=int(columns[0][-1]),
        duration=sum(columns[2]),
        slowest=max(columns[2]),
        data=sum(columns[3]),
        forward=sum(columns[4]),
        backward=sum(columns[5]),
        comm=sum(columns[6]),
        optimizer=sum(columns[7]),
        checkpoint=sum(columns[8]),
        samples=sum(columns[9]),
        tokens=sum(columns[10]),
        loss=next((loss for loss in reversed(columns[11]) if not math.isnan(loss)), math.nan),
        learning_rate=learning_rate,
    )


def _put(buckets: OpenBuckets, start: float, bucket: Bucket) -> None:
    ranks = buckets.setdefault(start, {})
    old = ranks.get(bucket.rank)
    ranks[bucket.rank] = bucket if old is None else join(old, bucket)


def join(older: Bucket, newer: Bucket) -> Bucket:
    """Two buckets of one rank as one; it reaches from the earlier start to the later end."""
    start = min(older.start, newer.start)
    return Bucket(
        rank=older.rank,
        start=start,
        width=max(older.start + older.width, newer.start + newer.width) - start,
        steps=older.steps + newer.steps,
        last_step=newer.last_step,
        duration=older.duration + newer.duration,
        slowest=max(older.slowest, newer.slowest),
        data=older.data + newer.data,
        forward=older.forward + newer.forward,
        backward=older.backward + newer.backward,
        comm=older.comm + newer.comm,
        optimizer=older.optimizer + newer.optimizer,
        checkpoint=older.checkpoint + newer.checkpoint,
        samples=older.samples + newer.samples,
        tokens=older.tokens + newer.tokens,
        loss=older.loss if math.isnan(newer.loss) else newer.loss,
        learning_rate=older.learning_rate if newer.learning_rate is None else newer.learning_rate,
    )


def merge(buckets: Iterable[Bucket], width: float) -> list[Bucket]:
    """One bucket a rank for each span `[n * width, (n + 1) * width)` in which buckets start, by time, then rank.

    What comes in may be of mixed widths; a bucket covers only the time that its parts covered.
    """
    merged: OpenBuckets = {}
    for bucket in sorted(buckets, key=attrgetter("start")):
        _put(merged, math.floor(bucket.start / width) * width, bucket)
    return [bucket for _, ranks in sorted(merged.items()) for _, bucket in sorted(ranks.items())]


def across_ranks(buckets: Iterable[Bucket]) -> list[Total]:
    """All ranks folded: one `Total` for buckets that overlap in time, as those of different ranks do."""
    groups: list[list[Bucket]] = []
    end = -math.inf
    for bucket in sorted(buckets, key=attrgetter("start")):
        if bucket.start >= end:
            groups.append([])
        groups[-1].append(bucket)
        end = max(end, bucket.start + bucket.width)
    return [total_of(group, group[0].start, max(b.start + b.width for b in group) - group[0].start) for group in groups]


def total_of(ranks: Collection[Bucket], start: float, width: float) -> Total:
    """One bucket of each rank as the total of `[start, start + width)`."""
    means = [bucket.duration / bucket.steps for bucket in ranks if bucket.steps]
    losses = [bucket.loss for bucket in ranks if not math.isnan(bucket.loss)]
    rates = [bucket.learning_rate for bucket in ranks if bucket.learning_rate is not None]
    return Total(
        start=start,
        width=width,
        ranks=len({bucket.rank for bucket in ranks}),
        steps=sum(bucket.steps for bucket in ranks),
        last_step=max(bucket.last_step for bucket in ranks),
        duration=sum(bucket.duration for bucket in ranks),
        fastest=min(means, default=0.0),
        slowest=max(means, default=0.0),
        data=sum(bucket.data for bucket in ranks),
        forward=sum(bucket.forward for bucket in ranks),
        backward=sum(bucket.backward for bucket in ranks),
        comm=sum(bucket.comm for bucket in ranks),
        optimizer=sum(bucket.optimizer for bucket in ranks),
        checkpoint=sum(bucket.checkpoint for bucket in ranks),
        samples=sum(bucket.samples for bucket in ranks),
        tokens=sum(bucket.tokens for bucket in ranks),
        loss=sum(losses) / len(losses) if losses else math.nan,
        learning_rate=max(rates, default=None),
    )


def merge_totals(totals: Iterable[Total], width: float) -> list[Total]:
    """As `merge`, for totals: `ranks`, `fastest` and `slowest` are the extremes of the parts."""
    groups: dict[float, list[Total]] = {}
    for total in sorted(totals, key=attrgetter("start")):
        groups.setdefault(math.floor(total.start / width) * width, []).append(total)
    return [_join_totals(group) if len(group) > 1 else group[0] for _, group in sorted(groups.items())]


def _join_totals(group: Sequence[Total]) -> Total:
    start = group[0].start
    return Total(
        start=start,
        width=max(t.start + t.width for t in group) - start,
        ranks=max(t.ranks for t in group),
        steps=sum(t.steps for t in group),
        last_step=max(t.last_step for t in group),
        duration=sum(t.duration for t in group),
        fastest=min(t.fastest for t in group),
        slowest=max(t.slowest for t in group),
        data=sum(t.data for t in group),
        forward=sum(t.forward for t in group),
        backward=sum(t.backward for t in group),
        comm=sum(t.comm for t in group),
        optimizer=sum(t.optimizer for t in group),
        checkpoint=sum(t.checkpoint for t in group),
        samples=sum(t.samples for t in group),
        tokens=sum(t.tokens for t in group),
        loss=next((t.loss for t in reversed(group) if not math.isnan(t.loss)), math.nan),
        learning_rate=next((t.learning_rate for t in reversed(group) if t.learning_rate is not None), None),
    )


def throughput(totals: Sequence[Total]) -> float:
    """Samples/s of all ranks together: the mean rank's samples over its step time, times the ranks."""
    duration = sum(total.duration for total in totals)
    ranks = max((total.ranks for total in totals), default=0)
    return ranks * sum(total.samples for total in totals) / duration if duration > 0 else 0.0

"""Steps folded by time and over ranks."""

from __future__ import annotations

import math
import struct

import pytest

from workbench.blackbox import STEP
from workbench.feed import Bucket
from workbench.views.buckets import OpenBuckets, across_ranks, fold_steps, merge, merge_totals, throughput


def block(*ends: float, loss: float = math.nan) -> bytes:
    return b"".join(
        STEP.pack(k, end, 0.5, 0.1, 0.1, 0.1, 0.1, 0.05, 0.0, 4.0, 40.0, loss) for k, end in enumerate(ends)
    )


def bucket(rank: int, start: float, width: float = 1.0, steps: int = 2, duration: float = 1.0) -> Bucket:
    parts = dict.fromkeys(("data", "forward", "backward", "comm", "optimizer"), 0.1)
    return Bucket(rank=rank, start=start, width=width, steps=steps, last_step=int(start), duration=duration,
                  slowest=duration, checkpoint=0.0, samples=10.0, tokens=0.0, loss=math.nan, **parts)  # fmt: skip


def test_a_step_counts_where_it_ended() -> None:
    found: OpenBuckets = {}
    fold_steps(found, 3, block(9.99, 10.0, 10.5, 12.0))
    fold_steps(found, 3, block(10.7, loss=2.5))
    assert sorted(found) == [9.0, 10.0, 12.0]
    ten = found[10.0][3]
    assert (ten.steps, ten.samples, ten.tokens, ten.duration, ten.loss) == (3, 12.0, 120.0, 1.5, 2.5)
    assert (ten.start, ten.width, ten.rank) == (10.0, 1.0, 3)


def test_steps_outside_go_to_the_nearest_bucket_inside() -> None:
    found: OpenBuckets = {}
    fold_steps(found, 0, block(1.0, 10.5, 99.0), earliest=10.0, latest=11.0)
    assert {start: ranks[0].steps for start, ranks in found.items()} == {10.0: 2, 11.0: 1}


def test_the_last_loss_that_was_reported_is_kept() -> None:
    found: OpenBuckets = {}
    fold_steps(found, 0, block(1.0, loss=0.5) + block(1.1) + block(2.1))
    assert found[1.0][0].loss == 0.5 and math.isnan(found[2.0][0].loss)


def test_the_last_learning_rate_that_was_seen_is_kept() -> None:
    found: OpenBuckets = {}
    for rank, rate in ((0, 0.1), (0, None), (0, 0.05), (1, 0.2), (1, None)):
        fold_steps(found, rank, block(1.0 + rank), learning_rate=rate)
    fold_steps(found, 0, block(5.0))
    assert [found[1.0][0].learning_rate, found[2.0][1].learning_rate] == [0.05, 0.2]
    ranks = [bucket for row in found.values() for bucket in row.values()]
    assert [total.learning_rate for total in across_ranks(ranks)][:2] == [0.05, 0.2]
    assert merge(ranks, 60.0)[0].learning_rate == 0.05 and found[5.0][0].learning_rate is None
    assert merge_totals(across_ranks(ranks), 60.0)[0].learning_rate == 0.2


@pytest.mark.parametrize(("rubbish", "error"), [(b"short", struct.error), (block(math.nan), ValueError)])
def test_rubbish_raises(rubbish: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        fold_steps({}, 0, rubbish)
    fold_steps({}, 0, b"")


def test_merging_keeps_to_the_time_that_was_covered() -> None:
    wide = merge([bucket(0, 61.0), bucket(0, 62.0), bucket(1, 60.0), bucket(0, 130.0)], 60.0)
    assert [(b.rank, b.start, b.width) for b in wide] == [(0, 61.0, 2.0), (1, 60.0, 1.0), (0, 130.0, 1.0)]
    assert wide[0].steps == 4 and wide[0].last_step == 62


def test_ranks_fold_where_they_overlap() -> None:
    one, two, three = across_ranks(
        [bucket(0, 60.0, 60.0, duration=2.0), bucket(1, 90.0, 30.0), bucket(0, 120.0), bucket(1, 121.0)]
    )
    assert (one.start, one.width, one.ranks, one.samples) == (60.0, 60.0, 2, 20.0)
    assert (one.fastest, one.slowest, one.duration) == (0.5, 1.0, 3.0)
    assert (two.ranks, three.start) == (1, 121.0)


def test_totals_merge() -> None:
    (whole,) = merge_totals(across_ranks([bucket(0, 1.0), bucket(1, 1.0, duration=3.0), bucket(0, 2.0)]), 10.0)
    assert (whole.start, whole.width, whole.ranks, whole.steps, whole.samples) == (1.0, 2.0, 2, 6, 30.0)
    assert (whole.fastest, whole.slowest) == (0.5, 1.5)


def test_throughput_does_not_depend_on_where_buckets_begin() -> None:
    """Steps of 2 s: one bucket a step, and none in the second between."""
    slow = across_ranks([bucket(rank, start, steps=1, duration=2.0) for rank in (0, 1) for start in (1.0, 3.0, 5.0)])
    assert throughput(slow) == throughput(slow[:1]) == 10.0
    assert throughput([]) == 0.0

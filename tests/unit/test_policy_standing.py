"""Which rank's gradients stand out: found, and named for what it is; among ranks that are alike nobody."""

from __future__ import annotations

import random
from typing import Any

import pytest

from workbench.policy.standing import LEAST, NEEDED, Marks, Standing, advance, scores
from workbench.telemetry import GradientStatistics


def report(
    norms: tuple[float | None, ...], cosines: tuple[float | None, ...] = (), at: int = 0, **fields: Any
) -> GradientStatistics:
    values = {"samples": LEAST, **fields}
    return GradientStatistics(
        job_id="a", restart_count=0, rank=0, start=2.0 * at, end=2.0 * at + 2, first_step=10 * at,
        last_step=10 * at + 9, ranks=tuple(range(len(norms))), norms=norms,
        cosines=cosines or (0.8,) * len(norms), zeros=(0.0,) * len(norms), **values,
    )  # fmt: skip


def told(*reports: GradientStatistics) -> list[Standing]:
    marks, found = Marks(), []
    for one in reports:
        marks, new = advance(marks, one)
        found += new
    return found


@pytest.mark.parametrize(
    ("norms", "cosines", "rank", "words"),
    [
        ((1.2, 1.1, 37.0, 1.3), (0.7, 0.7, 0.99, 0.7), 2, ("29.6 times as large", "sum where theirs is a mean")),
        ((1.2, 1.1, 0.1, 1.3), (0.8, 0.8, 0.7, 0.8), 2, ("11.5 times smaller", "repeated, masked")),
        ((1.2, 1.1, 0.0, 1.3), (0.8, 0.8, None, 0.8), 2, ("are all zero", "empty, masked")),
        ((1.2, 1.1, 1.3, 1.2), (0.85, -0.6, 0.9, 0.88), 1, ("point against the mean", "labels")),
        ((1.2, 1.1, 1.3, 1.2), (0.85, 0.1, 0.9, 0.88), 1, ("point away from the mean", "labels")),
        ((1.2, 9.0, 1.3), (0.8, 0.95, 0.8), 1, ("times as large",)),
    ],
)
def test_the_odd_rank_is_named_with_evidence_and_what_to_try(
    norms: tuple[float, ...], cosines: tuple[float, ...], rank: int, words: tuple[str, ...]
) -> None:
    (one,) = told(*(report(norms, cosines, at=at) for at in range(NEEDED)))
    finding = one.finding
    assert (one.ranks, finding.rank, finding.step) == ((rank,), rank, 29)
    for word in words:
        assert word in f"{finding.symptom}; {finding.cause}"
    assert "robust z" in finding.evidence[0]
    assert f"give the shard of rank {rank} to another rank" in finding.advice


def test_who_is_named_is_named_once_until_it_is_as_the_others_again() -> None:
    odd, usual = (1.2, 1.1, 37.0, 1.3), (1.2, 1.1, 1.2, 1.3)
    assert len(told(*(report(odd, at=at) for at in range(9)))) == 1
    again = [*[odd] * 3, *[usual] * 6, *[odd] * 6]
    assert len(told(*(report(norms, at=at) for at, norms in enumerate(again)))) == 2


def test_what_does_not_last_says_nothing() -> None:
    odd, usual = (1.2, 1.1, 37.0, 1.3), (1.2, 1.1, 1.2, 1.3)
    assert told(*(report(odd, at=at) for at in range(NEEDED - 1))) == []
    assert told(*(report(odd, at=at, samples=1) for at in range(NEEDED))) == [], "few looks"
    assert told(*(report(odd if at % 2 else usual, at=at) for at in range(40))) == []


@pytest.mark.parametrize(
    ("norms", "cosines", "about"),
    [
        ((1.0, 5.0), (0.3, 0.99), "norm"),
        ((1.0, 1.1), (0.29, 0.32), "direction"),
        ((1.0, 2.0), (0.7, 0.9), ""),
        ((1.0, 1.1), (0.72, 0.7), ""),
    ],
)
def test_of_two_ranks_nobody_is_blamed(norms: tuple[float, ...], cosines: tuple[float, ...], about: str) -> None:
    found = told(*(report(norms, cosines, at=at) for at in range(NEEDED)))
    assert [one.about for one in found] == ([about] if about else [])
    assert all(one.ranks == (0, 1) and one.finding.rank is None and one.score == 0 for one in found)


def test_what_was_not_measured_is_not_judged() -> None:
    assert told(*(report((), missing="no backward was seen", at=at) for at in range(NEEDED))) == []
    (one,) = told(*(report((1.0, None, 50.0), at=at) for at in range(NEEDED)))
    assert one.ranks == (0, 2), "of the two that are known nobody is blamed"


def test_two_optimizers_are_judged_apart() -> None:
    odd, usual = (1.2, 1.1, 37.0, 1.3), (1.2, 1.1, 1.2, 1.3)
    pairs = [(report(odd, at=at), report(usual, at=at, optimizer=1)) for at in range(NEEDED)]
    assert [one.ranks for one in told(*(one for pair in pairs for one in pair))] == [(2,)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64, 1024])
def test_among_ranks_that_are_alike_nobody_is_named(ranks: int) -> None:
    """Batches of a few samples make norms that differ by a third and cosines by a tenth."""
    draw, reports = random.Random(ranks), []
    for at in range(max(12, 2000 // ranks)):
        norms = tuple(draw.lognormvariate(0.0, 0.3) for _ in range(ranks))
        cosines = tuple(min(1.0, draw.gauss(0.75, 0.1)) for _ in range(ranks))
        reports.append(report(norms, cosines, at=at))
    assert told(*reports) == []


def test_equal_values_have_no_score_however_many() -> None:
    assert scores([1.0] * 5, 0.05) == [0.0] * 5
    assert scores([1.0, 1.0, 1.0, 2.0], 0.05)[3] == pytest.approx(0.6745 / 0.05)

"""Loss curves that are in trouble, and what each is said to come of; clean ones are in tests/property/."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import pytest

from workbench.events import Event, GradientMismatched, NonFiniteFound
from workbench.findings import Finding, Severity
from workbench.state import Compared, Mismatch
from workbench.views.curve import LossPoint, Shape, find_anomaly, thinned
from workbench.views.loss import Ranks, behind_now, diagnose, find_odd_rank

EVEN = Ranks(samples={0: 8.0, 1: 8.0}, steps={0: 100, 1: 100}, recent=10)


def falling(at: int) -> float:
    return 2.3 * math.exp(-at / 10) + 0.2


def curve(level: Callable[[int], float], count: int = 60, noise: float = 0.05) -> list[LossPoint]:
    chance = random.Random(count)
    return [LossPoint(10 * at + 10, level(at) + chance.gauss(0, noise)) for at in range(count)]


def by_rank(levels: Mapping[int, Callable[[int], float]], count: int = 60, noise: float = 0.05) -> list[LossPoint]:
    """The mean, and each rank's."""
    chance = random.Random(1)
    points = []
    for at in range(count):
        ranks = {rank: level(at) + chance.gauss(0, noise) for rank, level in levels.items()}
        points.append(LossPoint(10 * at + 10, sum(ranks.values()) / len(ranks), ranks))
    return points


def jumping(at: int) -> float:
    return falling(at) if at < 40 else 3.0


def one(points: list[LossPoint], events: tuple[Event, ...] = (), ranks: Ranks = EVEN) -> Finding:
    (finding,) = diagnose(points, events, ranks)
    assert not any("{" in text for text in finding.lines())
    return finding


# --- the curve --------------------------------------------------------------------------------------------------------


def test_a_jump_is_told_with_its_step_and_levels() -> None:
    found = find_anomaly(curve(jumping))
    assert found is not None and found.shape is Shape.JUMPS
    assert found.step == 410 and abs(found.before - 0.25) < 0.15 and abs(found.now - 3.0) < 0.1


def test_a_loss_that_has_recovered_is_no_trouble() -> None:
    assert find_anomaly(curve(lambda at: 3.0 if 20 <= at < 26 else falling(at))) is None


def test_a_growing_loss_is_told() -> None:
    found = find_anomaly(curve(lambda at: 2.3 + 0.02 * math.exp(at / 12)))
    assert found is not None and found.shape is Shape.GROWS


def test_an_oscillation_is_told_where_it_becomes_wide_and_where_it_always_was() -> None:
    wide = random.Random(5)
    found = find_anomaly(curve(lambda at: 1.0 + (wide.uniform(-0.9, 0.9) if at > 35 else 0.0), noise=0.03))
    assert found is not None and found.shape is Shape.OSCILLATES and found.now > 4 * found.before
    always = random.Random(6)
    found = find_anomaly(curve(lambda at: 2.3 + abs(always.gauss(0, 8)), count=90))
    assert found is not None and found.shape is Shape.OSCILLATES and found.step == 10


def test_a_single_odd_batch_and_few_points_are_nothing() -> None:
    assert find_anomaly(curve(lambda at: 50.0 if at == 41 else falling(at))) is None
    assert find_anomaly(curve(jumping, count=9)) is None


def test_many_points_are_merged_by_medians() -> None:
    points = curve(lambda at: 1.0, count=1000, noise=0.0)
    points[500] = LossPoint(5010, 99.0)
    assert len(thinned(points)) <= 120 and max(point.loss for point in thinned(points)) == 1.0


def test_steps_that_were_gone_back_over_do_not_count() -> None:
    points = [LossPoint(step, float(step)) for step in (10, 20, 30, 20, 30, 40)]
    assert [point.step for point in behind_now(points)] == [10, 20, 30, 40]


# --- causes -----------------------------------------------------------------------------------------------------------


def test_a_learning_rate_is_blamed_where_all_ranks_are_alike() -> None:
    finding = one(by_rank({0: jumping, 1: jumping}))
    assert finding.symptom == "the loss jumped from 0.249 to 2.99 at step 410"
    assert finding.cause == "the learning rate is too high" and finding.rank is None and finding.step == 410
    assert "the losses of ranks differ by" in finding.evidence[1] and "about 8 samples" in finding.evidence[2]


def test_the_rank_whose_data_is_bad_is_named_with_the_others_loss() -> None:
    finding = one(by_rank({0: falling, 1: lambda at: 4.0 if at > 30 else falling(at), 2: falling}))
    assert finding.rank == 1 and finding.cause.startswith("that rank's data or labels are wrong")
    assert "rank 1's loss is 4" in finding.evidence[0] and "the others have 0.2" in finding.evidence[0]
    assert "-r 1" in finding.advice
    alone = one(by_rank({0: falling, 1: lambda at: 2.3 + falling(at) / 9}, count=24))
    assert alone.symptom == "rank 1's loss is not like that of the others" and alone.rank == 1


def test_uneven_shards_are_told_where_the_ranks_losses_are_alike() -> None:
    finding = one(by_rank({0: jumping, 1: jumping}), ranks=Ranks(samples={0: 64.0, 1: 12.0}))
    assert finding.cause.startswith("shards are uneven")
    assert finding.evidence[0] == "rank 1 trains on 12 samples a step, rank 0 on 64"


@pytest.mark.parametrize(
    ("events", "ranks", "evidence"),
    [
        (
            (GradientMismatched(time=1.0, restart_count=0, step=400, cause="no_sync on the wrong side",
                                mismatch=Mismatch(compared=Compared.GRADIENTS)),),
            EVEN, "replicas differ since step 400: no_sync on the wrong side",
        ),
        ((), Ranks(steps={0: 500, 1: 900}, recent=20), "rank 0 has taken 500 steps, others up to 900"),
    ],
)  # fmt: skip
def test_stale_gradients_are_told(events: tuple[Event, ...], ranks: Ranks, evidence: str) -> None:
    finding = one(by_rank({0: jumping, 1: jumping}), events, ranks)
    assert finding.cause == "gradients are stale, or not the same on all ranks" and finding.evidence[0] == evidence


def test_ranks_that_are_only_looked_at_at_different_times_are_not_behind() -> None:
    finding = one(by_rank({0: jumping, 1: jumping}), ranks=Ranks(steps={0: 500, 1: 900}, recent=2000))
    assert finding.cause == "the learning rate is too high"


def test_an_overflow_is_told_where_the_loss_bursts() -> None:
    finding = one(curve(lambda at: falling(at) if at < 40 else 1e8))
    assert finding.cause.startswith("numbers overflowed") and "times what it was" in finding.evidence[0]


def broken(*ranks: int, step: int = 600) -> tuple[NonFiniteFound, ...]:
    return tuple(NonFiniteFound(time=1.0, restart_count=0, rank=rank, step=step, what="loss") for rank in ranks)


def test_nan_is_the_ranks_data_where_one_had_it_first() -> None:
    later = broken(0, step=601)
    finding = one(by_rank({0: falling, 1: falling}), broken(1) + later)
    assert finding.symptom == "loss of rank 1 is not finite since step 600"
    assert (finding.rank, finding.severity) == (1, Severity.ERROR) and "data" in finding.cause


def test_nan_on_all_ranks_is_an_overflow_or_after_a_rise_the_learning_rate() -> None:
    assert one(by_rank({0: falling, 1: falling}), broken(0, 1)).cause.startswith("numbers overflowed")
    finding = one(curve(lambda at: falling(at) if at < 40 else 40.0), broken(0, 1))
    assert finding.cause == "the learning rate is too high" and "before, the loss jumped" in finding.evidence[0]


def test_a_rank_must_stand_out_long_and_far() -> None:
    assert find_odd_rank(by_rank({0: falling, 1: lambda at: 1.5 * falling(at)})) is None
    assert find_odd_rank(by_rank({0: falling, 1: lambda at: 9.0 if at > 54 else falling(at)})) is None
    assert find_odd_rank(by_rank({0: falling})) is None


def test_of_very_many_ranks_a_few_points_tell_the_odd_one() -> None:
    levels: dict[int, Callable[[int], float]] = dict.fromkeys(range(1024), lambda at: 0.5)
    assert find_odd_rank(by_rank(levels, count=4)) is None
    found = find_odd_rank(by_rank({**levels, 700: lambda at: 2.5}, count=4))
    assert found is not None and (found.rank, found.count) == (700, 1024)
    assert find_odd_rank(by_rank({**levels, 700: lambda at: 2.5}, count=2)) is None

"""fully_shard over gloo: a patchwork of seeds, gathered parameters, reduce-scatters, and the replicas of HSDP."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.integration import sharded_programs as programs
from tests.integration.sharded_programs import STEPS, Told
from tests.integration.training_ranks import end_forkserver, run_in_ranks
from workbench.events import GradientMismatched
from workbench.policy.consistency import Cause, cause_of
from workbench.state import Compared, Mismatch

SHAPES = pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 1), (4, 2)])


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    yield
    end_forkserver()


def results(ranks: int, **options: Any) -> list[Told]:
    told: list[Told] = run_in_ranks(functools.partial(programs.run, **options), ranks)
    assert [one.off for one in told] == [""] * ranks
    return told


def only(told: list[Told]) -> Mismatch:
    found = [fields for one in told for event, fields in one.facts if event == "GradientMismatched"]
    assert len(found) == 1, [one["mismatch"]["compared"] for one in found]
    return msgspec.convert({**found[0], "time": 1.0, "restart_count": 0}, GradientMismatched).mismatch


@SHAPES
def test_ranks_that_agree_are_compared_and_nothing_changes(ranks: int, replicas: int) -> None:
    told = results(ranks, replicas=replicas)
    assert not any(one.facts for one in told)
    plain = results(ranks, replicas=replicas, watched=False)
    assert [one.result for one in told] == [one.result for one in plain]
    assert all(one.scatters == (2 * STEPS, 0, 0) for one in told)
    assert all((one.tensors, one.agreements) == ((4, STEPS) if replicas > 1 else (0, 0)) for one in told)


@SHAPES
def test_seeds_of_their_own_are_named_before_anything_is_trained(ranks: int, replicas: int) -> None:
    told = results(ranks, replicas=replicas, fault="seeds", policy="stop")
    mismatch = only(told)
    assert mismatch.compared is Compared.SHARDS
    assert mismatch.ranks == (), "none of them is right"
    assert mismatch.tensors[0] == "weight"
    assert cause_of(mismatch) is Cause.SEEDS
    assert all("fully_shard" in one.error for one in told)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_bit_that_flips_in_gathered_parameters_is_found_at_the_step(ranks: int) -> None:
    mismatch = only(results(ranks, fault="gathered"))
    assert mismatch.compared is Compared.GATHERED
    assert mismatch.ranks == ((1,) if ranks == 4 else ())
    assert mismatch.count == 1
    assert cause_of(mismatch) is Cause.GATHERED


@SHAPES
def test_a_reduce_scatter_that_goes_wrong_is_done_again(ranks: int, replicas: int) -> None:
    told = results(ranks, replicas=replicas, fault="scattered")
    mismatch = only(told)
    assert (mismatch.compared, mismatch.attempts, mismatch.is_lasting) == (Compared.REDUCE, 1, False)
    assert "rank 1" in mismatch.detail
    assert [one.result for one in told] == [one.result for one in results(ranks, replicas=replicas, watched=False)]


def test_one_that_stays_wrong_stops_the_job() -> None:
    told = results(2, fault="lasting", policy="stop")
    assert only(told).is_lasting
    assert all("reduce-scatter" in one.error for one in told)


def test_replicas_of_a_part_are_held_against_each_other() -> None:
    told = results(4, replicas=2, fault="state")
    mismatch = only([Told([fact for fact in one.facts if fact[1]["mismatch"]["compared"] == "state"], *one[1:])
                     for one in told])  # fmt: skip
    assert mismatch.tensors == ("0.weight.momentum_buffer",)
    assert mismatch.ranks == (1,), "its own digest tells, with two replicas"
    assert {rank for side in mismatch.sides for rank in side.ranks} == {1, 3}

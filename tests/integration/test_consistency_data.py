"""Real ranks over gloo that read what they should, and what they should not."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.integration import data_programs as programs
from tests.integration.training_ranks import end_forkserver, run_in_ranks
from workbench.findings import Finding
from workbench.policy.data import DataCause, explain_data
from workbench.state import DataDoubt

CLEAN = [name for name in programs.CASES if name.startswith("clean") and name != "clean_workers"]
WORLDS = pytest.mark.parametrize("ranks", [2, 4])


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    yield
    end_forkserver()


def told_by(case: str, ranks: int, **options: Any) -> list[tuple[int, DataDoubt, Finding]]:
    facts, *others = run_in_ranks(functools.partial(programs.run, case, **options), ranks)
    assert not any(others), "one rank speaks for all"
    found = []
    for fact in facts:
        assert fact["event"] == "DataDoubted", fact
        doubt = msgspec.convert(fact["doubt"], DataDoubt)
        found.append((fact["step"], doubt, explain_data(doubt, fact["step"])))
    return found


@WORLDS
@pytest.mark.parametrize("case", CLEAN)
def test_of_data_that_are_as_they_should_be_nothing_is_said(case: str, ranks: int) -> None:
    assert told_by(case, ranks) == []


@WORLDS
@pytest.mark.parametrize(
    ("case", "cause", "step"),
    [
        ("every_rank_reads_the_same_shard", DataCause.SAME_SHARD, 0),
        ("the_same_made_up_batches", DataCause.SAME_BATCH, 1),
        ("every_sampler_deals_for_rank_0", DataCause.SAME_SHARD, 0),
        ("split_for_twice_as_many", DataCause.WRONG_SPLIT, 1),
        ("set_epoch_forgotten", DataCause.NO_SET_EPOCH, None),
        ("set_epoch_differs", DataCause.OTHER_EPOCHS, 0),
        ("each_rank_reads_all_in_its_own_order", DataCause.OWN_ORDER, None),
        ("shards_overlap", DataCause.OVERLAP, None),
        ("uneven_batches", DataCause.UNEVEN, 1),
        ("the_same_random_numbers", DataCause.SAME_RANDOM, 1),
    ],
)
def test_what_is_odd_is_told_with_its_cause(case: str, cause: DataCause, step: int | None, ranks: int) -> None:
    found = told_by(case, ranks)
    first, _, why = found[0]
    assert why.cause == cause.value, [one[2].symptom for one in found]
    if cause is DataCause.NO_SET_EPOCH:
        step = programs.SAMPLES // ranks // 4  # the first step of epoch 1
        assert "epoch 1 equals that of epoch 0" in why.symptom
    assert step is None or first == step
    assert why.evidence
    assert why.advice


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("set_epoch_forgotten_with_workers", DataCause.NO_SET_EPOCH),
        ("workers_with_the_same_seed", DataCause.SAME_SEED),
    ],
)
def test_loaders_with_workers(case: str, cause: DataCause) -> None:
    assert cause.value in [why.cause for *_, why in told_by(case, 2)]


def test_loaders_with_workers_that_are_as_they_should_be() -> None:
    assert told_by("clean_workers", 2) == []


def test_the_ranks_are_named() -> None:
    (_, doubt, why), *_ = told_by("uneven_batches", 4)
    assert doubt.ranks == (1,)
    assert "4 to 12" in why.symptom
    (_, doubt, why), *_ = told_by("set_epoch_differs", 4)
    assert (doubt.ranks, doubt.epochs) == ((1,), (0, 1))


def test_two_of_four_that_read_the_same() -> None:
    (_, doubt, why), *_ = told_by("a_shard_of_one_rank_is_anothers", 4)
    assert doubt.ranks == (0, 1)
    assert why.dated().startswith("step 0: ranks 0 and 1 got the same batch")

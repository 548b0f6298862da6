"""All-reduces of real ranks over gloo that are hit before, in and after the sum: found, told, done again, right."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.integration import reduce_programs as programs
from tests.integration.reduce_programs import STEPS, Hit, Told
from tests.integration.training_ranks import end_forkserver, run_in_ranks
from workbench.events import GradientMismatched
from workbench.policy.consistency import Cause, cause_of
from workbench.state import Compared, Mismatch

WORLDS = pytest.mark.parametrize("ranks", [2, 4])
MODES = pytest.mark.parametrize("mode", ["checked", "bitwise", "exact"])


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    yield
    end_forkserver()


@functools.cache
def clean(ranks: int, mode: str | None, **options: Any) -> Told:
    return results(ranks, mode=mode, **options)[0]


def results(ranks: int, **options: Any) -> list[Told]:
    told: list[Told] = run_in_ranks(functools.partial(programs.run, **options), ranks)
    assert len({one.result for one in told}) == 1, "ranks have other parameters"
    assert not any(one.facts for one in told[1:]), "one rank speaks for all"
    return told


def only(told: list[Told]) -> Mismatch:
    found = [fields for event, fields in told[0].facts if event == "GradientMismatched"]
    assert len(found) == 1, [one["mismatch"]["compared"] for one in found]
    event = msgspec.convert({**found[0], "time": 1.0, "restart_count": 0}, GradientMismatched)
    assert event.mismatch.compared is Compared.REDUCE
    return event.mismatch


@WORLDS
@MODES
@pytest.mark.parametrize("stage", ["before", "in", "after"])
def test_a_flip_is_found_named_and_undone(mode: str, ranks: int, stage: str) -> None:
    told = results(ranks, mode=mode, hit=Hit(stage, bit=27 if mode != "exact" else 58))
    assert told[0].result == clean(ranks, mode).result, "not what it would have been"
    assert [(one.checked, one.found, one.healed) for one in told] == [(STEPS, 1, 1)] * ranks
    mismatch = only(told)
    assert mismatch.attempts == 1
    assert mismatch.tensors == ("2.weight",)  # of the last layer: its bucket is the first
    assert (mismatch.element, mismatch.elements) == (1, 1)  # 2.bias, of 4, lies before it
    cause = cause_of(mismatch)
    if stage == "after":
        assert (mismatch.ranks, mismatch.stage, cause) == ((1,), "after", Cause.CORRUPTED)
    else:
        assert (mismatch.ranks, mismatch.stage, cause) == ((), "in", Cause.REDUCED), "that is a guess"
    if stage == "before":
        assert "1" in mismatch.detail, "who sent it is no suspect"
    if stage != "before" and mode != "exact":
        assert mismatch.bits == (27,)


@MODES
def test_nothing_is_said_of_reduces_that_are_right(mode: str) -> None:
    told = clean(4, mode)
    assert told.facts == []
    assert (told.checked, told.found) == (STEPS, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_bitwise_training_is_that_of_plain_ddp(dtype: str) -> None:
    plain = run_in_ranks(functools.partial(programs.run, mode=None, dtype=dtype), 4)[0]
    told = clean(4, "bitwise", dtype=dtype)
    assert told.result == plain.result
    assert (told.checked, told.facts) == (STEPS, [])


@pytest.mark.parametrize("width", [32, 64])
def test_exact_training_does_not_depend_on_ranks_order_and_buckets(width: int) -> None:
    told = clean(4, "exact", width=width)
    assert told.result == clean(4, "exact", width=width, seat=(2, 0, 3, 1)).result
    assert told.result == clean(4, "exact", width=width, bucket_cap_mb=25).result


@pytest.mark.parametrize("mode", ["checked", "exact"])
def test_gradients_that_are_views_of_buckets_can_be_had_again(mode: str) -> None:
    told = results(2, mode=mode, hit=Hit("after"), gradient_as_bucket_view=True)
    assert only(told).ranks == (1,)
    assert told[0].result == clean(2, mode).result


def test_a_reduce_that_stays_wrong_is_told_after_two_more() -> None:
    told = results(2, hit=Hit("in", times=3))
    mismatch = only(told)
    assert (mismatch.attempts, mismatch.is_lasting, mismatch.ranks) == (2, True, ())
    assert cause_of(mismatch) is Cause.REDUCED


def test_and_the_job_stops_when_it_is_to() -> None:
    told = results(2, hit=Hit("in", times=3), policy="stop")
    assert all("what an all-reduce gave" in one.error for one in told)


@pytest.mark.parametrize(("program", "hook"), [("fp16", "fp16_compress_hook"), ("power_sgd", "powerSGD_hook")])
def test_a_hook_of_the_program_stays(program: str, hook: str) -> None:
    told = clean(2, "checked", program=program)
    assert (told.hooks, told.checked, told.facts) == ([hook], 0, [])
    assert told.result == clean(2, None, program=program).result


def test_a_hook_that_the_program_registers_later_takes_over() -> None:
    told = clean(2, "bitwise", program="late")
    assert (told.hooks, told.checked) == (["fp16_compress_hook"], STEPS)


def test_only_backwards_that_reduce_are_checked() -> None:
    told = results(2, program="accumulating", hit=Hit("after"))
    assert only(told).ranks == (1,)
    assert told[0].checked == STEPS
    assert told[0].result == clean(2, "checked", program="accumulating").result


def test_ranks_without_input_take_part_in_no_check() -> None:
    assert clean(2, "checked", program="uneven").checked == 0
    assert clean(2, "exact", program="uneven").facts == []


def test_some_backwards_are_checked_and_the_others_are_plain() -> None:
    assert clean(2, "checked", every=2).checked == (STEPS + 1) // 2

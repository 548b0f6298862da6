"""Real ranks over gloo that agree, and that do not: what is said of each, of whom, where and when."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.integration import consistency_programs as programs
from tests.integration.consistency_programs import AT, STEPS, Told
from tests.integration.training_ranks import end_forkserver, run_in_ranks
from workbench.events import GradientMismatched
from workbench.policy.consistency import Cause, cause_of
from workbench.policy.standing import Marks, advance
from workbench.state import Compared, Mismatch
from workbench.telemetry import GradientStatistics

CLEAN = [name for name in programs.CASES if name.startswith("clean")]
WORLDS = pytest.mark.parametrize("ranks", [2, 4])


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    yield
    end_forkserver()


def told_by(case: str, ranks: int, **options: Any) -> list[Told]:
    told: list[Told] = run_in_ranks(functools.partial(programs.run, case, **options), ranks)
    assert [one.off for one in told] == [""] * ranks, "checking ended"
    assert not any(one.facts for one in told[1:] if not is_of_nan(one)), "one rank speaks for all"
    return told


def is_of_nan(one: Told) -> bool:
    return all(event == "NonFiniteFound" for event, _ in one.facts)


def mismatches(told: list[Told]) -> list[GradientMismatched]:
    """As the record has them."""
    facts = [fields for event, fields in told[0].facts if event == "GradientMismatched"]
    return [msgspec.convert({**fields, "time": 1.0, "restart_count": 0}, GradientMismatched) for fields in facts]


def only(told: list[Told]) -> tuple[int, Mismatch]:
    found = mismatches(told)
    assert len(found) == 1, [one.mismatch.compared for one in found]
    return found[0].step, found[0].mismatch


def checks(told: list[Told]) -> dict[str, int]:
    found = [report for report in told[0].reports if "checked" in report]
    return {name: sum(report[name] for report in found) for name in ("checked", "agreed", "unclear")}


def looks(told: list[Told]) -> list[GradientStatistics]:
    about = {"job_id": "job", "restart_count": 0, "rank": 0}
    found = [report for report in told[0].reports if "samples" in report]
    return [msgspec.convert({**report, **about}, GradientStatistics) for report in found]


@WORLDS
@pytest.mark.parametrize("case", CLEAN)
def test_ranks_that_agree_are_checked_at_every_step_and_nothing_is_said(case: str, ranks: int) -> None:
    told = told_by(case, ranks)
    assert mismatches(told) == []
    found = checks(told)
    assert found["checked"] == found["agreed"] >= STEPS - 1
    assert {event for event, _ in told[0].facts} <= {"ConsistencyPaced"}
    assert sum(look.samples for look in looks(told)) >= 1
    assert {look.missing for look in looks(told)} == {""}
    assert all(None not in look.norms for look in looks(told) if "scaler" not in case)


def test_training_is_the_same_with_checks_and_without() -> None:
    """Bit for bit: a check, with a look at each step, reads, and sends in a group of its own."""
    looked = told_by("clean_adam", 2, budget=100.0)
    assert sum(look.samples for look in looks(looked)) >= STEPS - 1
    assert looked[0].result == told_by("clean_adam", 2, every=1000)[0].result


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("every_rank_for_itself", "no all_reduce of gradients"),
        ("a_model_that_drifts_apart_on_purpose", "noop_hook lets ranks go different ways"),
    ],
)
def test_where_ranks_are_meant_to_differ_nothing_is_checked_and_it_says_so(case: str, reason: str) -> None:
    told = told_by(case, 2)
    ((event, fields),) = told[0].facts
    assert event == "ConsistencyPaced"
    assert fields["every"] == 0
    assert reason in fields["reason"]


def test_a_rank_that_steps_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Told] = run_in_ranks(functools.partial(programs.run, "only_rank_0_steps"), 2)
    assert mismatches(told) == []
    assert "not every rank steps" in told[0].facts[0][1]["reason"]


@WORLDS
@pytest.mark.parametrize(
    ("case", "step", "compared", "cause", "tensors"),
    [
        ("inverted_no_sync", 0, Compared.GRADIENTS, Cause.NO_SYNC, 4),
        ("always_no_sync", 0, Compared.GRADIENTS, Cause.NOT_REDUCED, 4),
        ("forward_bypasses_ddp", 0, Compared.GRADIENTS, Cause.BYPASSED, 4),
        ("a_loop_that_forgets_its_all_reduce", AT, Compared.GRADIENTS, Cause.NOT_REDUCED, 4),
        ("batch_norm_not_synchronised", 1, Compared.BUFFERS, Cause.BUFFERS, 2),
    ],
)
def test_where_all_ranks_differ_nobody_is_blamed(
    case: str, step: int, compared: Compared, cause: Cause, tensors: int, ranks: int
) -> None:
    when, mismatch = only(told_by(case, ranks))
    assert (when, mismatch.compared, mismatch.ranks, mismatch.count) == (step, compared, (), tensors)
    assert cause_of(mismatch) is cause
    assert len(mismatch.sides) == ranks
    first = "1.running_mean" if compared is Compared.BUFFERS else mismatch.tensors[0]
    assert mismatch.tensors[0] == first


@WORLDS
@pytest.mark.parametrize(
    ("case", "step", "compared", "rank", "tensor", "cause"),
    [
        ("clip_on_one_rank", 0, Compared.GRADIENTS, 0, "0.weight", Cause.SCALED),
        ("noise_on_one_rank", AT, Compared.GRADIENTS, 1, "0.weight", Cause.CHANGED),
        ("bit_flip_in_gradient", AT, Compared.GRADIENTS, 1, "0.weight", Cause.CORRUPTED),
        ("no_gradient_on_one_rank", AT, Compared.ABSENT, 1, "", Cause.ABSENT),
        ("learning_rate_of_one_rank", AT + 1, Compared.SETTINGS, 1, "", Cause.OPTIONS),
        ("weights_loaded_on_rank_0_only", 0, Compared.PARAMETERS, 0, "0.weight", Cause.LOADED),
        ("optimizer_state_loaded_on_rank_0_only", 0, Compared.STATE, 0, "0.weight.momentum_buffer", Cause.STATE_LOADED),
        ("parameters_in_another_order", 0, Compared.STRUCTURE, 0, "a.weight", Cause.ORDER),
        ("parameters_of_another_type", 0, Compared.STRUCTURE, 0, "weight", Cause.TYPES),
    ],
)
def test_one_rank_that_deviates_is_named_where_a_majority_says_so(
    case: str, step: int, compared: Compared, rank: int, tensor: str, cause: Cause, ranks: int
) -> None:
    """Of two ranks the sides are named, and none is blamed."""
    when, mismatch = only(told_by(case, ranks))
    assert (when, mismatch.compared) == (step, compared)
    assert mismatch.ranks == ((rank,) if ranks > 2 else ())
    assert mismatch.told_by == ("majority" if ranks > 2 else "")
    assert cause_of(mismatch) is cause
    if ranks > 2 and tensor:
        assert mismatch.tensors[0] == tensor


@WORLDS
@pytest.mark.parametrize(
    ("case", "compared", "tensor", "bits", "cause"),
    [
        ("bit_flip_in_parameter", Compared.PARAMETERS, "2.weight", (0,), Cause.CORRUPTED),
        ("bit_flip_in_momentum", Compared.STATE, "2.weight.momentum_buffer", (12,), Cause.CORRUPTED),
        ("weights_written_on_one_rank", Compared.PARAMETERS, "2.weight", None, Cause.WRITTEN),
    ],
)
def test_what_changes_between_steps_is_named_with_two_ranks_as_well(
    case: str, compared: Compared, tensor: str, bits: tuple[int, ...] | None, cause: Cause, ranks: int
) -> None:
    """Its own digest after the last step tells on it."""
    when, mismatch = only(told_by(case, ranks))
    assert (when, mismatch.compared, mismatch.ranks) == (AT + 1, compared, (1,))
    assert mismatch.told_by == ("majority" if ranks > 2 else "own digest")
    assert (mismatch.tensors, mismatch.count) == ((tensor,), 1)
    assert cause_of(mismatch) is (cause if ranks == 2 or bits else Cause.DRIFTED)
    if bits:
        assert (mismatch.elements, mismatch.element, mismatch.bits) == (1, 3, bits)
        assert (mismatch.measured_on, mismatch.compared_with) == (1, 0)


def test_a_gradient_that_is_not_finite_on_one_rank_only() -> None:
    when, mismatch = only(told_by("nan_in_a_gradient_after_the_reduce", 4))
    assert (when, mismatch.ranks, mismatch.broken, mismatch.element) == (AT, (1,), (1,), 18)
    assert cause_of(mismatch) is Cause.NOT_FINITE


@WORLDS
def test_nan_is_traced_to_the_rank_that_had_it_first(ranks: int) -> None:
    told = told_by("nan_in_the_batch_of_one_rank", ranks)
    found = [fields for one in told for event, fields in one.facts if event == "NonFiniteFound"]
    assert [(fields["rank"], fields["step"]) for fields in found] == [(1, AT)]
    assert "before the all-reduce" in found[0]["what"]
    assert "its batch is not finite" in found[0]["what"]
    assert mismatches(told) == []


@pytest.mark.parametrize(
    ("case", "what", "module"),
    [
        ("nan_in_a_module_of_one_rank", "loss, before the all-reduce (NaN appears after module 0),", "0"),
        ("nan_in_the_backward_of_one_rank", "gradient of 2.inner.bias, before the all-reduce,", "2.inner"),
    ],
)
def test_nan_is_traced_to_the_module_that_had_it_first(case: str, what: str, module: str) -> None:
    told = told_by(case, 2)
    found = [fields for one in told for event, fields in one.facts if event == "NonFiniteFound"]
    assert found == [{"rank": 1, "step": AT, "what": what, "module": module}]


# --- what gradients are like ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["accumulated_with_no_sync", "reduced_by_a_loop"])
def test_a_look_sees_each_ranks_own_gradients_before_they_are_reduced(case: str) -> None:
    told = told_by(case, 2, budget=100.0)
    (look,) = looks(told)
    assert look.samples == STEPS - 1
    for rank, one in enumerate(told):
        assert look.norms[rank] == pytest.approx(statistics.median(one.result[1:]), rel=1e-3)
    assert look.layers
    assert all(0.001 < layer.update < 0.5 for layer in look.layers)


@pytest.mark.parametrize(
    ("case", "about", "words"),
    [
        ("wrong_labels_on_rank_1", "direction", "the gradients of rank 1 point against the mean"),
        ("a_large_shard_on_rank_1", "norm", "times as large as the others'"),
    ],
)
def test_a_rank_whose_gradients_stand_out_is_named(case: str, about: str, words: str) -> None:
    marks, found = Marks(), []
    for look in looks(told_by(case, 4, budget=100.0, often=True)):
        marks, new = advance(marks, look)
        found += new
    assert (found[0].ranks, found[0].about) == ((1,), about)
    assert words in found[0].finding.symptom
    assert {one.ranks for one in found} == {(1,)}


def test_a_rank_that_skips_a_step_does_not_hang_the_others() -> None:
    """They wait a while for it, go on, and say what it was when it comes again."""
    told = told_by("one_rank_skips_a_step", 4)
    when, mismatch = only(told)
    assert mismatch.compared is Compared.STEPS
    assert mismatch.ranks == (1,)
    assert cause_of(mismatch) is Cause.SKIPPED
    assert when > AT


# --- what is done about it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("bit_flip_in_gradient", 4),
        ("no_gradient_on_one_rank", 4),
        ("optimizer_state_loaded_on_rank_0_only", 4),
        ("bit_flip_in_momentum", 4),
        ("bit_flip_in_momentum", 2),
    ],
)
def test_repaired_ranks_end_as_if_nothing_had_happened(case: str, ranks: int) -> None:
    """Bit for bit, optimizer state included."""
    told = told_by(case, ranks, policy="repair")
    assert [event.response for event in mismatches(told)] == ["repair"]
    ((_, repaired),) = [fact for fact in told[0].facts if fact[0] == "ReplicasRepaired"]
    assert repaired["source"] == 0 or case.startswith("optimizer_state")
    clean = told_by("clean", ranks)
    assert [one.result for one in told] == [clean[0].result] * ranks


def test_a_repaired_parameter_is_the_same_on_all_ranks_again() -> None:
    """The gradient of that step was computed with it, on all ranks alike."""
    told = told_by("bit_flip_in_parameter", 4, policy="repair")
    assert len({tuple(one.result) for one in told}) == 1
    assert checks(told) == {"checked": STEPS, "agreed": STEPS - 1, "unclear": 0}


@WORLDS
def test_stopped_ranks_all_raise_before_the_step_is_taken(ranks: int) -> None:
    told = told_by("bit_flip_in_gradient", ranks, policy="stop")
    assert all(f"step {AT}" in one.error and "0.weight" in one.error for one in told)
    assert [event.response for event in mismatches(told)] == ["stop"]


def test_what_cannot_be_repaired_stops() -> None:
    told = told_by("forward_bypasses_ddp", 4, policy="repair")
    assert [event.response for event in mismatches(told)] == ["stop"]
    assert "cannot be told" in told[0].error


def test_buffers_that_are_each_ranks_own_stop_nothing() -> None:
    told = told_by("batch_norm_not_synchronised", 2, policy="stop")
    assert [event.response for event in mismatches(told)] == ["warn"]
    assert told[0].error == ""


def test_a_difference_is_told_once_and_counted_as_long_as_it_lasts() -> None:
    told = told_by("clip_on_one_rank", 4)
    assert len(mismatches(told)) == 1
    deviating = [pair for report in told[0].reports for pair in report.get("deviating", ())]
    assert sum(count for rank, count in deviating if rank == 0) == STEPS
    assert checks(told)["agreed"] == 0

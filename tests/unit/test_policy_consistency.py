"""From what ranks found when they differed to a cause, and to what the job does about it."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.errors import GradientMismatchError
from workbench.events import CheckpointSaved, GradientMismatched, RankRaised
from workbench.policy.consistency import RULES, Cause, cause_of, explain, is_corruption, summary
from workbench.policy.recovery import Action, avoided, decide
from workbench.session import error_of
from workbench.spec import JobSpec, MismatchPolicy
from workbench.state import THE_START, Checkpoint, Compared, FailureKind, JobPhase, JobState, Mismatch, Side
from workbench.testing import FakePool

SIDES = {"sides": (Side((0, 2, 3), "aa"), Side((1,), "bb")), "told_by": "majority", "ranks": (1,)}
TIE = {"sides": (Side((0,), "aa"), Side((1,), "bb"))}
ALL = {"sides": tuple(Side((rank,), str(rank)) for rank in range(4)), "count": 4, "of": 4}
ONE = {"tensors": ("0.weight",), "count": 1, "of": 4}
FLIP = {**ONE, "element": 5, "elements": 1, "size": 128, "bits": (3,), "deviation": 1e-9, "compared_with": 0}
WHOLE = {"tensors": ("0.weight",), "count": 4, "of": 4, "element": 0, "elements": 128, "size": 128, "bits": (1, 2)}
GRADIENTS, PARAMETERS, STATE = Compared.GRADIENTS, Compared.PARAMETERS, Compared.STATE


@pytest.mark.parametrize(
    ("cause", "compared", "evidence"),
    [
        (Cause.BYPASSED, GRADIENTS, {**ALL, "bypassed": (0, 1, 2, 3)}),
        (Cause.NO_SYNC, GRADIENTS, {**ALL, "unsynced": (0, 1, 2, 3), "synced": (0, 1, 2, 3)}),
        (Cause.NOT_REDUCED, GRADIENTS, {**ALL, "unsynced": (0, 1, 2, 3)}),
        (Cause.NOT_REDUCED, GRADIENTS, {**ALL, "bypassed": (0, 1, 2, 3), "is_wrapped": False}),
        (Cause.NOT_REDUCED, GRADIENTS, ALL),
        (Cause.SCALED, GRADIENTS, {**SIDES, **WHOLE, "ratio": 0.25}),
        (Cause.SCALED, GRADIENTS, {**TIE, **WHOLE, "ratio": 0.25}),
        (Cause.CORRUPTED, GRADIENTS, {**SIDES, **FLIP}),
        (Cause.CORRUPTED, GRADIENTS, {**TIE, **FLIP}),
        (Cause.CHANGED, GRADIENTS, {**SIDES, **WHOLE}),
        (Cause.NOT_FINITE, GRADIENTS, {**SIDES, **FLIP, "broken": (1,)}),
        (Cause.CHANGED, GRADIENTS, {**TIE, **ONE, "element": 0, "elements": 100, "size": 128}),
        (Cause.ABSENT, Compared.ABSENT, SIDES),
        (Cause.ORDER, Compared.STRUCTURE, {**SIDES, "values": ("a.weight (8, 8) float32", "b.weight (8, 8) float32")}),
        (Cause.TYPES, Compared.STRUCTURE, {**SIDES, "values": ("a.weight (8, 8) float16", "a.weight (8, 8) bfloat16")}),
        (Cause.STRUCTURE, Compared.STRUCTURE, {**SIDES, "values": ("a.weight (8, 8) float32", "b.bias (8,) float32")}),
        (Cause.LOADED, PARAMETERS, {**SIDES, **WHOLE, "is_first": True}),
        (Cause.STATE_LOADED, STATE, {**SIDES, **WHOLE, "lacking": (0, 2, 3)}),
        (Cause.STATE_LOADED, STATE, {**SIDES, **WHOLE, "is_first": True}),
        (Cause.CORRUPTED, PARAMETERS, {**SIDES, **FLIP}),
        (Cause.CORRUPTED, STATE, {**TIE, **FLIP, "ranks": (1,), "told_by": "own digest", "changed": (1,)}),
        (Cause.WRITTEN, PARAMETERS, {**TIE, **WHOLE, "ranks": (1,), "changed": (1,), "told_by": "own digest"}),
        (Cause.DRIFTED, PARAMETERS, {**SIDES, **WHOLE}),
        (Cause.OPTIONS, Compared.SETTINGS, {**SIDES, "values": ("lr = 0.1", "lr = 0.2")}),
        (Cause.BUFFERS, Compared.BUFFERS, {**ALL, "broadcasts": False}),
        (Cause.BUFFERS, Compared.BUFFERS, {**SIDES, **WHOLE}),
        (Cause.CORRUPTED, Compared.BUFFERS, {**SIDES, **FLIP}),
        (Cause.SKIPPED, Compared.STEPS, SIDES),
        (Cause.SCALER, Compared.SCALE, SIDES),
        (Cause.REDUCED, Compared.REDUCE, {**FLIP, "stage": "checksum"}),
        (Cause.REDUCED, Compared.REDUCE, {**FLIP, "is_lasting": True}),
        (Cause.CORRUPTED, Compared.REDUCE, {**SIDES, **FLIP, "stage": "after"}),
        (Cause.REDUCED, Compared.REDUCE, FLIP),
        (Cause.SEEDS, Compared.SHARDS, {**SIDES, **WHOLE}),
        (Cause.GATHERED, Compared.GATHERED, {**SIDES, **WHOLE}),
        (Cause.UNKNOWN, Compared.DATA, {}),
    ],
)
def test_the_evidence_has_a_cause(cause: Cause, compared: Compared, evidence: dict[str, Any]) -> None:
    mismatch = Mismatch(compared=compared, **evidence)
    found = explain(mismatch, 5)
    assert cause_of(mismatch) is cause and found.cause == cause.value
    assert found.dated().startswith("step 5: ")
    assert "{" not in found.symptom + found.advice
    assert found.advice
    assert cause.value in summary(mismatch, 5)


def test_every_rule_has_a_case_above() -> None:
    marks = [mark for mark in test_the_evidence_has_a_cause.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    met = {
        next(number for number, rule in enumerate(RULES) if rule.applies(Mismatch(compared=compared, **evidence)))
        for _, compared, evidence in marks[0].args[1]
    }
    assert met == set(range(len(RULES)))


def test_no_rank_is_blamed_that_is_not_known() -> None:
    for compared in Compared:
        mismatch = Mismatch(compared=compared, **TIE, **FLIP)
        found = explain(mismatch, 5)
        assert "rank 1" not in found.symptom + found.advice, found
        assert not is_corruption(mismatch)


def test_what_looks_like_a_device() -> None:
    assert is_corruption(Mismatch(compared=GRADIENTS, **SIDES, **FLIP))
    assert not is_corruption(Mismatch(compared=GRADIENTS, **SIDES, **WHOLE))


# --- what the job does ------------------------------------------------------------------------------------------------

JOB = "train"
BAD = Mismatch(compared=PARAMETERS, **SIDES, **FLIP)


def job(policy: MismatchPolicy, restarts: int = 1, ranks: int = 4) -> FakePool:
    pool = FakePool({"a": 4, "b": 4}, start=1000.0)
    spec = JobSpec(entrypoint="train.py", nproc_per_node=ranks, max_restarts=restarts, on_mismatch=policy)
    pool.launch(spec, JOB)
    pool.settle()
    assert pool.states[JOB].phase is JobPhase.HEALTHY
    return pool


def state(pool: FakePool) -> JobState:
    return pool.states[JOB]


def saves(pool: FakePool, step: int, agreed: bool | None) -> None:
    point = Checkpoint(step=step, path=f"/c/{step}", world_size=4, saved_at=1.0, agreed=agreed)
    count = state(pool).restart_count
    pool.feed(JOB, CheckpointSaved(time=pool.now, restart_count=count, checkpoint=point))


def differs(pool: FakePool, response: str, step: int = 9, mismatch: Mismatch = BAD) -> None:
    count = state(pool).restart_count
    event = GradientMismatched(time=pool.now, restart_count=count, step=step, mismatch=mismatch, response=response)
    pool.feed(JOB, event)


def raises(pool: FakePool, rank: int) -> None:
    count = state(pool).restart_count
    pool.feed(JOB, RankRaised(time=pool.now, restart_count=count, rank=rank, error="ReplicasDifferError", traceback=""))


@pytest.mark.parametrize("response", ["warn", "repair"])
def test_a_warning_or_a_repair_goes_on(response: str) -> None:
    pool = job(MismatchPolicy(response))
    differs(pool, response)
    pool.settle()
    assert (state(pool).phase, state(pool).restart_count) == (JobPhase.HEALTHY, 0)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_stop_fails_with_rank_step_tensor_and_cause(is_late: bool) -> None:
    """Whatever is heard of first: the difference, or the exception of a rank that stops for it."""
    pool = job(MismatchPolicy.STOP)
    if is_late:
        raises(pool, 2)
    differs(pool, "stop")
    pool.settle()
    pool.advance(1.0)
    pool.settle()
    assert state(pool).phase is JobPhase.FAILED
    failure = state(pool).failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.step) == (FailureKind.MISMATCH, 1, 9)
    for words in ("rank 1 deviates in parameters at step 9", "0.weight", "bits flipped", "the job was to stop then"):
        assert words in state(pool).reason
    error = error_of(state(pool))
    assert isinstance(error, GradientMismatchError)
    assert (error.rank, error.step, error.mismatch) == (1, 9, BAD)
    assert "replace the device" in error.hint


def test_a_rollback_goes_to_the_newest_checkpoint_in_which_all_agreed() -> None:
    pool = job(MismatchPolicy.ROLLBACK)
    for step, agreed in ((2, True), (4, True), (6, False), (8, None)):
        saves(pool, step, agreed)
    differs(pool, "rollback")
    pool.settle()
    assert state(pool).restart_count == 1
    assert state(pool).resume == "/c/4"


@pytest.mark.parametrize(
    ("points", "resume"),
    [
        ([(2, True), (9, True)], "/c/9"),  # of that very step, compared as it was saved
        ([(2, True), (10, True)], "/c/2"),
        ([(6, None), (8, None)], "/c/8"),
        ([(6, None), (9, None)], "/c/6"),
        ([(6, False)], THE_START),
        ([], THE_START),
    ],
)
def test_where_a_rollback_goes(points: list[tuple[int, bool | None]], resume: str) -> None:
    pool = job(MismatchPolicy.ROLLBACK)
    for step, agreed in points:
        saves(pool, step, agreed)
    differs(pool, "rollback")
    known = state(pool)
    assert known.failures[0].kind is FailureKind.MISMATCH
    decision = decide(known, known.failures[0])
    assert (decision.action, decision.resume) == (Action.FALL_BACK, resume)


def test_a_slot_with_two_corruptions_is_not_used_again() -> None:
    pool = job(MismatchPolicy.WARN, ranks=2)
    two = Mismatch(compared=PARAMETERS, ranks=(1,), told_by="own digest", changed=(1,), **FLIP)
    differs(pool, "warn", mismatch=two)
    assert avoided(state(pool)) == ()
    differs(pool, "warn", mismatch=Mismatch(compared=GRADIENTS, **WHOLE, ranks=(1,)))  # no corruption
    assert avoided(state(pool)) == ()
    differs(pool, "repair", step=12, mismatch=two)
    place = state(pool).placements[1]
    assert avoided(state(pool)) == ((place.worker, place.slot),)


def test_a_difference_of_another_generation_changes_nothing() -> None:
    pool = job(MismatchPolicy.STOP)
    before = state(pool)
    pool.feed(JOB, GradientMismatched(time=pool.now, restart_count=7, step=1, mismatch=BAD, response="stop"))
    assert state(pool) == before

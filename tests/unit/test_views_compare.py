"""Whether two runs agree: bit for bit, within a tolerance, or not; how fast they were, with noise."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from workbench.spec import JobSpec
from workbench.state import JobPhase
from workbench.views.compare import (
    Line,
    Trace,
    Verdict,
    check,
    compare,
    curve,
    deviation,
    printed_numbers,
    rate,
)
from workbench.views.text import render_lines

CURVE = {k: 2.0 * math.exp(-k / 50) for k in range(1, 101)}


def trace(losses: dict[int, float] | None = None, **fields: Any) -> Trace:
    known = CURVE if losses is None else losses
    spec = fields.pop("spec", JobSpec(entrypoint="train.py", nproc_per_node=1))
    seconds = fields.pop("seconds", lambda step: 0.1)
    ranks = fields.get("world_size", 1)
    return Trace(
        name="a", spec=spec, phase=fields.pop("phase", JobPhase.SUCCEEDED), reason="all ranks finished",
        world_size=fields.pop("world_size", 1), last_step=fields.pop("last_step", max(known, default=0)),
        losses={0: known} if known else {},
        durations={rank: {step: seconds(step) for step in CURVE} for rank in range(ranks)},
        samples={rank: dict.fromkeys(CURVE, 16.0) for rank in range(ranks)}, **fields,
    )  # fmt: skip


def verdicts(lines: list[Line]) -> dict[str, Verdict]:
    return {line.what.partition(",")[0]: line.verdict for line in lines}


def is_deviation(lines: list[Line]) -> bool:
    return any(line.verdict.is_deviation for line in lines)


def test_the_same_run_is_the_same_bit_for_bit() -> None:
    lines = check(
        trace(printed={"accuracy": (97.0,)}, states={40: "aa"}), trace(printed={"accuracy": (97.0,)}, states={40: "aa"})
    )
    found = verdicts(lines)
    assert {found[k] for k in ("end", "steps", "loss", "printed accuracy", "state at step 40")} == {Verdict.SAME}
    assert not is_deviation(lines)
    assert "bit for bit" in render_lines(lines, ("before", "now"))


def scaled(factor: float) -> dict[int, float]:
    return {step: loss * factor for step, loss in CURVE.items()}


@pytest.mark.parametrize(
    ("factor", "options", "deterministic", "verdict"),
    [
        (1.0 + 1e-12, {}, False, Verdict.NEAR),
        (1.0 + 1e-12, {}, True, Verdict.DIFFERS),
        (1.0 + 1e-12, {"exact": True}, False, Verdict.DIFFERS),
        (1.04, {}, False, Verdict.NEAR),
        (1.06, {}, False, Verdict.DIFFERS),
        (1.06, {"tolerance": 0.1}, False, Verdict.NEAR),
        (math.nan, {}, False, Verdict.DIFFERS),
    ],
)
def test_how_far_losses_may_lie_apart(
    factor: float, options: dict[str, Any], deterministic: bool, verdict: Verdict
) -> None:
    spec = JobSpec(entrypoint="train.py", nproc_per_node=1, deterministic=deterministic)
    lines = check(trace(spec=spec), trace(scaled(factor), spec=spec), **options)
    assert verdicts(lines)["loss"] is verdict
    assert is_deviation(lines) is verdict.is_deviation


def test_noise_of_single_steps_is_no_deviation_and_a_shift_at_the_end_is() -> None:
    noisy = {step: loss * (1.2 if step % 2 else 0.8) for step, loss in CURVE.items()}
    assert deviation(list(CURVE.values()), list(noisy.values())) < 0.05
    late = {step: loss + (0.2 if step > 90 else 0.0) for step, loss in CURVE.items()}
    assert deviation(list(CURVE.values()), list(late.values())) > 0.3
    assert deviation([math.nan, 1.0], [math.nan, 1.0]) == 0.0


def test_other_ranks_are_compared_by_their_means() -> None:
    lines = check(trace(), trace(world_size=2))
    assert verdicts(lines)["loss"] is Verdict.SAME and verdicts(lines)["ranks"] is Verdict.TOLD
    two = msgspec.structs.replace(trace(world_size=2), losses={0: scaled(0.9), 1: scaled(1.1)})
    assert curve(two)[1] == pytest.approx(CURVE[1])
    assert verdicts(check(trace(), two))["loss"] is Verdict.NEAR


def test_a_run_that_was_cut_short_on_purpose() -> None:
    short = {step: loss for step, loss in CURVE.items() if step <= 20}
    spec = JobSpec(entrypoint="train.py", nproc_per_node=1, max_steps=20)
    before = trace(printed={"loss": (1.0, 0.5), "accuracy": (97.0,)})
    lines = check(before, trace(short, spec=spec, printed={"loss": (1.0,), "accuracy": (50.0,)}))
    assert not is_deviation(lines) and "loss, 20 steps" in [line.what for line in lines]
    assert "printed accuracy" not in verdicts(lines)


@pytest.mark.parametrize(
    ("now", "what"),
    [
        ({"phase": JobPhase.FAILED}, "end"),
        ({"last_step": 90}, "steps"),
        ({"losses": {}, "last_step": 100}, "loss"),
        ({"printed": {"accuracy": (80.0,)}}, "printed accuracy"),
        ({"printed": {}}, "printed accuracy"),
    ],
)
def test_what_is_a_deviation(now: dict[str, Any], what: str) -> None:
    lines = check(trace(printed={"accuracy": (97.0,)}), trace(**{"printed": {"accuracy": (97.0,)}, **now}))
    assert [line.what.partition(",")[0] for line in lines if line.verdict.is_deviation] == [what]


def test_scripts_that_report_nothing_are_compared_by_what_they_print() -> None:
    text = "epoch 1 of 3: loss 0.5\nval_loss=2.5e-1 Loss: nan\nTest accuracy: 97.33% on 450\nxloss 3 loss_fn 4\n"
    assert {k: v for k, v in printed_numbers(text).items() if k != "loss"} == {
        "val_loss": (0.25,),
        "test_accuracy": (97.33,),
    }
    assert printed_numbers(text)["loss"][0] == 0.5
    assert verdicts(check(trace({}, last_step=9), trace({}, last_step=9)))["loss"] is Verdict.TOLD


def test_throughput_with_its_noise() -> None:
    found = rate(trace(world_size=2))
    assert found is not None and found.has_samples
    assert found.speed == (pytest.approx(320.0), pytest.approx(0.0, abs=1e-9))
    slower = trace(seconds=lambda step: 0.2 if step % 3 else 0.21)
    line = check(trace(seconds=lambda step: 0.1 if step % 3 else 0.11), slower)[-1]
    assert line.verdict is Verdict.TOLD and "slower" in line.note and "ratio 0.5" in line.note
    assert rate(msgspec.structs.replace(trace(), durations={0: {1: 0.1}})) is None


def test_two_runs_of_any_kind() -> None:
    a = trace(
        spec=JobSpec(entrypoint="train.py", nproc_per_node=1, args=("--lr", "0.1"), seed=1), packages={"torch": "2.1"}
    )
    b = trace(scaled(2.0), spec=JobSpec(entrypoint="train.py", nproc_per_node=1, args=("--lr", "0.2")),
              packages={"torch": "2.2"}, failures=("rank 1 killed by SIGKILL",))  # fmt: skip
    lines = {line.what: line for line in compare(a, b)}
    assert (lines["args"].before, lines["args"].now) == ("--lr 0.1", "--lr 0.2")
    assert {"seed", "package torch", "end", "loss, 100 steps", "throughput", "failures"} <= set(lines)
    assert "SIGKILL" in lines["failures"].note
    assert not is_deviation(list(lines.values()))


def test_programs_that_differ_are_told_by_parameter_and_file() -> None:
    a = trace(parameters={"lr": "0.1", "n": "1"}, code={"train.py": "a", "helper.py": "b", "gone.py": "c"})
    b = trace(parameters={"lr": "0.2", "n": "1"}, code={"train.py": "x", "helper.py": "b"})
    lines = {line.what: (line.before, line.now) for line in compare(a, b)}
    assert lines["parameter lr"] == ("0.1", "0.2") and lines["code train.py"] == ("a text", "another one")
    assert not {"parameter n", "code helper.py", "code gone.py"} & set(lines)


def test_a_run_from_a_checkpoint_is_held_to_the_last_of_what_was_printed() -> None:
    late = JobSpec(entrypoint="train.py", nproc_per_node=1, resume_from="/c/step-00000060")
    begun = {0: {step: value for step, value in trace().losses[0].items() if step > 60}}
    before = trace(printed={"loss": (3.0, 2.0, 1.0), "accuracy": (97.0,)})
    now = msgspec.structs.replace(before, spec=late, losses=begun, printed={"loss": (1.0,), "accuracy": (97.0,)})
    lines = check(before, now, exact=True)
    assert not is_deviation(lines) and "loss, 40 steps" in [line.what for line in lines]
    assert is_deviation(check(before, msgspec.structs.replace(now, printed={"accuracy": (96.0,)}), exact=True))
    shorter = msgspec.structs.replace(late, max_steps=80)
    short = msgspec.structs.replace(now, spec=shorter, last_step=80, printed={"loss": (9.0,), "accuracy": (9.0,)})
    assert not is_deviation(check(before, short, exact=True))

"""replay-check as it is typed: a script, a module or a job; what it says, and its exit code."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.fake_session import FakeSession, context_of
from workbench.errors import UsageError
from workbench.findings import Finding
from workbench.policy.replay import Divergence, Replay, ReplayReport
from workbench.verbs.complete import complete
from workbench.verbs.table import run

SAME = ReplayReport(label="train", steps=5, ranks=2, tensors=3120, job_ids=("a", "b", "c"))
FINDING = Finding(symptom="rank 1, step 0: x differs", evidence=("seen",), cause="this", advice="do that")
OTHER = ReplayReport(
    label="train", steps=5, ranks=2, tensors=9, job_ids=("a",), finding=FINDING,
    divergence=Divergence(run=Replay.SECOND, rank=1, step=0, kind="output", name="x"),
)  # fmt: skip


def do(session: FakeSession, line: str, report: ReplayReport = SAME, **context: Any) -> Any:
    session.report = report
    return run(context_of(session, **context), line.split())


def test_a_script_with_its_arguments_is_told_from_a_job() -> None:
    session = FakeSession("train-1")
    do(session, "replay-check train.py -n 4 --seed 3 --steps 7 -- --lr 0.1")
    do(session, "replay-check -m package.train")
    do(session, "replay-check train-1 --deterministic --env A=1")
    do(session, "replay-check")
    asked = [(name, {key: value for key, value in given.items() if key != "tell"}) for name, given in session.replayed]
    assert asked == [
        ("train.py", {"args": ("--lr", "0.1"), "steps": 7, "nproc_per_node": 4, "seed": 3}),
        ("", {"module": "package.train", "args": ()}),
        ("train-1", {"deterministic": True, "env": {"A": "1"}}),
        ("train-1", {}),
    ]
    with pytest.raises(UsageError, match="train-1 is no script here"):
        do(session, "replay-check train-1 -- --lr 0.1")


def test_same_bits_are_told_in_a_line() -> None:
    outcome = do(FakeSession("train-1"), "replay-check", shell=True)
    assert outcome.text == "same bits in 2 runs and with slots swapped: train, 5 steps on 2 ranks, 3,120 tensors a run"
    assert (outcome.code, outcome.document["is_same"], outcome.document["job_ids"]) == (0, True, ("a", "b", "c"))


def test_a_difference_is_told_with_its_cause_and_exit_code_1() -> None:
    outcome = do(FakeSession("train-1"), "replay-check --json", OTHER, shell=True)
    assert outcome.code == 1 and outcome.document["finding"]["cause"] == "this"
    assert outcome.text.splitlines() == [
        "NOT the same bits: train, 5 steps on 2 ranks",
        "rank 1, step 0: x differs",
        "evidence: seen",
        "likely cause: this",
        "what to do: do that",
    ]


def test_runs_are_told_as_they_begin_unless_quiet() -> None:
    for line, is_told in (("replay-check", True), ("replay-check -q", False), ("replay-check --json", False)):
        session = FakeSession("train-1")
        do(session, line)
        assert ("tell" in session.replayed[0][1]) is is_told


def test_jobs_and_scripts_are_offered() -> None:
    sources = {"job": lambda text: ["train-1"], "script": lambda text: ["train.py"]}
    assert complete(["replay-check", "tr"], sources) == ["train-1", "train.py"]

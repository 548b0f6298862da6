"""When a job is held to have stopped getting on, and when it may take its time."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from workbench.policy.health import Pace, Situation, is_kept_waiting, is_stalled, patience
from workbench.spec import EntrypointKind, JobSpec
from workbench.telemetry import RankBeat

SPEC = JobSpec(entrypoint="t.py")
BEGUN = Pace(step=0.01, has_begun=True, begins=1.0)


def beat(rank: int = 0, **fields: Any) -> RankBeat:
    base = {"job_id": "j", "restart_count": 0, "rank": rank, "time": 0.0, "step": 5, "since": 0.0}
    return RankBeat(**{**base, "activity": "RUNNING", **fields})


def beats(*several: RankBeat) -> dict[int, RankBeat]:
    return {one.rank: one for one in several}


@pytest.mark.parametrize(
    ("pace", "fields", "spec", "seconds"),
    [
        (BEGUN, {}, SPEC, 1.5),
        (Pace(step=2.0, has_begun=True), {}, SPEC, 10.0),
        (Pace(step=0.01, has_begun=True, pauses={Situation.STEPPING: 0.8}), {}, SPEC, 4.0),
        (BEGUN, {"is_evaluating": True}, SPEC, 60.0),
        (Pace(has_begun=True, pauses={Situation.EVALUATING: 20.0}), {"is_evaluating": True}, SPEC, 100.0),
        (BEGUN, {"activity": "CHECKPOINT"}, SPEC, 120.0),
        (Pace(has_begun=True, pauses={Situation.SAVING: 0.5}), {"activity": "CHECKPOINT"}, SPEC, 10.0),
        (BEGUN, {"expected": 40.0}, SPEC, 40.0),
        (BEGUN, {"expected": 0.5}, SPEC, 1.5),
        (Pace(), {}, SPEC, 300.0),
        (Pace(begins=4.0), {}, SPEC, 20.0),
        (BEGUN, {"is_evaluating": True}, JobSpec(entrypoint="t.py", progress_timeout=7.0), 7.0),
        (BEGUN, {"expected": 40.0}, JobSpec(entrypoint="t.py", progress_timeout=7.0), 40.0),
        (BEGUN, {"activity": "IDLE"}, SPEC, inf),
    ],
)
def test_patience(pace: Pace, fields: dict[str, Any], spec: JobSpec, seconds: float) -> None:
    assert patience(beats(beat(**fields)), pace, spec) == seconds


def test_the_most_patient_rank_speaks_for_all() -> None:
    waiting = beat(1, activity="COLLECTIVE", age=14.0)
    assert is_stalled(beats(beat(0, activity="CHECKPOINT", age=14.0), waiting), BEGUN, SPEC) is None
    assert is_stalled(beats(beat(0, age=14.0), waiting), BEGUN, SPEC) is not None


def test_a_rank_that_stands_still_is_named_with_both_times() -> None:
    assert is_stalled(beats(beat(0), beat(1, age=2.25)), BEGUN, SPEC) == (
        "rank 1 has stood still for 2.2 s; 1.3 s are usual at most"
    )
    assert is_stalled(beats(beat(0), beat(1, age=1.2)), BEGUN, SPEC) is None
    assert is_stalled({}, BEGUN, SPEC) is None


def test_before_the_first_step_only_a_rank_that_trains_is_suspected() -> None:
    quiet = JobSpec(entrypoint="t.py", startup_timeout=3.0)
    assert is_stalled(beats(beat(0, age=50.0)), Pace(), quiet) is None, "a program that trains nothing"
    joining = beat(1, age=3.0, activity="COLLECTIVE", collective="init_process_group")
    assert is_stalled(beats(beat(0, age=50.0), joining), Pace(), quiet) is not None


def test_who_is_kept_waiting_at_the_start_is_told_long_before_patience_is_over() -> None:
    joining = beat(1, age=12.4, activity="COLLECTIVE", collective="init_process_group")
    known = beats(beat(0, age=50.0), joining)
    assert is_stalled(known, Pace(), SPEC) is None
    assert is_kept_waiting(known, Pace(), SPEC) == "rank 1 has waited in a collective for 12 s, before its first step"
    assert is_kept_waiting(known, BEGUN, SPEC) is None
    assert is_kept_waiting(known, Pace(), JobSpec(kind=EntrypointKind.INTERACTIVE)) is None
    assert is_kept_waiting(beats(beat(0, age=50.0), beat(1, age=50.0)), Pace(), SPEC) is None, "nobody waits"
    patient = beat(1, age=12.4, activity="COLLECTIVE", expected=60.0)
    assert is_kept_waiting(beats(patient), Pace(), SPEC) is None, "it has said that it may take that long"


def test_an_interactive_job_may_be_idle_and_its_cells_may_take_long() -> None:
    spec = JobSpec(kind=EntrypointKind.INTERACTIVE)
    idle, busy = beat(0, activity="IDLE", age=900.0), beat(1, activity="CELL", age=900.0)
    assert is_stalled(beats(idle, busy), BEGUN, spec) is None
    assert is_stalled(beats(idle, beat(1, activity="COLLECTIVE", age=10.0)), BEGUN, spec) is not None


def test_what_ended_by_itself_is_learned_where_it_happened() -> None:
    pace = Pace()
    pace = pace.learn(beat(gap=9.0, gap_in="FORWARD"))
    assert pace.pauses == {}, "compiling comes once"
    pace = pace.learn(beat(gap=2.0, gap_in="DATA"))
    assert pace.pauses == {Situation.STEPPING: 2.0}, "a loader starts again in every epoch"
    pace = pace.begin(12.0).learn(beat(gap=20.0, gap_in="EVALUATION")).learn(beat(gap=1.0, gap_in="BACKWARD"))
    assert pace.pauses == {Situation.STEPPING: 2.0, Situation.EVALUATING: 20.0}
    assert pace.learn(beat(gap=30.0, gap_in="RUNNING", expected=60.0)) == pace, "it had been announced"
    again = pace.restart()
    assert (again.has_begun, again.begins, again.pauses) == (False, 12.0, pace.pauses)

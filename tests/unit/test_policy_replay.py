"""The first difference between two replays of a job, and what it comes of."""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

import pytest
from msgspec.structs import replace

from workbench.findings import Severity
from workbench.policy.replay import (
    CAUSES,
    Divergence,
    Note,
    Recording,
    Replay,
    compare,
    drawn_from,
    evidence,
    explain,
    read_recording,
    replay_spec,
    symptom,
    verdict,
)
from workbench.spec import JobSpec, NanPolicy

KINDS = "random/torch start/w batch/DataLoader input/Net output/drop|Dropout loss/loss gradient/w reduced/w parameter/w"


def note(kind: str, name: str, step: int, digest: str = "0") -> Note:
    return Note(step, kind, name, digest, 4, 1.0, (1.0, 2.0))


def recording(rank: int = 0, steps: int = 2, **fields: Any) -> Recording:
    notes = tuple(note(*key.split("/"), step) for step in range(steps) for key in KINDS.split())
    plain = {"threads": 1, "strings": 7, "is_deterministic": False, "devices": (), "host": "h", "notes": notes}
    return Recording(rank=rank, **{**plain, **fields})


def changed(one: Recording, *places: int, **fields: Any) -> Recording:
    """With other bits at these places."""
    notes = list(one.notes)
    for at in places:
        notes[at] = replace(notes[at], digest="1", sample=(1.5, 2.0))
    return replace(one, notes=tuple(notes), **fields)


def replaced_at(one: Recording, at: int, digest: str) -> Recording:
    notes = list(one.notes)
    notes[at] = replace(notes[at], digest=digest)
    return replace(one, notes=tuple(notes))


def test_a_generator_that_nothing_is_drawn_from_is_no_evidence() -> None:
    one = recording()
    other = changed(one, 0, 4, 9)
    assert drawn_from(one, other, 4) == ()
    assert drawn_from(replaced_at(one, 9, "2"), other, 4) == ("torch",)
    assert drawn_from(replaced_at(one, 9, "2"), changed(one, 4), 4) == ("torch",)  # the program has unseeded it
    # The program has seeded it in between: it is another then, and the same in both.
    assert drawn_from(replaced_at(one, 9, "2"), replaced_at(changed(one, 0, 4), 9, "2"), 4) == ()


def test_equal_recordings_have_no_difference_whatever_the_states_of_generators() -> None:
    first = [recording(0), recording(1)]
    assert compare(first, list(reversed(first)), Replay.SECOND) is None
    assert compare(first, [changed(first[0], 0, 9), first[1]], Replay.SECOND) is None


def test_the_earliest_difference_of_all_ranks_is_the_verdict() -> None:
    first = [recording(0), recording(1), recording(2)]
    first[2] = replaced_at(first[2], 9, "9")  # something was drawn between its two forwards
    other = [changed(first[0], 7, 8), changed(first[1], 16), changed(first[2], 0, 4, 5, 6, 7, 9)]
    found = compare(first, other, Replay.SECOND)
    assert found is not None
    assert (found.rank, found.step, found.kind, found.name, found.module) == (2, 0, "output", "drop", "Dropout")
    assert (found.deviation, found.scale, found.generators) == (0.5, 1.0, ("torch",))
    assert explain(found).cause == "dropout without a seed"
    assert symptom(found) == (
        "rank 2, step 0: the output of drop (Dropout) differs between run 1 and run 2, by at least 0.5 (RMS 1)"
    )


def test_another_way_of_the_program_is_told_as_such() -> None:
    one = recording()
    notes = list(one.notes)
    notes[4] = note("output", "other|Linear", 0)
    found = compare([one], [replace(one, notes=tuple(notes))], Replay.SECOND)
    assert found is not None and found.kind == "order"
    told = explain(found).symptom
    assert told == (
        "rank 0, step 0: the output of drop (Dropout) in run 1, the output of other (Linear) in its place in run 2"
    )


def test_a_program_that_ends_earlier_is_told() -> None:
    one = recording()
    found = compare([one], [replace(one, notes=one.notes[:9])], Replay.SECOND)
    assert found is not None and (found.step, found.instead) == (1, "the end of the program")


def test_the_slot_is_blamed_only_where_the_same_slots_gave_the_same_bits() -> None:
    one = recording()
    runs = {Replay.FIRST: [one], Replay.SECOND: [one], Replay.SWAPPED: [changed(one, 4)]}
    report = verdict("train", runs, ["a", "b", "c"])
    assert not report.is_same and report.finding is not None and report.divergence is not None
    assert report.divergence.run is Replay.SWAPPED and report.finding.severity is Severity.ERROR
    assert "another kind of device" in report.finding.cause
    assert "run 2, in the same slots, had the same bits as run 1" in report.finding.evidence
    assert verdict("train", {**runs, Replay.SWAPPED: [one]}, []).lines() == [
        "same bits in 2 runs and with slots swapped: train, 2 steps on 1 rank, 18 tensors a run"
    ]


BASE = Divergence(run=Replay.SECOND, rank=1, step=3, kind="output", name="layer", threads=(1, 1))
SHOWN = {
    "seeds torch's generator itself": {"generators": ("torch",), "is_deterministic": True},
    "numbers of threads (1 and 4)": {"threads": (1, 4)},
    "order of the all-reduce follows": {"was_same_again": True, "kind": "reduced"},
    "place computes otherwise": {"was_same_again": True},
    "initialised from a generator that is not seeded": {"kind": "start", "generators": ("torch",)},
    "initialised without a seed, or in the order": {"kind": "start"},
    "drawn or augmented with Python's random and numpy's": {"kind": "batch", "generators": ("random", "numpy")},
    "order of a set of strings": {"kind": "batch", "strings_differ": True},
    "which DataLoader worker": {"kind": "input"},
    "which way the program takes": {"kind": "order"},
    "dropout without": {"module": "Dropout2d", "generators": ("torch",)},
    "never written is read": {"is_wild": True},
    "layer uses random numbers without a seed": {"generators": ("torch",)},
    "atomics": {"kind": "gradient", "has_gpu": True},
    "another bucket layout": {"kind": "reduced"},
    "the optimizer uses more": {"kind": "parameter"},
    "layer uses Python's random, which is not seeded": {"generators": ("random",)},
    "layer uses something besides": {},
}


@pytest.mark.parametrize(("cause", "fields"), SHOWN.items())
def test_each_cause_has_its_evidence(cause: str, fields: dict[str, Any]) -> None:
    finding = explain(replace(BASE, **fields))
    assert cause in finding.cause
    assert "{" not in f"{finding.cause}{finding.advice}{finding.symptom}"
    assert (finding.rank, finding.step) == (1, 3)


def test_every_cause_is_reached() -> None:
    assert len(SHOWN) == len(CAUSES)


def test_evidence_is_what_was_seen() -> None:
    told = evidence(replace(BASE, generators=("torch",), threads=(1, 4), strings_differ=True, is_wild=True))
    assert told == (
        "all that the modules before it gave was the same",
        "states differed of torch's generator",
        "1 threads, then 4",
        "it is not finite, or absurdly large, in one of them only",
        "strings hashed differently in the two",
    )


def test_a_replay_neither_restarts_nor_saves_and_only_run_2_is_fresh() -> None:
    spec = JobSpec(entrypoint="train.py", max_restarts=3, checkpoint_every=5, checkpoint_dir="/d", min_ranks=1,
                   on_nan=NanPolicy.STOP, seed=4, env={"A": "1"}, nproc_per_node=2)  # fmt: skip
    first, second, swapped = (replay_spec(spec, 7, run) for run in Replay)
    assert (first.name, first.replay_steps, first.seed, first.env) == ("replay-train", 7, 4, {"A": "1"})
    assert not (first.max_restarts or first.checkpoint_every or first.checkpoint_dir or first.min_ranks)
    assert first.on_nan is NanPolicy.WARN
    assert [spec.cold for spec in (first, second, swapped)] == [False, True, False]
    assert [spec.rotate_slots for spec in (first, second, swapped)] == [False, False, True]


def test_what_a_rank_sent_is_read_nan_included() -> None:
    fields = {"rank": 1, "threads": 1, "strings": 3, "is_deterministic": True, "devices": [], "host": "h"}
    data = {**fields, "notes": [[0, "loss", "loss", "0f", 1, math.nan, [math.nan]]]}
    found = read_recording(zlib.compress(json.dumps(data).encode()))
    assert math.isnan(found.notes[0].scale) and found.steps == 0
    for wrong in (b"", zlib.compress(b"{}"), zlib.compress(b"no json")):
        with pytest.raises(ValueError):
            read_recording(wrong)

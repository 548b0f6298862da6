"""Ranks by time: what is kept of a job's checks, and how it reads; the same at 1,024 ranks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.events import (
    ConsistencyPaced,
    DataDoubted,
    GradientMismatched,
    ReplicasRepaired,
    decode_event,
    encode_event,
)
from workbench.findings import Finding, Severity
from workbench.state import Compared, DataAbout, DataDoubt, Mismatch, Side
from workbench.telemetry import ConsistencyReport
from workbench.views.found import current
from workbench.views.gradients import (
    COLUMNS,
    FINDINGS,
    LANES,
    WORST,
    Agreement,
    GradientsBuilder,
    agreement_line,
    cadence_text,
    strip,
)

A, D, R, U, N = Agreement.AGREES, Agreement.DEVIATES, Agreement.REPAIRED, Agreement.UNCLEAR, Agreement.UNCHECKED


def report(at: int, ranks: int = 4, **fields: Any) -> ConsistencyReport:
    """Ten checked steps."""
    values = {"checked": 10, "agreed": 10, "digest": "0123456789abcdef", "tensors": 4, **fields}
    return ConsistencyReport(
        job_id="job", restart_count=0, rank=0, start=2.0 * at, end=2.0 * at + 2, first_step=10 * at,
        last_step=10 * at + 9, ranks=tuple(range(ranks)), **values,
    )  # fmt: skip


def mismatched(step: int, rank: int = 1, tensor: str = "0.weight", **fields: Any) -> GradientMismatched:
    sides = (Side(ranks=(0, 2, 3), digest="aa"), Side(ranks=(rank,), digest="bb"))
    mismatch = Mismatch(
        compared=Compared.PARAMETERS, ranks=(rank,), told_by="majority", tensors=(tensor,), count=1, of=4, sides=sides,
        **fields,
    )  # fmt: skip
    return GradientMismatched(
        time=float(step), restart_count=0, step=step, mismatch=mismatch, finding=Finding(
            symptom=f"rank {rank} deviates", cause="bits flipped", advice="repair it", severity=Severity.ERROR,
            step=step,
        ),
    )  # fmt: skip


def test_ranks_by_time() -> None:
    builder = GradientsBuilder()
    builder.add((), [report(0), report(1, agreed=9, deviating=((1, 1),))])
    builder.add((), [report(2, agreed=9, deviating=((2, 1),), repaired=1), report(3, agreed=8, unclear=2)])
    view = builder.view()
    assert [lane.states for lane in view.lanes] == [(A, A, A, U), (A, D, A, U), (A, A, R, U), (A, A, A, U)]
    assert (view.checked, view.agreed) == (40, 36)
    assert [(c.first_step, c.last_step) for c in view.columns] == [(0, 9), (10, 19), (20, 29), (30, 39)]
    assert strip(view) == ["rank 0  ✓✓✓?", "rank 1  ✓✗✓?", "rank 2  ✓✓↻?", "rank 3  ✓✓✓?"]


def test_ranks_that_agree_have_no_strip_but_a_line_and_a_digest() -> None:
    builder = GradientsBuilder()
    assert not builder.view().has_begun
    assert agreement_line(builder.view()) == ""
    builder.add((), [report(0, every=3, parts=8, share=0.012)])
    view = builder.view()
    assert strip(view) == []
    assert view.digest == "0123456789abcdef"
    line = (
        "gradients: ranks agreed at all of 10 checks · checked each 3 steps, parameters and state all within 24 steps"
    )
    assert agreement_line(view) == f"{line}, for 1 % of a step's time"


def test_what_is_not_checked_says_why() -> None:
    builder = GradientsBuilder()
    builder.add([ConsistencyPaced(time=1.0, restart_count=0, step=0, every=0, reason="no DDP was seen")])
    assert agreement_line(builder.view()) == "gradients: not checked, no DDP was seen"


def test_what_was_found_comes_newest_first_with_its_advice() -> None:
    builder = GradientsBuilder()
    repaired = ReplicasRepaired(time=6.0, restart_count=0, step=6, ranks=(1,), source=0, tensors=2, size=64)
    doubt = DataDoubted(
        time=7.0, restart_count=0, step=7, doubt=DataDoubt(about=DataAbout.SIZES),
        finding=Finding(symptom="s", cause="uneven", advice="even", step=7),
    )  # fmt: skip
    builder.add([mismatched(6, deviation=0.5), repaired, doubt])
    view = builder.view()
    told = [(one.step, one.finding.severity, one.is_good) for one in view.found]
    assert told == [(7, Severity.WARNING, False), (6, Severity.NOTICE, True), (6, Severity.ERROR, False)]
    assert (view.mismatches, view.repairs, view.doubts) == (1, 1, 1)
    assert view.found[2].finding.line() == (
        "step 6: rank 1 deviates; likely cause: bits flipped; what to do: repair it"
    )
    assert "2 tensors put right, bit for bit, with what rank 0 has" in view.found[1].finding.symptom
    assert [side.digest for side in view.sides] == ["aa", "bb"]
    assert agreement_line(view) == "gradients · 1 difference · 1 repaired · 1 doubt about the data"


def test_what_is_to_be_told_now_is_each_cause_once_and_what_was_repaired_is_no_error() -> None:
    builder = GradientsBuilder()
    repaired = ReplicasRepaired(time=6.0, restart_count=0, step=6, ranks=(1,), source=0, tensors=2, size=64)
    common = DataDoubted(
        time=7.0, restart_count=0, step=7, doubt=DataDoubt(about=DataAbout.RANDOM),
        finding=Finding(symptom="s", cause="same numbers", advice="seed", severity=Severity.NOTICE),
    )  # fmt: skip
    builder.add([mismatched(5), mismatched(6), repaired, common])
    (one,) = current(builder.view().found, 0)
    assert (one.step, one.finding.severity, one.ranks) == (6, Severity.WARNING, (1,))
    assert "it was repaired" in one.finding.evidence[-1]
    builder.add([mismatched(9)])
    (one,) = current(builder.view().found, 0)
    assert (one.step, one.finding.severity) == (9, Severity.ERROR)
    assert current(builder.view().found, 1) == [], "what another generation had does not count as this one's"


OLD: list[tuple[dict[str, Any], Severity]] = [
    ({"event": "GradientMismatched", "mismatch": {"compared": "gradients"}}, Severity.ERROR),
    ({"event": "DataDoubted", "doubt": {"about": "sizes"}}, Severity.ERROR),
    ({"event": "DataDoubted", "doubt": {"about": "sizes"}, "is_certain": False}, Severity.WARNING),
    ({"event": "DataDoubted", "doubt": {"about": "random"}, "is_certain": False}, Severity.NOTICE),
]


@pytest.mark.parametrize(("about", "severity"), OLD)
def test_records_of_earlier_versions_have_their_words_as_a_finding(about: dict[str, Any], severity: Severity) -> None:
    words = {"cause": "few words", "sentence": "step 6: they differ", "evidence": ["it was seen"], "fix": "do it"}
    event = decode_event(msgspec.json.encode({"time": 6.0, "restart_count": 0, "step": 6, **about, **words}))
    assert isinstance(event, (DataDoubted, GradientMismatched))
    assert event.finding == Finding(
        symptom="they differ", cause="few words", advice="do it", evidence=("it was seen",), severity=severity, step=6
    )
    assert decode_event(encode_event(event)) == event and b"sentence" not in encode_event(event)
    builder = GradientsBuilder()
    builder.add([event])
    assert builder.view().found[0].finding == event.finding


@pytest.mark.parametrize("about", [one for one, _ in OLD[:2]])
def test_a_record_without_words_is_told_all_the_same(about: dict[str, Any]) -> None:
    builder = GradientsBuilder()
    builder.add([decode_event(msgspec.json.encode({"time": 6.0, "restart_count": 0, "step": 6, **about}))])
    assert builder.view().found[0].finding.dated().startswith("step 6: ")


def test_the_worst_parameters_are_those_named_most_often() -> None:
    builder = GradientsBuilder()
    names = ["a"] * 3 + ["b"] * 5 + [f"c{n}" for n in range(200)]
    builder.add([mismatched(step, tensor=name, deviation=step / 10) for step, name in enumerate(names)])
    worst = builder.view().worst
    assert [(one.name, one.times) for one in worst[:2]] == [("b", 5), ("a", 3)]
    assert worst[0].deviation == 0.7
    assert len(worst) == WORST
    assert len(builder.view().found) == FINDINGS


def test_two_optimizers_share_a_column() -> None:
    builder = GradientsBuilder()
    builder.add((), [report(0), report(0, optimizer=1, deviating=((3, 1),), agreed=9), report(1)])
    view = builder.view()
    assert [lane.states for lane in view.lanes] == [(A, A), (A, A), (A, A), (D, A)]
    assert view.tensors == 8


def test_a_thousand_ranks_fold_into_few_lanes() -> None:
    builder = GradientsBuilder()
    for at in range(300):
        odd = {200: ((7, 1),), 250: ((600, 2), (601, 2))}.get(at, ())
        builder.add((), [report(at, ranks=1024, deviating=odd)])
    view = builder.view()
    assert [lane.ranks for lane in view.lanes[:2]] == [(7,), (600, 601)]
    assert [lane.worst for lane in view.lanes] == [D, D, A]
    assert len(view.columns) <= COLUMNS
    assert len(msgspec.json.encode(view)) < 30_000


def test_many_stories_share_the_last_lane() -> None:
    builder = GradientsBuilder()
    builder.add((), [report(at, ranks=64, deviating=((at, 1),)) for at in range(40)])
    lanes = builder.view().lanes
    assert len(lanes) == LANES
    assert sorted(rank for lane in lanes for rank in lane.ranks) == list(range(64))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), min_size=1, max_size=400), st.integers(1, 50)
)
def test_of_any_record_nothing_is_lost_but_detail(found: list[tuple[int, bool, bool]], ranks: int) -> None:
    """Who ever deviated is seen to have; checks are counted whole; every rank is in one lane; lanes are as long."""
    builder = GradientsBuilder()
    odd: set[int] = set()
    for at, (rank, is_odd, is_unclear) in enumerate(found):
        deviating = ((rank, 1),) if is_odd and rank < ranks else ()
        odd |= {who for who, _ in deviating}
        builder.add((), [report(at, ranks=ranks, deviating=deviating, unclear=int(is_unclear))])
    view = builder.view()
    assert sum(column.checked for column in view.columns) == view.checked == 10 * len(found)
    assert sorted(rank for lane in view.lanes for rank in lane.ranks) == list(range(ranks))
    assert {len(lane.states) for lane in view.lanes} == {len(view.columns)}
    assert len(view.columns) <= COLUMNS
    assert odd <= {rank for lane in view.lanes if D in lane.states for rank in lane.ranks}


@pytest.mark.parametrize(
    ("every", "parts", "text"), [(1, 1, "checked each step, all else too"), (7, 2, "checked each 7 steps")]
)
def test_the_pace_in_words(every: int, parts: int, text: str) -> None:
    builder = GradientsBuilder()
    builder.add((), [report(0, every=every, parts=parts)])
    assert cadence_text(builder.view()).startswith(text)

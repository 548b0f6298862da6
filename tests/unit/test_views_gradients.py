"""Ranks by time: what is kept of a job's checks, and how it reads; the same at 1,024 ranks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.events import ConsistencyPaced, DataDoubted, GradientMismatched, ReplicasRepaired
from workbench.state import Compared, DataAbout, DataDoubt, Mismatch, Side
from workbench.telemetry import ConsistencyReport
from workbench.views.found import found_text
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
        time=float(step), restart_count=0, step=step, mismatch=mismatch, cause="bits flipped",
        sentence=f"step {step}: rank {rank} deviates", fix="repair it",
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
        time=7.0, restart_count=0, step=7, doubt=DataDoubt(about=DataAbout.SIZES), cause="uneven", sentence="s",
        is_certain=False,
    )  # fmt: skip
    builder.add([mismatched(6, deviation=0.5), repaired, doubt])
    view = builder.view()
    assert [(one.step, one.tone) for one in view.found] == [(7, "warn"), (6, "good"), (6, "bad")]
    assert (view.mismatches, view.repairs, view.doubts) == (1, 1, 1)
    assert found_text(view.found[2]) == "step 6: rank 1 deviates; repair it"
    assert "2 tensors put right, bit for bit, with what rank 0 has" in view.found[1].sentence
    assert [side.digest for side in view.sides] == ["aa", "bb"]
    assert agreement_line(view) == "gradients · 1 difference · 1 repaired · 1 doubt about the data"


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

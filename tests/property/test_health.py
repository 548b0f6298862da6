"""Properties of the patience with a job."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workbench.policy.health import FLOOR, PAUSES, Pace, is_stalled, patience
from workbench.spec import JobSpec
from workbench.telemetry import RankBeat

SPEC = JobSpec(entrypoint="t.py")
ACTIVITIES = ("RUNNING", "DATA", "FORWARD", "BACKWARD", "COLLECTIVE", "OPTIMIZER", "CHECKPOINT", "EXITING")
seconds = st.floats(0.0, 1000.0)
beat = st.builds(
    RankBeat,
    job_id=st.just("j"),
    restart_count=st.just(0),
    rank=st.integers(0, 3),
    time=st.floats(-1e9, 2e9),  # whatever a host's clock says
    step=st.integers(0, 100),
    activity=st.sampled_from(ACTIVITIES),
    since=st.floats(0.0, 1e9),
    age=seconds,
    gap=seconds,
    gap_in=st.sampled_from(("", "EVALUATION", *ACTIVITIES)),
    is_evaluating=st.booleans(),
    expected=seconds,
)
beats = st.lists(beat, min_size=1, max_size=4).map(lambda several: {one.rank: one for one in several})


@given(beats, st.floats(0.0, 100.0))
def test_nobody_is_suspected_within_its_patience(known: dict[int, RankBeat], step: float) -> None:
    pace = Pace(step=step, has_begun=True)
    limit = patience(known, pace, SPEC)
    assert limit >= max(FLOOR, 5 * step)
    assert (is_stalled(known, pace, SPEC, 1.0) is None) == (max(one.age for one in known.values()) < limit)


@given(st.lists(beat, max_size=20), beats)
def test_learning_only_makes_patient(taught: list[RankBeat], known: dict[int, RankBeat]) -> None:
    pace, longest = Pace(has_begun=True), 0.0
    for one in taught:
        before, pace = patience(known, pace, SPEC), pace.learn(one)
        assert patience(known, pace, SPEC) >= min(before, 10.0), "only the first pause of a kind has more"
        if not one.expected and one.gap_in in ("", "RUNNING", "DATA", "COLLECTIVE"):
            longest = max(longest, one.gap)
    assert patience(known, pace, SPEC) >= min(PAUSES * longest, 10.0)

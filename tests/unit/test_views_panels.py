"""The folds behind the panels: heat, ranking, communication, resources, events, smoothing, findings."""

from __future__ import annotations

import html
import math
import time
from array import array
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from test_views_job import NOW, beat, bucket, history, state, update, view_of
from test_widgets_panels import Reader
from workbench_widgets.panels.findings import findings_html

from workbench.blackbox import Traffic
from workbench.events import (
    DataDoubted,
    GradientMismatched,
    LaunchRequested,
    NonFiniteFound,
    PhaseChanged,
    RankExited,
    RankStarted,
    StragglerDetected,
)
from workbench.feed import Bucket
from workbench.findings import Finding, Severity
from workbench.spec import JobSpec
from workbench.state import Checkpoint, Compared, DataAbout, DataDoubt, Failure, FailureKind, JobPhase, Mismatch
from workbench.views.communication import entered, hidden, odd_ones, sent
from workbench.views.compare import Trace
from workbench.views.efficiency import Efficiency, efficiency, efficiency_text
from workbench.views.error_report import error_report
from workbench.views.findings import Shown, findings
from workbench.views.happenings import MOST, HappeningList
from workbench.views.heat import COLUMNS, ROWS, HeatBuilder, HeatView
from workbench.views.html import snapshot_html
from workbench.views.panels import PanelBuilder, PanelView
from workbench.views.ranking import host_of, pattern, ranking
from workbench.views.report import Chapter, report_html
from workbench.views.resources import POINTS, ResourceBuilder
from workbench.views.smoothing import smooth
from workbench.views.table import notes
from workbench.views.text import render_status


def values(heat: HeatView, column: int, metric: int = 0) -> list[float]:
    return [round(value, 4) for value in array("f", heat.columns[column].cells[metric])]


def heat_of(*buckets: Bucket) -> HeatView:
    builder = HeatBuilder()
    builder.add(buckets)
    return builder.view()


# --- heat ---


def test_a_cell_is_the_time_of_a_step_its_own_part_and_its_wait() -> None:
    heat = heat_of(bucket(0, 1000.0), bucket(1, 1000.0, duration=2.0), bucket(0, 1001.0))
    assert (heat.width, heat.ranks, heat.rows, len(heat.columns)) == (1.0, 2, 2, 2)
    assert values(heat, 0) == [0.1, 0.2] and values(heat, 0, 1) == [0.06, 0.16] and values(heat, 0, 2) == [0.04, 0.04]
    assert math.isnan(values(heat, 1)[1])


def test_a_long_job_gets_wider_columns_and_loses_no_step() -> None:
    builder = HeatBuilder()
    for second in range(3 * COLUMNS):
        builder.add((bucket(0, 1000.0 + second, duration=3.0 if second == 7 else 1.0),))
    heat = builder.view()
    assert len(heat.columns) <= COLUMNS and heat.width == 4.0
    assert values(heat, 1) == [0.15]  # 4 s, in one of which steps took three times as long


def test_a_coarse_history_reaches_over_several_columns() -> None:
    heat = heat_of(bucket(0, 1000.0, width=3.0), bucket(0, 1003.0))
    assert [values(heat, k) for k in range(4)] == [[0.1]] * 4


def test_many_ranks_share_rows_that_show_the_slowest() -> None:
    heat = heat_of(*(bucket(k, 1000.0, duration=9.0 if k == 700 else 1.0) for k in range(1024)))
    assert heat.fold == 8 and heat.rows == ROWS
    assert [row for row, value in enumerate(values(heat, 0)) if value > 0.5] == [700 // 8]


def test_ranks_that_join_later_and_jobs_that_grow() -> None:
    builder = HeatBuilder()
    builder.add((bucket(0, 1000.0),))
    builder.view()
    builder.add((bucket(3, 1001.0),))
    heat = builder.view()
    assert heat.ranks == 4 and len(values(heat, 0)) == 4 and math.isnan(values(heat, 0)[3])


def test_only_what_changed_is_made_anew() -> None:
    builder = HeatBuilder()
    builder.add(tuple(bucket(k, 1000.0 + s) for s in range(100) for k in range(1024)))
    builder.view()
    took = []
    for second in range(100, 105):
        more = tuple(bucket(k, 1000.0 + second) for k in range(1024))
        before = time.perf_counter()
        builder.add(more)
        builder.view()
        took.append(time.perf_counter() - before)
    assert min(took) < 0.05


# --- ranking ---


def rows_of(own: dict[int, float], hosts: dict[int, str] | None = None) -> Any:
    view = view_of(update(len(own)))
    return tuple(
        replace(row, own_time=own[row.rank], worker=f"tls://{(hosts or {}).get(row.rank, 'h1')}:1") for row in view.rows
    )


def test_ranks_are_scored_against_the_fastest_and_themselves() -> None:
    ranked = ranking(rows_of({0: 0.1, 1: 0.2, 2: 0.1}), {0: 0.1, 1: 0.05})
    assert [one.rank for one in ranked] == [1, 0, 2]
    assert ranked[0].to_fastest == pytest.approx(2.0) and ranked[0].to_itself == pytest.approx(4.0)
    assert ranked[0].is_slow and not ranked[1].is_slow and ranked[2].to_itself is None
    assert ranking(rows_of({0: 0.1}), {})[0].to_fastest is None
    assert ranking((), {}) == ()
    for times, slow in (([0.1, 0.13], [1]), ([0.1, 0.11], []), ([0.2, 0.1, 0.2, 0.1], [0, 2]), ([0.1, 0.1, 0.2], [2])):
        assert sorted(one.rank for one in ranking(rows_of(dict(enumerate(times))), {}) if one.is_slow) == slow


def test_what_slow_ranks_have_in_common() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}

    def said(*slow: int) -> str:
        return pattern(ranking(rows_of({k: 0.2 if k in slow else 0.1 for k in hosts}, hosts), {}))

    assert said() == "No rank stands out."
    assert said(2, 3) == "All ranks of b are slow, and no others: look at that host."
    assert said(3) == "Rank 3 is slow on b, its other ranks are not."
    assert said(1, 3) == "Ranks 1, 3 are slow, the others are not."
    assert pattern(ranking(rows_of({0: 0.1}), {})) == "There is no other rank to compare with."
    assert pattern(()) == ""


def test_hosts_of_addresses() -> None:
    assert host_of("tls://10.0.0.1:4000") == "10.0.0.1" and host_of("tcp://[::1]:5") == "::1" and host_of("w") == "w"


# --- communication ---


def test_who_has_not_entered_the_collective_in_which_the_others_wait() -> None:
    beats = [beat(k, activity="COLLECTIVE", collective="all_reduce", collective_seq=7, since=4.0) for k in range(3)]
    late = beat(3, activity="BACKWARD", collective="all_reduce", collective_seq=6)
    found = entered(view_of(update(4, beats=(*beats, late))).rows)
    assert [(one.ranks, one.behind, one.inside) for one in found] == [((3,), 1, 0), ((0, 1, 2), 0, 3)]
    said = odd_ones(found)
    assert said.startswith("Rank 3 has not entered all_reduce #7, in which ranks 0–2 have waited for 4.1 s")


def test_a_short_wait_is_nothing_to_tell() -> None:
    beats = [beat(k, activity="COLLECTIVE", collective="x", collective_seq=7 - k) for k in range(2)]
    assert odd_ones(entered(view_of(update(beats=tuple(beats))).rows)) == ""
    assert entered(view_of(update()).rows) == () and odd_ones(()) == ""


# --- resources ---


def test_resources_keep_the_least_the_mean_and_the_most() -> None:
    builder = ResourceBuilder()
    builder.add([beat(0, cpu=50.0, gpu=None), beat(1, cpu=100.0, gpu=80.0), beat(2, rss=0, cpu=0.0)])
    (moment,) = builder.view()
    assert (moment.spreads["cpu"].least, moment.spreads["cpu"].mean, moment.spreads["cpu"].most) == (50.0, 75.0, 100.0)
    assert moment.spreads["gpu"].number == 1 and "disk_read" not in moment.spreads


def test_a_day_of_beats_stays_small() -> None:
    builder = ResourceBuilder()
    for second in range(0, 86_400, 20):
        builder.add([beat(0, time=NOW + second, cpu=100.0 if second == 400 else 1.0)])
    moments = builder.view()
    assert len(moments) <= POINTS
    assert max(moment.spreads["cpu"].most for moment in moments) == 100.0
    assert builder.view() is moments


# --- events ---


def test_events_are_told_newest_first_and_ranks_together() -> None:
    events = HappeningList()
    events.add([LaunchRequested(time=1.0, job_id="j", spec=JobSpec(entrypoint="train.py"))])
    events.add([RankStarted(time=2.0, restart_count=0, rank=k, pid=k) for k in range(3)])
    events.add([StragglerDetected(time=3.0, restart_count=0, rank=1, score=2.0, reason="rank 1 is slow")])
    events.add([RankExited(time=4.0, restart_count=0, rank=1, signal=9)])
    lines = events.view()
    assert [(line.kind, line.ranks) for line in lines] == [
        ("exited", (1,)), ("straggler", (1,)), ("started", (0, 1, 2)), ("launched", ())
    ]  # fmt: skip
    assert lines[1].is_trouble and lines[0].text == "killed by SIGKILL" and events.seen == 4
    events.add([RankExited(time=4.1, restart_count=0, rank=2, signal=15, stop_signal=15)])
    assert events.view()[0].text == "stopped by the job with SIGTERM"


def test_only_the_newest_events_are_kept() -> None:
    events = HappeningList()
    for k in range(2 * MOST):
        events.add([PhaseChanged(time=float(k), phase=JobPhase.HEALTHY, reason=str(k), restart_count=0)])
    assert (
        len(events.view()) == MOST and events.seen == 2 * MOST and events.view()[0].text == f"HEALTHY: {2 * MOST - 1}"
    )


# --- smoothing ---


def test_a_smooth_curve_begins_where_the_curve_does() -> None:
    assert smooth([4.0, 4.0, 4.0], 0.9) == pytest.approx([4.0, 4.0, 4.0])
    assert smooth([1.0, 2.0], 0.0) == [1.0, 2.0] and smooth([], 0.9) == []
    made = smooth([1.0, math.nan, 1.0], 0.5)
    assert math.isnan(made[1]) and made[2] == pytest.approx(1.0)


# --- findings ---


def found(**changes: Any) -> tuple[Shown, ...]:
    return findings(view_of(update(**changes)), PanelView())


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert found() == ()


def test_a_failure_tells_what_to_do_and_offers_to_resume() -> None:
    failure = Failure(kind=FailureKind.SIGNAL, rank=1, reason="rank 1 killed by SIGSEGV", time=NOW)
    ended = state(phase=JobPhase.FAILED, ended_at=NOW, failure=failure)
    (one,) = found(state=ended, buckets=())
    assert one.finding.severity is Severity.ERROR and one.finding.cause and one.finding.advice
    assert one.act is None and one.ranks == (1,)
    view = replace(
        view_of(update(state=ended)), checkpoints=(Checkpoint(step=1, path="p", world_size=2, saved_at=NOW),)
    )
    assert findings(view, PanelView())[0].act is not None


KILLED = Failure(kind=FailureKind.SIGNAL, rank=1, reason="rank 1 killed by SIGKILL at step 9: on purpose", time=NOW)


@pytest.mark.parametrize("phase", [JobPhase.HEALTHY, JobPhase.STOPPING, JobPhase.STOPPED, JobPhase.SUCCEEDED])
def test_a_failure_that_the_job_has_recovered_from_is_told_as_past_and_asks_for_nothing(phase: JobPhase) -> None:
    of = state(phase=phase, ended_at=NOW if phase.is_terminal else None, failure=KILLED, restart_count=1, fruitless=1)
    saved = (Checkpoint(step=1, path="p", world_size=2, saved_at=NOW),)
    view = replace(view_of(update(state=of)), checkpoints=saved)
    (one,) = (shown for shown in findings(view, PanelView()) if KILLED.reason in shown.finding.symptom)
    assert one.finding.symptom.startswith("recovered from: ") and one.finding.severity is Severity.NOTICE
    assert one.finding.evidence == ("restart 1 of 3",) and one.finding.cause
    assert not one.finding.advice and one.act is None
    assert not any("resume" in line for line in notes(view))
    assert "(it has recovered)" in error_report(view, {}) and "what to do" not in error_report(view, {})


def test_a_failure_that_is_being_recovered_from_is_not_past_and_nothing_is_to_be_started() -> None:
    of = state(phase=JobPhase.RECOVERING, failure=KILLED, restart_count=1, fruitless=1)
    (one,) = found(state=of, buckets=())
    assert one.finding.symptom == KILLED.reason and one.finding.severity is Severity.WARNING
    assert not one.finding.advice and one.act is None
    ended = state(phase=JobPhase.FAILED, ended_at=NOW, failure=KILLED, failures=(KILLED,))
    assert found(state=ended, buckets=())[0].finding.advice == "resume the job"


def test_a_straggler_is_told_with_its_evidence() -> None:
    slow = (*history(1), *(replace(b, rank=1, duration=2.0) for b in history(1)))
    (one,) = found(buckets=slow)
    assert one.finding.symptom == "Rank 1 is slow, the others are not." and "median rank" in one.finding.evidence[0]
    panels = PanelBuilder()
    panels.add(update(buckets=history()))
    panels.add(update(buckets=slow))
    (one,) = findings(view_of(update(buckets=slow)), panels.view())
    assert "its own best was much better" in one.finding.cause


def test_waiting_for_data_and_for_others_are_hints() -> None:
    (data,) = found(buckets=history(data=0.35, comm=0.1))
    assert data.finding.severity is Severity.NOTICE
    assert data.finding.symptom == "All ranks spend 35 % of a step waiting for data."
    (comm,) = found(buckets=history(comm=0.6, data=0.0, forward=0.1, backward=0.2))
    assert "at least 60 % of a step in communication" in comm.finding.symptom
    ended = state(phase=JobPhase.SUCCEEDED, ended_at=NOW)
    (data,) = found(state=ended, buckets=history(data=0.35, comm=0.1))
    assert data.finding.symptom == "All ranks spent 35 % of a step waiting for data."


def test_replicas_that_differ_and_odd_data_are_told_everywhere_in_the_same_words() -> None:
    differ = Finding(
        symptom="rank 1 deviates in 0.weight", cause="bits flipped", advice="repair it", evidence=("others agree",),
        severity=Severity.ERROR, step=9, rank=1,
    )  # fmt: skip
    odd = Finding(symptom="both got the same batch", cause="the same shard", advice="split the data", step=7)
    mismatch, doubt = Mismatch(compared=Compared.PARAMETERS, ranks=(1,)), DataDoubt(about=DataAbout.BATCH)
    begun = LaunchRequested(time=990.0, job_id="digits-12ab", spec=JobSpec(entrypoint="t.py"))
    told = (
        begun, *update().events,
        DataDoubted(time=NOW, restart_count=0, step=7, doubt=doubt, finding=odd),
        GradientMismatched(time=NOW, restart_count=0, step=9, mismatch=mismatch, finding=differ),
    )  # fmt: skip
    view = view_of(update(events=told))
    assert view.findings == (differ, odd)
    assert [(one.finding, one.ranks) for one in found(events=told)][-2:] == [(differ, (1,)), (odd, ())]
    assert Severity.ERROR.value in findings_html(found(events=told))
    document = msgspec.to_builtins(view)
    assert [one["symptom"] for one in document["findings"]] == [differ.symptom, odd.symptom]
    trace = Trace(name="a", spec=JobSpec(entrypoint="t.py"), phase=JobPhase.HEALTHY, reason="", world_size=2)
    report = report_html("a", (), [Chapter(view=view, trace=trace)], ())
    for text in (render_status(view), Reader(snapshot_html(view)).text, html.unescape(report)):
        said = " ".join(text.split())
        for words in (*differ.lines(), *odd.lines()):
            assert words in said


def test_not_a_number_is_told_once() -> None:
    nan = [NonFiniteFound(time=NOW, restart_count=0, rank=1, step=k, what="loss") for k in (5, 6)]
    begun = LaunchRequested(time=990.0, job_id="digits-12ab", spec=JobSpec(entrypoint="t.py"))
    told = [one for one in found(events=(begun, *update().events, *nan)) if "not finite" in one.finding.symptom]
    assert [(one.finding.symptom, one.ranks) for one in told] == [("loss of rank 1 is not finite since step 5", (1,))]
    view = view_of(update(events=(begun, *update().events, *nan)))
    assert sum("not finite" in line for line in notes(view)) == 1
    cause = Failure(kind=FailureKind.DIVERGED, rank=1, reason="rank 1: loss is not finite at step 5", time=NOW)
    ended = state(phase=JobPhase.FAILED, failure=cause, reason=cause.reason, ended_at=NOW)
    told = [one for one in found(state=ended, events=(begun, *nan)) if "not finite" in one.finding.symptom]
    assert [one.finding.symptom for one in told] == [cause.reason]
    assert sum("not finite" in line for line in notes(view_of(update(state=ended, events=(begun, *nan))))) == 1


# --- all of them ---


def test_the_panels_are_folded_once_and_a_new_generation_forgets_what_was_best() -> None:
    builder = PanelBuilder()
    builder.add(update())
    first = builder.view()
    assert first.best == pytest.approx({0: 0.06, 1: 0.06}) and first.heat.ranks == 2 and first.resources
    builder.add(update(buckets=(), beats=(), events=()))
    assert builder.view().heat is first.heat
    builder.add(update(state=state(restart_count=1), buckets=(), beats=()))
    assert builder.view().best == {}


# --- how well ranks scale, what they send ---


def test_efficiency_is_load_balance_times_communication() -> None:
    rows = view_of(update(buckets=(*history(1), *(replace(b, rank=1, comm=0.1) for b in history(1))))).rows
    made = efficiency(rows)  # own work 60 and 90 ms of steps of 100 ms
    assert made == pytest.approx(Efficiency(0.75, 0.75 / 0.9, 0.9))
    assert made is not None and made.parallel == pytest.approx(made.balance * made.communication)
    assert efficiency_text(made) == "scaling efficiency 75 % = load balance 83 % × communication 90 %"
    assert efficiency(rows[:1]) is None and efficiency_text(None) == ""
    assert efficiency(view_of(update(buckets=history(comm=0.0))).rows) is None, "communication was not seen"


def test_what_is_sent_adds_up_over_ranks_and_is_told_by_step() -> None:
    ddp = Traffic("all_reduce (DDP)", 1200, 6_000_000)
    beats = (
        beat(0, counted=600, hidden=0.5, traffic=(ddp, Traffic("broadcast", 6, 1200))),
        beat(1, counted=600, hidden=0.25, traffic=(ddp,)),
    )
    rows = view_of(update(beats=beats)).rows
    assert [(one.name, one.calls_per_step, one.bytes_per_step, one.bytes) for one in sent(rows)] == [
        ("all_reduce (DDP)", 2.0, 10_000.0, 12_000_000),
        ("broadcast", 0.005, 1.0, 1200),
    ]
    assert hidden(rows) == {0: 0.5, 1: 0.25} and sent(view_of(update()).rows) == () == tuple(
        hidden(view_of(update()).rows)
    )

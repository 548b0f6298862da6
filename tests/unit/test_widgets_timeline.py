"""The panels of failures: lanes with marks, checkpoints, and the controls, on the page and in a notebook."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fake_session import FakeJob, FakeSession
from fake_session import state as fake_state
from fake_session import update as fake_update
from msgspec.structs import replace
from test_views_job import state, update, view_of
from test_views_story import RECOVERED
from test_views_timeline import began, killed, launched
from test_widgets_panels import EVIL, Reader
from test_widgets_theme import contrast
from workbench_widgets.actions import AGAIN, Once, perform
from workbench_widgets.controls import Panel
from workbench_widgets.launch_form import LaunchForm
from workbench_widgets.panels.checkpoints import EMPTY, Checkpoints, checkpoints_html
from workbench_widgets.panels.controls import Controls
from workbench_widgets.panels.timeline import (
    SHAPES,
    WEIGHT,
    Lanes,
    clusters_of,
    head_html,
    lanes_data,
    marks_data,
    summary,
    tables_html,
)
from workbench_widgets.theme import LANE_COLOURS, LANE_HATCHES, THEMES, colour, lane_colour

from workbench.errors import CheckpointNotFoundError, UsageError
from workbench.events import (
    CheckpointRefused,
    CheckpointSaved,
    Event,
    FaultHappened,
    GradientsStoodOut,
    StragglerDetected,
)
from workbench.findings import Finding
from workbench.session import Session
from workbench.session.controls import session_panel
from workbench.state import Checkpoint, CheckpointTier, JobPhase
from workbench.views.acts import Act, why_not
from workbench.views.charts import lanes
from workbench.views.checkpoints import CheckpointList
from workbench.views.job import JobView
from workbench.views.lane_rows import rows_of
from workbench.views.lane_text import render_timeline
from workbench.views.spans import LETTERS, MarkKind, SpanKind, Timeline


def point(step: int, **changes: Any) -> Checkpoint:
    made = Checkpoint(step=step, path=f"/machine/c/{step}", world_size=2, saved_at=1000.0 + step, size=2 * 10**9)
    return replace(made, **changes)


def saved(checkpoint: Checkpoint) -> CheckpointSaved:
    return CheckpointSaved(time=checkpoint.saved_at, restart_count=0, checkpoint=checkpoint, seconds=1.0)


def told(*events: Event, now: float = 9.0, **changes: Any) -> JobView:
    return view_of(update(state=state(**changes), events=events or tuple(RECOVERED), now=now))


def timeline(*events: Event, now: float = 9.0) -> Timeline:
    found = told(*events, now=now).timeline
    assert found is not None
    return found


ENDED = {"phase": JobPhase.FAILED, "ended_at": 8.0}
POINTS: tuple[Event, ...] = (*launched(), saved(point(400)), saved(point(500)))

# --- lanes ------------------------------------------------------------------------------------------------------------


def test_lanes_are_bars_with_words() -> None:
    found = timeline()
    data = lanes_data(rows_of(found.spans), found, "light")
    assert len({len(column) for column in data.values()}) == 1 and set(data["y"]) == {0, 1}
    dead = data["kind"].index("dead")
    assert data["words"][dead].startswith("rank 1 dead for 200 ms: killed by SIGKILL") and data["y"][dead] == 1
    assert (data["left"][dead], data["hatch"][dead]) == (5.0, "cross")
    assert "rank 1 killed by SIGKILL at step 10" in data["words"][data["kind"].index("recovering")]


def test_marks_in_one_place_are_one_that_tells_all() -> None:
    happened = FaultHappened(time=4.95, restart_count=0, fault="kill", rank=1)
    found = timeline(*launched(), happened, *killed(5.0, 1), began(5.6, 1, 11), now=500.0)
    (cluster,) = clusters_of(found)
    assert cluster.kind is MarkKind.FAILED and len(cluster.marks) == 4
    data = marks_data(found, "light")
    assert data["letter"] == ["F"] and data["shape"] == ["square"]
    assert [line[:8] for line in data["words"][0].split("<br>")] == ["<b>I</b>", "<b>F</b>", "<b>D</b>", "<b>R</b>"]
    near = timeline(*launched(), happened, *killed(5.0, 1), began(5.6, 1, 11))
    assert len(clusters_of(near)) > 1


def test_a_rank_that_stands_out_has_a_letter_of_its_own_and_its_cause_when_hovering() -> None:
    finding = Finding(symptom="the gradients of rank 1 are twice as large", cause="its shard", advice="swap", step=8)
    stands = GradientsStoodOut(
        time=2.0, restart_count=0, step=8, ranks=(1,), about="norm", score=8.5, finding=finding
    )  # fmt: skip
    found = timeline(*launched(), stands, now=500.0)
    data = marks_data(found, "light")
    at = data["letter"].index("O")
    for words in ("<b>O</b>", "rank 1", "robust z +8.5", "likely cause: its shard"):
        assert words in data["words"][at]
    assert data["colour"][at] == colour("warn", "light")
    assert "gradients stand out" in head_html(found) and "gradients stand out" in tables_html(found)
    assert "  O  " in render_timeline(found, "job") and "likely cause: its shard" in lanes(found)


def test_every_kind_of_mark_has_a_letter_of_its_own_and_a_weight() -> None:
    assert set(LETTERS) == set(MarkKind) == set(WEIGHT)
    assert len(set(LETTERS.values())) == len(LETTERS)


def test_the_chart_draws_and_takes_on_a_theme() -> None:
    lanes = Lanes("light")
    lanes.update(told())
    bars = lanes._lanes.data
    assert lanes.figure.yaxis.major_label_overrides == {-1: "events", 0: "rank 0", 1: "rank 1"}
    assert lanes.figure.x_range.end > 9.0 and lanes.figure.height > 100
    lanes.paint("dark")
    assert lanes._lanes.data["colour"] != bars["colour"]
    assert lanes._letters.glyph.text_color == colour("page", "dark")


def test_what_cannot_be_seen_is_not_sent() -> None:
    lanes = Lanes("light")
    lanes.update(told(now=6000.0))
    before = lanes._lanes.data
    lanes.update(told(now=6000.1))
    assert lanes._lanes.data is before
    lanes.update(
        told(*RECOVERED, StragglerDetected(time=9.0, restart_count=1, rank=0, score=2.0, reason="slow"), now=6000.1)
    )
    assert lanes._lanes.data is not before


def test_the_story_is_there_in_words_and_tables() -> None:
    found = timeline()
    head = Reader(head_html(found)).text
    assert "1 restart · 1 step lost" in head and "→ restart 1 of 3 → back after 0.6 s, 1 step lost" in head
    assert "dead" in head and "F" in head
    assert summary(found).startswith("Timeline of 2 attempts over 9.0 s; ") and "goes on" in summary(found)
    tables = Reader(tables_html(found))
    assert len(tables.of("table")) == 2 and "failure detected" in tables.text


def test_an_empty_chart_says_what_would_fill_it() -> None:
    assert "no rank has had a slot yet" in head_html(None)
    assert "No failure so far" in head_html(timeline(*launched()))
    assert Lanes("light").root is not None


def test_what_comes_from_a_job_is_text() -> None:
    bad = killed(5.0, 1)
    record = [*launched(), *[e if not hasattr(e, "failure") else replace(e, failure=replace(e.failure, reason=EVIL)) for e in bad]]  # fmt: skip  # noqa: E501
    found = timeline(*record)
    for html in (head_html(found), tables_html(found), *marks_data(found, "light")["words"]):
        assert "<img" not in html
    point_ = replace(point(3), problem=EVIL)
    refused = CheckpointRefused(time=5.0, restart_count=0, checkpoint=point_)
    assert "<img" not in checkpoints_html(told(*launched(), refused))


def test_every_kind_has_its_looks() -> None:
    assert set(LANE_COLOURS) == {kind.name for kind in SpanKind} >= set(LANE_HATCHES)
    assert set(WEIGHT) == set(MarkKind) >= set(SHAPES)
    trouble = ("STALLED", "DEAD", "RECOVERING", "WAITING", "STOPPING")
    assert len({LANE_HATCHES[kind] for kind in trouble}) == len(trouble)


@pytest.mark.parametrize("theme", THEMES)
def test_trouble_stands_out(theme: str) -> None:
    for kind in ("DEAD", "STALLED"):
        assert contrast(lane_colour(kind, theme), colour("page", theme)) >= 3
        assert contrast(lane_colour(kind, theme), lane_colour("STEPPING", theme)) >= 1.5


def test_many_ranks_are_few_bars() -> None:
    record = [*launched(1024)]
    for k in range(60):
        record += [*killed(5.0 + k, 7 * k, k), began(5.6 + k, k + 1, 11)]
    found = timeline(*record, now=100.0)
    rows = rows_of(found.spans)
    data = lanes_data(rows, found, "light")
    assert len(rows) <= 16 and len(data["y"]) < 6000 and not any(math.isnan(x) for x in data["left"])


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_are_a_table_with_buttons() -> None:
    read = Reader(checkpoints_html(told(*POINTS, **ENDED, now=1600.0)))
    for words in ("500", "8 min 30 s after the start", "2 GB", "✓ whole"):
        assert words in read.text
    assert "1 min 40 s ago" in Reader(checkpoints_html(told(*POINTS, now=1600.0))).text
    buttons = read.of("button")
    assert [b["aria-label"] for b in buttons] == ["resume from step 500", "resume from step 400"]
    assert not any("aria-disabled" in b for b in buttons) and "/machine" not in checkpoints_html(told(*POINTS))


def test_a_checkpoint_that_cannot_be_used_says_why() -> None:
    refused = CheckpointRefused(time=1510.0, restart_count=1, checkpoint=point(500, problem="model.pt: wrong digest"))
    memory = saved(point(510, path="", tier=CheckpointTier.MEMORY))
    view = told(*POINTS, refused, memory, **ENDED, now=1600.0)
    first, second, third = Reader(checkpoints_html(view)).of("button")
    assert "held in memory" in (first["title"] or "")
    assert second["title"] == "the checkpoint of step 500 cannot be used: model.pt: wrong digest"
    assert "aria-disabled" not in third
    assert "✗ model.pt: wrong digest" in Reader(checkpoints_html(view)).text


def test_a_press_is_of_its_row() -> None:
    acts: list[Act] = []
    panel = Checkpoints(acts.append)
    panel._pressed("resume", "disk-500")
    panel.update(told(*POINTS))
    panel._pressed("resume", "disk-400")
    panel._pressed("resume", "/etc/passwd")
    assert acts == [Act("resume", step=400, path="/machine/c/400")]
    assert checkpoints_html(told(*launched())) == EMPTY.html()


def test_thinned_out_checkpoints_are_gone() -> None:
    known = CheckpointList()
    known.add([*launched(), *(saved(point(step)) for step in range(10, 100, 10))])
    assert [c.step for c in known.newest_first] == [90, 80, 70]
    known.add([saved(point(75))])  # after a resume from 70
    assert [c.step for c in known.newest_first] == [75, 70]


# --- controls ---------------------------------------------------------------------------------------------------------


def controls(view: JobView) -> tuple[Controls, list[Act]]:
    acts: list[Act] = []
    made = Controls(acts.append)
    made.update(view)
    return made, acts


def test_resume_and_resize_take_the_ranks_beside_them() -> None:
    made, acts = controls(told(**ENDED))
    made._pressed("resume", "")
    made._pressed("ranks", "4")
    made._pressed("resume", "")
    assert acts == [Act("resume"), Act("resume", ranks=4)]
    made.update(told())
    made._pressed("resume", "")
    assert len(acts) == 2 and "the job runs: it goes on by itself" in made.root.markup
    made._pressed("resize", "")
    made._pressed("ranks", "2")
    made._pressed("resize", "")
    assert acts[2:] == [Act("resize", ranks=4)] and "it has 2 ranks already" in made.root.markup
    made._pressed("ranks", "")
    made._pressed("resize", "")
    assert len(acts) == 3 and "say first on how many ranks" in made.root.markup


def test_faults_are_behind_a_switch() -> None:
    made, acts = controls(told())
    assert 'data-do="inject"' not in made.root.markup
    made._pressed("faults", "")
    assert 'data-do="inject"' in made.root.markup and "SIGKILL" in made.root.markup
    for name, value in [("fault", "stop"), ("rank", "1"), ("fault", "nonsense"), ("inject", ""), ("rank", "7")]:
        made._pressed(name, value)
    assert acts == [Act("inject", fault="stop", rank=1)]
    made._pressed("inject", "")
    assert "there is no rank 7: the job has 2 ranks, from 0 on" in made.root.markup and len(acts) == 1
    made._pressed("faults", "")
    assert 'data-do="inject"' not in made.root.markup


@pytest.mark.parametrize(
    ("act", "changes", "why"),
    [
        (Act("resume"), {}, "the job runs: it goes on by itself"),
        (Act("resume"), ENDED, ""),
        (Act("resume", ranks=0), ENDED, "a job has at least 1 rank"),
        (Act("resize", ranks=3), {}, ""),
        (Act("resize", ranks=3), ENDED, "the job has ended: FAILED"),
        (Act("inject", fault="kill", rank=0), {}, ""),
        (Act("inject", fault="tickle", rank=0), {}, "there is no fault 'tickle'"),
        (Act("inject", fault="kill"), {}, "there is no rank None: the job has 2 ranks, from 0 on"),
        (Act("rm -rf"), {}, "there is no action 'rm -rf'"),
    ],
)
def test_why_not(act: Act, changes: dict[str, Any], why: str) -> None:
    assert why_not(act, told(**changes)) == why


def test_an_interactive_job_keeps_what_no_checkpoint_has() -> None:
    interactive = replace(told(), is_interactive=True)
    assert "no checkpoint has" in why_not(Act("resize", ranks=3), interactive)
    assert "launch it anew" in why_not(Act("resume"), replace(interactive, phase=JobPhase.STOPPED))


# --- clicking twice ---------------------------------------------------------------------------------------------------


def test_twice_is_once() -> None:
    time = [0.0]
    once, act = Once(lambda: time[0]), Act("resume", step=3)
    assert once.begin(act) == ""
    assert once.begin(act) == "resume is under way already" and once.begin(Act("resume", step=4)) == ""
    once.end(act)
    assert once.begin(act) == "resume was done just now"
    time[0] = AGAIN
    assert once.begin(act) == ""


def test_looking_twice_is_looking_twice() -> None:
    once = Once(lambda: 0.0)
    assert once.begin(Act("stacks")) == ""
    once.end(Act("stacks"))
    assert once.begin(Act("stacks")) == ""


def a_job(phase: JobPhase = JobPhase.HEALTHY, **fields: Any) -> FakeJob:
    job = FakeSession("run-1").known["run-1"]
    job.script = [fake_update(fake_state("run-1", phase, **fields), events=tuple(RECOVERED), now=9.0)]
    return job


def test_acts_say_what_they_did() -> None:
    job: Any = a_job()
    assert perform(Act("resume", step=400, path="/c"), job, told(**ENDED), by="me").startswith(
        "Resume from the checkpoint of step 400 was asked for; the job is "
    )
    anew = perform(Act("resume", ranks=2), job, told(**ENDED), by="me")
    assert anew.startswith("Resume on 2 ranks was asked for; ")  # no checkpoint of it is known
    assert perform(Act("resize", ranks=3), job, told(), by="me").startswith("Resize to 3 ranks was asked for")
    said = perform(Act("inject", fault="kill", rank=1), job, told(), by="me")
    assert said == "kill was done to rank 1."
    said = perform(Act("inject", fault="reorder", rank=1), job, told(), by="me")
    assert said.startswith("reorder awaits rank 1, at the rank's next collective: ")
    assert [call[0] for call in job.calls] == ["resume", "resume", "resize", "inject", "inject"]

    def gone(**_: Any) -> Any:
        raise CheckpointNotFoundError("run-1 has no checkpoint of step 400", hint="there are: 300")

    job.resume = gone
    said = perform(Act("resume", step=400), job, told(**ENDED), by="me")
    assert said == "It did not work: run-1 has no checkpoint of step 400 (there are: 300)"


# --- in a notebook ----------------------------------------------------------------------------------------------------


def test_a_notebook_s_buttons_do_the_same() -> None:
    job: Any = a_job(JobPhase.FAILED)
    panel = Panel(job)
    panel.ranks.value = "3"
    panel.buttons["resume"].click()
    panel.buttons["resume"].click()
    assert [call[0] for call in job.calls] == ["resume"] and "resume was done just now" in panel.said.value
    panel.buttons["stacks"].click()
    assert "Nothing done: the job has ended: FAILED." in panel.said.value
    assert "run-1" in panel.head.value and "goes on by itself" not in panel.buttons["resume"].tooltip


def test_a_notebook_s_faults_are_behind_a_switch_too() -> None:
    job: Any = a_job()
    panel = Panel(job)
    assert panel._on_purpose.layout.display == "none"
    panel.faults.value = True
    panel.fault.value, panel.rank.value = "stop", 1
    panel.buttons["inject"].click()
    assert job.calls == [("inject", "stop", 1)] and panel._on_purpose.layout.display == ""


def test_a_notebook_s_list_of_checkpoints() -> None:
    job: Any = a_job(JobPhase.FAILED)
    job.script = [fake_update(fake_state("run-1", JobPhase.FAILED), events=POINTS, now=1600.0)]
    panel = Panel(job)
    assert [text for text, _ in panel.checkpoint.options] == ["newest checkpoint", "step 500, disk", "step 400, disk"]
    panel.checkpoint.value = (400, "/machine/c/400")
    panel.buttons["resume"].click()
    assert job.calls[-1][:2] == ("resume", 400) and panel.checkpoint.value == (400, "/machine/c/400")


def test_a_job_gives_its_panel_or_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import workbench.session as session_module

    class Known(session_module.Job):
        def view(self) -> JobView:
            return told()

    job = Known(FakeSession("run-1"), "run-1")  # type: ignore[arg-type]
    assert isinstance(job.panel(), Panel)
    monkeypatch.setattr("workbench.session.controls.CONTROLS", "no_such_module_at_all")
    with pytest.raises(UsageError, match="there is no no_such_module_at_all here"):
        job.panel()


def test_a_session_gives_its_form_or_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = FakeSession()
    assert isinstance(session_panel(session), LaunchForm)
    monkeypatch.setattr("workbench.session.controls.LAUNCH_FORM", "no_such_module_at_all")
    with pytest.raises(UsageError, match="there is no no_such_module_at_all here"):
        Session.panel(session)

"""Failures and recoveries on the live page: a rank killed by the button, seen on the timeline, resumed by a click."""

from __future__ import annotations

from collections.abc import Callable

from lab import LiveView, Tab, wait_for
from test_notebook import await_steps

from workbench.session import Job
from workbench.state import JobPhase
from workbench.views.spans import MarkKind

Launch = Callable[..., Job]


def lanes(view: LiveView) -> dict[str, list[object]]:
    """What the chart of lanes was given, by column."""
    return dict(
        view.frame.evaluate(
            "() => { const s = [...Bokeh.documents[0].all_models].find(m => m.name === 'lanes');"
            "const d = s.data; return Object.fromEntries(d.get ? [...d.entries()] : Object.entries(d)); }"
        )
    )


def kill(view: LiveView, rank: int) -> None:
    """Through the page: the switch, the fault, the rank, the button."""
    if not view.frame.get_by_label("fault", exact=True).count():
        view.click("Faults …")
    view.frame.get_by_label("fault", exact=True).select_option("kill", timeout=10_000)
    view.frame.get_by_label("rank", exact=True).fill(str(rank), timeout=10_000)
    view.frame.wait_for_timeout(400)  # the page tells what was typed a moment later
    view.click("Inject")


def test_a_kill_is_recovered_and_told(tab: Tab, launch: Launch) -> None:
    job = launch("steady.py", 90, nproc_per_node=4, max_restarts=3)
    await_steps(job)
    view = tab.go_live(job.job_id)
    view.frame.get_by_text("No failure so far").wait_for(timeout=20_000)
    tab.shot("timeline-calm")
    for number, rank in enumerate((2, 1), 1):
        kill(view, rank)
        wait_for(lambda number=number: len(job.timeline.attempts) > number, "another attempt")
        wait_for(lambda: job.timeline.attempts[-1].began_at is not None, "its first step")
    first = job.timeline.attempts[0]
    assert first.cause is not None and first.cause.rank == 2 and first.injected_at is not None
    assert first.time_to_recover is not None and first.time_to_recover < 30
    view.frame.get_by_text("restart 1").locator("visible=true").first.wait_for(timeout=20_000)
    wait_for(lambda: "recovering" in lanes(view)["kind"] and "dead" in lanes(view)["kind"], "lanes of the failure")
    view.frame.locator(".story li").nth(1).wait_for(timeout=20_000)
    assert "killed by SIGKILL" in view.text(".story li") and "back after" in view.text(".story li")
    wait_for(lambda: {m.kind for m in job.timeline.marks} >= {MarkKind.INJECTED, MarkKind.RECOVERED}, "marks")
    tab.page.set_viewport_size({"width": 1280, "height": 1400})
    view.frame.wait_for_timeout(1500)
    tab.shot("timeline-light")
    view.frame.get_by_text("attempts and events as tables").click()
    view.frame.wait_for_timeout(500)
    tab.shot("timeline-tables")
    dark = tab.go_live(job.job_id, "dark")
    wait_for(lambda: lanes(dark)["kind"], "lanes")
    dark.frame.wait_for_timeout(1500)
    tab.shot("timeline-dark")


def test_an_ended_job_is_resumed_by_a_click_and_once(tab: Tab, launch: Launch) -> None:
    job = launch("steady.py", 90)
    await_steps(job)
    view = tab.go_live(job.job_id)
    view.click("Resume")
    view.frame.get_by_text("the job runs: it goes on by itself").wait_for(timeout=10_000)
    view.click("Cancel")
    view.click("Yes, cancel it")
    wait_for(lambda: job.phase is JobPhase.STOPPED, "the end")
    wait_for(lambda: view.phase() == "STOPPED", "the page says so")
    view.frame.get_by_role("button", name="Resume", exact=True).dblclick(timeout=10_000)
    wait_for(lambda: len(job.timeline.attempts) == 2 and job.timeline.attempts[-1].began_at, "it steps again", 60)
    assert "resumed by the live page" in job.timeline.attempts[-1].decision
    asked = [m for m in job.timeline.marks if m.kind is MarkKind.REQUESTED and "resume" in m.title]
    assert len(asked) == 1 and asked[0].count == 1
    view.frame.get_by_text("resumed by the live page").first.wait_for(timeout=20_000)
    tab.page.set_viewport_size({"width": 1280, "height": 1000})
    view.frame.wait_for_timeout(1500)
    tab.shot("resumed")


def test_an_ended_job_goes_on_from_the_checkpoint_that_is_pressed(tab: Tab, launch: Launch) -> None:
    job = launch("saved.py", 500, checkpoint_every=10, checkpoint_keep=5)
    wait_for(lambda: len(job.view().checkpoints) > 2, "checkpoints", 60)
    view = tab.go_live(job.job_id)
    view.click("Cancel")
    view.click("Yes, cancel it")
    wait_for(lambda: view.phase() == "STOPPED", "the page says so")
    older = view.frame.get_by_role("button", name="resume from step").nth(1)
    step = int("".join(filter(str.isdigit, older.get_attribute("aria-label", timeout=20_000) or "")))
    tab.page.set_viewport_size({"width": 1280, "height": 1000})
    tab.shot("checkpoints")
    older.dblclick(timeout=10_000)
    wait_for(lambda: len(job.timeline.attempts) == 2 and job.timeline.attempts[-1].began_at, "it steps again", 60)
    attempt = job.timeline.attempts[-1]
    assert attempt.resumed_step == step and f"from step {step}" in attempt.decision
    assert sum("resume from" in mark.title for mark in job.timeline.marks) == 1
    wait_for(lambda: view.phase() == "HEALTHY", "the page says so")
    view.frame.wait_for_timeout(1500)
    tab.shot("checkpoints-resumed")

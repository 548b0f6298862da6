"""One job from launch to end, all of it within a notebook: what a person does in JupyterLab who never leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import PROGRAMS
from lab import LiveView, Tab, wait_for
from playwright.sync_api import Frame
from test_dashboard_tab import launch_by_form
from test_notebook import HOLD_GIL, SLEEP, assert_moves, await_steps
from test_timeline import kill, lanes

from workbench.session import Job, Session
from workbench.state import JobPhase

CELLS = ("%load_ext workbench\n%dtrain dashboard", SLEEP.format(seconds=100), HOLD_GIL)


@pytest.mark.timeout(240)  # it waits for a kernel four times
def test_a_job_is_launched_watched_killed_resumed_and_attached_to_in_a_notebook(tab: Tab, session: Session) -> None:
    tab.expected = ("Canceled future for kernel_info_request",)  # JupyterLab's, of a busy kernel that is restarted
    tab.page.set_viewport_size({"width": 1280, "height": 1000})
    attach = "%load_ext workbench\n%dtrain attach {}"
    tab.open(tab.lab.write("story.ipynb", *CELLS, attach))
    tab.run_cell(0)
    tab.await_cell(0)
    frame = list_in_the_cell(tab)
    with ended(session, launch_by_form(frame, str(PROGRAMS / "steady.py"), "200", "2")) as job:
        await_steps(job)
        frame.locator("details.launch a").click()
        view = tab.live()
        for cell in (1, 2):
            moves_in_a_busy_cell(tab, view, cell)
        killed_and_resumed(view, job)
        tab.save()
        reloaded_in_a_busy_cell(tab, job)
        tab.restart_kernel()
        set_cell(tab, 3, attach.format(job.job_id))
        tab.run_cell(3)
        wait_for(lambda: len(live_views(tab)) == 2, "attached to by a kernel that did not launch it", 40)
        for view in live_views(tab):
            assert job.job_id in view.frame.url and view.phase() == "HEALTHY"
            assert_moves(view)
        tab.shot("story")


def list_in_the_cell(tab: Tab) -> Frame:
    def found() -> Frame | None:
        tab.page.evaluate("1")  # lets Playwright hear of new frames
        return next((frame for frame in tab.page.frames if "/dtrain/?theme=" in frame.url), None)

    frame: Frame = wait_for(found, "the list of jobs in the cell", 30)
    return frame


@contextmanager
def ended(session: Session, job_id: str) -> Iterator[Job]:
    """The job that the form launched, which no fixture knows of."""
    job = session.attach(job_id)
    try:
        yield job
    finally:
        job.cancel(force=True, by="the test's end")
        job.exception(timeout=20)


def moves_in_a_busy_cell(tab: Tab, view: LiveView, cell: int) -> None:
    tab.run_cell(cell)
    wait_for(tab.is_busy, "the kernel is busy")
    assert_moves(view)
    assert tab.is_busy(), "the cell ended before it was looked at"
    tab.restart_kernel()
    assert_moves(view)


def killed_and_resumed(view: LiveView, job: Job) -> None:
    """By the buttons. It has no restarts, so that it ends; nor a checkpoint. The timeline tells both."""
    before = view.step()
    kill(view, 1)
    wait_for(lambda: view.phase() == "FAILED", "the page says so", 20)
    view.frame.get_by_text("rank 1 killed by SIGKILL").locator("visible=true").first.wait_for(timeout=10_000)
    view.frame.get_by_role("button", name="Resume", exact=True).click(timeout=10_000)
    wait_for(lambda: len(job.timeline.attempts) == 2 and job.timeline.attempts[-1].began_at, "it steps again", 60)
    wait_for(lambda: view.phase() == "HEALTHY", "the page says so", 20)
    wait_for(lambda: "dead" in lanes(view)["kind"], "the lanes show it", 20)
    assert "killed by SIGKILL" in view.text(".story li") and "resumed by the live page" in view.text(".story")
    assert job.phase is JobPhase.HEALTHY
    wait_for(lambda: view.step() < before, "it is at its beginning", 10)
    assert_moves(view)


def reloaded_in_a_busy_cell(tab: Tab, job: Job) -> None:
    """The cell shows the list again, and from there the job."""
    tab.run_cell(1)
    wait_for(tab.is_busy, "the kernel is busy")
    tab.reload()
    list_in_the_cell(tab).get_by_role("link", name=job.job_id).click(timeout=20_000)
    assert_moves(tab.live())  # within the cell's 100 s: a reloaded JupyterLab hears that it is busy when it is no more


def live_views(tab: Tab) -> list[LiveView]:
    tab.page.evaluate("1")
    views = [LiveView(frame) for frame in tab.page.frames if "/dtrain/job" in frame.url]
    return [view for view in views if view.is_live()]


def set_cell(tab: Tab, index: int, source: str) -> None:
    about: dict[str, Any] = {"index": index, "source": source}
    tab.page.evaluate(
        "({index, source}) => "
        "window.jupyterapp.shell.currentWidget.content.widgets[index].model.sharedModel.setSource(source)",
        about,
    )

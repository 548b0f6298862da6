"""The live view of a job in a notebook: what a reader sees whatever the kernel does."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import LiveView, Tab, running_lab, wait_for
from playwright.sync_api import Browser

from workbench.session import Job, Session
from workbench.state import JobPhase

Launch = Callable[..., Job]
SHOW = "import workbench as wb\nsession = wb.Session(start=False)\njob = session.attach({id!r})\njob"
SLEEP = "import time\ntime.sleep({seconds})"
# One call in C: no other thread of the kernel gets on, so it first gets time to say that it is busy.
HOLD_GIL = "import time\ntime.sleep(0.5)\nsum(range(10**9))"
FRESH = 1.5  # s that what is shown may be behind


def show(tab: Tab, job: Job, name: str, *more: str) -> LiveView:
    """Open a notebook, run its first cell, which shows the job, and wait for the live page."""
    await_steps(job)
    notebook = tab.lab.write(f"{name}.ipynb", SHOW.format(id=job.job_id), *more)
    tab.open(notebook)
    tab.run_cell(0)
    return tab.live()


def await_steps(job: Job) -> None:
    def has_stepped() -> bool:
        state = job.state
        assert not state.phase.is_terminal, state.reason
        return job.view().step > 0

    wait_for(has_stepped, "the first step", 40)


def staleness(view: LiveView, seconds: float = 2.0) -> list[float]:
    """How far behind what is shown is, looked at often for a while."""
    end, found = time.monotonic() + seconds, []
    while time.monotonic() < end:
        found.append(view.staleness())
        view.frame.wait_for_timeout(100)
    return found


def assert_moves(view: LiveView) -> None:
    step = view.step()
    found = staleness(view)
    assert statistics.median(found) < FRESH, found
    assert view.step() > step


def test_a_job_as_the_last_expression_becomes_the_live_page(tab: Tab, launch: Launch) -> None:
    job = launch("steady.py", 60)
    view = show(tab, job, "first")
    assert_moves(view)
    assert view.phase() == "HEALTHY"
    assert "samples/s" in view.text("dl.stats")
    assert view.frame.get_by_role("table", name="Ranks of job").count() == 1
    tab.save()
    tab.shot("notebook-light")
    path = tab.lab.work / "first.ipynb"
    saved = wait_for(lambda: json.loads(path.read_text())["cells"][0]["outputs"], "the output is saved")
    html = "".join(saved[0]["data"]["text/html"])
    assert "<table>" in html and job.job_id in html
    assert path.stat().st_size < 50_000
    assert str(tab.lab.port) not in html and tab.lab.token not in html


@pytest.mark.parametrize("cell", [SLEEP.format(seconds=8), HOLD_GIL], ids=["sleep", "holds-the-GIL"])
def test_it_moves_while_a_cell_is_busy(tab: Tab, launch: Launch, cell: str) -> None:
    view = show(tab, launch("steady.py", 60), "busy", cell)
    tab.run_cell(1)
    wait_for(tab.is_busy, "the kernel is busy")
    assert_moves(view)
    assert tab.is_busy(), "the cell ended before it was looked at"
    tab.restart_kernel()  # it would keep a core busy


def test_a_reload_in_a_busy_cell_brings_it_back_with_its_history(tab: Tab, launch: Launch) -> None:
    view = show(tab, launch("steady.py", 90), "reload", SLEEP.format(seconds=100))
    wait_for(lambda: view.points() >= 4, "a few seconds of history", 20)
    points = view.points()
    tab.save()
    tab.run_cell(1)
    wait_for(tab.is_busy, "the kernel is busy")
    began = time.monotonic()
    tab.reload()
    again = tab.live(10)
    took = time.monotonic() - began
    print(f"live again {took:.1f} s after the reload")
    assert took < 10
    assert again.points() >= points
    assert_moves(again)


def test_it_goes_on_after_a_kernel_restart(tab: Tab, launch: Launch) -> None:
    view = show(tab, launch("steady.py", 60), "restart")
    tab.restart_kernel()
    assert view.is_live()
    assert_moves(view)


def test_it_is_the_same_in_notebook_7(
    browser: Browser, home: Path, launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job = launch("steady.py", 60)
    with running_lab(tmp_path_factory.mktemp("notebook"), is_notebook=True) as server:
        tab = Tab(browser, server)
        tab.expected = ("reading 'schema'",)  # of Notebook itself, in an empty one too
        try:
            view = show(tab, job, "seven", SLEEP.format(seconds=30))
            tab.run_cell(1)
            wait_for(tab.is_busy, "the kernel is busy")
            assert_moves(view)
            tab.shot("notebook-7-light")
            tab.theme("JupyterLab Dark")
            wait_for(lambda: view.frame.evaluate("() => document.documentElement.dataset.theme") == "dark", "dark", 5)
            tab.shot("notebook-7-dark")
            tab.save()
            wait_for(lambda: json.loads((server.work / "seven.ipynb").read_text())["cells"][0]["outputs"], "saved")
            tab.reload()
            assert_moves(tab.live(10))
            assert not tab.unexpected() and not tab.foreign
        finally:
            tab.close()


def test_it_works_under_a_base_url(tab_of_ana: Tab, launch: Launch) -> None:
    view = show(tab_of_ana, launch("steady.py", 60), "ana")
    assert "/user/ana/dtrain/job" in view.frame.url
    assert_moves(view)


def test_it_follows_the_theme(tab: Tab, launch: Launch) -> None:
    view = show(tab, launch("steady.py", 60), "theme")

    def colours() -> tuple[str, str]:
        chart = "[...Bokeh.documents[0].all_models].find(m => m.type === 'LinearAxis').major_label_text_color"
        page = "getComputedStyle(document.body).backgroundColor"
        return view.frame.evaluate(f"() => {page}"), view.frame.evaluate(f"() => {chart}.value ?? {chart}")

    assert view.frame.evaluate("() => document.documentElement.dataset.theme") == "light"
    light = colours()
    tab.theme("JupyterLab Dark")
    wait_for(lambda: view.frame.evaluate("() => document.documentElement.dataset.theme") == "dark", "dark", 5)
    wait_for(lambda: colours()[1] != light[1], "the chart is dark", 5)
    assert colours()[0] == "rgb(17, 17, 17)"
    assert_moves(view)
    tab.shot("notebook-dark")
    tab.theme("JupyterLab Light")
    wait_for(lambda: colours() == light, "light again", 5)


def test_clicking_cancel_ends_the_job_while_the_kernel_is_busy(tab: Tab, launch: Launch) -> None:
    job = launch("steady.py", 90)
    view = show(tab, job, "cancel", SLEEP.format(seconds=20))
    tab.run_cell(1)
    wait_for(tab.is_busy, "the kernel is busy")
    view.click("Cancel")
    tab.shot("cancel-asks")
    assert job.phase is JobPhase.HEALTHY  # one click is not enough
    began = time.monotonic()
    view.click("Yes, cancel it")
    wait_for(lambda: job.phase is JobPhase.STOPPED, "the job is stopped", 5)
    print(f"stopped {time.monotonic() - began:.1f} s after the click")
    wait_for(lambda: view.phase() == "STOPPED", "the page says so", 5)
    said = view.frame.locator("p[role=status]").all_inner_texts()
    assert any("Cancel was asked for" in text for text in said), said
    assert tab.is_busy()


def test_a_flood_of_prints_does_not_freeze_the_page(tab: Tab, launch: Launch, tmp_path: Path) -> None:
    go, lines = tmp_path / "go", 100_000
    job = launch("chatty.py", go, lines)
    wait_for(lambda: job.phase is JobPhase.HEALTHY, "the ranks run")
    tab.open(tab.lab.write("flood.ipynb", SHOW.format(id=job.job_id)))
    tab.run_cell(0)
    view = tab.live()
    wait_for(lambda: "waiting" in view.text(".log"), "the first line")
    tab.page.evaluate(
        "() => { let last = performance.now(); window.gap = 0; const tick = now => { "
        "window.gap = Math.max(window.gap, now - last); last = now; requestAnimationFrame(tick); }; "
        "requestAnimationFrame(t => { last = t; requestAnimationFrame(tick); }); }"
    )
    go.touch()
    wait_for(lambda: "has printed all" in view.text(".log"), "the last line", 60)
    view.frame.wait_for_timeout(1500)
    gap = tab.page.evaluate("() => window.gap")
    print(f"longest frame gap {gap:.0f} ms")
    assert gap < 500
    assert "not shown here" in view.text("section[aria-label=Logs] p")
    assert len(view.text(".log").splitlines()) <= 1000
    tab.save()
    assert (tab.lab.work / "flood.ipynb").stat().st_size < 50_000
    assert job.log_path(0).read_text().count(" line ") == lines  # nothing is lost on disk
    tab.shot("flood")


def test_a_job_shown_twice_is_live_twice(tab: Tab, launch: Launch) -> None:
    show(tab, launch("steady.py", 60), "twice", "job")
    tab.run_cell(1)

    def live_views() -> list[LiveView]:
        tab.page.evaluate("1")
        views = [LiveView(frame) for frame in tab.page.frames if "/dtrain/job" in frame.url]
        return [view for view in views if view.is_live()]

    wait_for(lambda: len(live_views()) == 2, "two live views", 20)
    for view in live_views():
        assert_moves(view)


def test_an_interactive_jobs_cell_is_interrupted_from_the_page(tab: Tab, session: Session) -> None:
    job = session.launch(interactive=True, nproc_per_node=2)
    try:
        wait_for(lambda: job.phase is JobPhase.HEALTHY, "the ranks wait")
        view = tab.go_live(job.job_id)
        run = job.execute("import time\ntime.sleep(60)")
        wait_for(lambda: "running a cell" in view.text("table"), "the cell runs", 10)
        tab.shot("interactive")
        view.click("Interrupt")
        answers = wait_for(lambda: run.poll(1.0) and run.is_done and run.answers, "every rank has answered", 10)
        assert all("KeyboardInterrupt" in answer.error for answer in answers.values())
        assert job.phase is JobPhase.HEALTHY
    finally:
        job.cancel(force=True, by="the test's end")
        job.exception(timeout=20)

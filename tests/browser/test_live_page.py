"""The live page by itself: what it shows, its buttons, and what it says when something is missing or gone."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
from lab import Lab, Tab, wait_for
from test_notebook import SHOW, assert_moves, await_steps

from workbench.session import Job, Session, stop_pool
from workbench.state import JobPhase

Launch = Callable[..., Job]
GONE = ("500 (", "502 (", "503 (", "WebSocket", "Lost websocket", "not connected", "ERR_")


def pid_of(home: Path, mark: str) -> int:
    return int(json.loads((home / mark).read_text())["pid"])


def health(lab: Lab) -> dict[str, object]:
    with urllib.request.urlopen(f"{lab.url}dtrain/healthz?token={lab.token}", timeout=5) as answer:
        return dict(json.loads(answer.read()))


def test_it_is_live_within_seconds_and_asks_no_other_host(tab: Tab, launch: Launch) -> None:
    job = launch("steady.py", 60)
    await_steps(job)
    tab.go_live(job.job_id)  # fills the browser's cache, as the first look at any job does
    began = time.monotonic()
    view = tab.go_live(job.job_id)
    took = time.monotonic() - began
    print(f"live {took:.1f} s after the address was entered")
    assert took < 10  # of which a machine that has nothing else to do needs a third
    assert_moves(view)
    html = view.frame.evaluate("() => document.documentElement.outerHTML")
    assert 'src="/' not in html and 'href="/' not in html and "://cdn" not in html
    tab.shot("page-light")
    tab.go_live(job.job_id, "dark").frame.wait_for_timeout(1500)
    tab.shot("page-dark")


def test_stacks_and_why_an_interrupt_is_refused(tab: Tab, launch: Launch) -> None:
    job = launch("steady.py", 60)
    await_steps(job)
    view = tab.go_live(job.job_id)
    view.click("Stacks")
    view.frame.get_by_text("Stacks of ranks 0, 1").wait_for(timeout=20_000)
    assert "steady.py" in view.text("pre")
    tab.shot("stacks")
    view.click("Close")
    view.click("Interrupt")
    view.frame.get_by_text("only a cell on an interactive job can be interrupted").wait_for(timeout=5_000)


def test_log_filters(tab: Tab, launch: Launch, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = launch("chatty.py", go, 30)
    wait_for(lambda: job.phase is JobPhase.HEALTHY, "the ranks run")
    go.touch()
    view = tab.go_live(job.job_id)
    wait_for(lambda: "rank 1 line 29" in view.text(".log") and "rank 0 line 29" in view.text(".log"), "both print")
    view.frame.get_by_label("ranks", exact=True).select_option("1")
    wait_for(lambda: "rank 0 line" not in view.text(".log"), "rank 0 is filtered out", 5)
    view.frame.get_by_label("lines that contain").fill("line 17")
    wait_for(lambda: len(view.text(".log").splitlines()) == 2, "one line (and who printed it)", 5)
    view.frame.get_by_label("lines that contain").fill("nobody says this")
    wait_for(lambda: "No line here is of this choice" in view.text(".log"), "it says that nothing matches", 5)


def test_every_control_is_reached_by_keyboard(tab: Tab, launch: Launch) -> None:
    job = launch("steady.py", 60)
    await_steps(job)
    view = tab.go_live(job.job_id)
    wait_for(lambda: view.points() > 0, "the chart has its first point", 20)
    reached = []
    focus = "() => { let e = document.activeElement; while (e && e.shadowRoot) e = e.shadowRoot.activeElement; "
    focus += "return e ? (e.getAttribute('aria-label') || e.innerText || e.nodeName).split('\\n')[0] : ''; }"
    wanted = {"Stacks", "Interrupt", "Cancel", "the newest points as a table", "lines that contain", "● Live"}
    wanted |= {"time shown in the charts", "❚❚ Pause", "what is coloured", "which events", "what is charted", "rank 1"}
    wanted.add("moment that is shown")
    while not wanted <= set(reached) and len(reached) < 200:
        tab.page.keyboard.press("Tab")
        reached.append(view.frame.evaluate(focus))
    assert wanted <= set(reached), (wanted - set(reached), reached)


def test_an_ended_job_and_one_that_never_was(tab: Tab, launch: Launch) -> None:
    job = launch("chatty.py", "/nowhere", "no number")
    job.exception(timeout=30)
    view = tab.go_live(job.job_id)
    assert view.phase() == "FAILED"
    assert "ValueError" in view.text(".notice.bad")
    tab.shot("failed")
    view.click("Cancel")
    view.frame.get_by_text("Nothing done: the job has ended: FAILED").wait_for(timeout=5_000)
    view = tab.go_live("no-such-job")
    view.frame.get_by_text("no job 'no-such-job'").wait_for(timeout=10_000)
    tab.shot("unknown")


def test_the_list_of_jobs_links_to_their_pages(tab: Tab, launch: Launch) -> None:
    job = launch("steady.py", 60)
    await_steps(job)
    tab.page.goto(f"{tab.lab.url}dtrain/?theme=dark")
    link = tab.page.get_by_role("link", name=job.job_id)
    link.wait_for(timeout=10_000)
    tab.shot("jobs-dark")
    link.click()
    assert_moves(tab.live())


def test_a_closed_page_is_forgotten_and_an_idle_server_rests(tab: Tab, launch: Launch, home: Path) -> None:
    job = launch("steady.py", 60)
    await_steps(job)
    tab.go_live(job.job_id)
    wait_for(lambda: health(tab.lab)["pages"] == 1, "only this page is there", 20, every=0.5)
    tab.page.goto("about:blank")
    wait_for(lambda: health(tab.lab)["pages"] == 0, "the page is forgotten", 20, every=0.5)
    wait_for(lambda: health(tab.lab)["followed"] == 0, "nobody follows the job", 60, every=1.0)
    server = psutil.Process(pid_of(home, "dashboard/dashboard.json"))
    before = sum(server.cpu_times()[:2])
    time.sleep(5)
    used = sum(server.cpu_times()[:2]) - before
    print(f"idle: {used * 1000 / 5:.0f} ms of CPU a second")
    assert used < 0.25


def test_without_its_server_the_snapshot_stays_and_says_what_to_do(tab: Tab, launch: Launch, home: Path) -> None:
    tab.expected = GONE
    job = launch("steady.py", 100)
    await_steps(job)
    tab.open(tab.lab.write("dead.ipynb", SHOW.format(id=job.job_id)))
    tab.run_cell(0)
    view = tab.live()
    tab.save()
    os.kill(pid_of(home, "dashboard/dashboard.json"), signal.SIGKILL)
    view.frame.get_by_text("The live view has lost its server").wait_for(timeout=30_000)
    assert view.phase() == "HEALTHY"  # the last picture stays
    tab.shot("server-lost")
    tab.reload()
    wait_for(lambda: "The live view cannot be reached" in tab.text_of(0), "the note below the snapshot", 20)
    assert f"{job.job_id}" in tab.text_of(0) and "%dtrain up" in tab.text_of(0)
    tab.shot("snapshot")
    Session(slots=4).close()  # as %dtrain up does
    assert_moves(tab.live(40))


def test_a_lost_pool_is_told_and_found_again(tab: Tab, home: Path) -> None:
    programs = Path(__file__).parent / "programs"

    session = Session(pool="other", slots=2, timeout=60)
    try:
        job = session.launch(programs / "steady.py", args=["100"], nproc_per_node=2)
        await_steps(job)
        view = tab.go_live(job.job_id)
        scheduler = pid_of(home, "pools/other/scheduler.json")
        os.kill(scheduler, signal.SIGSTOP)
        view.frame.get_by_text("No news:").wait_for(timeout=50_000)
        assert view.step() > 0  # the last picture stays
        tab.shot("pool-lost")
        os.kill(scheduler, signal.SIGCONT)
        wait_for(lambda: view.frame.get_by_text("No news:").count() == 0, "it is heard again", 30)
        os.kill(scheduler, signal.SIGKILL)  # another one comes by itself, and knows what became of the job
        wait_for(lambda: view.phase() == "FAILED", "what became of the job", 30)
        assert view.frame.get_by_text("No news:").count() == 0
    finally:
        session.close()
        stop_pool("other")


def test_a_failure_and_its_recovery_are_news(tab: Tab, launch: Launch) -> None:
    job = launch("steady.py", 60, max_restarts=2)
    await_steps(job)
    view = tab.go_live(job.job_id)
    title = view.frame.title()
    assert "failed" not in title
    job.inject("kill", 1)
    view.frame.get_by_text(f"{job.job_id} recovered: restart 1, after: rank 1 killed by SIGKILL").wait_for(
        timeout=20_000
    )
    assert view.frame.title() == f"{job.job_id} recovered · {title}"
    tab.shot("notice")
    view.click("Dismiss")
    assert view.frame.title() == title

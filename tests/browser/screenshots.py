"""Every panel in every state, light and dark, as PNG files in screenshots/: `make screenshots`. To be looked at.

Real pools, ranks, records and pages; only the 1,024 ranks are simulated, by the benchmark's agent. About four minutes.
Each state is a page as a whole, THEME/STATE.png, and its panels one by one, THEME/STATE/PANEL.png. With words,
only what is called so is taken anew: lists, run, ends, silence, many.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lab import ARGS, chromium, wait_for
from playwright.sync_api import Browser, Page, sync_playwright
from workbench_widgets.theme import THEMES

from workbench.pool.local import pool_dir, read_marks, stop_dashboard_if_unused
from workbench.session import Job, Session, stop_pool
from workbench.state import JobPhase

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent.parent / "screenshots"
PROGRAM = HERE / "programs" / "pictured.py"
ONLY = sys.argv[1:]
Take = Callable[[Browser, Session], None]
LARGE = float(os.environ.get("SCREENSHOT_SECONDS", "45"))  # s that the 1,024 ranks run before they are shown


def main() -> int:
    path = chromium()
    if path is None:
        print("there is no Chromium; `make test` installs it, or put one on the PATH")
        return 1
    if not ONLY:
        shutil.rmtree(TARGET, ignore_errors=True)
    missing = 0
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=ARGS)
        for take in (take_small, take_large):
            with tempfile.TemporaryDirectory(prefix="dt-shots-") as home:
                os.environ["DTRAIN_HOME"] = home
                missing += take(browser)
        browser.close()
    print(f"{len(list(TARGET.rglob('*.png')))} pictures in {TARGET}")
    return min(missing, 1)


def take_small(browser: Browser) -> int:
    """A pool of 4 slots, whose jobs are real; how many states could not be shown."""
    takes = chosen({"lists": of_lists, "run": of_a_run, "ends": of_ends, "silence": of_silence})
    if not takes:
        return 0
    session = Session(slots=4, timeout=60)
    try:
        return sum(not tried(take, browser, session) for take in takes)
    finally:
        session.close()
        stop_pool()


def chosen(takes: dict[str, Take]) -> list[Take]:
    return [take for name, take in takes.items() if not ONLY or name in ONLY]


def tried(take: Take, browser: Browser, session: Session) -> bool:
    """One state that cannot be brought about leaves the others."""
    try:
        take(browser, session)
    except Exception as error:
        print(f"not taken: {take.__name__}: {type(error).__name__}: {error}", flush=True)
        return False
    finally:
        for summary in session.jobs():
            if not summary.phase.is_terminal:
                session.attach(summary.job_id).cancel(force=True, by="the pictures")
    return True


def of_lists(browser: Browser, session: Session) -> None:
    with page_of(browser, link()) as page:
        shoot(page, "no-jobs")


def of_a_run(browser: Browser, session: Session) -> None:
    live = session.launch(PROGRAM, args=["600"], nproc_per_node=3, max_restarts=3, checkpoint_every=100)
    waiting = session.launch(PROGRAM, args=["9"], nproc_per_node=4)
    with page_of(browser, link(waiting.job_id)) as page:
        shoot(page, "empty", page.get_by_text("waiting").first.wait_for)
    waiting.cancel(by="the pictures")
    shoot_loading(browser, link(live.job_id))
    await_step(live, 250)
    live.inject("slow", 2)
    await_step(live, 400)
    with page_of(browser, link(live.job_id)) as page:
        shoot(page, "live")
    live.inject("kill", 1)
    wait_for(lambda: live.phase is JobPhase.HEALTHY and live.view().restart_count == 1, "it has recovered", 120)
    await_step(live, 450)
    with page_of(browser, link(live.job_id)) as page:
        shoot(page, "recovered")


def of_ends(browser: Browser, session: Session) -> None:
    failed = session.launch(PROGRAM, args=["9", "120"], nproc_per_node=3, checkpoint_every=50)
    ended = session.launch(PROGRAM, args=["6"], nproc_per_node=1)
    for name, job in (("failed", failed), ("ended", ended)):
        job.exception(timeout=180)
        with page_of(browser, link(job.job_id)) as page:
            shoot(page, name)
    with page_of(browser, link()) as page:
        shoot(page, "jobs")


def of_silence(browser: Browser, session: Session) -> None:
    stale = session.launch(PROGRAM, args=["600"], nproc_per_node=2)
    await_step(stale, 100)
    with page_of(browser, link(stale.job_id)) as page:
        shoot_stale(page)


def take_large(browser: Browser) -> int:
    sys.path.insert(0, str(HERE.parent / "bench"))
    from bench_scale import RANKS, simulated_pool

    def of_many(browser: Browser, session: Session) -> None:
        job = session.launch(source="simulated", nproc_per_node=RANKS)
        time.sleep(LARGE)
        with page_of(browser, link(job.job_id)) as page:
            shoot(page, "1024-ranks")

    if not chosen({"many": of_many}):
        return 0
    try:
        with simulated_pool() as session:
            return int(not tried(of_many, browser, session))
    finally:
        stop_dashboard_if_unused()


# --- pages ------------------------------------------------------------------------------------------------------------


def link(*words: str) -> str:
    command = [sys.executable, "-m", "workbench", "dashboard", "--no-browser", "--json", *words]
    return str(json.loads(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout)["url"])


@contextmanager
def page_of(browser: Browser, url: str) -> Iterator[Page]:
    page = browser.new_context(viewport={"width": 1280, "height": 900}, device_scale_factor=1).new_page()
    page.goto(url)
    page.wait_for_function("() => document.documentElement.dataset.live === '1'", timeout=60_000)
    yield page
    page.context.close()


def shoot(page: Page, state: str, ready: Callable[[], object] = lambda: None) -> None:
    """The page and its panels in both themes."""
    ready()
    page.wait_for_timeout(2500)
    for theme in THEMES:
        page.evaluate("theme => { document.documentElement.dataset.theme = theme; scrollTo(0, 0) }", theme)
        page.wait_for_timeout(700)
        folder = TARGET / theme / state
        folder.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=folder.with_suffix(".png"), full_page=True)
        for section in page.locator("section").all():
            if section.is_visible() and (box := section.bounding_box()) and box["height"] > 1:
                name = (section.get_attribute("aria-label") or "panel").lower().replace(" ", "-")
                section.screenshot(path=folder / f"{name}.png")
    print("taken:", state, flush=True)


def shoot_loading(browser: Browser, url: str) -> None:
    """What stands there before the page's scripts have come."""
    page = browser.new_context(viewport={"width": 1280, "height": 300}).new_page()
    page.route("**/static/**", lambda route: None)
    page.goto(url, wait_until="commit")
    page.locator("#state:not(:empty)").wait_for(timeout=20_000)
    for theme in THEMES:
        page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
        (TARGET / theme).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=TARGET / theme / "loading.png")
    page.context.close()


def shoot_stale(page: Page) -> None:
    """The scheduler answers no more for a while."""
    pid = read_marks(pool_dir("default"))["scheduler"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        shoot(page, "stale", lambda: page.get_by_text("No news").wait_for(timeout=120_000))
    finally:
        os.kill(pid, signal.SIGCONT)


def await_step(job: Job, step: int) -> None:
    wait_for(lambda: job.view().step >= step, f"step {step}", 180, every=0.5)


if __name__ == "__main__":
    sys.exit(main())

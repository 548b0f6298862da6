"""The live pages in a browser tab of their own: `dtrain dashboard` in a shell, a link, no Jupyter."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from axe import violations
from conftest import PROGRAMS
from lab import LOCAL, LiveView, Tab, wait_for
from playwright.sync_api import Browser, Frame, Page
from test_notebook import assert_moves, await_steps

from workbench.saved.session import load_session
from workbench.session import Job, Session
from workbench.state import JobPhase

Launch = Callable[..., Job]


def dtrain(*words: str) -> dict[str, Any]:
    """What the command line answers, as a document."""
    argv = [sys.executable, "-m", "workbench", *words, "--json"]
    return dict(json.loads(subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout))


def link(*words: str) -> str:
    return str(dtrain("dashboard", "--no-browser", *words)["url"])


class Reader:
    """A browser of its own, with no cookie yet. `errors`: what went wrong in it; `foreign`: what it asked of others."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        options.setdefault("viewport", {"width": 1280, "height": 1000})
        self._context = browser.new_context(**options)
        self.page: Page = self._context.new_page()
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self._context.on("request", lambda r: self._asked(r.url))

    def _asked(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in LOCAL:
            self.foreign.append(url)

    def open(self, url: str) -> LiveView:
        self.page.goto(url)
        self.page.wait_for_function("() => document.documentElement.dataset.live === '1'", timeout=20_000)
        return LiveView(self.page.main_frame)

    def shot(self, name: str) -> None:
        folder = os.environ.get("DTRAIN_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)

    def where(self) -> dict[str, list[str]]:
        """What the address asks for."""
        return parse_qs(urlsplit(str(self.page.evaluate("() => location.href"))).query)

    def cookies(self) -> str:
        return "; ".join(f"{c['name']}={c['value']}" for c in self._context.cookies())

    def close(self) -> None:
        self._context.close()


@pytest.fixture
def readers(browser: Browser, session: Session) -> Iterator[Callable[..., Reader]]:
    """`readers()`: a new reader; in the end none may have seen an error or asked another host."""
    made: list[Reader] = []

    def start(**options: Any) -> Reader:
        made.append(Reader(browser, **options))
        return made[-1]

    yield start
    for reader in made:
        reader.close()
    assert [reader.foreign for reader in made if reader.foreign] == []
    assert [reader.errors for reader in made if reader.errors] == []


def health(url: str, cookies: str) -> dict[str, Any]:
    parts = urlsplit(url)
    request = urllib.request.Request(f"http://{parts.netloc}/healthz", headers={"Cookie": cookies})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return dict(json.loads(answer.read()))


def launch_by_form(page: Page | Frame, script: str, arguments: str, ranks: str) -> str:
    """Two clicks, one job: its id."""
    page.get_by_text("Launch a job", exact=True).click()
    for label, text in (("script", script), ("arguments", arguments), ("ranks", ranks)):
        page.get_by_label(label, exact=True).fill(text)
    line = page.get_by_label("the line that does the same")
    line.wait_for(timeout=10_000)
    wait_for(lambda: line.inner_text().endswith(f"-n {ranks} {script} {arguments}"), "the line says it all", 10)
    page.get_by_role("button", name="Launch", exact=True).dblclick()
    page.get_by_text("was launched on pool default").wait_for(timeout=20_000)
    return page.locator("details.launch a").inner_text()


def test_from_the_list_to_a_job_whose_numbers_move(readers: Callable[..., Reader], launch: Launch) -> None:
    job = launch("steady.py", 60)
    await_steps(job)
    reader, url = readers(color_scheme="dark"), link()
    reader.open(url)
    assert "token" not in reader.page.url
    assert reader.page.evaluate("() => document.documentElement.dataset.theme") == "dark"  # as the system has it
    row = reader.page.get_by_role("link", name=job.job_id)
    row.wait_for(timeout=10_000)
    other = launch_by_form(reader.page, str(PROGRAMS / "steady.py"), "30", "2")
    for one in (job.job_id, other):
        reader.page.get_by_role("button", name=f"compare {one}").click(timeout=20_000)
    reader.shot("tab-jobs-dark")
    assert violations(reader.page) == []
    reader.page.get_by_role("link", name="Compare 2 jobs").click()
    reader.page.get_by_role("cell", name="30", exact=True).wait_for(timeout=20_000)  # what differs: the argument
    reader.shot("tab-compare-dark")
    assert violations(reader.page) == []
    reader.page.get_by_role("link", name="all jobs").click()
    row.wait_for(timeout=20_000)
    reader.page.emulate_media(color_scheme="light")
    assert violations(reader.page) == []
    reader.page.get_by_label("jobs whose name contains").fill("no such job")
    reader.page.get_by_text("No job is like that").wait_for(timeout=5_000)
    reader.page.get_by_label("jobs whose name contains").fill(job.job_id[:-2].upper())
    row.wait_for(timeout=5_000)
    row.click()
    reader.page.wait_for_function("() => document.documentElement.dataset.live === '1'", timeout=20_000)
    assert_moves(LiveView(reader.page.main_frame))
    assert health(url, reader.cookies())["pages"] >= 1
    with reader.page.expect_download() as waits:
        reader.page.get_by_role("button", name="Save session").click()
    assert waits.value.suggested_filename == f"{job.job_id}.dtrain"
    with load_session(waits.value.path()) as saved:
        assert saved.attach(job.job_id).spec.args == ("60",)
    reader.page.get_by_text("went to your browser").wait_for(timeout=10_000)
    reader.shot("tab-job-dark")


def test_the_launch_form_is_for_everybody_as_it_opens_is_filled_and_refuses(
    readers: Callable[..., Reader], session: Session
) -> None:
    reader, url = readers(color_scheme="light"), link()
    reader.open(url)
    page = reader.page
    page.get_by_text("Launch a job", exact=True).click()
    button = page.get_by_role("button", name="Launch", exact=True)
    assert_for_everybody(page, "give the script that the ranks are to run")
    button.press("Enter")
    assert_for_everybody(page, "Nothing done: give the script")
    page.get_by_label("script", exact=True).fill("/no/such/script.py")
    page.get_by_label("ranks", exact=True).fill("many")
    assert_for_everybody(page, "ranks: a whole number, at least 1")
    page.get_by_label("ranks", exact=True).fill("2")
    page.get_by_label("the line that does the same").wait_for(timeout=10_000)
    assert_for_everybody(page, "")
    button.click()
    assert_for_everybody(page, "It did not work: ")
    reader.shot("tab-launch-refused")


def assert_for_everybody(page: Page, said: str) -> None:
    """The form says `said`, and axe finds nothing in either theme."""
    status = page.locator("details.launch [role=status]")
    wait_for(lambda: said in status.inner_text() if said else not status.inner_text(), f"it says {said!r}", 10)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function("scheme => document.documentElement.dataset.theme === scheme", arg=scheme)
        assert violations(page) == []


def test_a_deep_link_points_at_a_rank_and_the_address_follows(readers: Callable[..., Reader], launch: Launch) -> None:
    job = launch("steady.py", 60)
    await_steps(job)
    reader = readers()
    parts = urlsplit(link(job.job_id))
    view = reader.open(f"http://{parts.netloc}{parts.path}?rank=1&step=4&{parts.query}")
    chosen = reader.page.locator("section[aria-label=Ranks] tr.chosen")
    chosen.wait_for(timeout=10_000)
    assert chosen.inner_text().strip().startswith("1")
    assert reader.page.get_by_label("ranks", exact=True).input_value() == "1"
    reader.page.get_by_role("button", name="rank 0", exact=True).first.click()
    wait_for(lambda: reader.where().get("rank") == ["0"], "the address follows", 5)
    assert reader.where() == {"id": [job.job_id], "rank": ["0"], "step": ["4"]}
    reader.shot("tab-rank")
    reader.page.reload()  # and is a link itself
    reader.page.wait_for_function("() => document.documentElement.dataset.live === '1'", timeout=20_000)
    assert reader.page.get_by_role("button", name="rank 0", exact=True).first.get_attribute("aria-pressed") == "true"
    assert view.phase() == "HEALTHY"


def test_a_link_to_look_at_shows_all_and_acts_on_nothing(readers: Callable[..., Reader], launch: Launch) -> None:
    job = launch("steady.py", 60)
    await_steps(job)
    reader = readers()
    view = reader.open(link(job.job_id, "--read-only"))
    assert_moves(view)
    assert urlsplit(reader.page.url).path == "/look/job"
    assert reader.page.get_by_role("button", name="Cancel").count() == 0
    reader.shot("tab-look")
    netloc = urlsplit(reader.page.url).netloc
    for path in ("/", f"/job?id={job.job_id}", "/job/ws"):
        request = urllib.request.Request(f"http://{netloc}{path}", headers={"Cookie": reader.cookies()})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=5)
    assert job.phase is JobPhase.HEALTHY


def test_a_wrong_token_shows_nothing(browser: Browser, session: Session) -> None:
    netloc = urlsplit(link()).netloc
    with contextlib.closing(Reader(browser)) as reader:
        answer = reader.page.goto(f"http://{netloc}/?token=wrong")
        assert answer is not None and answer.status == 403
        assert "dtrain dashboard" in reader.page.inner_text("body")
        assert reader.cookies() == ""


def test_closing_the_tab_frees_its_session(readers: Callable[..., Reader], launch: Launch) -> None:
    job = launch("steady.py", 60)
    await_steps(job)
    reader, url = readers(), link(job.job_id)
    reader.open(url)
    cookies = reader.cookies()
    wait_for(lambda: health(url, cookies)["pages"] == 1, "only this page is there", 20, every=0.5)
    reader.page.goto("about:blank")
    wait_for(lambda: health(url, cookies)["pages"] == 0, "the page is forgotten", 20, every=0.5)
    wait_for(lambda: health(url, cookies)["followed"] == 0, "nobody follows the job", 60, every=1.0)


def test_a_notebook_shows_all_jobs_in_the_cell(tab: Tab, launch: Launch) -> None:
    job = launch("steady.py", 60)
    await_steps(job)
    tab.open(tab.lab.write("all.ipynb", "%load_ext workbench\n%dtrain dashboard"))
    tab.run_cell(0)
    tab.await_cell(0)

    def found() -> Any:
        tab.page.evaluate("1")  # lets Playwright hear of new frames
        return next((frame for frame in tab.page.frames if "/dtrain/?theme=" in frame.url), None)

    frame = wait_for(found, "the list of jobs in the cell", 30)
    frame.get_by_role("link", name=job.job_id).click(timeout=20_000)
    assert_moves(tab.live())
    saved = (tab.lab.work / "all.ipynb").read_text()
    assert "token" not in saved

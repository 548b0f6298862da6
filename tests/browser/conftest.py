"""One pool, one browser and one JupyterLab a base URL for the folder, all in directories of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import ARGS, Lab, Tab, chromium, running_lab
from playwright.sync_api import Browser, sync_playwright

from workbench.session import Job, Session, stop_pool

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """The DTRAIN_HOME of pool, dashboard, JupyterLab and kernels."""
    made = Path(tempfile.mkdtemp(prefix="dt-browser-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTRAIN_HOME", str(made))
        yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="session")
def session(home: Path) -> Iterator[Session]:
    """A session with a pool of 4 slots, whose start also starts the live pages."""
    made = Session(slots=4, timeout=60)
    yield made
    made.close()
    stop_pool()


@pytest.fixture
def launch(session: Session) -> Iterator[object]:
    """`launch("steady.py", "60")`: a job of 2 ranks, ended with the test."""
    jobs: list[Job] = []

    def start(program: str, *args: object, **options: object) -> Job:
        options = {"nproc_per_node": 2, **options}
        jobs.append(session.launch(PROGRAMS / program, args=[str(arg) for arg in args], **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.cancel(force=True, by="the test's end")
        job.exception(timeout=20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of a module: Playwright keeps an event loop running, which tests of other folders must not find."""
    path = chromium()
    if path is None:
        pytest.skip("there is no Chromium; `make test` installs it, or put one on the PATH")
    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=path, args=ARGS)
        yield made
        made.close()


@pytest.fixture(scope="session")
def lab(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as made:
        yield made


@pytest.fixture(scope="session")
def lab_of_ana(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """As a Hub serves it: under a prefix."""
    with running_lab(tmp_path_factory.mktemp("ana"), "/user/ana/") as made:
        yield made


@pytest.fixture
def tab(browser: Browser, lab: Lab) -> Iterator[Tab]:
    yield from _tab(browser, lab)


@pytest.fixture
def tab_of_ana(browser: Browser, lab_of_ana: Lab) -> Iterator[Tab]:
    yield from _tab(browser, lab_of_ana)


def _tab(browser: Browser, lab: Lab) -> Iterator[Tab]:
    """A tab; when the test is over nothing may have been asked of another host, and no error be left unexplained."""
    made = Tab(browser, lab)
    try:
        yield made
        assert made.foreign == []
        assert made.unexpected() == []
    finally:
        made.close()

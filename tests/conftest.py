"""For every test: a home that is no one's, a time limit by folder, and nothing left behind when all have run."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import shared_memory

FOLDER_LIMITS = {"unit": 20, "property": 60, "integration": 60, "chaos": 120, "browser": 120}  # s a test
# Real processes on a machine that may stand still for seconds: what fails is tried once more, and the summary names it.
AGAIN = ("integration", "chaos", "browser")
MARK = "DTRAIN_TEST_RUN"  # in the environment of all that a test starts
PATIENCE = 15.0  # s that what was stopped, and what it shared, may take to be gone


def pytest_configure(config: pytest.Config) -> None:
    for folder in FOLDER_LIMITS:
        config.addinivalue_line("markers", f"{folder}: in tests/{folder}/")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in a shell's background; tests press Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test without a limit of its own gets its folder's."""
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        if folder in FOLDER_LIMITS:
            item.add_marker(folder)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(FOLDER_LIMITS[folder]))
        if folder in AGAIN:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture
def dtrain_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A DTRAIN_HOME of the test's own; its path is short, as a unix socket's must be."""
    home = Path(tempfile.mkdtemp(prefix="dt-"))
    monkeypatch.setenv("DTRAIN_HOME", str(home))
    yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the last test when a process or a shared memory file of any test is still there after it.

    Each of the processes that run tests side by side has a mark, and so a look, of its own.

    Until a test says otherwise DTRAIN_HOME is an empty directory, never the developer's own.
    """
    home, run = tmp_path_factory.mktemp("no-home"), uuid.uuid4().hex
    shared_before = shared_memory.names()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, run)
        patch.setenv("DTRAIN_HOME", str(home))
        yield
    left = _await_none(run)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()  # ours: it carries this run's mark
    files = shared_memory.left(shared_before, PATIENCE)
    assert not left, f"still running after the last test: {', '.join(map(_describe, left))}"
    assert not files, f"left in {shared_memory.FOLDER}: {', '.join(files)}"


def _await_none(run: str) -> list[psutil.Process]:
    deadline = time.monotonic() + PATIENCE
    while (left := _started_by(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _started_by(run: str) -> list[psutil.Process]:
    """Processes that a test started, directly or not; told by their environment, whatever their name or parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.pid != os.getpid() and process.environ().get(MARK) == run
            if is_ours and process.status() != psutil.STATUS_ZOMBIE and not _ends_with_us(process):
                found.append(process)
    return found


def _ends_with_us(process: psutil.Process) -> bool:
    """Python's own bookkeeper of multiprocessing, which lives as long as the interpreter that has used it."""
    return process.ppid() == os.getpid() and "multiprocessing.resource_tracker" in " ".join(process.cmdline())


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({' '.join(process.cmdline())[:160]})"
    except psutil.Error:
        return str(process.pid)

"""One real pool for the folder: scheduler, worker, agent and zygote as detached processes, in a home of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.events import LaunchRequested
from workbench.runner.live import LiveJob
from workbench.session import Job, Session, stop_pool
from workbench.spec import JobSpec
from workbench.state import JobPhase
from workbench.store.jobfile import JobFile


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A DTRAIN_HOME that the shared pool lives in; the variable is restored afterwards."""
    home = tmp_path_factory.mktemp("home")
    before = os.environ.get("DTRAIN_HOME")
    os.environ["DTRAIN_HOME"] = str(home)
    yield home
    if before is None:
        del os.environ["DTRAIN_HOME"]
    else:
        os.environ["DTRAIN_HOME"] = before


@pytest.fixture(scope="session")
def shared_session(shared_home: Path) -> Iterator[Session]:
    """A session with a pool of 4 slots."""
    session = Session(slots=4, timeout=60)
    yield session
    session.close()
    os.environ["DTRAIN_HOME"] = str(shared_home)
    stop_pool()


@pytest.fixture
def session(shared_session: Session, shared_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """The shared session; a job that a test leaves running is ended after it."""
    monkeypatch.setenv("DTRAIN_HOME", str(shared_home))
    yield shared_session
    for job_id in shared_session.pool_status().running:
        job = shared_session.attach(job_id)
        job.cancel(force=True, by="the test's end")
        job.exception(timeout=20)


def await_phase(job: Job, phase: JobPhase, timeout: float = 30.0) -> None:
    """Wait until the job is in `phase`; any other terminal phase fails with its reason."""
    deadline = time.monotonic() + timeout
    while (state := job.state).phase is not phase:
        assert not state.phase.is_terminal, f"{state.phase}: {state.reason}"
        assert time.monotonic() < deadline, f"still {state.phase}: {state.reason}"
        time.sleep(0.02)


@pytest.fixture
def job_path(tmp_path: Path) -> Path:
    """Where a job's record may lie."""
    return tmp_path / "jobs" / "a-1" / "job.sqlite"


@pytest.fixture
def live_job(job_path: Path) -> Iterator[LiveJob]:
    """A job that was launched, in a runner's memory, with its record; no pool."""
    made = LiveJob("a-1", JobFile.create(job_path, "a-1"))
    made.apply(LaunchRequested(time=1.0, job_id="a-1", spec=JobSpec(entrypoint="train.py")))
    yield made
    made.close()

"""The timeline of a real job with real deaths, against the steps that its record keeps one by one."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.test_session import DDP
from workbench.blackbox import StepRecord
from workbench.session import Job, Session
from workbench.state import JobPhase
from workbench.store.home import job_path
from workbench.store.jobfile import JobFile

BEYOND = 60.0


def await_steps(job: Job, attempt: int, count: int) -> None:
    """Until that attempt has taken so many steps."""
    deadline = time.monotonic() + BEYOND
    while True:
        view = job.view()
        assert view.timeline is not None and time.monotonic() < deadline, view.reason
        newest = view.timeline.attempts[-1]
        if newest.restart_count == attempt and newest.began_at is not None and min(r.step for r in view.rows) >= count:
            return
        time.sleep(0.05)


def test_what_it_tells_of_two_kills_is_what_happened(session: Session, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DDP)
    job = session.launch(script, args=["4", "0.03"], nproc_per_node=2, max_restarts=3)
    killed: list[float] = []
    for attempt, rank in enumerate((1, 0)):
        await_steps(job, attempt, 20)
        killed.append(time.time())
        job.inject("kill", rank)
    assert job.wait(120) is JobPhase.SUCCEEDED
    told = job.timeline
    first, second, last = told.attempts
    for attempt, asked, rank in zip((first, second), killed, (1, 0), strict=True):
        assert attempt.cause is not None and attempt.cause.rank == rank
        assert attempt.injected_at is not None and attempt.recovered_at is not None
        assert asked <= attempt.injected_at <= (attempt.detected_at or 0) <= attempt.recovered_at
    assert first.lost_steps == first.last_step and last.last_step == 128 and told.is_over
    raw = [record for rank in (0, 1) for record in counted(steps(job, rank))]
    useful = sum(record.duration for record in raw) / 2
    assert told.goodput.useful == pytest.approx(useful, rel=0.01)
    assert told.goodput.ettr == pytest.approx(useful / (told.end - told.start), rel=0.01)


def steps(job: Job, rank: int) -> list[StepRecord]:
    with JobFile.open(job_path(job.job_id), read_only=True) as file:
        return file.steps(rank)


def counted(records: list[StepRecord]) -> list[StepRecord]:
    """The steps of the last attempt: the others began from nothing, and so does this one."""
    at = max((k + 1 for k, (a, b) in enumerate(pairwise(records)) if b.step <= a.step), default=0)
    return records[at:]

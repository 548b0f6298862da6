"""What comparing replicas has told lies in the job's record: after the runner has gone, bounded, told once."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from workbench.events import LaunchRequested
from workbench.feed import Cursor
from workbench.runner import live
from workbench.runner.live import LiveJob
from workbench.spec import JobSpec
from workbench.store import checks
from workbench.store.checks import CheckStore
from workbench.store.jobfile import JobFile
from workbench.telemetry import Check, ConsistencyReport, GradientStatistics

LAUNCH = LaunchRequested(time=1.0, job_id="a-1", spec=JobSpec(entrypoint="train.py"))


def report(at: int, *, deviating: tuple[tuple[int, int], ...] = ()) -> ConsistencyReport:
    """Ten checked steps of four ranks."""
    return ConsistencyReport(
        job_id="a-1", restart_count=0, rank=0, start=2.0 * at, end=2.0 * at + 2, first_step=10 * at,
        last_step=10 * at + 9, ranks=(0, 1, 2, 3), checked=10, agreed=10 - len(deviating), deviating=deviating,
        digest=f"{at * 0x9E3779B97F4A7C15 % 2**64:016x}",
    )  # fmt: skip


def statistics(at: int) -> GradientStatistics:
    return GradientStatistics(
        job_id="a-1", restart_count=0, rank=0, start=2.0 * at, end=2.0 * at + 2, first_step=10 * at,
        last_step=10 * at + 9, ranks=(0, 1), samples=3, norms=(1.0, None),
    )  # fmt: skip


def told_by(job_path: Path) -> tuple[Check, ...]:
    """What a client gets from a runner that has only the record."""
    again = LiveJob("a-1", JobFile.open(job_path, read_only=True))
    again.restore()
    update = again.update(Cursor(), 100.0)
    assert again.update(update.cursor, 100.0).checks == (), "nothing twice"
    again.close()
    return update.checks


def test_another_runner_tells_what_was_found(live_job: LiveJob, job_path: Path) -> None:
    found = [report(0), statistics(0), report(1, deviating=((2, 1),)), statistics(1)]
    for one in found:
        live_job.report(one)
    live_job.flush(5.0)
    assert told_by(job_path) == live_job.update(Cursor(), 5.0).checks == tuple(found)


def test_who_reads_along_sees_what_is_added(live_job: LiveJob, job_path: Path) -> None:
    other = LiveJob("a-1", JobFile.open(job_path, read_only=True))
    cursor = Cursor()
    for at in range(3):
        live_job.report(report(at))
        live_job.flush(2.0 * at + 2)
        other.restore()
        update = other.update(cursor, 1.0)
        assert update.checks == (report(at),)
        cursor = update.cursor
    other.close()


def test_a_long_story_is_told_in_longer_stretches(
    live_job: LiveJob, job_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_job.file._checks = CheckStore(live_job.file._connection, most=8192)
    monkeypatch.setattr(checks, "ROW", 8)
    for at in range(600):
        live_job.report(report(at, deviating=((3, 1),) if at == 7 else ()))
        live_job.flush(2.0 * at + 2)
    assert job_path.stat().st_size < 2**20
    told = told_by(job_path)
    kept = [one for one in told if isinstance(one, ConsistencyReport)]
    assert len(kept) < 300
    assert (kept[0].first_step, kept[-1].last_step) == (0, 5999)
    assert sum(one.checked for one in kept) == 6000
    assert [dict(one.deviating) for one in kept if one.deviating] == [{3: 1}]
    assert kept[-10:] == [report(at) for at in range(590, 600)], "the newest stay as they were"


def test_what_has_fallen_out_of_memory_comes_from_the_record(job_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "CHECK_BYTES", 2048)
    live_job = LiveJob("a-1", JobFile.create(job_path, "a-1"))
    live_job.apply(LAUNCH)
    for at in range(20):
        live_job.report(report(at))
    assert live_job.update(Cursor(), 50.0).checks == tuple(report(at) for at in range(20))
    live_job.close()


def test_a_record_that_knows_nothing_of_checks_is_read_and_written(job_path: Path) -> None:
    with JobFile.create(job_path, "a-1") as file:
        file.append(LAUNCH)
    connection = sqlite3.connect(job_path)
    connection.execute("DROP TABLE checks")
    connection.close()
    with JobFile.open(job_path, read_only=True) as old:
        assert old.checks() == ([], 0)
    with JobFile.open(job_path) as old:
        old.add_check(report(0))
        old.flush(1.0)
        assert old.problems == ()
    assert told_by(job_path) == (report(0),)


def test_what_is_damaged_is_left_out(live_job: LiveJob, job_path: Path) -> None:
    for at in range(2):
        live_job.report(report(at))
        live_job.flush(2.0 * at + 2)
    live_job.close()
    connection = sqlite3.connect(job_path)
    with connection:
        connection.execute("UPDATE checks SET data = x'00ff' WHERE number = 1")
    connection.close()
    assert told_by(job_path) == (report(1),)

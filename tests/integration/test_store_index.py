"""The list of jobs: order, filters, completion, many jobs, several processes, a damaged file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from workbench.errors import StoreError
from workbench.events import CancelRequested, LaunchRequested
from workbench.feed import JobSummary
from workbench.spec import JobSpec
from workbench.state import JobPhase
from workbench.store.index import JobIndex, summary_of
from workbench.store.jobfile import JobFile


def summary(job_id: str, at: float = 0.0, phase: JobPhase = JobPhase.SUCCEEDED) -> JobSummary:
    return JobSummary(job_id=job_id, label="train", phase=phase, reason="", world_size=2, submitted_at=at)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.sqlite"


def test_newest_first_with_filters(path: Path) -> None:
    with JobIndex(path) as index:
        index.put(summary("a-1", 1.0), "default")
        index.put(summary("b-2", 3.0, JobPhase.HEALTHY), "default")
        index.put(summary("a-3", 2.0, JobPhase.FAILED), "other")
        assert [s.job_id for s in index.list()] == ["b-2", "a-3", "a-1"]
        assert [s.job_id for s in index.list(limit=1, offset=1)] == ["a-3"]
        assert [s.job_id for s in index.list(pool="default")] == ["b-2", "a-1"]
        assert [s.job_id for s in index.list(phase=JobPhase.FAILED)] == ["a-3"]
        assert [s.job_id for s in index.list(unfinished=True, pool="default")] == ["b-2"]
        assert [s.job_id for s in index.list(prefix="a-")] == ["a-3", "a-1"]
        assert [s.job_id for s in index.list(search="A-")] == ["a-3", "a-1"]
        assert [s.job_id for s in index.list(search="%")] == []
        assert index.counts() == {"SUCCEEDED": 1, "HEALTHY": 1, "FAILED": 1}
        assert index.counts("-3") == {"FAILED": 1}
        assert index.ids() == ["b-2", "a-3", "a-1"]
        assert index.ids("a", limit=1) == ["a-3"]


def test_a_job_has_one_line_the_last(path: Path) -> None:
    with JobIndex(path) as index:
        index.put(summary("a-1", phase=JobPhase.HEALTHY), "default")
        index.put(summary("a-1", phase=JobPhase.FAILED), "default")
        (line,) = index.list()
        assert line.phase is JobPhase.FAILED and index.get("a-1") == line and index.get("a") is None


def test_a_prefix_is_taken_literally(path: Path) -> None:
    with JobIndex(path) as index:
        index.put(summary("a_b"), "default")
        index.put(summary("axb"), "default")
        assert index.ids("a_") == ["a_b"] and index.ids("%") == [] and index.ids("a'; DROP TABLE jobs --") == []


def test_the_nearest_ids_are_told(path: Path) -> None:
    with JobIndex(path) as index:
        for k, name in enumerate(("digits-12ab", "digits-77cd", "bert-0001")):
            index.put(summary(name, k), "default")
        assert index.nearest("digits-12ba")[0] == "digits-12ab"
        assert index.nearest("zzzzzzzz") == ["bert-0001", "digits-77cd", "digits-12ab"]


def test_two_processes_may_write_by_turns(path: Path) -> None:
    with JobIndex(path) as one, JobIndex(path) as two:
        one.put(summary("a-1", 1), "x")
        two.put(summary("b-2", 2), "y")
        assert one.ids() == two.ids() == ["b-2", "a-1"]


def test_ten_thousand_jobs_are_listed_at_once(path: Path) -> None:
    with JobIndex(path) as index:
        rows = {f"job-{k:05d}": (summary(f"job-{k:05d}", k), "default") for k in range(9_999)}
        index._unwritten.update(rows)
        index.put(summary("last-1", 1e6), "default")  # writes them all
        took = []
        for _ in range(5):
            before = time.perf_counter()
            assert index.list(limit=50)[0].job_id == "last-1"
            assert len(index.ids("job-09", limit=200)) == 200
            assert index.list(search="B-0999", limit=50)[0].job_id == "job-09998"
            assert sum(index.counts("job").values()) == 9_999
            took.append(time.perf_counter() - before)
        assert min(took) < 0.05
        assert index.list(limit=50, offset=9_990)[-1].job_id == "job-00000"
        assert index.nearest("jbo-09999")[0] == "job-09998"


def test_a_full_disk_does_not_raise_and_the_line_is_kept(path: Path) -> None:
    with JobIndex(path) as index:
        index._connection.execute("PRAGMA query_only=ON")
        index.put(summary("a-1"), "default")
        assert "cannot be written" in index.problem
        assert index.get("a-1") is not None
        index._connection.execute("PRAGMA query_only=OFF")
        index.put(summary("b-2"), "default")
        assert index.problem == "" and len(index.ids()) == 2


def record(home: Path, job_id: str, at: float) -> None:
    with JobFile.create(home / "jobs" / job_id / "job.sqlite", job_id) as file:
        file.append(LaunchRequested(time=at, job_id=job_id, spec=JobSpec(entrypoint="train.py", nproc_per_node=2)))
        file.append(CancelRequested(time=at + 1))


@pytest.mark.parametrize("content", [None, b"", b"rubbish" * 1000])
def test_a_damaged_or_missing_list_is_made_anew_from_the_records(path: Path, content: bytes | None) -> None:
    record(path.parent, "a-1", 5.0)
    record(path.parent, "b-2", 6.0)
    (path.parent / "jobs" / "torn").mkdir()
    (path.parent / "jobs" / "torn" / "job.sqlite").write_bytes(b"torn")
    if content is not None:
        path.write_bytes(content)
    with JobIndex(path) as index:
        lines = index.list(pool="any")
        assert [(s.job_id, s.phase, s.world_size) for s in lines] == [
            ("b-2", JobPhase.STOPPED, 2),
            ("a-1", JobPhase.STOPPED, 2),
        ]
    aside = path.with_name("index.sqlite.damaged1")
    assert aside.exists() is (content is not None)
    if content is not None:
        assert aside.read_bytes() == content


def test_the_line_of_an_unreadable_record_is_none(tmp_path: Path) -> None:
    assert summary_of(tmp_path / "job.sqlite") is None


def test_an_unreadable_list_says_what_to_do(path: Path) -> None:
    index = JobIndex(path)
    index._connection.execute("DROP TABLE jobs")
    with pytest.raises(StoreError, match=r"cannot be read.*delete .*index\.sqlite"):
        index.ids()
    index.close()

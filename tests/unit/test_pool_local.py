"""Marks of processes: this one is told from a dead one, a reused pid and another boot."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import pytest

from workbench.errors import PoolUnavailableError, UsageError
from workbench.policy.comeback import MOST
from workbench.pool import local


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_mark_names_one_process_and_no_other() -> None:
    directory = local.private_dir(local.pool_dir("p"))
    mark = local.write_mark(directory, "scheduler", "tls://127.0.0.1:1")
    assert local.read_marks(directory) == {"scheduler": mark}
    assert mark.is_alive
    replace = msgspec.structs.replace
    assert not replace(mark, created=mark.created - 100).is_alive, "a reused pid"
    assert not replace(mark, boot="another").is_alive
    assert not replace(mark, pid=2**22 + 1).is_alive


def test_a_stale_pool_is_recognised_and_cleaned() -> None:
    directory = local.private_dir(local.pool_dir("p"))
    mark = local.write_mark(directory, "scheduler", "tls://127.0.0.1:1")
    stale = msgspec.structs.replace(mark, boot="another")
    (directory / "scheduler.json").write_bytes(msgspec.json.encode(stale))
    local.private_dir(directory / "tls")
    (directory / "tls" / "key.pem").write_text("secret")
    assert local.list_pools() == [("p", None)]
    assert local.find_pool("p") is None
    assert not list(directory.glob("*.json"))
    assert not (directory / "tls" / "key.pem").exists()


def test_a_torn_mark_counts_as_none() -> None:
    directory = local.private_dir(local.pool_dir("p"))
    (directory / "scheduler.json").write_text('{"role": "sched')
    assert local.read_marks(directory) == {}
    assert local.find_pool("p") is None


def test_directories_are_private_and_names_checked(home: Path) -> None:
    directory = local.private_dir(local.pool_dir("p"))
    assert directory.is_relative_to(home)
    assert directory.stat().st_mode & 0o077 == 0
    for name in ("", "a/b", "../x", ".hidden"):
        with pytest.raises(UsageError, match="cannot be a pool name"):
            local.pool_dir(name)


def test_a_job_sees_the_callers_environment_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SETTING", "1")
    monkeypatch.setenv("JPY_PARENT_PID", "2")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    seen = local.caller_environment()
    assert seen["MY_SETTING"] == "1"
    assert seen["PATH"] == os.environ["PATH"]
    assert not {"JPY_PARENT_PID", "MPLBACKEND"} & set(seen)


def test_a_pool_started_while_another_looks_is_not_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = local.private_dir(local.pool_dir("p"))
    mark = local.write_mark(directory, "scheduler", "tls://127.0.0.1:1")
    (directory / "scheduler.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(mark, boot="another")))
    locked = local._locked

    def start_meanwhile(where: Path, *more: float):  # type: ignore[no-untyped-def]
        local.write_mark(directory, "scheduler", "tls://127.0.0.1:2")
        return locked(where, *more)

    monkeypatch.setattr(local, "_locked", start_meanwhile)
    found = local.find_pool("p")
    assert found is not None
    assert found.address == "tls://127.0.0.1:2"
    assert local.read_marks(directory)["scheduler"] == found


def test_a_pool_of_another_version_is_refused_with_the_way_out() -> None:
    from workbench.pool.client import PoolClient

    directory = local.private_dir(local.pool_dir("p"))
    mark = local.write_mark(directory, "scheduler", "tls://127.0.0.1:1")
    other = msgspec.structs.replace(mark, version="0.0.1")
    with pytest.raises(PoolUnavailableError, match=r"runs version 0\.0\.1, this is .*dtrain pool stop --name p"):
        PoolClient.connect_local("p", other)


# A scheduler as far as its mark goes.
SCHEDULER = """
import os, sys, time
from pathlib import Path
from workbench.pool.local import read_marks, write_mark
where = Path(sys.argv[1])
write_mark(where, "scheduler", "tls://127.0.0.1:2", deaths=read_marks(where)["scheduler"].deaths)
os.close(int(sys.argv[sys.argv.index("--lock") + 1]))
time.sleep(60)
"""


def leave_dead_scheduler(directory: Path, **more: object) -> None:
    """Its mark, and that of a worker which lives: this process."""
    argv = (sys.executable, "-c", SCHEDULER, str(directory))
    mark = local.write_mark(directory, "scheduler", "tls://127.0.0.1:1", **{"argv": argv, **more})
    local.put_mark(directory, msgspec.structs.replace(mark, pid=2**22 + 1))
    local.write_mark(directory, "worker")


def test_a_pool_whose_worker_lives_is_brought_back_by_whoever_looks_first() -> None:
    directory = local.private_dir(local.pool_dir("p"))
    leave_dead_scheduler(directory)
    before = time.time()
    found = local.find_pool("p")
    assert found is not None
    try:
        assert found.is_alive and found.address == "tls://127.0.0.1:2"
        (death,) = found.deaths
        assert before <= death <= time.time()
        assert local.find_pool("p") == found
        assert local.start_pool("p", 1, "") == (found, False)
    finally:
        local.end_process(found)


@pytest.mark.parametrize(
    ("why", "more"),
    [("it ends because it was told to", {"is_closing": True}), ("of another version: nobody knows how", {"argv": ()})],
)
def test_a_pool_that_is_not_to_come_back_is_swept_but_for_who_sweeps(why: str, more: dict[str, object]) -> None:
    directory = local.private_dir(local.pool_dir("p"))
    leave_dead_scheduler(directory, **more)
    assert local.find_pool("p") is None, why
    assert local.read_marks(directory) == {}


def test_who_stops_a_pool_does_not_bring_it_back_first() -> None:
    directory = local.private_dir(local.pool_dir("p"))
    leave_dead_scheduler(directory)
    assert local.find_pool("p", brings_back=False) is None
    assert local.read_marks(directory) == {}


def test_a_start_that_fails_counts_as_a_death_and_after_some_there_is_no_more(tmp_path: Path) -> None:
    directory = local.private_dir(local.pool_dir("p"))
    count = tmp_path / "count"
    leave_dead_scheduler(directory, argv=(sys.executable, "-c", f"open({str(count)!r}, 'a').write('x')"))
    assert local.find_pool("p") is None
    assert count.read_text() == "x" * (MOST + 1), "the last one has only told the jobs"
    assert local.read_marks(directory) == {}


def test_who_cannot_wait_is_told_that_others_are_at_it() -> None:
    directory = local.private_dir(local.pool_dir("p"))
    leave_dead_scheduler(directory)
    with local._locked(directory), pytest.raises(BlockingIOError):
        local.find_pool("p", patience=0.0)

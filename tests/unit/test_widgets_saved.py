"""Saved sessions behind the pages: by which key, for how many, and as long as whose process."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from workbench_widgets import saved as saved_module
from workbench_widgets.overview import Query, listing_of
from workbench_widgets.pages import file_of, is_saved
from workbench_widgets.saved import Guests, SavedPools, Shelf, began_at, key_of
from workbench_widgets.server import _end_with_guests

from workbench import WorkbenchError, load_session
from workbench.state import JobPhase

SAVED = Path(__file__).parents[1] / "data" / "saved_session_v1" / "run.dtrain"


def copied(folder: Path, name: str = "run.dtrain") -> Path:
    return Path(shutil.copyfile(SAVED, folder / name))


def test_a_job_is_found_by_the_files_key_which_tells_nothing_of_where_it_lies(tmp_path: Path) -> None:
    shelf, path = Shelf(), copied(tmp_path, "my run: 1.dtrain")
    key = shelf.add(path)
    assert key == shelf.add(path) and key.startswith("my_run__1.dtrain-") and ":" not in key
    assert shelf.find(f"{key}:trial-1").job_id == "trial-1"
    assert is_saved(f"{key}:trial-1") and file_of(f"{key}:trial-1") == key and not is_saved("trial-1")
    with pytest.raises(WorkbenchError, match="not open here"):
        shelf.find("other:trial-1")
    with pytest.raises(WorkbenchError, match="no job"):
        shelf.find(f"{key}:other")
    shelf.close()


def test_a_file_that_was_saved_again_is_another(tmp_path: Path) -> None:
    path = copied(tmp_path)
    before = key_of(path)
    os.utime(path, ns=(1, 1))
    assert key_of(path) != before
    with pytest.raises(WorkbenchError, match="cannot open"):
        key_of(tmp_path / "none.dtrain")


def test_only_so_many_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_module, "MOST", 2)
    shelf = Shelf()
    keys = [shelf.add(copied(tmp_path, f"{name}.dtrain")) for name in "abc"]
    assert [shelf.get(key) is not None for key in keys] == [False, True, True]
    shelf.add(tmp_path / "b.dtrain")
    shelf.add(copied(tmp_path, "d.dtrain"))
    assert shelf.get(keys[1]) is not None and shelf.get(keys[2]) is None
    shelf.close()


def test_the_list_of_its_jobs() -> None:
    with load_session(SAVED) as session:
        listing = listing_of(SavedPools(session, "run-1:"))
        assert listing.jobs is not None and [job.job_id for job in listing.jobs] == ["run-1:trial-1"]
        assert listing.total(JobPhase.SUCCEEDED) == 1 and "run.dtrain: saved" in listing.pools[0]
        assert listing_of(SavedPools(session), Query(phase=JobPhase.FAILED)).jobs == ()


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


def test_a_server_is_kept_as_long_as_a_guest_lives() -> None:
    clock = Clock()
    guests = Guests(clock)
    assert not guests.are_gone  # the first is on its way
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        guests.add(child.pid)
        guests.settle()
        clock.time += 1000
        assert not guests.are_gone and began_at(child.pid)
        assert child.stdin is not None
        child.stdin.close()
    assert guests.are_gone and began_at(child.pid) == ""
    nobody = Guests(clock)
    clock.time += saved_module.GRACE + 1
    assert nobody.are_gone


def test_a_pid_that_another_process_has_by_now_is_no_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    guests = Guests(Clock())
    guests.add(os.getpid())
    guests.settle()
    Clock.time += 1
    assert not guests.are_gone
    monkeypatch.setattr(saved_module, "began_at", lambda pid: "later")
    assert guests.are_gone


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_server_ends_when_nobody_needs_it(is_needed: bool) -> None:
    stopped = []

    class Loop:
        async def run_in_executor(self, _: None, call: Callable[[], bool]) -> bool:
            return call()

        def stop(self) -> None:
            stopped.append(1)

    class Pages:
        def is_needed(self) -> bool:
            return is_needed

    asyncio.run(_end_with_guests(Pages(), Loop()))
    assert bool(stopped) is not is_needed

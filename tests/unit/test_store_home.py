"""Where things lie, and who may reach them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from workbench.errors import StoreError, UnknownJobError
from workbench.store import home


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "a" / "home"))
    return tmp_path / "a" / "home"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_directory_on_the_way_is_private(own_home: Path) -> None:
    assert home.jobs_dir() == own_home / "jobs" and home.pools_dir() == own_home / "pools"
    assert {mode(p) for p in (own_home.parent, own_home, home.jobs_dir(), home.pools_dir())} == {0o700}


def test_paths_of_a_job(own_home: Path) -> None:
    assert home.job_path("a-1") == own_home / "jobs" / "a-1" / "job.sqlite"
    assert home.log_path("a-1", 3) == own_home / "jobs" / "a-1" / "logs" / "rank3.log"
    assert home.index_path() == own_home / "index.sqlite"
    assert not home.job_dir("a-1").exists()


@pytest.mark.parametrize("job_id", ["..", ".", "", "a/b", "../a", "a\0b", "a\n", "-a"])
def test_what_is_no_job_id_reaches_no_path(job_id: str) -> None:
    with pytest.raises(UnknownJobError):
        home.job_path(job_id)


@pytest.mark.parametrize("others", [0o777, 0o770, 0o1777])
def test_a_home_that_others_can_write_is_refused(own_home: Path, others: int) -> None:
    own_home.mkdir(parents=True)
    own_home.chmod(others)
    with pytest.raises(StoreError, match=r"other users can write.*chmod go-w"):
        home.home_dir()


def test_a_home_that_others_can_only_read_is_taken(own_home: Path) -> None:
    own_home.mkdir(parents=True)
    own_home.chmod(0o755)
    assert home.home_dir() == own_home and mode(home.jobs_dir()) == 0o700


def test_a_file_in_its_place_is_told(own_home: Path) -> None:
    own_home.parent.mkdir()
    own_home.write_text("")
    with pytest.raises(StoreError, match="is a file, not a directory"):
        home.home_dir()
    with pytest.raises(StoreError, match="cannot make the directory"):
        home.private_dir(own_home / "jobs")


def test_relative_and_tilde_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DTRAIN_HOME", "here/it")
    assert home.home_dir() == tmp_path / "here" / "it"
    monkeypatch.setenv("DTRAIN_HOME", "~/mine")
    assert home.home_dir() == tmp_path / "mine"
    monkeypatch.setenv("DTRAIN_HOME", "~nobody-of-that-name/x")
    with pytest.raises(StoreError, match="names no user"):
        home.home_dir()


def test_without_the_variable_it_is_the_users_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setenv("DTRAIN_HOME", " ")
    assert home.home_dir() == tmp_path / "share" / "dtrain"


def test_atomic_write_replaces_the_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    home.atomic_write(target, b"old")
    home.atomic_write(target, b"new", mode=0o640)
    assert target.read_bytes() == b"new" and mode(target) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(StoreError, match="cannot write"):
        home.atomic_write(tmp_path / "target", b"x")
    with pytest.raises(StoreError, match="cannot write"):
        home.atomic_write(tmp_path / "missing" / "target", b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["target"]

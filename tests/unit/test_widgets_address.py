"""Where the live pages are, and that nobody else can be there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from workbench_widgets import address
from workbench_widgets.address import LONGEST, UnsafeDirectoryError, home_dir, socket_path

from workbench.store import home as store


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path_factory.mktemp("run")
    made.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
    return made


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(address, "SHARED", tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    return tmp_path


def test_one_home_has_one_address_whatever_it_is_called(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert socket_path(tmp_path) == socket_path(tmp_path / "link")
    assert socket_path(tmp_path) != socket_path(tmp_path / "other")
    assert socket_path(tmp_path).parent == runtime / "dtrain"
    assert (runtime / "dtrain").stat().st_mode & 0o777 == 0o700


def test_without_a_runtime_directory_it_is_in_tmp(shared: Path) -> None:
    assert socket_path(shared).parent == shared / f"dtrain-{os.getuid()}"


def test_a_long_runtime_directory_is_left_for_tmp(
    shared: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path_factory.mktemp("r") / ("x" * LONGEST)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    assert socket_path(shared).is_relative_to(shared)


def test_a_runtime_directory_that_others_may_use_is_not_used(shared: Path, runtime: Path) -> None:
    runtime.chmod(0o750)
    assert socket_path(shared).is_relative_to(shared)


@pytest.mark.parametrize("trap", ["open", "link", "file"])
def test_what_somebody_else_may_have_put_there_is_refused(shared: Path, trap: str) -> None:
    place = shared / f"dtrain-{os.getuid()}"
    match trap:
        case "open":
            place.mkdir()
            place.chmod(0o777)
        case "link":
            (shared / "real").mkdir(mode=0o700)
            place.symlink_to(shared / "real")
        case "file":
            place.touch(0o700)
    with pytest.raises(UnsafeDirectoryError, match="dtrain-"):
        socket_path(shared)


def test_a_directory_of_another_user_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    socket_path(shared)
    (shared / "dtrain-12345").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UnsafeDirectoryError):
        socket_path(shared)


@pytest.mark.parametrize(
    "variables",
    [
        {"DTRAIN_HOME": "/somewhere/else"},
        {"DTRAIN_HOME": "~/dt"},
        {"DTRAIN_HOME": "relative"},
        {"DTRAIN_HOME": "  "},
        {"XDG_DATA_HOME": "/data"},
        {},
    ],
    ids=str,
)
def test_the_home_is_the_one_that_the_rest_of_the_package_uses(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DTRAIN_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert home_dir() == store._named_home()

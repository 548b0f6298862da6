"""What tests leave in /dev/shm is found, and what others use there is not taken for it."""

from __future__ import annotations

import mmap
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import shared_memory


@pytest.fixture
def file() -> Iterator[Path]:
    """A path there that is this test's own."""
    if not shared_memory.FOLDER.is_dir():
        pytest.skip(f"there is no {shared_memory.FOLDER}")
    path = shared_memory.FOLDER / f"test-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def is_left(path: Path, before: set[str], patience: float = 0.0, ours: tuple[int, ...] = ()) -> bool:
    return path.name in shared_memory.left(before, patience, ours=ours)


def test_a_file_that_nobody_has_mapped_is_left(file: Path) -> None:
    before = shared_memory.names()
    file.write_bytes(b"a")
    assert is_left(file, before)
    assert not is_left(file, shared_memory.names()), "it was there before"


def test_a_file_that_is_mapped_is_its_users_and_left_only_when_that_is_us(file: Path) -> None:
    before = shared_memory.names()
    file.write_bytes(b"a")
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 1):
        assert not is_left(file, before)
        assert is_left(file, before, ours=(os.getpid(),))


def test_a_file_that_is_about_to_be_removed_is_not_left(file: Path) -> None:
    before = shared_memory.names()
    file.write_bytes(b"a")
    remover = threading.Timer(0.2, file.unlink)
    remover.start()
    assert not is_left(file, before, patience=10)
    remover.join()

"""Files in /dev/shm that tests leave, told from those of whatever else is running, other tests included."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

import psutil

FOLDER: Final = Path("/dev/shm")


def names() -> set[str]:
    """This user's files there."""
    found = set()
    for path in FOLDER.iterdir() if FOLDER.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                found.add(path.name)
    return found


def left(before: Collection[str], patience: float, *, ours: Collection[int] = ()) -> list[str]:
    """Files not in `before` that nobody will remove: none but processes in `ours` has them mapped, for `patience` s.

    What others have mapped is theirs, and what they are just about to map or to remove is not as it is for long.
    """
    deadline = time.monotonic() + patience
    found = _unused(names() - set(before), ours)
    while found and time.monotonic() < deadline:
        time.sleep(0.1)
        found &= _unused(found & names(), ours)
    return sorted(found)


def _unused(files: set[str], ours: Collection[int]) -> set[str]:
    for process in psutil.process_iter() if files else ():
        if process.pid not in ours:
            with contextlib.suppress(psutil.Error, OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                files = {name for name in files if f"{FOLDER}/{name}" not in maps}
    return files

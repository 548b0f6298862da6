"""Where the live pages are reached: a unix socket in a private directory. Standard library only.

The server of a home and the proxy inside Jupyter find each other by this one rule, without a file, a port or a token.
The directory is not the home: a unix socket's path may have 107 bytes, and a home on a network disk is no place for it.
Whoever could put a socket there could put a page into the user's Jupyter, so its owner and mode are checked each time.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from pathlib import Path
from typing import Final

LONGEST: Final = 107  # bytes that the kernel takes for a socket's path
SHARED: Final = Path("/tmp")  # not TMPDIR, which may differ between the server and Jupyter


class UnsafeDirectoryError(RuntimeError):
    """Others could have put something at the address."""


def home_dir() -> Path:
    """The user's dtrain home; the same as `workbench.store.home` says, which Jupyter's process need not load."""
    named = os.environ.get("DTRAIN_HOME", "").strip()
    return Path(named or _data_dir() / "dtrain").expanduser().absolute()


def _data_dir() -> Path:
    """As platformdirs has it."""
    if sys.platform == "darwin":
        return Path("~/Library/Application Support")
    return Path(os.environ.get("XDG_DATA_HOME", "").strip() or "~/.local/share")


def socket_path(home: Path) -> Path:
    """The socket of this home's server; its directory is there, private and ours. Raises `UnsafeDirectoryError`."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(home))).hexdigest()[:16] + ".sock"
    uid = os.getuid()
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", "").strip() or f"/run/user/{uid}")
    path = runtime / "dtrain" / name
    if not _is_private(runtime, uid) or len(os.fsencode(path)) > LONGEST:
        path = SHARED / f"dtrain-{uid}" / name
    _make_private(path.parent, uid)
    return path


def _is_private(directory: Path, uid: int) -> bool:
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o077


def _make_private(directory: Path, uid: int) -> None:
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UnsafeDirectoryError(f"cannot make {directory}: {error.strerror}") from error
    if not _is_private(directory, uid):
        raise UnsafeDirectoryError(f"{directory} must be a directory of yours that nobody else can use (mode 0700)")

"""Where everything that the product keeps lies: one private directory. The one place that reads DTRAIN_HOME.

    HOME/index.sqlite                 the list of jobs
    HOME/jobs/JOB/job.sqlite          a job's record
    HOME/jobs/JOB/logs/rank0.log      output of its ranks
    HOME/pools/NAME/                  marks, certificates and logs of a pool's processes

Directories are 0700, files 0600. Asking for a path makes the directories on the way to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import Final

from workbench.errors import StoreError, UnknownJobError

VARIABLE: Final = "DTRAIN_HOME"
_OTHERS_CAN_WRITE: Final = 0o022
_JOB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")


def home_dir() -> Path:
    """The home, made if need be; `StoreError` when it cannot be, or when others could write into it."""
    return _checked(private_dir(_named_home()))


def jobs_dir() -> Path:
    return private_dir(home_dir() / "jobs")


def pools_dir() -> Path:
    return private_dir(home_dir() / "pools")


def index_path() -> Path:
    return home_dir() / "index.sqlite"


def job_dir(job_id: str) -> Path:
    """The job's directory, which need not exist. `UnknownJobError` for what can be no job's id, such as `../x`."""
    if not _JOB_ID.match(job_id):
        raise UnknownJobError(f"{job_id!r} can be no job's id", hint="list the jobs with: %dtrain jobs")
    return jobs_dir() / job_id


def job_path(job_id: str) -> Path:
    """The job's record."""
    return job_dir(job_id) / "job.sqlite"


def log_path(job_id: str, rank: int) -> Path:
    return job_dir(job_id) / "logs" / f"rank{rank}.log"


def private_dir(path: Path) -> Path:
    """Make `path` (and its parents) a directory that only this user can use, if it is not there yet; return it."""
    try:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for parent in reversed(missing):
            parent.mkdir(mode=0o700, exist_ok=True)
        if not path.is_dir():
            raise StoreError(f"{path} is a file, not a directory", hint=f"move it away, or set {VARIABLE} elsewhere")
    except OSError as error:
        raise StoreError(
            f"cannot make the directory {path}: {error.strerror}", hint=f"set {VARIABLE} to a directory you can write"
        ) from error
    return path


def atomic_write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace `path` as a whole and durably: a reader, or a crash, sees all of the old content or all of the new."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()
            raise
        sync_dir(path.parent)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}", hint="is the disk full or read-only?") from error


def sync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _named_home() -> Path:
    named = os.environ.get(VARIABLE, "").strip()
    if named:
        try:
            return Path(named).expanduser().absolute()
        except RuntimeError as error:
            raise StoreError(f"{VARIABLE}={named!r} names no user: {error}", hint="give an absolute path") from error
    import platformdirs

    return Path(platformdirs.user_data_dir("dtrain", appauthor=False)).absolute()


def _checked(path: Path) -> Path:
    """Others could plant a record, a certificate or a socket in a directory they can write."""
    found = path.stat()
    if found.st_mode & _OTHERS_CAN_WRITE:
        raise StoreError(
            f"other users can write into {path}",
            hint=f"chmod go-w {path}, or set {VARIABLE} to a directory of your own",
        )
    if os.geteuid() not in (0, found.st_uid):
        raise StoreError(f"{path} belongs to another user", hint=f"set {VARIABLE} to a directory of your own")
    return path

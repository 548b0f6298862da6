"""SQLite as the store uses it: WAL, private files, a kind and a version that are checked. No table is known here."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from workbench.errors import JobFileError, StoreError
from workbench.store.home import private_dir, sync_dir

SPARE: Final = 2**20  # bytes that must be free before a file is begun
BUSY_TIMEOUT: Final = 2.0  # s that a writer waits for another process


class Kind(NamedTuple):
    """What a file must be: `application_id` marks it as ours, a higher `version` than ours is refused."""

    what: str  # "the record of a job"
    remedy: str  # what can still be done when it is damaged
    application_id: int
    version: int
    schema: tuple[str, ...]


def create(path: Path, kind: Kind, first: tuple[str, tuple[object, ...]] | None = None) -> sqlite3.Connection:
    """A new file with its schema and the row that `first` inserts, or `StoreError` and nothing left behind."""
    is_new_dir = not path.parent.exists()
    private_dir(path.parent)
    try:
        _check_space(path.parent)
        # SQLite gives its -wal and -shm files the mode of the database.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except OSError as error:
        if is_new_dir:
            path.parent.rmdir()
        if isinstance(error, FileExistsError):
            raise JobFileError(f"{path} is there already", hint="open it instead") from error
        raise StoreError(
            f"cannot begin {kind.what} in {path.parent}: {error.strerror}",
            hint="free some disk space, or set DTRAIN_HOME to a directory you can write",
        ) from error
    try:
        return _begin(path, kind, first)
    except (sqlite3.Error, OSError) as error:
        remove(path)
        if is_new_dir:
            path.parent.rmdir()
        raise StoreError(f"cannot begin {kind.what} in {path.parent}: {error}", hint="is the disk full?") from error


def _check_space(directory: Path) -> None:
    free = os.statvfs(directory)
    if free.f_bavail * free.f_frsize < SPARE:
        raise OSError(28, f"only {free.f_bavail * free.f_frsize // 1024} kB are free there")


def _begin(path: Path, kind: Kind, first: tuple[str, tuple[object, ...]] | None) -> sqlite3.Connection:
    connection = _connect(path, "rw")
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        with transaction(connection):
            connection.execute(f"PRAGMA application_id={kind.application_id}")
            for statement in kind.schema:
                connection.execute(statement)
            if first is not None:
                connection.execute(*first)
            connection.execute(f"PRAGMA user_version={kind.version}")
        sync_dir(path.parent)
    except BaseException:
        connection.close()
        raise
    return connection


def open_existing(path: Path, kind: Kind, *, read_only: bool = False) -> sqlite3.Connection:
    """An existing file of that kind; `JobFileError` says what is wrong with it and what can be done."""
    if not path.is_file():
        raise JobFileError(f"{kind.what} is missing: {path}", hint="was it deleted or moved?")
    try:
        connection = _connect_existing(path, read_only)
    except sqlite3.OperationalError as error:
        raise JobFileError(f"{kind.what} cannot be opened: {path}: {error}", hint="check its permissions") from error
    except sqlite3.DatabaseError as error:
        raise damaged(path, kind, error) from error
    try:
        _check_kind(connection, path, kind)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_existing(path: Path, read_only: bool) -> sqlite3.Connection:
    if not read_only:
        return _connect(path, "rw")
    try:
        return _connect(path, "ro")
    except sqlite3.OperationalError:
        # In a directory that cannot be written, WAL's shared memory cannot be made: read the file as it lies there.
        return _connect(path, "ro&immutable=1")


def _check_kind(connection: sqlite3.Connection, path: Path, kind: Kind) -> None:
    try:
        (mark,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:
        raise damaged(path, kind, error) from error
    if mark != kind.application_id or version < 1:
        raise JobFileError(f"{path} is not {kind.what}", hint="it is empty, or something else wrote it")
    if version > kind.version:
        raise JobFileError(
            f"{path} was written by a newer dtrain workbench (format {version}, this one reads {kind.version})",
            hint="pip install --upgrade dtrain-workbench",
        )


def damaged(path: Path, kind: Kind, error: Exception) -> JobFileError:
    """The exception for a torn or overwritten file."""
    return JobFileError(f"{kind.what} is damaged: {path}: {error}", hint=kind.remedy)


def remove(path: Path) -> None:
    """Delete a database and what belongs to it."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).unlink()


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing; durable at the end when `PRAGMA synchronous` is FULL."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite itself rolls back when the disk is full
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def quick_transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """One that does not wait for the disk: what may be lost with the power, telemetry, and is never torn."""
    connection.execute("PRAGMA synchronous=NORMAL")
    try:
        with transaction(connection):
            yield
    finally:
        connection.execute("PRAGMA synchronous=FULL")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # opening alone reads nothing
        connection.execute("PRAGMA synchronous=FULL")
    except BaseException:
        connection.close()
        raise
    return connection

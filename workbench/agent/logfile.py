"""A rank's log: all it wrote, raw, in at most `limit` bytes.

`rank0.log` grows to half the limit, then becomes `rank0.log.1` (the one before goes) and a new one begins. Positions
are bytes from the start of all that was ever written, so they stay valid; `rank0.log.start` keeps where `rank0.log`
begins.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class LogFile:
    """The writing side. Nothing here raises: what cannot be written is counted and told."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._half = path, max(limit // 2, 1)
        self._fd = -1
        self._size = 0
        self._lost = 0  # bytes that could not be written since the last time it went well
        self._retry_at = 0.0
        self.start = read_start(path)
        self._open()

    @property
    def position(self) -> int:
        """Bytes from the start of all output to its end."""
        return self.start + self._size

    def write(self, data: bytes, now: float) -> str:
        """Append; returns what to tell of trouble: at the first failure, and when it is over."""
        if self._lost and now < self._retry_at:
            self._lost += len(data)
            return ""
        try:
            if self._size + len(data) > self._half and self._size:
                self._rotate()
            if self._fd < 0:
                self._open()
            done = self._write(data)
        except OSError as error:
            return self._fail(len(data), error, now)
        lost, self._lost = self._lost, 0
        if lost and done == len(data):
            return f"the log is written again; {lost} bytes are not in it"
        return ""

    def _write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            count = os.write(self._fd, view)
            self._size += count
            view = view[count:]
        return len(data)

    def _fail(self, size: int, error: OSError, now: float) -> str:
        first, self._lost, self._retry_at = not self._lost, self._lost + size, now + 1.0
        return f"output is shown but not kept: {self._path} cannot be written: {error.strerror}" if first else ""

    def _open(self) -> None:
        with suppress(OSError):
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        position = self.position
        self.close()
        self._path.replace(older_half(self._path))
        start = _start_file(self._path)
        temporary = start.with_suffix(".tmp")
        temporary.write_text(str(position))
        temporary.replace(start)
        self.start, self._size = position, 0
        self._open()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def older_half(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _start_file(path: Path) -> Path:
    return path.with_name(path.name + ".start")


def read_start(path: Path) -> int:
    """The position at which the current file begins."""
    try:
        return int(_start_file(path).read_text())
    except (OSError, ValueError):
        return 0

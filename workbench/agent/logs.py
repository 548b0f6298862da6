"""A rank's output: all of it in a file with a bound, the newest of it for display."""

from __future__ import annotations

import codecs
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

CHUNK: Final = 64 * 2**10  # bytes for display at once
EVERY: Final = 0.2  # s between two chunks of one rank, when output does not stop
BLOCK: Final = 2**16


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a log, and the byte at which the next page begins. `truncated`: there was more than fits."""

    text: str
    next: int
    truncated: bool = False


class LogFile:
    """Appends to `path`; at half of `limit` bytes the file becomes `path.1`, whose predecessor goes."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit
        self.problem = ""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file: BinaryIO | None = self._open()
        self.written = 0  # of the rank, in all generations of this file's life

    def _open(self) -> BinaryIO | None:
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            self.problem = f"output is not kept: {error.strerror}"
            return None
        return os.fdopen(fd, "ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Never raises: a full disk costs the log, not the rank."""
        self.written += len(data)
        if self._file is None:
            return
        try:
            self._file.write(data)
            if self._file.tell() > self.limit // 2:
                self._file.close()
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._file = self._open()
        except OSError as error:
            self.problem = f"output is not kept: {error.strerror}"

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Display:
    """One stream of one rank on its way to a screen: decoded, at most a chunk each `EVERY` s, the newest kept."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = bytearray()
        self._since = 0.0
        self._last = 0.0
        self.offset = 0  # of what was shown or dropped so far
        self.dropped = 0

    def add(self, data: bytes, now: float) -> None:
        if not self._held:
            self._since = now
        self._held += data
        if len(self._held) > 2 * CHUNK:
            self._drop(len(self._held) - CHUNK)

    def _drop(self, count: int) -> None:
        del self._held[:count]
        self.dropped += count
        self.offset += count
        self._decoder.reset()

    def due(self) -> float | None:
        """When the next chunk is to be shown; None when there is nothing."""
        if not self._held:
            return None
        at = self._last + EVERY
        return at if self._held.endswith(b"\n") else max(at, self._since + EVERY)

    def take(self, now: float) -> tuple[str, int, int]:
        """`(text, offset of its first byte, bytes dropped before it)`."""
        if len(self._held) > CHUNK:
            self._drop(len(self._held) - CHUNK)
        text, offset, dropped = self._decoder.decode(bytes(self._held)), self.offset, self.dropped
        self.offset += len(self._held)
        self._held.clear()
        self.dropped, self._last = 0, now
        return text, offset, dropped


def read_page(path: Path, *, tail: int | None, grep: str | None, since: int, limit: int) -> LogPage:
    """See `Agent.read_log`."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return LogPage(text="", next=0)
    if tail is None:
        with path.open("rb") as file:
            file.seek(min(since, size))
            data = file.read(limit)
        data = data[: data.rfind(b"\n") + 1] or data
        lines = data.decode(errors="replace").splitlines()
        kept = list(_matching(lines, grep))
        end = min(since, size) + len(data)
        return LogPage(text="\n".join(kept), next=end, truncated=end < size)
    kept = []
    budget = limit
    for line in _backwards(path):
        if next(iter(_matching([line], grep)), None) is not None:
            kept.append(line)
            budget -= len(line)
        if len(kept) >= tail or budget < 0:
            break
    return LogPage(text="\n".join(reversed(kept)), next=size, truncated=budget < 0)


def _matching(lines: list[str], grep: str | None) -> Iterator[str]:
    if not grep:
        yield from lines
        return
    try:
        pattern = re.compile(grep)
    except re.error:
        pattern = re.compile(re.escape(grep))
    yield from (line for line in lines if pattern.search(line))


def _backwards(path: Path) -> Iterator[str]:
    """Lines from the newest to the oldest, also of the half that was rotated away; one block in memory."""
    for part in (path, path.with_name(path.name + ".1")):
        if not part.exists():
            continue
        with part.open("rb") as file:
            position, rest = file.seek(0, os.SEEK_END), b""
            first = True
            while position > 0:
                step = min(BLOCK, position)
                position -= step
                file.seek(position)
                data = file.read(step) + rest
                pieces = data.split(b"\n")
                rest = pieces[0]
                rows = pieces[1:]
                if first and rows and rows[-1] == b"":
                    rows = rows[:-1]
                first = False
                for row in reversed(rows):
                    yield row.decode(errors="replace")
            if rest:
                yield rest.decode(errors="replace")


def now() -> float:
    return time.monotonic()

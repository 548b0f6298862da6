"""A rank's log: all it wrote, raw, in at most `limit` bytes; and pages of it.

`rank0.log` grows to half the limit, then becomes `rank0.log.1` (the one before goes) and a new one begins. Positions are
bytes from the start of all that was ever written, so they stay valid; `rank0.log.start` keeps where `rank0.log` begins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

BLOCK: Final = 2**18
SCAN: Final = 2**28  # bytes that one page with `grep` looks through at most
SETTLED: Final = 1.0  # s without a write after which an unfinished line counts as one


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a log. `start` is where it begins and `next` where the next page does; `truncated`: something is missing
    in front (rotated away, over the size of a page, or not looked through)."""

    text: str
    next: int
    start: int = 0
    truncated: bool = False


class LogFile:
    """The writing side. It never raises: what cannot be written is counted and told."""

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
        self._path.replace(_older(self._path))
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


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _start_file(path: Path) -> Path:
    return path.with_name(path.name + ".start")


def read_start(path: Path) -> int:
    """The position at which the current file begins."""
    try:
        return int(_start_file(path).read_text())
    except (OSError, ValueError):
        return 0


class _Span:
    """Both halves of a log as one range of positions, `first` to `end`."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        current = stack.enter_context(path.open("rb"))
        start = read_start(path)
        self.parts: list[tuple[int, BinaryIO]] = [(start, current)]
        with suppress(FileNotFoundError):
            older = stack.enter_context(_older(path).open("rb"))
            self.parts.insert(0, (start - os.fstat(older.fileno()).st_size, older))
        self.first = self.parts[0][0]
        self.end = start + os.fstat(current.fileno()).st_size
        self.is_settled = time.time() - os.fstat(current.fileno()).st_mtime > SETTLED

    def read(self, start: int, end: int) -> bytes:
        pieces = []
        for (begin, file), stop in zip(self.parts, [*(p[0] for p in self.parts[1:]), self.end], strict=True):
            low, high = max(start, begin), min(end, stop)
            if low < high:
                pieces.append(os.pread(file.fileno(), high - low, low - begin))
        return b"".join(pieces)


def read_page(
    path: Path, *, tail: int | None = None, grep: str | None = None, since: int = 0, limit: int = 2**20
) -> LogPage:
    """The last `tail` lines; or, without `tail`, what was written from position `since` on, at most `limit` bytes of it.

    `grep` keeps the lines that contain it: plain text, not a pattern, so that no page can take for ever. Blocks are read
    as they are needed, the file never as a whole. A log that is not there is an empty page.
    """
    with ExitStack() as stack:
        try:
            span = _Span(path, stack)
        except OSError:
            return LogPage(text="", next=since)
        needle = grep.encode(errors="surrogateescape") if grep else b""
        if tail is not None:
            return _last_lines(span, tail, needle, limit)
        return _forward(span, since, needle, limit)


def _last_lines(span: _Span, tail: int, needle: bytes, limit: int) -> LogPage:
    found: list[bytes] = []
    size, position = 0, span.end
    for position, line in _lines_backwards(span):
        if len(found) >= tail or size + len(line) > limit:
            break
        if needle in line:
            found.append(line)
            size += len(line)
    else:
        position = span.first
    if not found and tail and span.end > span.first and not needle:  # one line, longer than a page
        found = [span.read(max(span.first, span.end - limit), span.end)]
    text = b"".join(reversed(found)).decode(errors="replace")
    return LogPage(text=text, next=span.end, start=position, truncated=len(found) < tail and position > 0)


def _lines_backwards(span: _Span) -> Iterator[tuple[int, bytes]]:
    """(position after the line, line), newest first, as far back as a page looks; the last may be unfinished."""
    rest: list[bytes] = []  # pieces of a line whose start lies further in front, the last piece first
    after = end = span.end
    floor = max(span.first, span.end - SCAN)
    while end > floor:
        begin = max(floor, end - BLOCK)
        lines = _split(span.read(begin, end))
        for piece in reversed(lines[1:]):
            if line := piece + b"".join(reversed(rest)):
                yield after, line
                after -= len(line)
            rest = []
        rest.append(lines[0])
        end = begin
    if line := b"".join(reversed(rest)):
        yield after, line


def _split(data: bytes) -> list[bytes]:
    """Lines by newline alone, each with its own; the last is empty when the data ends with one."""
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + parts[-1:]


def _forward(span: _Span, since: int, needle: bytes, limit: int) -> LogPage:
    start = min(max(since, span.first), span.end)
    truncated = since < span.first
    if not needle:
        data = _whole_characters(span.read(start, min(start + limit, span.end)), final=span.is_settled)
        return LogPage(text=data.decode(errors="replace"), next=start + len(data), start=start, truncated=truncated)
    found: list[bytes] = []
    position, size = start, 0
    while position < span.end and size < limit and position - start < SCAN:
        block = span.read(position, min(position + BLOCK, span.end))
        cut = block.rfind(b"\n") + 1
        is_last = position + len(block) >= span.end
        if not cut and is_last and not span.is_settled:
            break
        block = block if (is_last and span.is_settled) or not cut else block[:cut]
        for line in _split(block):
            if needle in line:
                found.append(line)
                size += len(line)
        position += len(block)
    text = b"".join(found).decode(errors="replace")
    return LogPage(text=text, next=position, start=start, truncated=truncated)


def _whole_characters(data: bytes, *, final: bool) -> bytes:
    """The data without a UTF-8 character that its end cuts in two; all of it when nothing more will come."""
    if final or not data:
        return data
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # the first byte of a character of 2 to 4 bytes
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if length > back else data
        if byte < 0x80:
            break
    return data

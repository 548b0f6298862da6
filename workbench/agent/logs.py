"""Pages of a rank's log, read from its files (see `logfile.py`), in blocks, never as a whole."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from workbench.agent.logfile import older_half, read_start

BLOCK: Final = 2**18
SCAN: Final = 2**28  # bytes that one page looks through at most
SETTLED: Final = 1.0  # s without a write after which an unfinished line counts as one


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a log. `start` is where it begins and `next` where the next page does; `truncated`: something is missing
    in front (rotated away, over the size of a page, or not looked through)."""

    text: str
    next: int
    start: int = 0
    truncated: bool = False


class _Span:
    """Both halves of a log as one range of positions, `first` to `end`. Raises `OSError` when there is none."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        start, files = _open_halves(path, stack)
        sizes = [os.fstat(file.fileno()).st_size for file in files]
        begins = [start - sum(sizes[:-1]), start] if len(files) > 1 else [start]
        self.parts: list[tuple[int, BinaryIO]] = list(zip(begins, files, strict=True))
        self.first, self.end = begins[0], start + sizes[-1]
        self.is_settled = time.time() - os.fstat(files[-1].fileno()).st_mtime > SETTLED

    def read(self, start: int, end: int) -> bytes:
        pieces = []
        for (begin, file), stop in zip(self.parts, [*(p[0] for p in self.parts[1:]), self.end], strict=True):
            low, high = max(start, begin), min(end, stop)
            if low < high:
                pieces.append(os.pread(file.fileno(), high - low, low - begin))
        return b"".join(pieces)


def _open_halves(path: Path, stack: ExitStack) -> tuple[int, list[BinaryIO]]:
    """Where the current half begins, and the halves, older first; tried again when it is being rotated just now."""
    files: list[BinaryIO] = []
    for _ in range(3):
        start, current = read_start(path), stack.enter_context(path.open("rb"))
        files = [current]
        with suppress(FileNotFoundError):
            files.insert(0, stack.enter_context(older_half(path).open("rb")))
        if read_start(path) == start and path.stat().st_ino == os.fstat(current.fileno()).st_ino:
            return start, files
    raise FileNotFoundError(path)


def read_page(
    path: Path, *, tail: int | None = None, grep: str | None = None, since: int = 0, limit: int = 2**20
) -> LogPage:
    """The last `tail` lines; or, without `tail`, what was written from position `since` on; at most `limit` bytes.

    `grep` keeps the lines that contain it: plain text, not a pattern, so that no page can take for ever. A log that is
    not there is an empty page.
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
    size, floor = 0, max(span.first, span.end - SCAN)
    start = span.end
    for after, line in _lines_backwards(span, floor):
        start = after
        if len(found) >= tail or size + len(line) > limit:
            break
        if needle in line:
            found.append(line)
            size += len(line)
    else:
        start = floor
    if not found and not needle and tail and span.end > span.first:  # its last line is longer than a page
        start = max(span.first, span.end - limit)
        found = [span.read(start, span.end)]
        return LogPage(text=found[0].decode(errors="replace"), next=span.end, start=start, truncated=True)
    text = b"".join(reversed(found)).decode(errors="replace")
    return LogPage(text=text, next=span.end, start=start, truncated=len(found) < tail and start > 0)


def _lines_backwards(span: _Span, floor: int) -> Iterator[tuple[int, bytes]]:
    """(position after the line, line), newest first, back to `floor`; the newest may be unfinished."""
    rest: list[bytes] = []  # pieces of a line whose start lies further in front, the last piece first
    after = end = span.end
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
    if needle:
        data, end = _matching(span, start, needle, limit)
    else:
        data = _whole_characters(span.read(start, min(start + limit, span.end)), final=span.is_settled)
        end = start + len(data)
    return LogPage(text=data.decode(errors="replace"), next=end, start=start, truncated=since < span.first)


def _matching(span: _Span, start: int, needle: bytes, limit: int) -> tuple[bytes, int]:
    """The lines from `start` on that hold the needle, and where the looking ended: after a whole line."""
    found: list[bytes] = []
    position, size = start, 0
    while position < span.end and size < limit and position - start < SCAN:
        block = span.read(position, min(position + BLOCK, span.end))
        is_last = position + len(block) >= span.end
        if cut := block.rfind(b"\n") + 1:
            block = block if is_last and span.is_settled else block[:cut]
        elif is_last and not span.is_settled:
            break
        matches = [line for line in _split(block) if needle in line]
        found += matches
        size += sum(map(len, matches))
        position += len(block)
    return b"".join(found), position


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

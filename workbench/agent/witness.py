"""What a rank says of itself while it hangs: its answers, and the file that its stacks are written to.

The rank's side is `training/witness.py`. Offers and answers arrive in the loop's thread; whoever asks waits in another.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from workbench.agent.wire import Frame, close_all
from workbench.evidence import GroupEvidence

LOOK: Final = 0.005  # s between two looks whether the stacks have been written
SETTLED: Final = 0.02  # s without more of them: they are whole
MOST: Final = 2**18  # bytes of stacks that are read
THREAD: Final = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*$", re.MULTILINE)
FRAME: Final = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\S+) in (?P<name>.*)$', re.MULTILINE)
_groups: Final = msgspec.json.Decoder(tuple[GroupEvidence, ...])


class Witness:
    """One rank's."""

    def __init__(self) -> None:
        self._file = -1
        self._signal = self._thread = self._main = 0
        self._answers: dict[int, tuple[GroupEvidence, ...]] = {}
        self._ids = itertools.count(1)
        self._changed = threading.Condition()

    # --- in the loop's thread ---

    def offered(self, frame: Frame) -> None:
        """The rank has said where its stacks would be, and how to have them written."""
        self.close()
        close_all(frame.fds[1:])
        with self._changed:
            self._file = frame.fds[0] if frame.fds else -1
            header = frame.header
            self._signal, self._thread, self._main = header["signal"], header["thread"], header["main"]

    def answered(self, frame: Frame) -> None:
        with self._changed:
            self._answers = {frame.header["id"]: _groups.decode(frame.payload)}
            self._changed.notify_all()

    def next_id(self) -> int:
        """The id of a question that is about to be asked."""
        return next(self._ids)

    def close(self) -> None:
        with self._changed:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
            self._changed.notify_all()

    # --- in a thread that may wait ---

    def wait(self, number: int, deadline: float) -> tuple[GroupEvidence, ...] | None:
        """The answer to that question; None when it has not come by `deadline` (of `time.monotonic`)."""
        with self._changed:
            while number not in self._answers:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None
            return self._answers[number]

    def stacks(self, pid: int, deadline: float) -> str:
        """All threads' stacks, the main one's first, as py-spy writes them; empty: it cannot."""
        file = self._borrow()
        if file < 0:
            return ""
        try:
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)  # the rank writes where this stands: the descriptors are one file
            if ctypes.CDLL(None).tgkill(pid, self._thread, self._signal):
                return ""
            return as_spy(_read_settled(file, deadline), self._main)
        finally:
            os.close(file)

    def _borrow(self) -> int:
        with self._changed:
            return os.dup(self._file) if self._file >= 0 else -1


def _read_settled(file: int, deadline: float) -> str:
    """What is written there, once no more comes."""
    size, since = 0, time.monotonic()
    while (now := time.monotonic()) < deadline and not (size and now - since > SETTLED):
        if (grown := os.fstat(file).st_size) != size:
            size, since = grown, now
        time.sleep(LOOK)
    return os.pread(file, min(size, MOST), 0).decode(errors="replace")


def as_spy(text: str, main: int) -> str:
    """faulthandler's text in py-spy's form: `Thread 0x1f (unknown): "MainThread"`, `    load (/a/train.py:41)`."""
    threads = sorted(_threads(text), key=lambda thread: thread[0] != main)
    lines = []
    for number, frames in threads:
        lines.append(f'Thread {number:#x} (unknown): "{"MainThread" if number == main else "?"}"')
        lines += [f"    {name} ({file}:{line})" for file, line, name in frames]
    return "\n".join(lines)


def _threads(text: str) -> Iterator[tuple[int, list[tuple[str, str, str]]]]:
    _, *parts = THREAD.split(text)
    for number, body in zip(parts[::2], parts[1::2], strict=True):
        yield int(number, 16), FRAME.findall(body)

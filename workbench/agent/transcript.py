"""What a rank writes, from its pipes into its log and on to display. Pipes are drained whatever the disk does."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from workbench.agent.logfile import LogFile
from workbench.agent.loop import Loop
from workbench.agent.output import Output
from workbench.telemetry import OutputWritten

READ: Final = 2**20
DRAIN: Final = 8 * READ  # bytes read at most once a rank has ended: something that it left behind may go on writing
PIPE_SIZES: Final = (2**20, 2**18)  # the first that the system grants
NEVER: Final = float("inf")


def make_pipe() -> tuple[int, int]:
    """A pipe as large as can be had, so that a rank seldom waits for us."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reader, False)
    for size in PIPE_SIZES:
        with suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, size)
            break
    return reader, writer


class Transcript:
    """One rank's; all in the loop's thread. `tell` gets what is to be shown."""

    def __init__(self, job_id: str, rank: int, log: LogFile, loop: Loop, tell: Callable[[OutputWritten], None]) -> None:
        self._job_id, self._rank, self._log, self._loop, self._tell = job_id, rank, log, loop, tell
        self._output = Output(offset=log.position)
        self._flush_at = NEVER
        self._pipes: dict[int, str] = {}

    def open(self) -> tuple[int, int]:
        """Make the pipes; the returned ends, for stdout and stderr, are the caller's to pass on and close."""
        out, out_writer = make_pipe()
        err, err_writer = make_pipe()
        self._pipes = {out: "stdout", err: "stderr"}
        return out_writer, err_writer

    def begin(self) -> None:
        for fd in self._pipes:
            self._loop.add(fd, partial(self._read, fd))

    def close(self) -> None:
        for fd in self._pipes:
            self._loop.remove(fd)
            os.close(fd)
        self._pipes = {}
        self._flush_at = NEVER
        self._log.close()

    def note(self, text: str) -> None:
        """A line of ours in the log, between generations of ranks."""
        line = f"[dtrain] {text}\n".encode()
        self._log.write(line, self._loop.now())
        self._output.offset = self._log.position

    def drain(self) -> None:
        """Read what lies in the pipes."""
        for fd in self._pipes:
            left = DRAIN
            while left > 0 and self._read(fd):
                left -= READ

    def flush(self, *, everything: bool = False) -> None:
        """Show what is due, or all there is."""
        wall = self._loop.wall()
        for piece in self._output.take(self._loop.now(), everything=everything):
            self._show(piece.stream, piece.text, wall, piece.offset, piece.dropped)

    def _read(self, fd: int) -> bool:
        """Take one piece of output; False when there is none."""
        try:
            data = os.read(fd, READ)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove(fd)
            return False
        now = self._loop.now()
        if trouble := self._log.write(data, now):
            self._show("stderr", f"[dtrain] {trouble}\n", self._loop.wall(), self._output.offset)
        self._output.add(self._pipes[fd], data, now)
        self._schedule()
        return True

    def _show(self, stream: str, text: str, time: float, offset: int, dropped: int = 0) -> None:
        self._tell(
            OutputWritten(
                job_id=self._job_id,
                rank=self._rank,
                stream=stream,
                text=text,
                time=time,
                offset=offset,
                dropped=dropped,
            )
        )

    def _schedule(self) -> None:
        due = self._output.due()
        if due is not None and due < self._flush_at - 0.001:
            self._flush_at = due
            self._loop.call_at(due, self._on_time)

    def _on_time(self) -> None:
        if self._loop.now() < self._flush_at:  # an earlier one came first, or it has been closed
            return
        self._flush_at = NEVER
        self.flush()
        self._schedule()

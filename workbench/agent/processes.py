"""The processes of jobs on this host, as the agent holds them: ranks, and rendezvous stores."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

from workbench import blackbox
from workbench.agent.launch import memory_file
from workbench.agent.logs import LogFile
from workbench.agent.loop import Loop
from workbench.agent.output import Output
from workbench.agent.wire import Channel, Frame, Header
from workbench.agent.words import doing, split_status
from workbench.commands import StartRanks
from workbench.events import Event, LaunchFailed, RankExited, RankRaised, RankStarted
from workbench.state import Placement
from workbench.telemetry import CellFinished, OutputWritten, Report, StepsTaken

Emit: TypeAlias = Callable[[Event | Report], None]

READ: Final = 2**20
DRAIN: Final = 8 * READ  # bytes read at most once a rank has ended: something that it left behind may go on writing
PIPE_SIZES: Final = (2**20, 2**18)  # the first that the system grants


def make_pipe() -> tuple[int, int]:
    """A pipe as large as can be had, so that a rank seldom waits for us."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reader, False)
    for size in PIPE_SIZES:
        with suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, size)
            break
    return reader, writer


@dataclass(frozen=True)
class RankPlan:
    """What one rank is to be. `cold`: why it is not forked, empty when it is; `launch`: what it is to read."""

    command: StartRanks
    placement: Placement
    cold: str
    launch: bytes


class RankProcess:
    """One rank, from the request for it to its exit. `on_gone` is called once, after its last word."""

    def __init__(self, plan: RankPlan, log: LogFile, log_path: str, loop: Loop, emit: Emit) -> None:
        self.plan, self.log, self.log_path, self._loop, self._emit = plan, log, log_path, loop, emit
        self.on_gone: Callable[[], None] = lambda: None
        self.rank = plan.placement.rank
        self.pid = 0
        self.is_gone = False
        self.stop_signal: int | None = None
        self.detail = ""
        self.cells: set[str] = set()
        self.output = Output(offset=log.position)
        self.cursor = 0
        self._pidfd = -1
        self._flush_at = float("inf")
        self._pipes: dict[int, str] = {}
        self._channel: Channel | None = None
        self.box: mmap.mmap | None = None

    @property
    def generation(self) -> tuple[str, int]:
        return self.plan.command.job_id, self.plan.command.restart_count

    # --- what its zygote says of it ---

    def request(self) -> tuple[Header, tuple[int, ...]]:
        launch = memory_file("dtrain-launch", self.plan.launch)
        box = memory_file("dtrain-box", b"")
        os.ftruncate(box, blackbox.SIZE)
        self.box = mmap.mmap(box, blackbox.SIZE)
        blackbox.format_box(self.box)
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        out, out_writer = make_pipe()
        err, err_writer = make_pipe()
        self._pipes = {out: "stdout", err: "stderr"}
        return {"op": "exec" if self.plan.cold else "fork"}, (launch, box, theirs.detach(), out_writer, err_writer)

    def forked(self, pid: int, pidfd: int, time: float) -> None:
        self.pid, self._pidfd = pid, pidfd
        assert self._channel is not None
        self._loop.add_channel(self._channel, self._on_frames, lambda: None)
        for fd in self._pipes:
            self._loop.add(fd, lambda fd=fd: self._read(fd, READ))  # type: ignore[misc]
        self._emit(
            RankStarted(
                time=time,
                restart_count=self.plan.command.restart_count,
                rank=self.rank,
                pid=pid,
                log_path=self.log_path,
                cold=self.plan.cold,
            )
        )
        if self.stop_signal is not None:
            self.kill_group(self.stop_signal)

    def refused(self, reason: str) -> None:
        self._close()
        self._emit(
            LaunchFailed(
                time=self._loop.wall(),
                restart_count=self.plan.command.restart_count,
                worker=self.plan.placement.worker,
                reason=reason,
                rank=self.rank,
            )
        )
        self.on_gone()

    def exited(self, status: int | None, time: float, peak: int) -> None:
        if status is None and self._pidfd >= 0:
            # Its zygote is gone, so the kernel kills it; it has not exited before that is seen.
            self.detail = "lost with its zygote"
            self.kill_group(signal.SIGKILL, ours=False)
            self._loop.add(self._pidfd, lambda: self._finish(None, self._loop.wall()))
            return
        self._finish(status, time)

    def cancel(self) -> None:
        """It was never asked for: say that it has ended."""
        self.stop_signal = signal.SIGKILL
        self.detail = "stopped before it had started"
        self._finish(None, self._loop.wall())

    def _finish(self, status: int | None, time: float) -> None:
        if self._channel is not None:
            self._on_frames(self._channel.read()[0])
        self.drain()
        self.flush(everything=True)
        self.report_steps()
        self._answer_cells()
        code, number = split_status(status)
        snapshot = blackbox.read_header(self.box) if self.box is not None else None
        exited = RankExited(
            time=time,
            restart_count=self.plan.command.restart_count,
            rank=self.rank,
            exit_code=code,
            signal=number,
            step=snapshot.step or None if snapshot else None,
            doing=doing(snapshot) if snapshot and code != 0 else "",
            detail=self.detail,
            stop_signal=self.stop_signal,
            log_path=self.log_path,
        )
        self._close()
        self._emit(exited)
        self.on_gone()

    def _close(self) -> None:
        self.is_gone = True
        for fd in (*self._pipes, self._pidfd):
            if fd >= 0:
                self._loop.remove(fd)
                os.close(fd)
        self._pipes, self._pidfd = {}, -1
        if self._channel is not None:
            self._loop.remove(self._channel.fileno())
            self._channel.close()
        if self.box is not None:
            self.box.close()
        self.log.close()

    # --- what it says itself ---

    def _on_frames(self, frames: list[Frame]) -> None:
        for frame in frames:
            match frame.header["op"]:
                case "raised":
                    self._on_raised(frame.header)
                case "cell":
                    self._on_cell(frame)

    def _on_raised(self, header: Header) -> None:
        snapshot = blackbox.read_header(self.box) if self.box else None
        raised = RankRaised(
            time=self._loop.wall(),
            restart_count=self.plan.command.restart_count,
            rank=self.rank,
            error=header["error"],
            traceback=header["traceback"],
            is_collective=header["is_collective"],
            step=snapshot.step or None if snapshot else None,
        )
        self._emit(raised)

    def _on_cell(self, frame: Frame) -> None:
        header = frame.header
        self.cells.discard(header["cell_id"])
        # What the cell wrote lies in the pipes by now, and is to be seen before its answer.
        self.drain()
        self.flush(everything=True)
        finished = CellFinished(
            job_id=self.plan.command.job_id,
            cell_id=header["cell_id"],
            rank=self.rank,
            ok=header["ok"],
            data=header.get("data", {}),
            error=header.get("error", ""),
            traceback=header.get("traceback", ""),
            payload=frame.payload,
            seconds=header.get("seconds", 0.0),
        )
        self._emit(finished)

    def _answer_cells(self) -> None:
        for cell_id in sorted(self.cells):
            self._emit(
                CellFinished(
                    job_id=self.plan.command.job_id,
                    cell_id=cell_id,
                    rank=self.rank,
                    ok=False,
                    error=f"rank {self.rank} ended while it ran the cell",
                )
            )
        self.cells.clear()

    def tell(self, header: Header, payload: bytes = b"") -> None:
        """Send the rank a frame."""
        assert self._channel is not None
        self._loop.send(self._channel, header, payload)

    # --- output and steps ---

    def _read(self, fd: int, size: int) -> bool:
        """Take one piece of output; False when there is none."""
        try:
            data = os.read(fd, size)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove(fd)
            return False
        now = self._loop.now()
        if trouble := self.log.write(data, now):
            self._say(trouble)
        self.output.add(self._pipes[fd], data, now)
        self._schedule_flush()
        return True

    def _say(self, text: str) -> None:
        """A line of ours among the rank's output; it is not in the log."""
        self._emit(
            OutputWritten(
                job_id=self.plan.command.job_id,
                rank=self.rank,
                stream="stderr",
                text=f"[dtrain] {text}\n",
                time=self._loop.wall(),
                offset=self.output.offset,
            )
        )

    def _schedule_flush(self) -> None:
        due = self.output.due()
        if due is not None and due < self._flush_at - 0.001:
            self._flush_at = due
            self._loop.call_at(due, self._on_flush_time)

    def _on_flush_time(self) -> None:
        if self.is_gone or self._loop.now() < self._flush_at:
            return
        self._flush_at = float("inf")
        self.flush()
        self._schedule_flush()

    def drain(self) -> None:
        """Read what lies in the pipes."""
        for fd in list(self._pipes):
            left = DRAIN
            while left > 0 and self._read(fd, READ):
                left -= READ

    def flush(self, *, everything: bool = False) -> None:
        """Show what is due, or all there is."""
        wall = self._loop.wall()
        for piece in self.output.take(self._loop.now(), everything=everything):
            self._emit(
                OutputWritten(
                    job_id=self.plan.command.job_id,
                    rank=self.rank,
                    stream=piece.stream,
                    text=piece.text,
                    time=wall,
                    offset=piece.offset,
                    dropped=piece.dropped,
                )
            )

    def report_steps(self) -> None:
        """Tell of the steps finished since the last report."""
        if self.box is None:
            return
        block, self.cursor, dropped = blackbox.read_steps(self.box, self.cursor)
        if block:
            self._emit(
                StepsTaken(
                    job_id=self.plan.command.job_id,
                    restart_count=self.plan.command.restart_count,
                    rank=self.rank,
                    block=block,
                    dropped=dropped,
                )
            )

    # --- signals ---

    def stop(self, grace: float) -> None:
        """SIGTERM to the rank, and SIGKILL to its group when it has not ended `grace` seconds later."""
        if grace <= 0:
            self.kill_group(signal.SIGKILL)
            return
        self.signal(signal.SIGTERM, ours=True)
        self.signal(signal.SIGCONT)  # a stopped process takes no SIGTERM
        self._loop.call_at(self._loop.now() + grace, lambda: self.kill_group(signal.SIGKILL))

    def signal(self, number: int, *, ours: bool = False) -> bool:
        """Send a signal to the rank's process alone; `ours`: to end it."""
        if self.is_gone:
            return False
        if ours:
            self.stop_signal = int(number)
        if self._pidfd < 0:  # it is being forked: `forked` sends it
            return True
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def kill_group(self, number: int, *, ours: bool = True) -> None:
        """Send a signal to the rank and to all that it started."""
        if self.signal(number, ours=ours) and self.pid:
            with suppress(OSError):  # it has not made its group yet
                os.killpg(self.pid, number)


class StoreProcess:
    """A job's rendezvous store, as one child of a zygote. It is told of only when it fails."""

    def __init__(self, listener: socket.socket, on_failure: Callable[[str], None]) -> None:
        self._listener, self._on_failure = listener, on_failure
        self._alive: socket.socket | None = None
        self._pidfd = -1
        self.host, self.port = listener.getsockname()[:2]
        self.is_over = False

    def request(self) -> tuple[Header, tuple[int, ...]]:
        self._alive, theirs = socket.socketpair()
        header = {"op": "store", "host": self.host, "port": self.port}
        return header, (self._listener.detach(), theirs.detach())

    def forked(self, pid: int, pidfd: int, time: float) -> None:
        self._pidfd = pidfd
        if self.is_over:
            self.kill()

    def refused(self, reason: str) -> None:
        self._close()
        self._on_failure(reason)

    def exited(self, status: int | None, time: float, peak: int) -> None:
        was_wanted, _ = not self.is_over, self._close()
        if was_wanted:
            self._on_failure("the job's rendezvous store died")

    def kill(self) -> None:
        """End it at once; `exited` follows, and says nothing more."""
        self.is_over = True
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _close(self) -> None:
        self.is_over = True
        self._listener.close()
        if self._alive is not None:
            self._alive.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

"""A rank's process, as the agent holds it: from the request for it to its last word."""

from __future__ import annotations

import mmap
import os
import re
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from workbench import blackbox
from workbench.agent.lastwords import LastWords, last_words, read_end
from workbench.agent.launch import memory_file
from workbench.agent.logfile import LogFile
from workbench.agent.loop import Loop
from workbench.agent.memory import Group, Ledger
from workbench.agent.transcript import Transcript
from workbench.agent.wire import Channel, Frame, Header, close_all
from workbench.agent.witness import Witness
from workbench.agent.words import doing, split_status
from workbench.blackbox import Snapshot
from workbench.commands import StartRanks
from workbench.events import DataDoubted, Event, GradientMismatched, LaunchFailed, RankExited, RankRaised, RankStarted
from workbench.findings import Severity
from workbench.policy.consistency import explain
from workbench.policy.data import explain_data
from workbench.state import Placement
from workbench.telemetry import CellFinished, ConsistencyReport, GradientStatistics, Report, StepsTaken

Emit: TypeAlias = Callable[[Event | Report], None]
FACTS: Final = (
    "CheckpointSaved", "CheckpointFailed", "CheckpointRefused", "RunResumed", "NonFiniteFound", "FaultHappened",
    "GradientMismatched", "ReplicasRepaired", "ConsistencyPaced", "DataDoubted",
)  # fmt: skip


KILLED_WORKER: Final = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: Killed")
# Signals that a process sends itself by what it does: it leaves a stack.
CRASHES: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True)
class RankPlan:
    """What one rank is to be. `cold`: why it is not forked, empty when it is; `launch`: what it is to read."""

    command: StartRanks
    placement: Placement
    cold: str
    launch: bytes
    log_path: str


class RankProcess:
    """All in the loop's thread. Emits one `RankStarted` and then one `RankExited`, or one `LaunchFailed`.

    `on_gone` is called once, after the last of these.
    """

    def __init__(self, plan: RankPlan, log: LogFile, loop: Loop, emit: Emit, ledger: Ledger) -> None:
        self.plan, self._loop, self.emit, self._ledger = plan, loop, emit, ledger
        self.on_gone: Callable[[], None] = lambda: None
        self.on_frame: Callable[[Frame], object] = lambda frame: close_all(frame.fds)  # what is not for this class
        self.rank, self.job_id = plan.placement.rank, plan.command.job_id
        self.restart_count = plan.command.restart_count
        self.transcript = Transcript(self.job_id, self.rank, log, loop, emit)
        self.pid = 0
        self.is_gone = False
        self.stop_signal: int | None = None
        self.left: int | None = None  # the exit code with which it left its program, before anybody stopped it
        self.detail = ""  # what is to be told with its exit
        self.cells: set[str] = set()  # those it has not answered
        self.witness = Witness()
        self.box: mmap.mmap | None = None
        # Epoch seconds minus the clock of timers, as the rank takes it when it starts: what the box says of time is by
        # it, and stays right when the system's clock is set.
        self.offset = loop.wall() - loop.now()
        self._cursor = 0
        self._pidfd = -1
        self._channel: Channel | None = None
        self.own_group: Group | None = None  # a memory cgroup that was made for it
        self._kills_before = 0
        self._log, self._log_begin = log, log.position  # where this generation's part of it begins

    # --- what its zygote says of it ---

    def request(self) -> tuple[Header, tuple[int, ...]]:
        launch = memory_file("dtrain-launch", self.plan.launch)
        box = memory_file("dtrain-box", b"")
        os.ftruncate(box, blackbox.SIZE)
        self.box = mmap.mmap(box, blackbox.SIZE)
        blackbox.format_box(self.box)
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._kills_before = self._ledger.count()
        return {"op": "exec" if self.plan.cold else "fork"}, (launch, box, theirs.detach(), *self.transcript.open())

    def forked(self, pid: int, pidfd: int, time: float) -> None:
        self.pid, self._pidfd = pid, pidfd
        assert self._channel is not None
        self._loop.add_channel(self._channel, self._on_frames, lambda: None)
        self.transcript.begin()
        if self.restart_count:
            self.transcript.note(f"restart {self.restart_count}")
        started = RankStarted(
            time=time,
            restart_count=self.restart_count,
            rank=self.rank,
            pid=pid,
            log_path=self.plan.log_path,
            cold=self.plan.cold,
        )
        self.emit(started)
        if self.stop_signal is not None:
            self.kill_group()

    def refused(self, reason: str) -> None:
        self._close()
        failed = LaunchFailed(
            time=self._loop.wall(),
            restart_count=self.restart_count,
            worker=self.plan.placement.worker,
            reason=reason,
            rank=self.rank,
        )
        self.emit(failed)
        self.on_gone()

    def exited(self, status: int | None, time: float, peak: int) -> None:
        if status is not None or self._pidfd < 0:
            self._finish(status, time, peak)
            return
        # Its zygote is gone, so the kernel kills it; it has not exited before that is seen.
        self.detail = "lost with its zygote"
        self._kill_group()
        self._loop.add(self._pidfd, lambda: self._finish(None, self._loop.wall(), 0))

    def cancel(self) -> None:
        """Its zygote was never asked for it: say that it has ended."""
        self.stop_signal = signal.SIGKILL
        self.detail = "stopped before it had started"
        self._finish(None, self._loop.wall(), 0)

    def _finish(self, status: int | None, time: float, peak: int) -> None:
        if self._channel is not None:
            self._on_frames(self._channel.read()[0])
        self.transcript.drain()
        self.transcript.flush(everything=True)
        self.report_steps()
        exited = self._exit_event(status, time, peak)
        self._close()
        self.emit(exited)
        self._answer_cells()  # after its end: who waits for the answer is to find out how it ended
        self.on_gone()

    def _exit_event(self, status: int | None, time: float, peak: int) -> RankExited:
        code, number = split_status(status)
        snapshot = self._snapshot()
        if self.left is not None and self.stop_signal is not None:
            # The interpreter takes tenths of a second to end, and closes its sockets early: peers fail, and the stop
            # that this brings about finds it still leaving. It left of itself all the same.
            code, number, self.stop_signal = self.left, None, None
        words = LastWords()
        if self.stop_signal is None and not self.detail:
            if number == signal.SIGKILL:
                self.detail = self._memory_detail(peak)
            elif number in CRASHES:
                words = last_words(read_end(self.plan.log_path, self._log_begin - self._log.start))
        return RankExited(
            time=time,
            restart_count=self.restart_count,
            rank=self.rank,
            exit_code=code,
            signal=number,
            step=_step(snapshot),
            doing=doing(snapshot) if snapshot and code != 0 else "",
            detail=self.detail or words.text,
            traceback=words.stack,
            stop_signal=self.stop_signal,
            log_path=self.plan.log_path,
            **_collective(snapshot),
        )

    def _memory_detail(self, peak: int) -> str:
        """SIGKILL that nobody here sent: the kernel's, if it has killed something for want of memory meanwhile."""
        if not self._ledger.explains(self.pid, self._kills_before, self.own_group):
            return ""
        return f"out of memory (the kernel ended it; it had used up to {peak / 2**30:.1f} GiB)"

    def _close(self) -> None:
        self.is_gone = True
        self.transcript.close()
        if self.own_group is not None:
            self.own_group.remove()
        if self._pidfd >= 0:
            self._loop.remove(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._channel is not None:
            self._loop.remove(self._channel.fileno())
            self._channel.close()
        self.witness.close()
        if self.box is not None:
            self.box.close()
            self.box = None

    # --- what it says itself ---

    def _on_frames(self, frames: list[Frame]) -> None:
        for frame in frames:
            match frame.header["op"]:
                case "raised":
                    self._on_raised(frame.header)
                case "cell":
                    self._on_cell(frame)
                case "leaving" if self.stop_signal is None:
                    self.left = frame.header["code"]
                case "fact":
                    self._on_fact(frame.header)
                case "consistency":
                    self._on_consistency(frame.header["fields"])
                case "witness":
                    self.witness.offered(frame)
                case "evidence":
                    self.witness.answered(frame)
                case _:
                    self.on_frame(frame)

    def _on_fact(self, header: Header) -> None:
        """What the rank puts into the record: of a rank's own kinds only, since any program may write to its line."""
        if header["event"] not in FACTS:
            return
        fields = {"time": self._loop.wall(), "restart_count": self.restart_count, **header["fields"]}
        if header["event"] in ("NonFiniteFound", "FaultHappened"):
            fields["rank"] = self.rank
        if header["event"] == "FaultHappened":
            fields["step"] = self.last_step
        event = msgspec.convert({**fields, "event": header["event"]}, Event)
        self.emit(self._explained(event) if isinstance(event, (DataDoubted, GradientMismatched)) else event)

    def _explained(self, event: DataDoubted | GradientMismatched) -> Event:
        """With its cause, which goes to the log as well, but where it may be on purpose."""
        if isinstance(event, DataDoubted):
            why = explain_data(event.doubt, event.step)
        else:
            why = explain(event.mismatch, event.step)
        if why.severity is Severity.ERROR or isinstance(event, GradientMismatched):
            self.transcript.note(why.line())
        return msgspec.structs.replace(event, finding=why)

    def _on_consistency(self, fields: dict[str, Any]) -> None:
        about = {"job_id": self.job_id, "restart_count": self.restart_count, "rank": self.rank}
        told = {**fields, **about}
        is_look = "samples" in fields
        self.emit(msgspec.convert(told, GradientStatistics) if is_look else msgspec.convert(told, ConsistencyReport))

    def _on_raised(self, header: Header) -> None:
        if self.stop_signal is None:
            self.left = 1
        snapshot = self._snapshot()
        error = header["error"]
        if (killed := KILLED_WORKER.search(error)) and self._ledger.explains(int(killed[1]), self._kills_before):
            error = f"{error} (out of memory: the kernel ended it)"
        raised = RankRaised(
            time=self._loop.wall(),
            restart_count=self.restart_count,
            rank=self.rank,
            error=error,
            traceback=header["traceback"],
            is_collective=header["is_collective"],
            step=_step(snapshot),
            **_collective(snapshot),
        )
        self.emit(raised)

    def _on_cell(self, frame: Frame) -> None:
        # What the cell wrote lies in the pipes by now, and is to be seen before its answer.
        self.transcript.drain()
        self.transcript.flush(everything=True)
        header = frame.header
        self.cells.discard(header["cell_id"])
        finished = CellFinished(
            job_id=self.job_id,
            cell_id=header["cell_id"],
            rank=self.rank,
            ok=header["ok"],
            data=header.get("data", {}),
            error=header.get("error", ""),
            traceback=header.get("traceback", ""),
            payload=frame.payload,
            seconds=header.get("seconds", 0.0),
        )
        self.emit(finished)

    def _answer_cells(self) -> None:
        reason = f"rank {self.rank} ended before it had answered"
        for cell_id in sorted(self.cells):
            self.emit(CellFinished(job_id=self.job_id, cell_id=cell_id, rank=self.rank, ok=False, error=reason))
        self.cells.clear()

    def tell(self, header: Header, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Send the rank a frame; the descriptors are closed once they are on their way."""
        assert self._channel is not None
        self._loop.send(self._channel, header, payload, fds)

    # --- its black box ---

    @property
    def last_step(self) -> int | None:
        """The last step that it has finished; None before the first."""
        return _step(self._snapshot())

    def _snapshot(self) -> Snapshot | None:
        return blackbox.read_header(self.box) if self.box is not None else None

    def report_steps(self) -> None:
        """Tell of the steps finished since the last report."""
        if self.box is None:
            return
        block, self._cursor, dropped = blackbox.read_steps(self.box, self._cursor)
        if block:
            steps = StepsTaken(
                job_id=self.job_id, restart_count=self.restart_count, rank=self.rank, block=block, dropped=dropped,
                learning_rate=blackbox.read_learning_rate(self.box),
            )  # fmt: skip
            self.emit(steps)

    # --- signals ---

    def stop(self, grace: float) -> None:
        """SIGTERM, and SIGKILL for the whole group when the rank has not ended `grace` s later.

        SIGTERM goes to the rank alone: its DataLoader workers may be what it needs to save a last checkpoint. What it
        leaves in its group when it ends is killed then.
        """
        if grace <= 0 or not self.pid:
            self.kill_group()
            return
        self._note_stop(signal.SIGTERM)
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)  # a stopped process takes no SIGTERM
        self._loop.call_at(self._loop.now() + grace, self.kill_group)

    def kill_group(self) -> None:
        """SIGKILL to the rank and all that it started, to end it; one that is being forked gets it when it is there."""
        if not self.is_gone:
            self._note_stop(signal.SIGKILL)
            self._kill_group()

    def _note_stop(self, number: int) -> None:
        """It is being ended by us, unless it has ended already, unseen yet: then its exit is its own."""
        if self._pidfd < 0 or not is_readable(self._pidfd):
            self.stop_signal = number

    def _kill_group(self) -> None:
        if self.send_signal(signal.SIGKILL):
            with suppress(OSError):  # it has not made its group yet
                os.killpg(self.pid, signal.SIGKILL)

    def send_signal(self, number: int) -> bool:
        """Send a signal to the rank's process alone; False when it is not there."""
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True


def is_readable(fd: int) -> bool:
    """Whether reading would not wait; for a pidfd: the process has ended. (`select` takes no number above 1023.)"""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _collective(snapshot: Snapshot | None) -> dict[str, Any]:
    """The collective that the rank entered last, as fields of an event; none that has no number to compare by."""
    if snapshot is None or not snapshot.collective_seq:
        return {}
    return {"collective": snapshot.collective, "collective_seq": snapshot.collective_seq}


def _step(snapshot: Snapshot | None) -> int | None:
    """The last step finished, None before the first."""
    return snapshot.step or None if snapshot else None

"""One worker's agent, simulated: it takes commands, keeps pretended processes, and answers with events.

It reads no clock: every method that tells something is handed the time.
"""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from workbench.commands import RequestCheckpoint, StartRanks, StartStore, StopRanks
from workbench.events import (
    CheckpointSaved,
    Event,
    LaunchFailed,
    RankExited,
    RankRaised,
    RankStarted,
    StoreAwaited,
    StoreStarted,
)
from workbench.state import Checkpoint

PORT: Final = 29500

AgentCommand = StartStore | StartRanks | StopRanks | RequestCheckpoint


@dataclass
class FakeRank:
    """One simulated process; `is_starting` until its agent has told that it runs."""

    job_id: str
    restart_count: int
    rank: int
    pid: int
    is_starting: bool = True
    stop_signal: int | None = None
    kill_at: float | None = None


@dataclass
class FakeAgent:
    """What is set here holds for what the agent does next.

    `refuse_store` and `refuse_ranks` are reasons, each used once; `is_slow`: ranks start at `start_ranks` only;
    `is_stubborn`: ranks ignore SIGTERM; `saves`: ranks save a checkpoint when asked, at `step`.
    """

    worker: str
    slots: int
    host: str = "127.0.0.1"
    refuse_store: str = ""
    refuse_ranks: dict[int, str] = field(default_factory=dict)
    is_slow: bool = False
    is_stubborn: bool = False
    saves: bool = False
    step: int = 0
    commands: deque[AgentCommand] = field(default_factory=deque)
    events: deque[tuple[str, Event]] = field(default_factory=deque)
    ranks: list[FakeRank] = field(default_factory=list)
    stores: set[tuple[str, int]] = field(default_factory=set)
    last_pid: int = 1000

    def carry(self, now: float) -> bool:
        """Do the next command; whether there was one."""
        if not self.commands:
            return False
        match self.commands.popleft():
            case StartStore() as command:
                self._start_store(command, now)
            case StartRanks() as command:
                self._take_ranks(command, now)
            case StopRanks() as command:
                self._stop(command, now)
            case RequestCheckpoint() as command:
                self._save(command, now)
        return True

    def start_ranks(self, now: float) -> None:
        """The ranks that were told to start run now."""
        for process in [p for p in self.ranks if p.is_starting]:
            process.is_starting = False
            started = RankStarted(
                time=now,
                restart_count=process.restart_count,
                rank=process.rank,
                pid=process.pid,
                log_path=f"/logs/{process.job_id}/rank{process.rank}.log",
            )
            self.events.append((process.job_id, started))

    def say_raised(self, process: FakeRank, now: float, error: str, *, is_collective: bool) -> None:
        raised = RankRaised(
            time=now,
            restart_count=process.restart_count,
            rank=process.rank,
            error=error,
            traceback=f"Traceback (most recent call last):\n{error}",
            is_collective=is_collective,
        )
        self.events.append((process.job_id, raised))

    def end(self, process: FakeRank, now: float, *, exit_code: int | None = None, number: int | None = None) -> None:
        """The process is gone."""
        self.ranks.remove(process)
        exited = RankExited(
            time=now,
            restart_count=process.restart_count,
            rank=process.rank,
            exit_code=exit_code,
            signal=number,
            stop_signal=process.stop_signal,
        )
        self.events.append((process.job_id, exited))

    def end_graces(self, now: float) -> None:
        """Kill what was told to stop and has not by now."""
        for process in [p for p in self.ranks if p.kill_at is not None and p.kill_at <= now]:
            self._signal(process, now, signal.SIGKILL)

    def _start_store(self, command: StartStore, now: float) -> None:
        reason, self.refuse_store = self.refuse_store, ""
        event: Event
        if reason and command.patience:  # it comes free in time
            waits = StoreAwaited(time=now, restart_count=command.restart_count, reason=reason)
            self.events.append((command.job_id, waits))
        if reason and not command.patience:
            event = LaunchFailed(time=now, restart_count=command.restart_count, worker=self.worker, reason=reason)
        else:
            self.stores.add((command.job_id, command.restart_count))
            event = StoreStarted(
                time=now, restart_count=command.restart_count, host=command.host, port=command.port or PORT
            )
        self.events.append((command.job_id, event))

    def _take_ranks(self, command: StartRanks, now: float) -> None:
        for rank in [placement.rank for placement in command.placements]:
            assert all((p.job_id, p.rank) != (command.job_id, rank) for p in self.ranks), f"rank {rank} runs already"
            if reason := self.refuse_ranks.pop(rank, ""):
                failed = LaunchFailed(
                    time=now, restart_count=command.restart_count, worker=self.worker, reason=reason, rank=rank
                )
                self.events.append((command.job_id, failed))
                continue
            self.last_pid += 1
            self.ranks.append(FakeRank(command.job_id, command.restart_count, rank, self.last_pid))
        if not self.is_slow:
            self.start_ranks(now)

    def _save(self, command: RequestCheckpoint, now: float) -> None:
        """Every rank's state at `step`; the agent that has rank 0 tells of it."""
        if self.saves and any(p.rank == 0 and p.job_id == command.job_id for p in self.ranks):
            saved = Checkpoint(step=self.step, path=f"/ckpt/step-{self.step}", world_size=1, saved_at=now)
            event = CheckpointSaved(time=now, restart_count=command.restart_count, checkpoint=saved)
            self.events.append((command.job_id, event))

    def _stop(self, command: StopRanks, now: float) -> None:
        generation = (command.job_id, command.restart_count)
        self.stores.discard(generation)
        for process in [p for p in self.ranks if (p.job_id, p.restart_count) == generation]:
            if command.grace <= 0 or process.is_starting:
                self._signal(process, now, signal.SIGKILL)
            elif not self.is_stubborn:
                self._signal(process, now, signal.SIGTERM)
            elif process.stop_signal is None:
                process.stop_signal, process.kill_at = int(signal.SIGTERM), now + command.grace

    def _signal(self, process: FakeRank, now: float, number: signal.Signals) -> None:
        process.stop_signal = int(number)
        self.end(process, now, number=int(number))

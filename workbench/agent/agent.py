"""One host's agent: takes commands, keeps the processes they ask for, and tells what becomes of them.

Everything happens in one thread of its own, so nothing is locked. It is the ancestor (through zygotes) of every process
that it starts, and each of them ends when it does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from workbench.agent.cells import Cells
from workbench.agent.evidence import Question, ask, gather
from workbench.agent.faults import inject
from workbench.agent.jobs import Jobs
from workbench.agent.launch import Host
from workbench.agent.logs import LogPage, read_page
from workbench.agent.loop import Loop
from workbench.agent.stacks import dump_stacks
from workbench.agent.usage import NoDevices, find_devices
from workbench.agent.watch import Watch
from workbench.agent.zygotes import Zygotes
from workbench.commands import (
    AgentCommand,
    ExecuteCell,
    ForgetJob,
    InjectFault,
    InterruptRanks,
    KeepEnvironment,
    PullValue,
    PushValue,
    RequestCheckpoint,
    StartRanks,
    StartStore,
    StopRanks,
)
from workbench.events import Event
from workbench.evidence import RankEvidence
from workbench.requests import ListCheckpoints
from workbench.state import Checkpoint
from workbench.telemetry import Report

T = TypeVar("T")
ASK: Final = 5.0  # s that another thread waits for the loop at most


class Agent:
    """Start it, submit commands from any thread, and `stop` it: it then leaves no process behind.

    `worker` is put into events. Logs go to `jobs_dir/<job>/logs/rank<k>.log`. `emit(job_id, news)` is called from the
    agent's thread and must not block. `gpus` are this host's devices by slot, as CUDA_VISIBLE_DEVICES would name them.
    """

    def __init__(
        self,
        *,
        worker: str,
        jobs_dir: Path,
        emit: Callable[[str, Event | Report], None],
        python: str = sys.executable,
        preload: tuple[str, ...] = (),
        gpus: tuple[str, ...] = (),
    ) -> None:
        self._loop = Loop()
        self._jobs_dir = jobs_dir
        host = Host(environ=dict(os.environ), gpus=gpus, python=python)
        self._zygotes = Zygotes(self._loop, host.environ, python, preload)
        self._jobs = Jobs(self._loop, self._zygotes, host, jobs_dir, worker, emit)
        self._cells = Cells(self._jobs)
        self._gpus = gpus
        self._thread = threading.Thread(target=self._run, name="dtrain-agent", daemon=True)

    def start(self) -> None:
        """Start the thread; the zygote warms up in the background."""
        self._loop.post(self._zygotes.warm_up)
        self._loop.post(self._begin_to_watch)
        self._thread.start()

    def serve(self, worker: str) -> None:
        """For another worker from now on; thread-safe."""
        self._loop.post(lambda: self._jobs.serve(worker))

    def rest(self, reason: str, timeout: float = 5.0) -> None:
        """Kill every rank and see it gone; zygotes stay, and what is kept for jobs. Thread-safe."""
        deadline, is_clear = time.monotonic() + timeout, False
        while not is_clear and time.monotonic() < deadline:
            with suppress(TimeoutError):
                is_clear = self._ask(lambda: self._clear(reason))
            time.sleep(0.005)

    def _clear(self, reason: str) -> bool:
        self.end_ranks(reason)  # again and again: what was under way may have started something
        return self._jobs.is_idle

    def environments(self) -> dict[str, dict[str, str]]:
        """What `KeepEnvironment` gave, by job; thread-safe."""
        return dict(self._jobs.environments)

    def stop(self, timeout: float = 5.0) -> None:
        """Kill everything that was started, and end the thread. Does nothing the second time."""
        if not self._thread.is_alive():
            return
        deadline = self._loop.now() + timeout / 2
        self._loop.post(lambda: self._shut_down(deadline))
        self._thread.join(timeout)

    def submit(self, command: AgentCommand) -> None:
        """Have a command carried out; its results come through `emit`. Returns at once; thread-safe."""
        self._loop.post(lambda: self._carry_out(command))

    def call_every(self, seconds: float, call: Callable[[], object]) -> None:
        """Have the agent's thread call this again and again while it lives; thread-safe."""

        def again() -> None:
            self._loop.call_at(self._loop.now() + seconds, again)
            call()

        self._loop.post(again)

    def end_ranks(self, reason: str) -> None:
        """Kill every rank, for a reason that is told with its end. In the agent's thread."""
        for process in self._jobs.ranks.values():
            process.detail = reason
        self._jobs.kill_all()

    @property
    def is_warm(self) -> bool:
        """Whether ranks can be forked at once; thread-safe."""
        return self._zygotes.is_warm

    @property
    def is_idle(self) -> bool:
        """Whether no process of any job is left. In the agent's thread."""
        return self._jobs.is_idle

    def read_log(
        self, job_id: str, rank: int, *, tail: int | None, grep: str | None, since: int = 0, limit: int = 2**20
    ) -> LogPage:
        """A page of a rank's log, from files only: also of a rank that has long ended. See `logs.read_page`."""
        if job_id != Path(job_id).name or job_id in ("", ".", ".."):
            raise ValueError(f"{job_id!r} is no job id")
        path = self._jobs_dir / job_id / "logs" / f"rank{rank}.log"
        return read_page(path, tail=tail, grep=grep, since=since, limit=limit)

    def list_checkpoints(self, question: ListCheckpoints) -> list[Checkpoint]:
        """A job's on disk, newest first, from files only."""
        folder = Path(question.folder) if question.folder else self._jobs_dir / question.job_id / "checkpoints"
        return self._jobs.checkpoints.listing(folder, thorough=question.thorough)

    def stacks(self, job_id: str, timeout: float = 10.0) -> dict[int, str]:
        """Each running rank's Python stack as text; where it cannot be had, why."""
        return dump_stacks(self._ask(lambda: self._jobs.pids(job_id)), timeout)

    def evidence(self, job_id: str, restart_count: int, *, deep: bool, timeout: float) -> list[RankEvidence]:
        """What can be known now of the generation's ranks here; `deep`: with their stacks and their own answers."""
        questions = self._ask(lambda: self._question(job_id, restart_count, deep))
        return gather(questions, timeout) if deep else [question.seen for question in questions]

    def _question(self, job_id: str, restart_count: int, deep: bool) -> list[Question]:
        return [
            ask(process, self._watch.pulse(process), deep=deep)
            for process in self._jobs.ranks.values()
            if (process.job_id, process.restart_count) == (job_id, restart_count) and process.pid
        ]

    def zygote_pids(self) -> tuple[int, ...]:
        """The zygotes that live now, the default one first."""
        return self._ask(self._zygotes.pids)

    def _ask(self, question: Callable[[], T]) -> T:
        """Have the loop's thread answer; raises `RuntimeError` when it has ended, `TimeoutError` when it is stuck."""
        if not self._thread.is_alive():
            raise RuntimeError("the agent has been stopped")
        future: Future[T] = Future()
        self._loop.post(lambda: future.set_result(question()))
        return future.result(ASK)

    def _run(self) -> None:
        try:
            self._loop.run()
        finally:
            self._loop.close()

    def _begin_to_watch(self) -> None:
        devices = find_devices() if self._gpus else NoDevices()
        self._watch = Watch(self._loop, self._jobs.ranks, self._gpus, devices)
        self._jobs.on_rank = self._watch.begin

    def _shut_down(self, deadline: float) -> None:
        """Kill, see them gone, and only then let their zygotes go."""
        self._jobs.kill_all()
        if not self._jobs.is_idle and self._loop.now() < deadline:
            self._loop.call_at(self._loop.now() + 0.01, lambda: self._shut_down(deadline))
            return
        self._zygotes.end_all()
        self._jobs.kept.close()
        self._loop.stop()

    def _carry_out(self, command: AgentCommand) -> None:
        match command:
            case StartStore():
                self._jobs.start_store(command)
            case StartRanks():
                self._jobs.start_ranks(command)
            case StopRanks():
                self._jobs.stop_ranks(command)
            case InjectFault():
                inject(self._jobs, command)
            case RequestCheckpoint():
                self._jobs.request_checkpoint(command)
            case KeepEnvironment():
                self._jobs.environments[command.job_id] = command.env
            case ForgetJob():
                self._jobs.forget(command)
            case ExecuteCell() | PushValue() | PullValue():
                self._cells.ask(command)
            case InterruptRanks():
                self._cells.interrupt(command)

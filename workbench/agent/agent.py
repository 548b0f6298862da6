"""One host's keeper of ranks: starts, watches and stops them, and says what it sees.

One thread with one selector; commands come through a queue, and everything else is a file descriptor: the zygote's
socket, ranks' pipes and control sockets, their pidfds. Nothing here decides: facts go out through `emit`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil

from workbench import blackbox
from workbench.agent import wire
from workbench.agent.contract import rank_environment
from workbench.agent.logs import Display, LogFile, LogPage, read_page
from workbench.commands import (
    AgentCommand,
    ExecuteCell,
    InjectFault,
    InterruptRanks,
    PullValue,
    PushValue,
    StartRanks,
    StartStore,
    StopRanks,
)
from workbench.events import Event, LaunchFailed, RankExited, RankRaised, RankStarted, StoreStarted
from workbench.state import Placement
from workbench.telemetry import CellFinished, OutputWritten, RankBeat, Report, StepsTaken

TICK: Final = 0.1
PIPE: Final = 2**20
FAULTS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}


class Rank:
    """What the agent holds of one rank."""

    def __init__(self, command: StartRanks, place: Placement, log: LogFile) -> None:
        self.job_id, self.restart_count, self.rank = command.job_id, command.restart_count, place.rank
        self.log = log
        self.box_fd = os.memfd_create("dtrain-box")
        os.ftruncate(self.box_fd, blackbox.SIZE)
        self.box = mmap.mmap(self.box_fd, blackbox.SIZE)
        blackbox.format_box(self.box)
        self.control, self.control_far = socket.socketpair()
        self.reader = wire.Reader()
        self.pipes: dict[int, str] = {}
        self.far: list[int] = []
        for stream in ("stdout", "stderr"):
            near, far = os.pipe2(os.O_CLOEXEC)
            with contextlib.suppress(OSError):
                import fcntl

                fcntl.fcntl(near, fcntl.F_SETPIPE_SZ, PIPE)
            os.set_blocking(near, False)
            self.pipes[near] = stream
            self.far.append(far)
        self.display = {"stdout": Display(), "stderr": Display()}
        self.pid = 0
        self.pidfd = -1
        self.status: int | None = None
        self.cursor = 0
        self.stop_signal: int | None = None
        self.left: int | None = None
        self.kill_at: float | None = None
        self.process: psutil.Process | None = None
        self.beat = (-1, -1, 0.0)
        self.usage = (0, 0.0, 0.0)


class Agent:
    """See the module. `submit`, `read_log` and `stacks` may be called from any thread."""

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
        self._worker, self._dir, self._emit = worker, jobs_dir, emit
        self._python, self._preload, self._gpus = python, preload, gpus
        self._queue: queue.SimpleQueue[AgentCommand | None] = queue.SimpleQueue()
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="dtrain-agent", daemon=True)
        self._ranks: dict[tuple[str, int], Rank] = {}
        self._by_pid: dict[int, Rank] = {}
        self._stores: dict[str, int] = {}
        self._zygote: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._reader = wire.Reader()
        self._ready = False
        self._asked: dict[int, Any] = {}
        self._waiting: list[tuple[dict[str, Any], list[int], Any]] = []
        self._next = 0
        self._stopping = False

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        self._queue.put(None)
        self._poke()
        self._thread.join(timeout)

    def submit(self, command: AgentCommand) -> None:
        self._queue.put(command)
        self._poke()

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._waker, b"x")

    def zygote_pids(self) -> tuple[int, ...]:
        return (self._zygote.pid,) if self._zygote is not None else ()

    # --- the loop ---

    def _run(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_wake)
        self._start_zygote()
        next_tick = time.monotonic() + TICK
        while not self._stopping:
            timeout = max(0.0, min([next_tick, *self._deadlines()]) - time.monotonic())
            for key, _ in self._selector.select(timeout):
                key.data()
            now = time.monotonic()
            self._show(now)
            self._kill_due(now)
            if now >= next_tick:
                self._telemetry()
                next_tick = now + TICK
        self._end()

    def _deadlines(self) -> list[float]:
        found = []
        for rank in self._ranks.values():
            found += [due for shown in rank.display.values() if (due := shown.due()) is not None]
            if rank.kill_at is not None:
                found.append(rank.kill_at)
        return found

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        while True:
            try:
                command = self._queue.get_nowait()
            except queue.Empty:
                return
            if command is None:
                self._stopping = True
                return
            self._carry_out(command)

    def _carry_out(self, command: AgentCommand) -> None:
        match command:
            case StartStore():
                self._start_store(command)
            case StartRanks():
                for place in command.placements:
                    self._start_rank(command, place)
            case StopRanks():
                self._stop_job(command)
            case InjectFault():
                rank = self._ranks.get((command.job_id, command.rank))
                if rank is not None and rank.status is None:
                    os.kill(rank.pid, FAULTS[command.fault])
            case ExecuteCell():
                self._to_ranks(command, {"op": "execute", "source": command.source})
            case PushValue():
                self._to_ranks(command, {"op": "push", "name": command.name}, command.payload)
            case PullValue():
                self._to_ranks(command, {"op": "pull", "name": command.name})
            case InterruptRanks():
                for number in command.ranks:
                    rank = self._ranks.get((command.job_id, number))
                    if rank is not None and rank.status is None:
                        self._frame(rank, {"op": "interrupt"})
                        os.kill(rank.pid, signal.SIGINT)

    def _to_ranks(self, command: Any, header: dict[str, Any], payload: bytes = b"") -> None:
        for number in command.ranks:
            rank = self._ranks.get((command.job_id, number))
            if rank is None or rank.status is not None:
                answer = CellFinished(
                    job_id=command.job_id, cell_id=command.cell_id, rank=number, ok=False, error="the rank is gone"
                )
                self._emit(command.job_id, answer)
            else:
                self._frame(rank, {**header, "cell_id": command.cell_id}, payload)

    def _frame(self, rank: Rank, header: dict[str, Any], payload: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            rank.control.setblocking(True)
            wire.send(rank.control, header, payload)
            rank.control.setblocking(False)

    # --- the zygote ---

    def _start_zygote(self) -> None:
        near, far = socket.socketpair()
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        file = str(Path(__file__).with_name("zygote.py"))
        argv = [self._python, file, str(far.fileno()), str(os.getpid()), ",".join(self._preload)]
        self._zygote = subprocess.Popen(argv, pass_fds=[far.fileno()], env=env, stdin=subprocess.DEVNULL)
        far.close()
        self._sock, self._reader, self._ready = near, wire.Reader(), False
        self._selector.register(near, selectors.EVENT_READ, self._on_zygote)

    def _on_zygote(self) -> None:
        assert self._sock is not None
        try:
            alive = wire.receive(self._sock, self._reader)
        except OSError:
            alive = False
        for header, _, _ in self._reader.frames():
            match header["op"]:
                case "ready":
                    self._ready = True
                    waiting, self._waiting = self._waiting, []
                    for ask in waiting:
                        self._fork(*ask)
                case "forked":
                    self._asked.pop(header["id"])(header["pid"])
                case "exited":
                    self._reaped(header["pid"], header["status"])
        if not alive:
            self._zygote_died()

    def _zygote_died(self) -> None:
        assert self._sock is not None and self._zygote is not None
        self._selector.unregister(self._sock)
        self._sock.close()
        self._zygote.wait()
        self._zygote, self._sock, self._ready = None, None, False
        for rank in list(self._by_pid.values()):
            if rank.status is None:
                self._exited(rank, None, "lost with its zygote")
        self._stores.clear()

    def _fork(self, header: dict[str, Any], fds: list[int], then: Callable[[int], None]) -> None:
        if self._zygote is None:
            self._start_zygote()
        if not self._ready:
            self._waiting.append((header, fds, then))
            return
        assert self._sock is not None
        self._next += 1
        self._asked[self._next] = then
        wire.send(self._sock, {**header, "op": "fork", "id": self._next, "fds": len(fds)}, fds=fds)
        for fd in fds:
            os.close(fd)

    # --- start ---

    def _start_store(self, command: StartStore) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((command.host, command.port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            why = f"port {command.port} is in use on {command.host}" if command.port else str(error)
            self._emit(
                command.job_id,
                LaunchFailed(
                    time=time.time(), restart_count=command.restart_count, worker=self._worker, reason=f"{why}"
                ),
            )
            return
        port = listener.getsockname()[1]

        def started(pid: int) -> None:
            self._stores[command.job_id] = pid

        self._fork({"kind": "store"}, [listener.detach()], started)
        self._emit(
            command.job_id,
            StoreStarted(time=time.time(), restart_count=command.restart_count, host=command.host, port=port),
        )

    def _start_rank(self, command: StartRanks, place: Placement) -> None:
        spec = command.spec
        path = self._dir / command.job_id / "logs" / f"rank{place.rank}.log"
        rank = Rank(command, place, LogFile(path, spec.log_limit))
        old = self._ranks.get((command.job_id, place.rank))
        if old is not None:
            self._forget(old)
        self._ranks[command.job_id, place.rank] = rank
        contract = rank_environment(
            rank=place.rank,
            local_rank=place.local_rank,
            node_rank=place.node_rank,
            world_size=command.world_size,
            local_world_size=spec.nproc_per_node,
            nnodes=command.nnodes,
            master=command.master,
            job_id=command.job_id,
            restart_count=command.restart_count,
            max_restarts=spec.max_restarts,
        )
        env = {**os.environ, **spec.env, **contract}
        if spec.nproc_per_node > 1:
            env.setdefault("OMP_NUM_THREADS", "1")
        request = {
            "kind": "rank",
            "rank": place.rank,
            "entry": spec.kind.value,
            "entrypoint": spec.entrypoint,
            "args": list(spec.args),
            "source": spec.source,
            "cwd": spec.cwd or str(Path.home()),
            "seed": spec.seed,
            "env": env,
        }
        fds = [rank.box_fd, rank.control_far.detach(), *rank.far]
        self._fork(request, fds, lambda pid: self._started(rank, pid, spec.payload))

    def _started(self, rank: Rank, pid: int, payload: bytes) -> None:
        rank.pid = pid
        self._by_pid[pid] = rank
        rank.control.setblocking(False)
        self._selector.register(rank.control, selectors.EVENT_READ, lambda: self._on_control(rank))
        for fd in rank.pipes:
            self._selector.register(fd, selectors.EVENT_READ, lambda fd=fd: self._on_output(rank, fd))
        with contextlib.suppress(psutil.Error):
            rank.process = psutil.Process(pid)
        if payload:
            self._frame(rank, {"op": "call"}, payload)
        self._emit(
            rank.job_id,
            RankStarted(
                time=time.time(),
                restart_count=rank.restart_count,
                rank=rank.rank,
                pid=pid,
                log_path=str(rank.log.path),
            ),
        )

    # --- what ranks say ---

    def _on_output(self, rank: Rank, fd: int, most: int = 4) -> None:
        for _ in range(most):
            try:
                data = os.read(fd, PIPE)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(fd)
                os.close(fd)
                del rank.pipes[fd]
                return
            rank.log.write(data)
            rank.display[rank.pipes[fd]].add(data, time.monotonic())

    def _show(self, now: float, only: Rank | None = None) -> None:
        for rank in [only] if only is not None else list(self._ranks.values()):
            for stream, display in rank.display.items():
                due = display.due()
                if due is not None and (only is not None or due <= now):
                    text, offset, dropped = display.take(now)
                    chunk = OutputWritten(
                        job_id=rank.job_id,
                        rank=rank.rank,
                        stream=stream,
                        text=text,
                        time=time.time(),
                        offset=offset,
                        dropped=dropped,
                    )
                    self._emit(rank.job_id, chunk)

    def _drain(self, rank: Rank) -> None:
        for fd in list(rank.pipes):
            self._on_output(rank, fd, 256)
        self._show(time.monotonic(), rank)

    def _on_control(self, rank: Rank) -> None:
        try:
            alive = wire.receive(rank.control, rank.reader, 2**20)
        except BlockingIOError:
            return
        except OSError:
            alive = False
        for header, payload, _ in rank.reader.frames():
            self._said(rank, header, payload)
        if not alive:
            with contextlib.suppress(KeyError):
                self._selector.unregister(rank.control)

    def _said(self, rank: Rank, header: dict[str, Any], payload: bytes) -> None:
        match header["op"]:
            case "raised":
                step = blackbox.read_header(rank.box).step
                event = RankRaised(
                    time=time.time(),
                    restart_count=rank.restart_count,
                    rank=rank.rank,
                    error=header["error"],
                    traceback=header["traceback"],
                    is_collective=header["is_collective"],
                    step=step or None,
                )
                self._emit(rank.job_id, event)
            case "cell":
                self._drain(rank)
                answer = CellFinished(
                    job_id=rank.job_id,
                    rank=rank.rank,
                    payload=payload,
                    **{k: v for k, v in header.items() if k not in ("op", "fds")},
                )
                self._emit(rank.job_id, answer)
            case "leaving":
                # The interpreter's end takes a while, and its sockets close early: peers fail, and the stop that this
                # brings about may find the rank still leaving. It left of itself all the same, with this code.
                rank.left = header["code"]
            case "note":
                rank.display["stderr"].add((header["text"] + "\n").encode(), time.monotonic())

    # --- ends ---

    def _reaped(self, pid: int, status: int) -> None:
        for job_id, store in list(self._stores.items()):
            if store == pid:
                del self._stores[job_id]
                return
        rank = self._by_pid.get(pid)
        if rank is not None and rank.status is None:
            self._exited(rank, status, "")

    def _exited(self, rank: Rank, status: int | None, detail: str) -> None:
        rank.status = status if status is not None else -1
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)
        self._on_control(rank)
        self._drain(rank)
        self._steps(rank)
        if rank.left is not None and rank.stop_signal is not None:
            status, rank.stop_signal = rank.left << 8, None
        snap = blackbox.read_header(rank.box)
        doing = f"in {snap.collective}" if snap.activity is blackbox.Activity.COLLECTIVE else ""
        event = RankExited(
            time=time.time(),
            restart_count=rank.restart_count,
            rank=rank.rank,
            exit_code=os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
            signal=os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
            step=snap.step or None,
            doing=doing,
            detail=detail,
            stop_signal=rank.stop_signal,
            log_path=str(rank.log.path),
        )
        self._by_pid.pop(rank.pid, None)
        rank.kill_at = None
        self._emit(rank.job_id, event)
        self._forget(rank)

    def _forget(self, rank: Rank) -> None:
        for fd in list(rank.pipes):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fd)
            os.close(fd)
        rank.pipes.clear()
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(rank.control)
        rank.control.close()
        rank.log.close()
        rank.box.close()
        if self._ranks.get((rank.job_id, rank.rank)) is rank:
            del self._ranks[rank.job_id, rank.rank]

    def _stop_job(self, command: StopRanks) -> None:
        now = time.monotonic()
        for rank in [r for (job_id, _), r in self._ranks.items() if job_id == command.job_id]:
            if rank.pid and rank.status is None and rank.restart_count <= command.restart_count:
                number = signal.SIGTERM if command.grace > 0 else signal.SIGKILL
                self._signal(rank, number)
                rank.kill_at = now + command.grace if command.grace > 0 else None
        store = self._stores.pop(command.job_id, None)
        if store is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(store, signal.SIGKILL)

    def _signal(self, rank: Rank, number: int) -> None:
        rank.stop_signal = number
        for each in (number, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, each)

    def _kill_due(self, now: float) -> None:
        for rank in list(self._ranks.values()):
            if rank.kill_at is not None and now >= rank.kill_at:
                rank.kill_at = None
                self._signal(rank, signal.SIGKILL)

    def _end(self) -> None:
        for rank in list(self._by_pid.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        if self._sock is not None:
            self._sock.close()
        if self._zygote is not None:
            try:
                self._zygote.wait(2.0)
            except subprocess.TimeoutExpired:
                self._zygote.kill()
                self._zygote.wait(2.0)
        for rank in list(self._ranks.values()):
            self._forget(rank)
        self._selector.close()
        os.close(self._wake)
        os.close(self._waker)

    # --- telemetry ---

    def _steps(self, rank: Rank) -> None:
        block, rank.cursor, dropped = blackbox.read_steps(rank.box, rank.cursor)
        if block or dropped:
            self._emit(
                rank.job_id,
                StepsTaken(
                    job_id=rank.job_id, restart_count=rank.restart_count, rank=rank.rank, block=block, dropped=dropped
                ),
            )

    def _telemetry(self) -> None:
        now = time.monotonic()
        for rank in self._ranks.values():
            if not rank.pid:
                continue
            self._steps(rank)
            snap = blackbox.read_header(rank.box)
            if now - rank.usage[2] > 1.0:
                self._measure(rank, now)
            if ((snap.step, int(snap.activity)) != rank.beat[:2] and now - rank.beat[2] > 0.4) or now - rank.beat[
                2
            ] > 2.0:
                rank.beat = (snap.step, int(snap.activity), now)
                self._emit(rank.job_id, self._beat(rank, snap))

    def _measure(self, rank: Rank, now: float) -> None:
        rss, cpu = rank.usage[0], rank.usage[1]
        if rank.process is not None:
            with contextlib.suppress(psutil.Error):
                family = [rank.process, *rank.process.children(recursive=True)]
                rss = sum(p.memory_info().rss for p in family)
                cpu = rank.process.cpu_percent()
        rank.usage = (rss, cpu, now)

    def _beat(self, rank: Rank, snap: blackbox.Snapshot) -> RankBeat:
        now = time.time()
        return RankBeat(
            job_id=rank.job_id,
            restart_count=rank.restart_count,
            rank=rank.rank,
            time=now,
            step=snap.step,
            activity=snap.activity.name,
            since=max(0.0, now - snap.since) if snap.since else 0.0,
            collective=snap.collective,
            collective_seq=snap.collective_seq,
            rss=rank.usage[0],
            cpu=rank.usage[1],
            progress=snap.progress,
        )

    # --- asked from other threads ---

    def read_log(
        self, job_id: str, rank: int, *, tail: int | None, grep: str | None, since: int = 0, limit: int = 2**20
    ) -> LogPage:
        return read_page(
            self._dir / job_id / "logs" / f"rank{rank}.log", tail=tail, grep=grep, since=since, limit=limit
        )

    def stacks(self, job_id: str, timeout: float = 10.0) -> dict[int, str]:
        found = {}
        for (job, number), rank in list(self._ranks.items()):
            if job == job_id and rank.pid:
                argv = ["py-spy", "dump", "--pid", str(rank.pid), "--nonblocking"]
                done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
                found[number] = done.stdout or done.stderr
        return found

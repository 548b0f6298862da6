"""The jobs' processes on this host: starting, stopping, and telling that they have ended."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from workbench.agent.checkpoints import Checkpoints
from workbench.agent.environment import decide_start, zygote_environ
from workbench.agent.keeper import Keeper, Recipe
from workbench.agent.launch import Host, describe, find_fault, rank_environ
from workbench.agent.logfile import LogFile
from workbench.agent.loop import Loop
from workbench.agent.memory import Ledger
from workbench.agent.processes import RankPlan, RankProcess
from workbench.agent.snapshots import Kept
from workbench.agent.stores import StoreProcess, listen
from workbench.agent.zygotes import Zygotes
from workbench.commands import ForgetJob, RequestCheckpoint, StartRanks, StartStore, StopRanks
from workbench.events import Event, LaunchFailed, StoreAwaited, StoreStarted
from workbench.spec import EntrypointKind
from workbench.state import Placement
from workbench.telemetry import Report

PORT_RETRY: Final = 0.1  # s between two looks whether somebody else has left it
RETRY: Final = 0.01  # s between two looks whether an earlier store of ours has left its port
Generation = tuple[str, int]


class Jobs:
    """All in the loop's thread. `emit(job_id, news)`."""

    def __init__(
        self,
        loop: Loop,
        zygotes: Zygotes,
        host: Host,
        jobs_dir: Path,
        worker: str,
        emit: Callable[[str, Event | Report], None],
    ) -> None:
        self._loop, self._zygotes, self._host, self._jobs_dir = loop, zygotes, host, jobs_dir
        self._worker, self.emit = worker, emit
        self.ranks: dict[tuple[str, int], RankProcess] = {}
        self._stores: dict[Generation, StoreProcess] = {}
        self._awaited: set[Generation] = set()  # whose store is to start as soon as it can have its port
        self._dying: set[StoreProcess] = set()  # killed, and not yet gone: each still has its port
        self._ledger = Ledger()
        self.checkpoints = Checkpoints()
        self._keepers: dict[RankProcess | StoreProcess, Keeper] = {}
        self.on_rank: Callable[[], None] = lambda: None  # there is one more
        self.kept = Kept()
        self.environments: dict[str, dict[str, str]] = {}  # by job, for a scheduler that does not know them any more

    def serve(self, worker: str) -> None:
        """The name of this host's worker, for events."""
        self._worker = worker

    # --- stores ---

    def start_store(self, command: StartStore) -> None:
        """Listen at once, so that a port in use is told at once, or try again; serve when a zygote can."""
        generation = (command.job_id, command.restart_count)
        self._kill_store(generation)
        self._awaited.add(generation)
        self._try_store(command, self._loop.now() + command.patience)

    def _try_store(self, command: StartStore, until: float, *, is_told: bool = False) -> None:
        generation = (command.job_id, command.restart_count)
        if generation not in self._awaited:  # it has been stopped meanwhile
            return
        if any(store.port == command.port for store in self._dying):
            self.call_later(RETRY, lambda: self._try_store(command, until, is_told=is_told))
            return
        try:
            listener = listen(command.host, command.port)
            keeper = self._zygotes.get(self._zygotes.default)
        except OSError as error:
            self._try_again(command, until, error, is_told=is_told)
            return
        self._awaited.discard(generation)
        store = self._stores[generation] = StoreProcess(listener, partial(self._on_store_failure, generation))
        store.on_gone = partial(self._on_store_gone, store)
        self._keepers[store] = keeper
        started = StoreStarted(
            time=self._loop.wall(), restart_count=command.restart_count, host=command.host, port=store.port
        )
        keeper.start(store)
        self.emit(command.job_id, started)

    def _try_again(self, command: StartStore, until: float, error: OSError, *, is_told: bool) -> None:
        """For a port that is in use, while there is patience: another program may have it for a moment."""
        if error.errno != errno.EADDRINUSE or self._loop.now() >= until:
            self._awaited.discard((command.job_id, command.restart_count))
            self._fail(command.job_id, command.restart_count, _no_store(command, error))
            return
        if not is_told:
            reason = f"port {command.port} is in use on {command.host}, and tried again for {command.patience:g} s"
            now = self._loop.wall()
            self.emit(command.job_id, StoreAwaited(time=now, restart_count=command.restart_count, reason=reason))
        self.call_later(PORT_RETRY, lambda: self._try_store(command, until, is_told=True))

    def _on_store_failure(self, generation: Generation, reason: str) -> None:
        if self._stores.pop(generation, None) is not None and not self._of(generation):
            self._fail(*generation, reason)

    def _kill_store(self, generation: Generation) -> None:
        self._awaited.discard(generation)
        if store := self._stores.pop(generation, None):
            store.kill()
            if self._keepers[store].forget(store):
                self._on_store_gone(store)
            else:
                self._dying.add(store)

    def _on_store_gone(self, store: StoreProcess) -> None:
        self._dying.discard(store)
        self._keepers.pop(store, None)

    # --- ranks ---

    def start_ranks(self, command: StartRanks) -> None:
        """Each rank is started by itself: one that cannot be does not keep the others from being stopped in order."""
        if fault := find_fault(command.spec, self._host):
            self._fail(command.job_id, command.restart_count, fault)
            return
        for placement in command.placements:
            if (command.job_id, placement.rank) in self.ranks:
                fault = f"rank {placement.rank} of an earlier generation still runs here"
                self._fail(command.job_id, command.restart_count, fault, placement.rank)
                continue
            try:
                self._start_rank(command, placement)
            except OSError as error:
                fault = f"{error.strerror}: {error.filename}" if error.filename else str(error)
                self._fail(command.job_id, command.restart_count, fault, placement.rank)

    def _start_rank(self, command: StartRanks, placement: Placement) -> None:
        folder = self._jobs_dir / command.job_id
        log_path = make_private(folder / "logs") / f"rank{placement.rank}.log"
        errors = make_private(folder / "errors") / f"rank{placement.rank}.restart{command.restart_count}.json"
        environ = rank_environ(command, placement, self._host, errors)
        environ.update(self.checkpoints.environ(command, folder))
        recipe = self._zygotes.recipe(command.spec.python, command.spec.preload, environ)
        zygote = zygote_environ(self._host.environ, recipe.hash_seed)
        _, cold = decide_start(environ, zygote, cold=command.spec.cold, preloads=bool(recipe.modules))
        launch = describe(command, placement, environ, recipe.python, self._program(command, folder))
        plan = RankPlan(command, placement, cold, launch, str(log_path))
        keeper = self._zygotes.get(Recipe(self._host.python, is_bare=True) if cold else recipe)
        log = LogFile(log_path, command.spec.log_limit)
        process = RankProcess(plan, log, self._loop, partial(self.emit, command.job_id), self._ledger)
        process.on_gone = partial(self._on_gone, process)
        process.on_frame = partial(self.kept.on_frame, process)
        self.ranks[command.job_id, placement.rank] = process
        self._keepers[process] = keeper
        self.on_rank()
        keeper.start(process)

    def _program(self, command: StartRanks, folder: Path) -> Path:
        """A cell's text as a file, for processes that the program spawns; written once a job."""
        path = folder / "program.py"
        if command.spec.kind is EntrypointKind.SOURCE and not path.exists():
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            temporary.touch(0o600)
            temporary.write_text(command.spec.source)
            temporary.replace(path)
        return path

    def _on_gone(self, process: RankProcess) -> None:
        self.ranks.pop((process.job_id, process.rank), None)
        self._keepers.pop(process, None)
        command, generation = process.plan.command, (process.job_id, process.restart_count)
        # On several hosts the others' ranks may still need it: there the job's end stops it.
        if len(command.placements) == command.world_size and not self._of(generation):
            self._kill_store(generation)

    def stop_ranks(self, command: StopRanks) -> None:
        """End the generation's ranks here; the store goes with the last of them, or with their grace."""
        generation = (command.job_id, command.restart_count)
        for process in self._of(generation):
            if self._keepers[process].forget(process):
                process.cancel()
            else:
                process.stop(command.grace)
        if command.grace <= 0 or not self._of(generation):
            self._kill_store(generation)
        else:
            self._loop.call_at(self._loop.now() + command.grace, lambda: self._kill_store(generation))

    def request_checkpoint(self, command: RequestCheckpoint) -> None:
        """Pass it on; a rank that saves nothing leaves it unheard."""
        for process in self._of((command.job_id, command.restart_count)):
            if process.pid:
                process.tell({"op": "checkpoint"})

    def forget(self, command: ForgetJob) -> None:
        """Let go of what was held for the job from one generation to the next."""
        self.kept.forget(command.job_id)
        self.environments.pop(command.job_id, None)

    def zygote_of(self, process: RankProcess) -> int:
        return self._keepers[process].pid

    def wall(self) -> float:
        """Seconds since the epoch, as events have them."""
        return self._loop.wall()

    def call_later(self, delay: float, call: Callable[[], None]) -> None:
        self._loop.call_at(self._loop.now() + delay, call)

    def kill_all(self) -> None:
        for process in tuple(self.ranks.values()):
            if self._keepers[process].forget(process):
                process.cancel()
            else:
                process.kill_group()
        for generation in (*self._stores, *self._awaited):
            self._kill_store(generation)

    @property
    def is_idle(self) -> bool:
        """Whether no process of any job is left."""
        return not self.ranks and not self._stores and not self._dying

    def pids(self, job_id: str) -> dict[int, int]:
        """Process ids of a job's running ranks here, by rank."""
        return {rank: process.pid for (job, rank), process in self.ranks.items() if job == job_id and process.pid}

    def _of(self, generation: Generation) -> list[RankProcess]:
        return [process for process in self.ranks.values() if (process.job_id, process.restart_count) == generation]

    def _fail(self, job_id: str, restart_count: int, reason: str, rank: int | None = None) -> None:
        failed = LaunchFailed(
            time=self._loop.wall(), restart_count=restart_count, worker=self._worker, reason=reason, rank=rank
        )
        self.emit(job_id, failed)


def _no_store(command: StartStore, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        lasting = f", and was for {command.patience:g} s" if command.patience else ""
        return f"port {command.port} is in use on {command.host}{lasting}; choose another, or 0 for any free port"
    return f"the rendezvous store cannot listen on {command.host}:{command.port}: {error.strerror or error}"


def make_private(folder: Path) -> Path:
    """The folder, made with its parents where they are missing, for this user only."""
    for path in (*reversed(folder.parents), folder):
        with suppress(FileExistsError):
            path.mkdir(0o700)
    return folder

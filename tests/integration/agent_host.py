"""One real agent, with its zygote, for a test module; and what its jobs have told so far."""

from __future__ import annotations

import itertools
import os
import signal
import textwrap
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from workbench.agent.agent import Agent
from workbench.commands import (
    ExecuteCell,
    InjectFault,
    InterruptRanks,
    PullValue,
    PushValue,
    StartRanks,
    StartStore,
    StopRanks,
)
from workbench.events import LaunchFailed, RankExited, RankRaised, RankStarted, StoreStarted
from workbench.spec import EntrypointKind, JobSpec
from workbench.state import Placement
from workbench.telemetry import CellFinished, OutputWritten

WORKER = "tcp://here"
T = TypeVar("T")


class AgentHost:
    """An agent whose news are kept by job, in order."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.news: dict[str, list[Any]] = defaultdict(list)
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self.jobs_dir = folder / "jobs"
        self.agent = Agent(worker=WORKER, jobs_dir=self.jobs_dir, emit=self._emit, **options)
        self.agent.start()

    def _emit(self, job_id: str, news: Any) -> None:
        with self._changed:
            self.news[job_id].append(news)
            self._changed.notify_all()

    # --- programs and jobs ---

    def script(self, text: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def spec(self, text: str, **fields: Any) -> JobSpec:
        """A script with this text, in a file of its own."""
        path = self.script(text, f"train{next(self._numbers)}.py")
        return JobSpec(entrypoint=str(path), cwd=str(self.folder), **fields)

    def start(self, spec: JobSpec, ranks: int = 1, restart_count: int = 0, job_id: str = "", **options: Any) -> str:
        """Start store and ranks; returns once the ranks have been asked for."""
        job_id = job_id or f"job{next(self._numbers)}"
        before = len(self.news[job_id])
        host = options.get("host", "127.0.0.1")
        self.agent.submit(
            StartStore(
                job_id=job_id,
                restart_count=restart_count,
                worker=WORKER,
                host=host,
                port=options.get("port", 0),
                patience=options.get("patience", 0.0),
            )
        )
        store = self.until(job_id, lambda: self.of(job_id, (StoreStarted, LaunchFailed), before))[0]
        if isinstance(store, StoreStarted):
            command = start_ranks(job_id, spec, ranks, restart_count, (store.host, store.port))
            self.agent.submit(command)
        return job_id

    def run(self, spec: JobSpec, ranks: int = 1, timeout: float = 30.0, **options: Any) -> str:
        """Start the job and wait until every rank has ended."""
        job_id = self.start(spec, ranks, **options)
        self.ended(job_id, ranks, timeout)
        return job_id

    def stop(self, job_id: str, grace: float = 0.0, restart_count: int = 0) -> None:
        self.agent.submit(StopRanks(job_id=job_id, restart_count=restart_count, worker=WORKER, grace=grace))

    def execute(self, job_id: str, cell_id: str, source: str, ranks: tuple[int, ...] = (0,)) -> None:
        self.agent.submit(ExecuteCell(job_id=job_id, worker=WORKER, cell_id=cell_id, source=source, ranks=ranks))

    def push(self, job_id: str, cell_id: str, name: str, payload: bytes) -> None:
        self.agent.submit(
            PushValue(job_id=job_id, worker=WORKER, cell_id=cell_id, name=name, payload=payload, ranks=(0,))
        )

    def pull(self, job_id: str, cell_id: str, name: str) -> None:
        self.agent.submit(PullValue(job_id=job_id, worker=WORKER, cell_id=cell_id, name=name, ranks=(0,)))

    def interrupt(self, job_id: str, ranks: tuple[int, ...] = (0,)) -> None:
        self.agent.submit(InterruptRanks(job_id=job_id, worker=WORKER, ranks=ranks))

    def inject(self, job_id: str, fault: str, rank: int = 0) -> None:
        self.agent.submit(InjectFault(job_id=job_id, worker=WORKER, rank=rank, fault=fault))

    # --- what they told ---

    def of(self, job_id: str, kind: type[T] | tuple[type[Any], ...], since: int = 0) -> list[T]:
        return [news for news in self.news[job_id][since:] if isinstance(news, kind)]

    def until(self, job_id: str, found: Callable[[], T], timeout: float = 30.0) -> T:
        """Wait for something true; fails with what the job has told."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not (value := found()):
                left = deadline - time.monotonic()
                assert left > 0, [str(news)[:300] for news in self.news[job_id]]
                self._changed.wait(min(left, 0.05))
        return value

    def ended(self, job_id: str, ranks: int = 1, timeout: float = 30.0) -> list[RankExited]:
        """The ranks' ends, by rank; a rank that could not be started fails the test."""

        def found() -> list[RankExited]:
            assert not self.of(job_id, LaunchFailed), self.of(job_id, LaunchFailed)
            exits: list[RankExited] = self.of(job_id, RankExited)
            return exits if len(exits) >= ranks else []

        return sorted(self.until(job_id, found, timeout), key=lambda exit: exit.rank)

    def refusal(self, job_id: str, timeout: float = 30.0) -> LaunchFailed:
        return self.until(job_id, lambda: self.of(job_id, LaunchFailed), timeout)[0]

    def started(self, job_id: str, ranks: int = 1) -> list[RankStarted]:
        return self.until(job_id, lambda: self._enough(self.of(job_id, RankStarted), ranks))

    @staticmethod
    def _enough(found: list[T], count: int) -> list[T]:
        return found if len(found) >= count else []

    def raised(self, job_id: str) -> RankRaised:
        return self.until(job_id, lambda: self.of(job_id, RankRaised))[0]

    def answer(self, job_id: str, cell_id: str, timeout: float = 20.0) -> CellFinished:
        def found() -> list[CellFinished]:
            return [cell for cell in self.of(job_id, CellFinished) if cell.cell_id == cell_id]

        return self.until(job_id, found, timeout)[0]

    def shown(self, job_id: str, rank: int = 0) -> str:
        return "".join(out.text for out in self.of(job_id, OutputWritten) if out.rank == rank)

    def says(self, job_id: str, text: str, rank: int = 0, timeout: float = 20.0) -> str:
        """Wait until the rank's output holds the text."""
        return self.until(job_id, lambda: text in self.shown(job_id, rank) and self.shown(job_id, rank), timeout)

    def log(self, job_id: str, rank: int = 0) -> str:
        return (self.jobs_dir / job_id / "logs" / f"rank{rank}.log").read_text(errors="replace")

    def output(self, text: str, ranks: int = 1, **fields: Any) -> str:
        """What a script that ends well writes on rank 0."""
        job_id = self.run(self.spec(text, **fields), ranks)
        assert [exit.exit_code for exit in self.ended(job_id, ranks)] == [0] * ranks, self.log(job_id)
        return self.log(job_id)


def start_ranks(
    job_id: str, spec: JobSpec, ranks: int, restart_count: int = 0, master: tuple[str, int] = ("127.0.0.1", 1)
) -> StartRanks:
    placements = tuple(
        Placement(rank=rank, local_rank=rank, node_rank=0, worker=WORKER, slot=rank) for rank in range(ranks)
    )
    return StartRanks(
        job_id=job_id,
        restart_count=restart_count,
        worker=WORKER,
        spec=spec,
        placements=placements,
        world_size=ranks,
        nnodes=1,
        master=master,
    )


def interactive(folder: Path) -> JobSpec:
    return JobSpec(kind=EntrypointKind.INTERACTIVE, cwd=str(folder))


def is_alive(pid: int) -> bool:
    """Whether the process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def await_gone(pids: list[int], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """Direct children, zombies too."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def descriptors(pid: int | str = "self") -> set[str]:
    return {path.name for path in Path(f"/proc/{pid}/fd").iterdir()}


@contextmanager
def agent_host(folder: Path, **options: Any) -> Iterator[AgentHost]:
    """An agent for a `with`; whatever a test did, no process of it is left."""
    made, zygotes = AgentHost(folder, **options), ()
    try:
        yield made
    finally:
        with suppress(RuntimeError):  # the test has stopped it
            zygotes = made.agent.zygote_pids()
        started = [news.pid for told in made.news.values() for news in told if isinstance(news, RankStarted)]
        made.agent.stop()
        await_gone([*zygotes, *started], 2.0)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)

"""Interactive ranks for tests: forked from a process that has torch, with a store outside them as in a job."""

from __future__ import annotations

import mmap
import multiprocessing as mp
import multiprocessing.forkserver
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workbench import blackbox

PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "cloudpickle", "workbench.training.cells"]
PATIENCE = 20.0


def context() -> Any:
    forks = mp.get_context("forkserver")
    forks.set_forkserver_preload(PRELOAD)
    return forks


def end_forkserver() -> None:
    """It would outlive the tests otherwise."""
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


def set_contract(rank: int, world_size: int, port: int) -> None:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
    values |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    values |= {"GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({key: str(value) for key, value in values.items()})


def serve(rank: int, world_size: int, port: int, control: Connection, box_path: str) -> None:
    """In the rank."""
    from workbench.training import guard, observe
    from workbench.training.cells import serve_cells
    from workbench.training.control import Control

    set_contract(rank, world_size, port)
    with Path(box_path).open("r+b") as file:
        box = blackbox.Writer(mmap.mmap(file.fileno(), blackbox.SIZE))
    guard.install()
    observe.install(box, offset=time.time() - time.monotonic())
    namespace = vars(sys.modules["__main__"])
    line = Control(lambda: (*control.recv(), ()), lambda header, payload: control.send((header, payload)), {})
    line.start()
    serve_cells(line, namespace, box)


def call(target: Callable[[int], Any], rank: int, world_size: int, port: int, result: Connection) -> None:
    """In a rank that runs a function."""
    set_contract(rank, world_size, port)
    try:
        result.send((True, target(rank)))
    except BaseException:
        result.send((False, traceback.format_exc()))
    sys.stdout.flush()


class Rank:
    """The agent's side of one interactive rank."""

    def __init__(self, rank: int, world_size: int, port: int, folder: Path) -> None:
        self.control, far = mp.Pipe()
        path = folder / f"box{rank}"
        path.write_bytes(bytes(blackbox.SIZE))
        with path.open("r+b") as file:
            self.box = mmap.mmap(file.fileno(), blackbox.SIZE)
        blackbox.format_box(self.box)
        self.process = context().Process(target=serve, args=(rank, world_size, port, far, str(path)))
        self.process.start()
        far.close()
        self._cells = 0

    def begin(self, source: str) -> str:
        return self.ask({"op": "execute", "source": source})

    def ask(self, header: dict[str, Any], payload: bytes = b"") -> str:
        self._cells += 1
        cell_id = f"cell-{self._cells}"
        self.control.send(({**header, "cell_id": cell_id}, payload))
        return cell_id

    def answer(self, timeout: float = PATIENCE) -> dict[str, Any]:
        header, payload = self.answer_with_payload(timeout)
        assert payload == b""
        return header

    def answer_with_payload(self, timeout: float = PATIENCE) -> tuple[dict[str, Any], bytes]:
        if not self.control.poll(timeout):
            raise TimeoutError(f"no answer; the rank: {blackbox.read_header(self.box)}")
        return self.control.recv()  # type: ignore[no-any-return]

    def run(self, source: str) -> dict[str, Any]:
        cell_id = self.begin(source)
        answer = self.answer()
        assert answer["cell_id"] == cell_id
        return answer

    def interrupt(self) -> None:
        """As the agent does it."""
        self.control.send(({"op": "interrupt"}, b""))
        os.kill(self.process.pid, signal.SIGINT)

    def until(self, activity: blackbox.Activity, name: str = "") -> blackbox.Snapshot:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            seen = blackbox.read_header(self.box)
            if seen.activity is activity and seen.collective.startswith(name):
                return seen
            time.sleep(0.002)
        raise TimeoutError(f"never {activity!r} in {name!r}: {seen}")

    def end(self) -> None:
        self.control.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)


@contextmanager
def store_port() -> Iterator[int]:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@contextmanager
def ranks(folder: Path, world_size: int = 2) -> Iterator[list[Rank]]:
    with store_port() as port:
        made = [Rank(rank, world_size, port, folder) for rank in range(world_size)]
        try:
            yield made
        finally:
            for rank in made:
                with suppress(OSError):
                    rank.end()


def run_in_ranks(target: Callable[[int], Any], world_size: int = 2, timeout: float = 40.0) -> list[Any]:
    """The target's result by rank; a rank that does not answer in time is killed and `TimeoutError` raised."""
    with store_port() as port:
        pairs, processes = [], []
        for rank in range(world_size):
            near, far = mp.Pipe(duplex=False)
            process = context().Process(target=call, args=(target, rank, world_size, port, far))
            process.start()
            far.close()
            pairs.append(near)
            processes.append(process)
        try:
            results = [_result(near, timeout) for near in pairs]
            for process in processes:
                process.join(10)
            assert [process.exitcode for process in processes] == [0] * world_size, "a rank did not end"
            return results
        finally:
            for process in processes:
                process.kill()
                process.join(5)


def _result(near: Connection, timeout: float) -> Any:
    if not near.poll(timeout):
        raise TimeoutError("a rank hangs")
    ok, value = near.recv()
    if not ok:
        raise AssertionError(value)
    return value

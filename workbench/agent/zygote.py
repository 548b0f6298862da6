"""A process with one thread that has imported what ranks need and forks them when its agent says so.

It never touches CUDA, runs no user's code, and ends, with every process group it started, when its agent goes away. A
zygote that has imported nothing is a keeper: its children become fresh interpreters. Standard library and torch only.

From the agent: `fork`, `exec` (descriptors: launch, black box, control, stdout, stderr) and `store` (listening socket,
control), each with an `id`. To the agent: `ready` or `refused` once, then `forked` (with a pidfd), `exited`, `failed`.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import selectors
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from workbench.agent.fresh import die_with_parent
from workbench.agent.wire import Connection, Frame

ALWAYS: Final = ("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.utils.data")
IF_THERE: Final = ("numpy", "cloudpickle", "threadpoolctl")
FORK_SAFE: Final = frozenset({"jemalloc_bg_thd"})  # its allocator is told of forks; pyarrow, and so pandas, has it


class RefusedError(Exception):
    """A module that must not, or cannot, be preloaded."""


class Zygote:
    """`warm` imports what is to be imported and returns what is to be told of it."""

    def __init__(self, fd: int, warm: Callable[[], dict[str, Any]]) -> None:
        self._agent = Connection(socket.socket(fileno=fd))
        self._warm = warm
        self._children: dict[int, int] = {}  # pid → id
        self._is_ending = False

    def serve(self) -> Callable[[], None]:
        """Serve until the agent goes away; in a child, return what the child is to do."""
        die_with_parent(os.getppid(), signal.SIGTERM)
        try:
            self._agent.send({"op": "ready", **self._warm()})
        except RefusedError as error:
            self._agent.send({"op": "refused", "reason": str(error)})
            os._exit(1)
        zygote = os.getpid()
        try:
            task = self._wait_for_work()
        finally:  # whatever goes wrong here, no rank is left behind
            if os.getpid() == zygote:
                self._kill_all()
        if task is None:
            os._exit(0)
        return task

    def _wait_for_work(self) -> Callable[[], None] | None:
        """None once the agent is gone, in the zygote; in a child, its task."""
        wake = self._wake_on_signals()
        with selectors.DefaultSelector() as selector:
            selector.register(self._agent, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while not self._is_ending:
                for key, _ in selector.select():
                    if key.fd == wake:
                        os.read(wake, 4096)
                    elif (task := self._take()) is not None:
                        return task
                self._reap()
        return None

    def _wake_on_signals(self) -> int:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return reader

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = True

    def _tell(self, header: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        try:
            self._agent.send(header, fds=fds)
        except OSError:  # the agent is gone, and a child has ended before that was seen
            self._is_ending = True

    def _take(self) -> Callable[[], None] | None:
        frames = self._agent.read()
        if frames is None:
            self._is_ending = True
            return None
        for frame in frames:
            if (task := self._carry_out(frame)) is not None:
                return task
        return None

    def _carry_out(self, frame: Frame) -> Callable[[], None] | None:
        number, parent = frame.header["id"], os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._tell({"op": "failed", "id": number, "reason": f"cannot fork: {error.strerror}"})
            pid = -1
        if pid == 0:
            self._agent.sock.detach()  # else its end would close a number that may be the program's by then
            return _child_task(frame, parent)
        for fd in frame.fds:
            os.close(fd)
        if pid > 0:
            self._children[pid] = number
            handle = os.pidfd_open(pid)
            self._tell({"op": "forked", "id": number, "pid": pid, "time": time.time()}, fds=(handle,))
            os.close(handle)
        return None

    def _reap(self) -> None:
        """Report children that have ended; what is left of their process groups ends with them."""
        while self._children:
            seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if seen is None:
                return
            # Before it is reaped: until then nobody else can have its number.
            with suppress(OSError):
                os.killpg(seen.si_pid, signal.SIGKILL)
            _, status, usage = os.wait4(seen.si_pid, 0)
            if (number := self._children.pop(seen.si_pid, None)) is not None:
                peak = usage.ru_maxrss * 1024
                self._tell({"op": "exited", "id": number, "status": status, "peak": peak, "time": time.time()})

    def _kill_all(self) -> None:
        for pid in self._children:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(OSError):  # it may not have a group of its own yet
                os.kill(pid, signal.SIGKILL)


def _child_task(frame: Frame, parent: int) -> Callable[[], None]:
    """In the child: leave everything behind that is the zygote's, but start nothing yet."""
    from workbench.agent import fresh, rank

    fresh.leave_zygote(parent, keep=frame.fds)
    match frame.header["op"]:
        case "fork":
            return partial(rank.run_warm, *frame.fds)
        case "exec":
            return partial(rank.exec_cold, *frame.fds)
        case _:
            return partial(rank.run_store, *frame.fds, host=frame.header["host"], port=frame.header["port"])


def warm_up(modules: tuple[str, ...]) -> dict[str, Any]:
    """Import torch and `modules`. A module from a user's own folders is refused: its edits must take effect."""
    start = time.monotonic()
    for name in modules:
        check_module(name)
    for name in ALWAYS:
        importlib.import_module(name)
    for name in IF_THERE:
        with suppress(ImportError):
            importlib.import_module(name)
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise RefusedError(f"{name} cannot be preloaded: {type(error).__name__}: {error}") from error
    importlib.import_module("workbench.agent.rank").prepare()
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page in every rank
    threads = len(_threads())
    if threads != 1:
        blame = f" ({', '.join(modules)})" if modules else ""
        raise RefusedError(f"the zygote has {threads} threads after its imports{blame}; a fork needs exactly one")
    torch = sys.modules["torch"]
    return {"torch": torch.__version__, "seconds": time.monotonic() - start}


def _threads() -> list[str]:
    """Of this process, by name, without those that a fork cannot harm."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name not in FORK_SAFE]


def check_module(name: str) -> None:
    """Raise `RefusedError` unless the module lies in site-packages or belongs to the interpreter."""
    root = name.partition(".")[0]
    if root in sys.stdlib_module_names:
        return
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise RefusedError(f"{name} cannot be preloaded: {sys.executable} has no module {root}")
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    for place in places:
        if not is_installed(place):
            raise RefusedError(
                f"{name} cannot be preloaded: it lies in {Path(place).parent}, outside site-packages, and an edit"
                " there must take effect at the next launch"
            )


def is_installed(path: str) -> bool:
    """Whether the file belongs to the interpreter or to an installed package."""
    real = os.path.realpath(path)
    if any(f"{os.sep}{folder}{os.sep}" in real for folder in ("site-packages", "dist-packages")):
        return True
    stdlib = os.path.realpath(sysconfig.get_path("stdlib"))
    return path in ("built-in", "frozen") or real.startswith(stdlib + os.sep)

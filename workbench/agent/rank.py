"""What a rank does before and around its user's program.

Nothing here ends the process: functions return, or raise what the program raised, so that `atexit`, non-daemon threads,
open files, `sys.exit(3)` and `os._exit` behave as under `python train.py`. Standard library and torch only.
"""

from __future__ import annotations

import importlib
import json
import linecache
import os
import pkgutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from workbench import blackbox, training
from workbench.agent import excepthook, fresh
from workbench.agent.wire import SIZES, Connection, Frame, Header
from workbench.training import determinism, witness
from workbench.training.control import Control
from workbench.training.descriptors import raised


class Launch(NamedTuple):
    """What the agent wants run: see `launch.describe` for the header's fields."""

    header: Header
    payload: bytes


def prepare() -> None:
    """In the zygote: import what ranks import, and call once what is slow the first time."""
    for name in ("cloudpickle", "numpy.random", "runpy", "multiprocessing.process", "tempfile", "zipfile"):
        with suppress(ImportError):  # numpy and cloudpickle need not be there
            importlib.import_module(name)
    importlib.import_module("workbench.agent.programs")
    for module in pkgutil.walk_packages(training.__path__, "workbench.training."):
        importlib.import_module(module.name)
    fresh.openblas()
    fresh.set_seeds(0)
    linecache.clearcache()
    for loaded in list(sys.modules.values()):
        if isinstance(loaded, ModuleType):  # libraries put other things there as well
            loaded.__dict__.pop("__warningregistry__", None)


def run_warm(launch_fd: int, box_fd: int, control_fd: int, out: int, err: int) -> None:
    """A rank that has been forked from a zygote with torch."""
    launch = read_launch(launch_fd)
    os.close(launch_fd)
    environ = launch.header["env"]
    old_path = os.environ.get("PYTHONPATH", "")
    fresh.set_stdio(out, err)
    fresh.set_environment(environ)
    fresh.set_streams(environ)
    os.chdir(launch.header["cwd"])
    fresh.set_path(launch.header["path0"], old_path, environ.get("PYTHONPATH", ""))
    fresh.renew_modules()
    fresh.set_threads(environ)
    fresh.set_torch_switches(environ)
    _run(launch, box_fd, control_fd)


def exec_cold(launch_fd: int, box_fd: int, control_fd: int, out: int, err: int) -> None:
    """Become a fresh interpreter that goes on as a rank; nothing of this one is left."""
    header = read_launch(launch_fd).header
    fresh.set_stdio(out, err)
    fresh.default_signals()
    os.chdir(header["cwd"])
    for fd in (launch_fd, box_fd, control_fd):
        os.set_inheritable(fd, True)
    bootstrap = str(Path(__file__).with_name("bootstrap.py"))
    argv = [header["python"], bootstrap, "rank", *map(str, (launch_fd, box_fd, control_fd))]
    try:
        os.execve(header["python"], argv, header["env"])
    except OSError as error:
        os.write(2, f"{header['python']} cannot be started: {error.strerror}\n".encode())
        os._exit(127)


def run_cold(launch_fd: int, box_fd: int, control_fd: int) -> None:
    """A rank in a fresh interpreter."""
    launch = read_launch(launch_fd)
    os.close(launch_fd)
    fresh.set_streams(dict(os.environ))
    sys.path.insert(0, launch.header["path0"])
    importlib.import_module("torch.distributed")
    _run(launch, box_fd, control_fd)


def read_launch(fd: int) -> Launch:
    """Read what the agent wrote; the descriptor keeps its position."""
    text, tail = SIZES.unpack(os.pread(fd, SIZES.size, 0))
    header = json.loads(_pread(fd, text, SIZES.size))
    return Launch(header, _pread(fd, tail, SIZES.size + text))


def _pread(fd: int, size: int, offset: int) -> bytes:
    parts = []
    while size:
        part = os.pread(fd, size, offset)
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)


def _run(launch: Launch, box_fd: int, control_fd: int) -> None:
    from workbench.agent import programs

    header = launch.header
    fresh.enable_faulthandler()
    fresh.set_seeds(None if header["seed"] is None else header["seed"] + header["rank"])
    box = blackbox.Writer(fresh.map_shared(box_fd, blackbox.SIZE))
    control = open_line(Connection(socket.socket(fileno=raised(control_fd))), header["settings"])
    fresh.allow_tracing()
    if header["deterministic"]:
        settings = header["settings"]
        determinism.install(header["rank"], is_elastic=bool(settings["min_ranks"] or settings["min_nnodes"]))
    watch(box)
    pid = os.getpid()
    word: Header = {"op": "leaving", "code": 0}
    try:
        programs.run(launch, box, control)
    except SystemExit as leaving:
        word["code"] = exit_code(leaving)
        raise
    except BaseException as error:
        error.__traceback__ = excepthook.own_traceback(error.__traceback__)
        word = {"op": "raised", **_account(error)}
        raise
    finally:
        if os.getpid() == pid:  # not a child that the program forked
            _tell(control, word)


def _account(error: BaseException) -> Header:
    """Describe and show it. A signal's handler may raise meanwhile, as DataLoader's does when a worker has died: then
    that is the error, of which this one came.
    """
    try:
        told = excepthook.describe(error)
        excepthook.show(error)
    except BaseException as second:
        told = excepthook.describe(second)
        excepthook.show(second)
    excepthook.silence()
    return told


def open_line(connection: Connection, settings: Header) -> Control:
    """This process' line to its agent, listening."""

    def receive() -> Frame:
        if (frame := connection.receive()) is None:
            raise EOFError
        return frame

    control = Control.current = Control(receive, connection.send, settings)
    witness.install(control)
    control.start()
    return control


def exit_code(leaving: SystemExit) -> int:
    """What the interpreter will make of it."""
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else 1


def watch(box: blackbox.Writer) -> None:
    """Have the rank's steps and phases go into its black box, and its groups end without a deadlock."""
    from workbench.training import faults, guard, limit, observe

    if Control.current is not None:
        faults.install(Control.current)
    guard.install()
    if Control.current is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _compare_replicas(Control.current)
    observer = observe.install(box, offset=time.time() - time.monotonic())
    if Control.current is not None and (most := Control.current.settings.get("max_steps", 0)):
        limit.install(most, observer)
    if Control.current is not None and (steps := Control.current.settings.get("replay_steps")):
        from workbench.training import replay

        replay.install(Control.current, steps)


def _compare_replicas(control: Control) -> None:
    """Before the observer: a check is no part of the optimizer's time. Training goes on without it, whatever it is."""
    from workbench.training import consistency

    try:
        consistency.install(control)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
    except Exception as error:
        sys.stderr.write(f"dtrain: replicas are not compared: {type(error).__name__}: {error}\n")


def _tell(control: Control, header: Header) -> None:
    try:
        control.send(header)
    except OSError:  # the agent is gone, and this process soon will be
        return


def run_store(listen_fd: int, control_fd: int, *, host: str, port: int) -> None:
    """A job's rendezvous store: outside every rank, so that it outlives any of them."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.read(control_fd, 1)  # until the agent closes its end
    del store
    os._exit(0)

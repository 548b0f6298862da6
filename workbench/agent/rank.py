"""What makes a forked child a fresh process, and then runs the user's program in it. Standard library and torch only."""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import io
import linecache
import mmap
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
import types
from typing import Any

from workbench import blackbox
from workbench.agent import wire

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# A survivor's words when a peer went away: they say nothing of the cause.
PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "connectFullMesh failed",
             "Timed out waiting", "NCCL communicator was aborted", "remote process exited", "Socket closed")  # fmt: skip


class Child:
    """One rank's ends of its wires."""

    def __init__(self, request: dict[str, Any], fds: list[int]) -> None:
        box, control, out, err = fds
        self.request = request
        self.rank = int(request["rank"])
        self._own_descriptors(box, control, out, err)
        self.control = socket.socket(fileno=3)
        self.reader = wire.Reader()
        self.box = blackbox.Writer(mmap.mmap(4, blackbox.SIZE))
        os.close(4)
        self.offset = time.time() - time.monotonic()

    @staticmethod
    def _own_descriptors(box: int, control: int, out: int, err: int) -> None:
        """0, 1, 2 as a program expects them, 3 the control socket, 4 the box; nothing else stays open."""
        high = [os.dup2(fd, 200 + k) for k, fd in enumerate((control, box))]
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (err, 2)):
            os.dup2(source, target, inheritable=True)
        for source, target in zip(high, (3, 4), strict=True):
            os.dup2(source, target, inheritable=False)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 4:
                with contextlib.suppress(OSError):
                    os.close(int(name))

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """To the agent; when it is gone so are we, soon."""
        with contextlib.suppress(OSError):
            wire.send(self.control, header, payload)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        while True:
            for header, payload, _ in self.reader.frames():
                return header, payload
            if not wire.receive(self.control, self.reader):
                raise EOFError("the agent is gone")


def run(request: dict[str, Any], fds: list[int]) -> None:
    """Become the rank (or the store) and run to the end of the user's program."""
    if request["kind"] == "store":
        _serve_store(fds[0], request)
        return
    child = Child(request, fds)
    _fresh_process(request)
    _observe(child)
    sys.excepthook = lambda kind, error, tb: _on_exception(child, kind, error, tb)
    try:
        _run_program(child)
    except SystemExit as leaving:
        child.send({"op": "leaving", "code": _exit_code(leaving)})
        raise
    child.send({"op": "leaving", "code": 0})


def _serve_store(listener: int, request: dict[str, Any]) -> None:
    import torch.distributed as dist

    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != listener:
            with contextlib.suppress(OSError):
                os.close(int(name))
    sock = socket.socket(fileno=os.dup(listener))
    host, port = sock.getsockname()[:2]
    sock.detach()
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    while store:
        signal.pause()


# --- as a fresh process would be --------------------------------------------------------------------------------------


def _fresh_process(request: dict[str, Any]) -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    os.chdir(request["cwd"])
    os.umask(0o022)
    sys.stdin, sys.stdout, sys.stderr = (_stream(fd) for fd in (0, 1, 2))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    faulthandler.enable(2)
    _paths(request)
    _seed(request)
    _threads()


def _stream(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "rb" if fd == 0 else "wb", closefd=False)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    if fd == 0:
        return io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8")
    buffer = io.BufferedWriter(raw)
    errors = "backslashreplace" if fd == 2 else "strict"
    stream = io.TextIOWrapper(
        buffer, encoding="utf-8", errors=errors, line_buffering=True, write_through=unbuffered or fd == 2
    )
    stream.mode = "w"  # type: ignore[misc]
    return stream


def _paths(request: dict[str, Any]) -> None:
    script = request["entrypoint"]
    first = os.path.dirname(os.path.realpath(script)) if request["entry"] == "script" else request["cwd"]
    extra = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    sys.path[:0] = [first, *extra]
    sys.argv = [script if request["entry"] in ("script", "module") else "", *request["args"]]
    sys.orig_argv = [sys.executable, *sys.argv]
    linecache.clearcache()


def _seed(request: dict[str, Any]) -> None:
    import torch

    seed = request.get("seed")
    number = None if seed is None else int(seed) + int(request["rank"])
    random.seed(number)
    if number is None:
        torch.seed()
    else:
        torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(None if number is None else number % 2**32)


def _threads() -> None:
    import torch

    count = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if count.isdigit() and int(count) > 0:
        torch.set_num_threads(int(count))
    else:
        torch.set_num_threads(len(os.sched_getaffinity(0)))


def _observe(child: Child) -> None:
    try:
        from workbench.training import guard, observe

        observe.install(child.box, offset=child.offset)
        guard.install()
    except Exception as error:  # watching never stops training
        child.send({"op": "note", "text": f"this rank is not watched: {type(error).__name__}: {error}"})


# --- the program ------------------------------------------------------------------------------------------------------


def _run_program(child: Child) -> None:
    request = child.request
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    match request["entry"]:
        case "script":
            path = request["entrypoint"]
            main.__file__ = path
            main.__dict__["__cached__"] = None
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
            exec(code, main.__dict__)
        case "module":
            runpy._run_module_as_main(request["entrypoint"])  # type: ignore[attr-defined]
        case "source":
            name = f"<cell {request['entrypoint'] or 'program'}>"
            text = request["source"]
            linecache.cache[name] = (len(text), None, text.splitlines(True), name)
            exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)
        case "function":
            _call_function(child)
        case "interactive":
            from workbench.training.cells import serve_cells

            serve_cells(child.receive, child.send, main.__dict__, child.box)


def _exit_code(leaving: SystemExit) -> int:
    """What the interpreter will make of it."""
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else 1


def _call_function(child: Child) -> None:
    import cloudpickle

    _, payload = child.receive()
    function, args, kwargs = cloudpickle.loads(payload)
    result = cloudpickle.dumps(function(*args, **kwargs))
    child.send({"op": "cell", "cell_id": "result", "ok": True}, result)


def _on_exception(
    child: Child, kind: type[BaseException], error: BaseException, tb: types.TracebackType | None
) -> None:
    while tb is not None and (
        tb.tb_frame.f_code.co_filename.startswith(OURS) or "runpy" in tb.tb_frame.f_code.co_filename
    ):
        tb = tb.tb_next
    text = "".join(traceback.format_exception(kind, error, tb))
    short = traceback.format_exception_only(kind, error)[-1].strip()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
    gone = any(words in text for words in PEER_GONE) and isinstance(error, (RuntimeError, ConnectionError))
    child.send({"op": "raised", "error": short, "traceback": text, "is_collective": gone})

"""The zygote: one thread, torch and torch._dynamo imported, CUDA never touched; forks ranks on request.

Run as a file, so that any interpreter that has torch will do. Standard library and torch only. The agent is at the other
end of the socket given by descriptor: its end is the zygote's, and the ranks', end.

A child returns from `serve` into `main`, and from there into the user's program: its interpreter ends as one does that
ran `python train.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import select
import signal
import socket
import sys
import sysconfig
from typing import Any, NoReturn

if __name__ == "__main__":  # run as a file: the package lies two folders up
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from workbench.agent import wire

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """SIGKILL this process when the thread that forked it ends; at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def preload(names: list[str]) -> dict[str, str]:
    """Import what ranks will want; by module, why one could not be."""
    problems = {}
    for name in ("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "numpy", *names):
        try:
            if name in names and (reason := _not_installed(name)):
                problems[name] = reason
                continue
            importlib.import_module(name)
        except Exception as error:
            problems[name] = f"{type(error).__name__}: {error}"
    problems.pop("numpy", None)
    return problems


def _not_installed(name: str) -> str:
    """Why a module is not one of site-packages; the user's own modules change between launches."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    if spec is None:
        return "there is no such module"
    origin = os.path.realpath(spec.origin or next(iter(spec.submodule_search_locations or [""])))
    roots = {os.path.realpath(sysconfig.get_path(key)) for key in ("purelib", "platlib", "stdlib", "platstdlib")}
    inside = any(origin.startswith(root + os.sep) for root in roots) or "site-packages" in origin
    return "" if inside else f"{origin} is not in site-packages: an edit there would not take effect"


class Zygote:
    """The parent's side: children by pid, and the loop."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.reader = sock, wire.Reader()
        self.children: set[int] = set()

    def serve(self) -> tuple[dict[str, Any], list[int]]:
        """Serve until a fork: only a child returns, with its request and descriptors."""
        wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self.sock, wake], [], [])
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
                self.reap()
            if self.sock in ready:
                if not wire.receive(self.sock, self.reader):
                    self.end()
                for header, _payload, fds in self.reader.frames():
                    if self.fork(header, fds):
                        os.close(wake)
                        os.close(waker)
                        return header, fds

    def fork(self, header: dict[str, Any], fds: list[int]) -> bool:
        """True in the child."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            die_with_parent(parent)
            os.setsid()
            self.sock.close()
            return True
        self.children.add(pid)
        for fd in fds:
            os.close(fd)
        wire.send(self.sock, {"op": "forked", "id": header["id"], "pid": pid})
        return False

    def reap(self) -> None:
        while self.children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.children.discard(pid)
            wire.send(self.sock, {"op": "exited", "pid": pid, "status": status})

    def end(self) -> NoReturn:
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(0)


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    problems = preload([name for name in sys.argv[3].split(",") if name])
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    wire.send(sock, {"op": "ready", "problems": problems, "threads": threads, "version": sys.version})
    request, fds = Zygote(sock).serve()
    from workbench.agent import rank

    rank.run(request, fds)


if __name__ == "__main__":
    main()

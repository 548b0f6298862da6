"""Rendezvous stores: one TCPStore a generation of a job, outside every rank, on a socket that the agent has bound."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from workbench.agent.wire import Header

BACKLOG: Final = 4096  # connections that wait for the store while it starts


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at this host's address, and no other; port 0: any free one. Raises `OSError`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class StoreProcess:
    """One store, as a child of a zygote. It is told of only when it fails."""

    def __init__(self, listener: socket.socket, on_failure: Callable[[str], None]) -> None:
        self._listener, self._on_failure = listener, on_failure
        self._lifeline: socket.socket | None = None  # the child ends when this does
        self._pidfd = -1
        self.pid = 0
        self.host, self.port = listener.getsockname()[:2]
        self.is_over = False
        self.is_gone = False
        self.on_gone: Callable[[], None] = lambda: None  # its port is free again

    def request(self) -> tuple[Header, tuple[int, ...]]:
        self._lifeline, theirs = socket.socketpair()
        header = {"op": "store", "host": self.host, "port": self.port}
        return header, (self._listener.detach(), theirs.detach())

    def forked(self, pid: int, pidfd: int, time: float) -> None:
        self.pid, self._pidfd = pid, pidfd
        if self.is_over:
            self.kill()

    def refused(self, reason: str) -> None:
        self._end(reason)

    def exited(self, status: int | None, time: float, peak: int) -> None:
        self._end("the job's rendezvous store died")

    def kill(self) -> None:
        """End it at once; nothing more is told."""
        self.is_over = True
        self._listener.close()  # when it is still ours
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _end(self, reason: str) -> None:
        was_wanted, self.is_over, self.is_gone = not self.is_over, True, True
        self._listener.close()
        if self._lifeline is not None:
            self._lifeline.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if was_wanted:
            self._on_failure(reason)
        self.on_gone()

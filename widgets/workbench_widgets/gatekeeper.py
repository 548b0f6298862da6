"""Opens ports for the pages when it is asked to, and opens them again after a crash of the server.

Asked over the unix socket by a process of this user; what comes through Jupyter's proxy, or through a port, is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import RequestHandler

from workbench_widgets.gate import BYTES, RIGHTS, Gate, Keys, Ticket
from workbench_widgets.tab import FILE

ADDRESS: Final = "127.0.0.1"
MOST: Final = 8  # ports
GOOD_FOR: Final = 60.0  # s that a browser may take to start
BODY: Final = 2**16  # bytes of a request
BROUGHT: Final = ("X-Forwarded-", "X-Proxycontextpath", RIGHTS)  # headers of requests that somebody passes on
logger = logging.getLogger(__name__)


class Gatekeeper:
    """`pages` is the application behind the gate; `directory` is private and keeps what is to be found again."""

    def __init__(self, pages: Any, directory: Path, headers: Mapping[str, str]) -> None:
        self._pages, self._file, self._headers = pages, directory / FILE, headers
        self._open: dict[int, HTTPServer] = {}
        self._keys = Keys.new()
        self._tickets: list[Ticket] = []

    def restore(self) -> None:
        """Open what a server before this one had open, as far as its ports are free."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._file.read_text())
            ports = [int(port) for port in kept["ports"]][:MOST]
            self._keys = Keys(str(kept["act"]), str(kept["look"]))
            for port in ports:
                with contextlib.suppress(OSError):
                    self._listen(port)

    def open(self, port: int, ticket_for: str = "") -> dict[str, Any]:
        """Port and tokens; 0: any port. Raises `OSError` when it cannot be had. `ticket_for`: act, look or ''."""
        if port not in self._open:
            if port == 0 and self._open:
                port = next(iter(self._open))
            elif len(self._open) >= MOST:
                raise OSError(f"{MOST} ports are open already")
            else:
                port = self._listen(port)
                self._keep()
        return {"port": port, **self._keys._asdict(), "ticket": self._ticket(ticket_for)}

    def _ticket(self, name: str) -> str:
        if name not in Keys._fields:
            return ""
        made = Ticket(secrets.token_urlsafe(BYTES), name, time.monotonic() + GOOD_FOR)
        self._tickets[:] = [*self._tickets[-MOST:], made]
        return made.token

    def close(self) -> None:
        for server in self._open.values():
            server.stop()

    def _listen(self, port: int) -> int:
        sockets = bind_sockets(port, ADDRESS)
        number = int(sockets[0].getsockname()[1])
        gate = Gate(self._pages, self._keys, number, tickets=self._tickets, headers=self._headers)
        server = HTTPServer(gate, max_body_size=BODY)
        server.add_sockets(sockets)
        self._open[number] = server
        return number

    def _keep(self) -> None:
        """Write it down, for this user's eyes; without a disk to write to, a crash costs the reader a new link."""
        new = self._file.with_suffix(".new")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump({"ports": list(self._open), **self._keys._asdict()}, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._file)
        except OSError as error:
            logger.warning("the links to the pages cannot be kept: %s", error)


class Local(RequestHandler):
    """Of requests that this machine's own processes send over the unix socket."""

    def refuses_what_is_passed_on(self) -> bool:
        """Whether somebody passes the request on for another; it is answered then. No answer is to be kept."""
        self.set_header("Cache-Control", "no-store")
        is_passed_on = any(name.startswith(BROUGHT) for name in self.request.headers)
        if is_passed_on:
            self.refuse(403, "this is for processes of this machine alone")
        return is_passed_on

    def refuse(self, status: int, why: str) -> None:
        self.set_status(status)
        self.write({"error": why})


class Open(Local):
    """`POST /gate {"port": 0}`."""

    def initialize(self, keepers: list[Gatekeeper]) -> None:
        (self._keeper,) = keepers

    def post(self) -> None:
        if self.refuses_what_is_passed_on():
            return
        try:
            body = json.loads(self.request.body)
            port, ticket = body["port"], str(body.get("ticket", ""))
            if type(port) is not int or not 0 <= port < 65_536:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            self.refuse(400, 'say {"port": 0}')
            return
        try:
            self.write(self._keeper.open(port, ticket))
        except OSError as error:
            self.refuse(409, f"port {port} cannot be had: {error.strerror or error}")

"""The pages in a browser tab: the port that the server opens when it is asked to, and the links to it.

Asked for over the unix socket, so by this user alone. Port and tokens lie in the private directory of the server, so
that one which is started again after a crash opens the same port, and open tabs come back by themselves; `dtrain down`
removes them with the server. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

from workbench_widgets.address import socket_path

FILE: Final = "tab.json"  # beside the server's mark
STARTS: Final = 60.0  # s that a server may take to answer
ASKS: Final = 10.0


class Tab(NamedTuple):
    """Where the pages are, with the tokens that open them."""

    port: int
    act: str
    look: str
    ticket: str = ""

    def link(self, job_id: str = "", *others: str, read_only: bool = False, once: bool = False) -> str:
        """The address of a job's page, of the list of jobs, or of several jobs beside each other.

        `once`: good for one use within a minute.
        """
        path = "compare" if others else f"job/{quote(job_id, safe='')}" if job_id else ""
        ids = [("id", one) for one in (job_id, *others)] if others else []
        query = urlencode([*ids, ("token", self.ticket if once else self.look if read_only else self.act)])
        return f"http://127.0.0.1:{self.port}/{'look/' if read_only else ''}{path}?{query}"


class TabError(RuntimeError):
    """The server did not open the port; the text says why."""


def open_tab(home: Path, port: int = 0, *, read_only: bool = False, timeout: float = STARTS) -> Tab:
    """Have the server of this home listen on `port` (0: where it listens already, else any that is free).

    `read_only`: what the ticket is for.
    Waits for a server that is being started. Raises `TabError`.
    """
    answer = _ask(home, "/gate", {"port": port, "ticket": "look" if read_only else "act"}, timeout)
    return Tab(int(answer["port"]), *(str(answer[name]) for name in ("act", "look", "ticket")))


def show_saved(home: Path, file: Path, *, timeout: float = STARTS) -> str:
    """Have the server of this home show a saved session as long as this process lives: its key in addresses.

    Waits for a server that is being started. Raises `TabError`.
    """
    return str(_ask(home, "/saved", {"path": str(file.absolute()), "guest": os.getpid()}, timeout)["key"])


def _ask(home: Path, what: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout
    while True:
        try:
            status, answer = _post(socket_path(home), what, body)
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > deadline:
                raise TabError(f"the server of the live pages does not answer: {error}") from error
            time.sleep(0.1)
        else:
            if status != 200:
                raise TabError(str(answer.get("error") or f"the server of the live pages answered {status}"))
            return answer


def _post(path: Path, what: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    connection = _Connection(path)
    try:
        connection.request("POST", what, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    return answer.status, json.loads(text) if answer.headers.get_content_type() == "application/json" else {}


class _Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ASKS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ASKS)
        self.sock.connect(str(self._path))

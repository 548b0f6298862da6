"""Saved sessions behind the same pages: looked at only. No pool is asked, no process started, nothing of them is run.

In a shell they have a server of their own, which ends with Ctrl-C (`Server`). In a notebook the server of the home
shows them, once a process of this user asked it to (`Show`); one that was started for that alone ends with the last
process that did (`Guests`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tornado.ioloop import IOLoop

from workbench import Job, Session, WorkbenchError, load_session
from workbench_widgets.gatekeeper import Local
from workbench_widgets.pools import Pools

MOST: Final = 8  # files that are open at once, more than a page compares; the one asked for longest ago is closed
GRACE: Final = 60.0  # s in which the first guest comes
STEM: Final = 40  # characters of a file's name that are in its key
NOT_OPEN: Final = "this saved session is not open here"


class SavedPools(Pools):
    """A saved session in the place of pools. `prefix` is put before the ids of its jobs."""

    def __init__(self, session: Any, prefix: str = "") -> None:
        super().__init__(Path())
        self._saved, self._prefix = session, prefix

    def names(self) -> list[str]:
        return [str(self._saved.name)]

    def session(self, name: str) -> Session:
        return self._saved  # type: ignore[no-any-return]

    def forget(self, session: Session) -> None:
        """It cannot be lost."""

    def find(self, job_id: str) -> Job:
        return self._saved.attach(job_id.removeprefix(self._prefix))  # type: ignore[no-any-return]

    def told(self, status: Any) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self._saved.document.saved_at))
        return f"{self._saved.archive.path.name}: saved {when} UTC, to be looked at"

    def shown(self, job_id: str) -> str:
        return f"{self._prefix}{job_id}"

    def close(self) -> None:
        self._saved.close()


class Shelf:
    """The saved sessions that a server shows, by key: one that others on this machine can make nothing of."""

    def __init__(self) -> None:
        self._open: dict[str, SavedPools] = {}

    def add(self, path: Path) -> str:
        """Open a file; its key, the same as long as it is the same file. Raises `WorkbenchError`. From any thread."""
        key = key_of(path)
        known = self._open.pop(key, None)
        self._open[key] = known or SavedPools(load_session(path), f"{key}:")
        while len(self._open) > MOST:
            self._open.pop(next(iter(self._open))).close()
        return key

    def get(self, key: str) -> SavedPools | None:
        return self._open.get(key)

    def find(self, job_id: str) -> Job:
        """`KEY:JOB`. Raises `WorkbenchError`."""
        pools = self._open.get(job_id.partition(":")[0])
        if pools is None:
            raise WorkbenchError(NOT_OPEN, hint="show it again with: %dtrain dashboard FILE")
        return pools.find(job_id)

    def close(self) -> None:
        for pools in self._open.values():
            pools.close()


def key_of(path: Path) -> str:
    """The file's name, and what tells it from others of that name and from what it was before."""
    try:
        found = path.resolve().stat()
    except OSError as error:
        raise WorkbenchError(f"cannot open {path}: {error.strerror}") from error
    told = f"{path.resolve()} {found.st_ino} {found.st_mtime_ns} {found.st_size}"
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", path.name)[:STEM]
    return f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


class Guests:
    """Processes for which a server is kept, by pid and when they began."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._until = now, now() + GRACE
        self._known: dict[int, str] = {}

    def add(self, pid: int) -> None:
        began = began_at(pid)
        if began:
            self._known[pid] = began

    @property
    def are_gone(self) -> bool:
        """Whether there were some, or have been none for long, and none is left."""
        self._known = {pid: began for pid, began in self._known.items() if began_at(pid) == began}
        return not self._known and self._now() > self._until

    def settle(self) -> None:
        """The first has come."""
        self._until = self._now()


def began_at(pid: int) -> str:
    """When the process began, as the kernel counts it; '' when there is none."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else rest[18]


class Show(Local):
    """`POST /saved {"path": "/…/run.dtrain", "guest": 4711}`, over the unix socket alone: answered with the key."""

    def initialize(self, shelf: Shelf, guests: Guests) -> None:
        self._shelf, self._guests = shelf, guests

    async def post(self) -> None:
        if self.refuses_what_is_passed_on():
            return
        try:
            body = json.loads(self.request.body)
            path, guest = Path(str(body["path"])), int(body["guest"])
        except (ValueError, KeyError, TypeError):
            self.refuse(400, 'say {"path": FILE, "guest": PID}')
            return
        try:
            key = await IOLoop.current().run_in_executor(None, self._shelf.add, path)
        except WorkbenchError as error:
            self.refuse(409, str(error))
            return
        self._guests.add(guest)
        self._guests.settle()
        self.write({"key": key})


class Server:
    """Shows one file on a port of this machine; `tab` has its links. Made by the main thread.

    Raises `WorkbenchError` for what cannot be shown, `OSError` for a port that cannot be had.
    """

    def __init__(self, path: Path, port: int = 0) -> None:
        from workbench_widgets.pages import Pages
        from workbench_widgets.server import make_server, without_secrets
        from workbench_widgets.tab import Tab

        logging.basicConfig(level=logging.WARNING)
        for handler in logging.getLogger().handlers:
            handler.addFilter(without_secrets)
        logging.getLogger("bokeh.server.util").setLevel(logging.ERROR)
        self._session = load_session(path)
        self._pages = Pages(SavedPools(self._session), may_act=False)
        self._folder = tempfile.TemporaryDirectory(prefix="dtrain-")
        folder = Path(self._folder.name)
        self._server, self._keeper = make_server(self._pages, folder / "pages.sock", folder)
        try:
            told = self._keeper.open(port, "look")
        except OSError:
            self._close()
            raise
        self.tab = Tab(told["port"], told["act"], told["look"], told["ticket"])

    def run(self) -> None:
        """Until SIGINT or SIGTERM; nothing is left behind."""
        loop, numbers = IOLoop.current(), (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, lambda *_: loop.add_callback_from_signal(loop.stop)) for number in numbers]
        try:
            self._server.start()
            loop.start()
        finally:
            self._close()
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _close(self) -> None:
        self._keeper.close()
        self._pages.close()
        self._server.stop(wait=False)
        self._session.close()
        self._folder.cleanup()

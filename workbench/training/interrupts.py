"""An interrupt reaches a cell wherever the main thread is: in Python by SIGINT, in a collective by its sockets.

SIGINT alone leaves a rank that waits inside gloo waiting: Python raises KeyboardInterrupt only when C++ returns. So
when the main thread sleeps in C++ and does not take the signal, the connections of its process groups are shut under
it, first the groups' own, then those to the store (it may wait for a peer to arrive). A main thread that computes is
let alone: it returns by itself, and its groups stay whole.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from workbench.training.guard import Guard
from workbench.training.observe import BACKWARD, COMM, Observer
from workbench.training.sockets import Connection

PATIENCE: Final = 0.05  # s that Python has to take the signal
PAUSE: Final = 0.005
AGAIN: Final = 0.25  # s until connections that are new meanwhile are shut as well
GIVE_UP: Final = 30.0  # s after which a cell that still has not left needs another interrupt
ASLEEP: Final = 3  # looks in a row at which the main thread slept


class Interrupts:
    """Of the cell that runs; made in the main thread."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._main = threading.get_native_id(), threading.get_ident()
        self._arrived = 0  # counts cells
        self._cell = 0  # the one begun last, by that count
        self._unwanted = 0  # one that was interrupted before it began
        self._is_running = False
        self._taken = 0.0  # when the main thread last took a SIGINT in this cell
        self._watcher: threading.Thread | None = None
        self._watched = 0  # the cell it is for
        self.was_freed = False  # sockets were shut under this cell
        self.broken = ""  # where the process group was interrupted; its user has not been told

    # --- in the main thread ---

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_running:  # else it ended nothing, and does not count as taken
            self._taken = time.monotonic()
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """While the cell runs; outside, an interrupt must not cost a cell its answer."""
        self._cell += 1
        self.was_freed = False
        self._taken = 0.0
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def check(self) -> None:
        """At the start of the cell: it may have been interrupted while it waited."""
        if self._unwanted == self._cell:
            self._taken = time.monotonic()
            raise KeyboardInterrupt

    def tell(self) -> str:
        """What the user must know of the process group, once."""
        where, self.broken = self.broken, ""
        if not where:
            return ""
        return (
            f"the process group was interrupted inside {where}; destroy_process_group() and init_process_group() again "
            "before the next collective"
        )

    # --- in the thread that reads the control socket ---

    def arrive(self) -> None:
        """A cell has come in and waits for its turn."""
        self._arrived += 1

    def interrupt(self) -> None:
        """The agent wants the running cell to end, or the one about to begin; it sends SIGINT as well."""
        if not self._is_running and self._arrived > self._cell:
            self._unwanted = self._cell + 1
        cell = self._cell
        is_watched = self._watcher is not None and self._watcher.is_alive() and self._watched == cell
        if self._is_running and not is_watched:
            self._watched = cell
            self._watcher = threading.Thread(target=self._free, args=(cell,), name="dtrain-interrupt", daemon=True)
            self._watcher.start()

    # --- in a thread of its own ---

    def _free(self, cell: int) -> None:
        began = time.monotonic()
        if self._has_taken(cell, since=began - PATIENCE, within=PATIENCE / 2):
            return
        signal.pthread_kill(self._main[1], signal.SIGINT)  # if the agent's has not come; twice is once
        if self._has_taken(cell, since=began - PATIENCE, within=PATIENCE / 2):
            return
        wanted = _is_not_store
        while time.monotonic() < began + GIVE_UP:
            if self._is_asleep(cell):
                self._shut(wanted)
                wanted = _is_any
            if self._has_taken(cell, since=began, within=PATIENCE if wanted is _is_any else AGAIN):
                return

    def _has_taken(self, cell: int, *, since: float, within: float) -> bool:
        deadline = time.monotonic() + within
        while self._is_running and self._cell == cell and self._taken < since:
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE)
        return True

    def _is_asleep(self, cell: int) -> bool:
        for _ in range(ASLEEP):
            state = Path(f"/proc/self/task/{self._main[0]}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "SD" or self._cell != cell or not self._is_running:
                return False
            time.sleep(PAUSE)
        return True

    def _shut(self, wanted: Callable[[Connection], bool]) -> None:
        guard = Guard.current
        activity, name = self._observer.activity, self._observer.collective
        self.was_freed = True
        if guard is not None and guard.sockets.shut(wanted):
            where = name.partition("[")[0] if activity == COMM else "backward()" if activity == BACKWARD else ""
            if where != "init_process_group":  # then there is no group
                self.broken = where or "a collective"


def _is_not_store(connection: Connection) -> bool:
    return connection.peer_port != int(os.environ.get("MASTER_PORT") or 0)


def _is_any(connection: Connection) -> bool:
    return True

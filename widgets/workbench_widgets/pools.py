"""The pools of a home, as the live pages see them: a session each, made when asked for, made anew when it is lost."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any, Final

from workbench import Job, Session, WorkbenchError
from workbench.views.table import pool_line

CONNECT_TIMEOUT: Final = 5.0


class Pools:
    """Sessions by pool name. Any thread; nothing is ever started."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Every pool that this home has had."""
        root = self._home / "pools"
        return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []

    def session(self, name: str) -> Session:
        """The line to a pool. Raises `WorkbenchError` when it does not run."""
        with self._lock:
            session = self._sessions.get(name)
            if session is None:
                session = Session(pool=name, start=False, timeout=CONNECT_TIMEOUT)
                self._sessions[name] = session
            return session

    def forget(self, session: Session) -> None:
        """Hang up a line that was lost; the next one who asks gets a new one."""
        with self._lock:
            if self._sessions.get(session.name) is session:
                del self._sessions[session.name]
        session.close()

    def find(self, job_id: str) -> Job:
        """The job, at the pool that runs it; an ended one at any that has its record. Raises `WorkbenchError`."""
        first_error: WorkbenchError | None = None
        reached: list[Session] = []
        for name in self.names():
            try:
                session = self._reach(name)
            except WorkbenchError as error:
                first_error = first_error or error
                continue
            if job_id in session.pool_status().running:
                return session.attach(job_id)
            reached.append(session)
        for session in reached:
            try:
                return session.attach(job_id)
            except WorkbenchError as error:
                first_error = error
        raise first_error or no_pool()

    def told(self, status: Any) -> str:
        """A pool in a line."""
        return pool_line(status)

    def shown(self, job_id: str) -> str:
        """How a job is called in addresses and lists."""
        return job_id

    def is_any_running(self) -> bool:
        """Asks all of them, as far as that is needed."""
        for name in self.names():
            with contextlib.suppress(WorkbenchError):
                self._reach(name)
                return True
        return False

    def _reach(self, name: str) -> Session:
        session = self.session(name)
        try:
            session.pool_status()
        except Exception:
            self.forget(session)
            raise
        return session

    def close(self) -> None:
        with self._lock:
            sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.close()


def no_pool() -> WorkbenchError:
    return WorkbenchError("no pool runs here", hint="start one with: %dtrain up")

"""What a verb needs of the place where it was typed: a screen, a clock, and the pool and job that are current there.

A notebook keeps one `Context` for as long as its kernel lives, a shell makes one a command. Sessions are opened when a
verb first needs one; nothing is looked up before.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from workbench.errors import PoolError, UnknownJobError, UsageError, WorkbenchError
from workbench.spec import EntrypointKind
from workbench.verbs.declare import Arguments

if TYPE_CHECKING:
    from workbench.session import Job, Session

DEFAULT_POOL: Final = "default"
START: Final = 60.0  # s that a pool of this machine may take to start
DIAL: Final = 10.0  # s after which an address where nothing answers is given up
_QUICK: Final = 0.2  # s that completion may ask a pool


class Screen(Protocol):
    """Where a verb's text goes. Only the thread that runs the verb may call it."""

    @property
    def width(self) -> int:
        """Characters in a line."""

    @property
    def has_color(self) -> bool:
        """Whether ANSI colours are shown as such."""

    @property
    def redraws(self) -> bool:
        """Whether `update` replaces what it showed before."""

    @property
    def interval(self) -> float:
        """Seconds between two updates."""

    def write(self, text: str, *, is_error: bool = False) -> None:
        """Text as it is, at once."""

    def update(self, text: str) -> None:
        """Progress, in place of what the last call showed."""

    def settle(self) -> None:
        """What the last `update` showed stays; the next one begins anew."""

    def display(self, bundle: Mapping[str, str]) -> None:
        """A value as a MIME bundle, in the richest form that can be shown."""


class WaitInterrupted(KeyboardInterrupt):
    """A wait was interrupted; the text says what goes on without it."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def _open(address: str | None, pool: str, slots: int | None, *, start: bool) -> Session:
    from workbench.session import Session

    timeout = DIAL if address else START
    return Session(address, pool=pool, slots=slots, start=start, timeout=timeout)


@dataclass
class Context:
    """See the module. `namespace` is the notebook's, None in a shell."""

    screen: Screen
    namespace: MutableMapping[str, Any] | None = None
    prefix: str = "dtrain"
    opener: Callable[..., Session] = _open
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    job_id: str = ""  # the current job: the last one launched or attached here
    interactive_id: str = ""  # the last such that is interactive
    _session: Session | None = field(default=None, repr=False)
    _opened: tuple[str | None, str] | None = None

    @property
    def is_shell(self) -> bool:
        return self.namespace is None

    def quiet(self, args: Arguments) -> bool:
        """Whether only what was asked for is to be said."""
        return bool(getattr(args, "quiet", False)) or os.environ.get("DTRAIN_QUIET", "") not in ("", "0")

    # --- the pool ---

    def session(self, args: Arguments, *, start: bool = False, slots: int | None = None) -> Session:
        """The session that the arguments name, else the current one, else this machine's default pool.

        A pool that does not run is started only when `start` is true.
        """
        wanted = self.target(args)
        if self._session is not None and wanted == self._opened and self._answers():
            self._session.was_started = False  # by this verb, that is
            return self._session
        opened = self.opener(wanted[0], wanted[1], slots, start=start)
        self.forget_session()
        if wanted != self._opened:
            self.job_id = self.interactive_id = ""  # they were another pool's
        self._session, self._opened = opened, wanted
        return opened

    def target(self, args: Arguments) -> tuple[str | None, str]:
        """Address (None: a pool of this machine) and pool name: given, else the current one, else the default."""
        address, pool = getattr(args, "address", None), getattr(args, "pool", None)
        if address or pool:
            return address, pool or DEFAULT_POOL
        if self._opened is not None:
            return self._opened
        return os.environ.get("DTRAIN_ADDRESS") or None, os.environ.get("DTRAIN_POOL") or DEFAULT_POOL

    def _answers(self) -> bool:
        """Whether the pool still does; it may have been stopped since."""
        assert self._session is not None
        try:
            self._session.pool_status()
        except PoolError:
            self.forget_session()
            return False
        return True

    def forget_session(self) -> None:
        """Hang up; the next verb opens a session anew."""
        if self._session is not None:
            with contextlib.suppress(Exception):
                self._session.close()
        self._session = None

    def quick_job_ids(self, prefix: str) -> list[str]:
        """Ids for completion, from a session that is open already; none rather than wait."""
        if self._session is None:
            return []
        import workbench.requests as rq

        try:
            request = rq.ListIds(prefix=prefix, limit=50)
            return self._session.ask("ids", request, list[str], timeout=_QUICK)
        except Exception:  # completion never fails
            return []

    # --- the job ---

    def adopt(self, job: Job) -> None:
        """Make it the current job."""
        self.job_id = job.job_id
        if job.spec.kind is EntrypointKind.INTERACTIVE:
            self.interactive_id = job.job_id

    def job(self, args: Arguments) -> Job:
        """The job that was named, else the current one, else the only one that runs, else the newest that has ended."""
        session = self.session(args)
        if args.job:
            return session.attach(args.job)
        if self.job_id:
            with contextlib.suppress(UnknownJobError):  # its record may have been removed
                return session.attach(self.job_id)
            self.job_id = ""
        status = session.pool_status()
        active = [*dict.fromkeys([*status.running, *(job_id for job_id, _ in status.waiting)])]
        if len(active) == 1:
            return session.attach(active[0])
        if not active and (ended := session.job_ids(limit=1)):
            return session.attach(ended[0])
        what = f"{len(active)} jobs run" if active else "no job has run here"
        raise UsageError(f"which job? {what}", hint=_one_of(active))

    def interactive_job(self, args: Arguments) -> Job:
        """The interactive job that cells run on; raises `UsageError` with how to come by one."""
        if args.job:
            return self.session(args).attach(args.job)
        if self.interactive_id:
            return self.session(args).attach(self.interactive_id)
        hint = "start one with: %dtrain launch --interactive -n 2"
        with contextlib.suppress(WorkbenchError):
            if found := self._running_interactive(args):
                hint = f"attach to one with: %dtrain attach {found[0]}; or {hint}"
        raise UsageError("no interactive job was launched or attached here", hint=hint)

    def _running_interactive(self, args: Arguments) -> list[str]:
        session = self.session(args)
        jobs = (session.attach(job_id) for job_id in session.pool_status().running[:16])
        return [job.job_id for job in jobs if job.spec.kind is EntrypointKind.INTERACTIVE]


def _one_of(candidates: list[str]) -> str:
    return f"give one of: {', '.join(candidates[:8])}" if candidates else "launch one with: %dtrain launch SCRIPT"

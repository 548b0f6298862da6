"""What a notebook, a script or a shell holds: a `Session` is a line to a pool, a `Job` is a name in it.

Both are handles without state of their own: a client never owns a job. Values come from the pool's record each time
they are asked for, so that two notebooks, a restarted kernel and the dashboard see the same.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import workbench.requests as rq
from workbench.capture import capture
from workbench.entrypoint import check_here, spec_of
from workbench.errors import PoolLostError, PoolUnavailableError, UsageError
from workbench.feed import JobSummary, PoolStatus
from workbench.policy.replay import STEPS, ReplayReport
from workbench.pool import local
from workbench.replays import replay_check
from workbench.session.cells import CellRun
from workbench.session.controls import session_panel
from workbench.session.failed import error_of
from workbench.session.job import Job
from workbench.spec import JobSpec, check_spec
from workbench.state import JobPhase
from workbench.store.home import jobs_dir

if TYPE_CHECKING:
    from workbench.pool.client import PoolClient

SERVICE: Final = "workbench.runner.service:make_service"
T = TypeVar("T")
DEATH: Final = 0.5  # s in which a scheduler whose connections have closed is seen to be gone
SAVED: Final = 100  # newest jobs that one file takes when none are named
__all__ = ["CellRun", "Job", "Session", "error_of", "stop_pool"]


class Session:
    """A connection to a pool.

    `target` None: the pool of this machine called `pool`, started with `slots` slots (None: one a GPU, else one a core)
    if it does not run and `start` is true. Else a cluster that runs already: an address (`tls://host:8786`), a
    scheduler file, or a `dask.distributed.Client`.

    Raises `PoolUnavailableError` when there is none within `timeout` seconds. A pool of this machine that is brought
    back after its scheduler was killed is found again by the next request.
    """

    def __init__(
        self,
        target: Any = None,
        *,
        pool: str = "default",
        slots: int | None = None,
        start: bool = True,
        timeout: float = 30.0,
    ) -> None:
        self.name = pool
        self.was_started = False
        self.touched: dict[str, None] = {}  # ids of jobs that were launched or attached here, in order
        self._finding = threading.Lock()
        self._client = self._local(slots, start, timeout) if target is None else self._foreign(target, timeout)
        self._await_slots(timeout)

    def _local(self, slots: int | None, start: bool, timeout: float) -> PoolClient:
        if slots is not None and slots < 1:
            raise UsageError(f"a pool of {slots} slots", hint="give at least 1")
        mark = local.find_pool(self.name)
        if mark is None:
            if not start:
                raise PoolUnavailableError(f"pool {self.name} does not run", hint="start it with: %dtrain up")
            mark, self.was_started = local.start_pool(self.name, slots or _default_slots(), SERVICE)
        if start:
            local.start_dashboard()
        return self._connect(mark)

    def _connect(self, mark: local.Mark) -> PoolClient:
        from workbench.pool.client import PoolClient

        self._mark = mark
        return PoolClient.connect_local(self.name, mark)

    def _foreign(self, target: Any, timeout: float) -> PoolClient:
        from workbench.pool.client import PoolClient
        from workbench.runner.service import make_service

        return PoolClient.connect(target, functools.partial(make_service, self.name), jobs_dir(), timeout)

    def _await_slots(self, timeout: float) -> None:
        """A pool is there once a worker's agent has joined."""
        deadline = time.monotonic() + timeout
        while not self.pool_status().workers:
            if time.monotonic() > deadline:
                raise PoolUnavailableError(
                    f"no worker joined pool {self.name} within {timeout:.0f} s", hint="see worker.log in its directory"
                )
            time.sleep(0.02)

    # --- the pool ---

    @property
    def address(self) -> str:
        """The scheduler's address."""
        return self._client.address

    @property
    def is_local(self) -> bool:
        """Whether the pool is one of this machine, so that paths mean the same here and there."""
        return self._client.is_local

    @property
    def ambient(self) -> dict[str, str]:
        """The caller's own environment, for ranks of this machine; used, never recorded."""
        return local.caller_environment() if self.is_local else {}

    def pool_status(self) -> PoolStatus:
        """Workers, slots, and jobs that run or wait, as they are now."""
        return self.ask("status", None, PoolStatus)

    def ask(self, name: str, body: object, kind: type[T], timeout: float = 30.0) -> T:
        """One request to the runner; see `workbench.requests`."""
        if name in rq.ONCE:  # then not to a scheduler that is known to be gone
            self._find_again(self._client, patience=0.0)
        while True:
            client = self._client
            try:
                return client.ask(name, body, kind, timeout)
            except PoolLostError as error:
                if not self._find_again(client):
                    raise
                if name in rq.ONCE:
                    what = f"the pool's scheduler died, and is back; {name!r} may have been taken, or not"
                    raise PoolLostError(what, hint="look at %dtrain jobs and status before trying again") from error
            self._await_slots(local.START_TIMEOUT)

    def _find_again(self, lost: PoolClient, patience: float = DEATH) -> bool:
        """Whether there is another line to the pool now: its scheduler was killed, and it was brought back."""
        deadline = time.monotonic() + patience
        with self._finding:
            while self.is_local and self._client is lost and self._mark.is_alive:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.01)
            if self.is_local and self._client is lost and (mark := local.find_pool(self.name)) is not None:
                self._client = self._connect(mark)  # the old one hangs up when nobody waits for it any more
            return self._client is not lost

    def close(self) -> None:
        """Hang up. The pool and its jobs go on."""
        self._client.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session: pool {self.name} at {self.address}>"

    # --- jobs ---

    def launch(
        self,
        entrypoint: str | os.PathLike[str] | Callable[..., Any] | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        module: str | None = None,
        source: str | None = None,
        interactive: bool = False,
        **options: Any,
    ) -> Job:
        """Start a job: a script, a module, a program's text, a function (with `args`, `kwargs`), or ranks that wait.

        `options` are fields of `JobSpec`. Returns at once; the job may still wait for slots. Raises `SpecError`.
        """
        return self.launch_spec(spec_of(entrypoint, args, kwargs, module, source, interactive, options))

    def replay_check(
        self,
        entrypoint: str | os.PathLike[str] | Callable[..., Any] | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        module: str | None = None,
        source: str | None = None,
        steps: int = STEPS,
        timeout: float = 600.0,
        tell: Callable[[str], None] | None = None,
        **options: Any,
    ) -> ReplayReport:
        """Whether a program gives the same bits again: `steps` steps of it twice, and once with ranks' slots swapped.

        Given as to `launch`. Returns when all has run, each run within `timeout` s; `tell` gets a line as each begins.
        Raises the error of a run that fails. `policy.replay` tells what is compared.
        """
        spec = spec_of(entrypoint, args, kwargs, module, source, False, options)
        return replay_check(self.launch_spec, spec, steps=steps, timeout=timeout, tell=tell)

    def launch_spec(self, spec: JobSpec) -> Job:
        """Start what a spec describes; paths are taken from the working directory."""
        ready = check_here(check_spec(spec)) if self.is_local else check_spec(spec)
        request = rq.Launch(spec=ready, ambient=self.ambient, origin=capture(ready))
        return self._touch(self.ask("launch", request, str))

    def attach(self, job_id: str) -> Job:
        """A job by its id or an unambiguous beginning of it, running or ended. Raises `UnknownJobError`."""
        return self._touch(self.ask("resolve", job_id, str))

    def _touch(self, job_id: str) -> Job:
        self.touched[job_id] = None
        return Job(self, job_id)

    def jobs(
        self, limit: int = 50, offset: int = 0, phase: JobPhase | None = None, search: str = ""
    ) -> list[JobSummary]:
        """Jobs, newest first; `search`: those whose id holds it."""
        request = rq.ListJobs(limit=limit, offset=offset, phase=phase, search=search)
        return self.ask("jobs", request, list[JobSummary])

    def job_counts(self, search: str = "") -> dict[str, int]:
        """How many jobs are in each phase, by its name."""
        return self.ask("job_counts", rq.CountJobs(search=search), dict[str, int])

    def job_ids(self, prefix: str = "", limit: int = 200) -> list[str]:
        """Ids that begin with `prefix`, newest first."""
        return self.ask("ids", rq.ListIds(prefix=prefix, limit=limit), list[str])

    def panel(self) -> Any:
        """A form for a notebook (ipywidgets) that launches a script; it shows the `%dtrain` line that does the same."""
        return session_panel(self)

    # --- keeping ---

    def save(
        self,
        path: str | os.PathLike[str],
        jobs: Sequence[Job | str] | None = None,
        *,
        env: Sequence[str] = (),
        with_checkpoints: bool = False,
    ) -> tuple[str, ...]:
        """Write jobs to one file that can be looked at anywhere, and run again; what it leaves out, in words.

        `jobs` None: those that were launched or attached through this session, else all that the pool lists. A running
        one is saved as it stands. Secrets and home paths are taken out; of environment variables only those are kept
        that say how ranks compute, and what `env` names (patterns). `with_checkpoints`: the newest whole one as well,
        else they are only named. Raises `SavedFileError`; what was at `path` then stays.
        """
        from workbench.collect import save

        chosen = [job if isinstance(job, str) else job.job_id for job in jobs] if jobs is not None else None
        ids = [self.attach(job_id).job_id for job_id in chosen] if chosen else list(self.touched)
        ids = ids or self.job_ids(limit=SAVED)
        if not ids:
            raise UsageError("there is no job to save", hint="launch one with: %dtrain launch SCRIPT")
        document = save(Path(path), self.ask, list(dict.fromkeys(ids)), env=env, with_checkpoints=with_checkpoints)
        return document.left_out


def stop_pool(name: str = "default", timeout: float = 10.0) -> bool:
    """End a pool of this machine with all its jobs; False when it did not run."""
    directory = local.pool_dir(name)
    was_there = any(mark.is_alive for mark in local.read_marks(directory).values())
    if local.find_pool(name, brings_back=False) is not None:
        with contextlib.suppress(Exception), Session(pool=name, start=False, timeout=5.0) as session:
            session.ask("shutdown", timeout, type(None), timeout + 5.0)
        local.await_end(directory)
    local.stop_dashboard_if_unused()
    return was_there


def _default_slots() -> int:
    """0 leaves it to the worker where there are GPUs; else one slot a core."""
    from workbench.pool.worker import find_gpus

    return 0 if find_gpus() else len(os.sched_getaffinity(0))

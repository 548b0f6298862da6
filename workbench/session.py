"""What a notebook, a script or a shell holds: a `Session` is a line to a pool, a `Job` is a name in it.

Both are handles without state of their own: a client never owns a job. Values come from the pool's record each time
they are asked for, so that two notebooks, a restarted kernel and the dashboard see the same.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

import workbench.requests as rq
from workbench.capture import capture
from workbench.entrypoint import check_here, pickle_value, spec_of, unpickle
from workbench.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    GradientMismatchError,
    HangError,
    JobError,
    PoolUnavailableError,
    RankFailedError,
    RendezvousTimeoutError,
    RestartsExhaustedError,
    SpecError,
    UsageError,
)
from workbench.events import Event
from workbench.feed import Bucket, CellStarted, Cursor, JobSummary, PoolStatus, Update
from workbench.policy.consistency import explain
from workbench.policy.failure import first_cause
from workbench.policy.replay import STEPS, ReplayReport
from workbench.pool import local
from workbench.replays import replay_check
from workbench.spec import EntrypointKind, JobSpec, check_spec
from workbench.state import THE_START, Checkpoint, Failure, FailureKind, JobPhase, JobState, RankState
from workbench.store.home import jobs_dir, log_path
from workbench.telemetry import CellFinished, OutputWritten
from workbench.views.failure import failure_text

if TYPE_CHECKING:
    from workbench.agent.logs import LogPage
    from workbench.past import Past
    from workbench.pool.client import PoolClient
    from workbench.views.job import JobView
    from workbench.views.spans import Timeline

SERVICE: Final = "workbench.runner.service:make_service"
CONTROLS: Final = "workbench_widgets.controls"  # by name: it is above, and needs what not every install has
T = TypeVar("T")
SAVED: Final = 100  # newest jobs that one file takes when none are named
POLL: Final = 10.0  # s that one request for news may wait


class Session:
    """A connection to a pool.

    `target` None: the pool of this machine called `pool`, started with `slots` slots (None: one a GPU, else one a core)
    if it does not run and `start` is true. Else a cluster that runs already: an address (`tls://host:8786`), a
    scheduler file, or a `dask.distributed.Client`.

    Raises `PoolUnavailableError` when there is none within `timeout` seconds.
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
        from workbench.pool.client import PoolClient

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
        return self._client.ask(name, body, kind, timeout)

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


class Job:
    """One job of a pool. Every property asks the pool; the values it gives are snapshots."""

    is_saved = False  # a job of a saved session: nothing comes any more, and nothing can be done to it

    def __init__(self, session: Session, job_id: str) -> None:
        self.session, self.job_id = session, job_id

    # --- what is ---

    @property
    def state(self) -> JobState:
        return self.session.ask("state", self.job_id, JobState)

    @property
    def phase(self) -> JobPhase:
        return self.state.phase

    @property
    def reason(self) -> str:
        """Why the phase is what it is, in words."""
        return self.state.reason

    @property
    def spec(self) -> JobSpec:
        return self.state.spec

    @property
    def ranks(self) -> tuple[RankState, ...]:
        return self.state.ranks

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Those on disk, newest first; what is known against one is its `problem`. Looks at manifests and sizes."""
        return self.session.ask("checkpoints", rq.ListCheckpoints(job_id=self.job_id), list[Checkpoint])

    def verify_checkpoints(self, timeout: float = 600.0) -> list[Checkpoint]:
        """The same, once every byte of them has been read."""
        request = rq.ListCheckpoints(job_id=self.job_id, thorough=True)
        return self.session.ask("checkpoints", request, list[Checkpoint], timeout)

    def follow(self, cursor: Cursor | None = None, timeout: float = POLL) -> Update:
        """What is new since `cursor` (None: all), at once when there is something, else after at most `timeout` s."""
        request = rq.Follow(job_id=self.job_id, cursor=cursor or Cursor(), timeout=timeout)
        return self.session.ask("follow", request, Update, timeout + 20.0)

    def updates(self) -> Iterator[Update]:
        """The whole history, then what comes, until the job has ended."""
        update = self.follow(timeout=0.0)
        yield update
        while not update.state.phase.is_terminal:
            update = self.follow(update.cursor)
            yield update

    def view(self, at: float | None = None) -> JobView:
        """What panels show of the job now, or at a time (epoch s) of its past."""
        from workbench.views.job import ViewBuilder

        builder = ViewBuilder(is_past=at is not None)
        builder.add(self.follow(timeout=0.0) if at is None else self.at(at))
        return builder.view()

    def past(self, known: Past | None = None) -> Past:
        """Its record up to now, to be asked how it stood at any time. `known`, from before, is brought up to date."""
        from workbench.past import Past

        past = known or Past()
        past.add(self.follow(past.cursor, timeout=0.0))
        return past

    def at(self, time: float, past: Past | None = None) -> Update:
        """What a follower would have been told by `time` (epoch s), from an empty cursor; of output nothing."""
        past = past or self.past()
        asked = (self.history(one.width, since=one.since, until=one.until) for one in past.wanted(time))
        return past.at(time, next(filter(None, asked), ()))

    @property
    def timeline(self) -> Timeline:
        """Attempts, failures and recoveries, what every rank did when, and the share of time that was of use."""
        timeline = self.view().timeline
        assert timeline is not None  # the record of a job begins with its launch
        return timeline

    def events(self) -> list[Event]:
        """The record, oldest first."""
        return self.session.ask("events", self.job_id, list[Event])

    def history(
        self,
        width: float | None = None,
        ranks: Sequence[int] | None = None,
        since: float = 0.0,
        until: float | None = None,
    ) -> list[Bucket]:
        """Steps folded into buckets of `width` s by rank, that start in `[since, until)`; None: as much data allows."""
        chosen = None if ranks is None else tuple(ranks)
        request = rq.History(job_id=self.job_id, width=width, ranks=chosen, since=since, until=until)
        return self.session.ask("history", request, list[Bucket])

    # --- waiting ---

    def wait(self, timeout: float | None = None) -> JobPhase:
        """Wait for the end. Raises the job's error when it FAILED, `TimeoutError` when it goes on. Stops nothing."""
        state = self._await_end(timeout)
        if state.phase is JobPhase.FAILED:
            raise self._error(state)
        return state.phase

    def exception(self, timeout: float | None = None) -> JobError | None:
        """Wait for the end; the error of a job that did not succeed, else None."""
        state = self._await_end(timeout)
        return None if state.phase is JobPhase.SUCCEEDED else self._error(state)

    def _error(self, state: JobState) -> JobError:
        if not state.restart_count:
            return error_of(state)
        from workbench.views.story import earlier_lines

        return error_of(state, earlier_lines(self.timeline))

    def result(self, timeout: float | None = None) -> list[Any] | None:
        """Wait for the end; of a launched function what each rank returned, in rank order. Raises the job's error."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        update = self.follow(timeout=0.0)
        if update.state.spec.kind is not EntrypointKind.FUNCTION:
            return None
        answers = {cell.rank: cell for cell in update.cells if cell.cell_id == "result"}
        return [unpickle(answers[rank]) if rank in answers else None for rank in range(update.state.world_size)]

    def _await_end(self, timeout: float | None) -> JobState:
        deadline = None if timeout is None else time.monotonic() + timeout
        update = self.follow(timeout=0.0)
        while not update.state.phase.is_terminal:
            left = POLL if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.job_id} is still {update.state.phase.value} after {timeout:g} s")
            update = self.follow(update.cursor, timeout=min(POLL, left))
        return update.state

    # --- acting ---

    def cancel(self, force: bool = False, by: str = "") -> JobPhase:
        """End the job: SIGTERM, the spec's grace, SIGKILL; `force` leaves the grace out. Returns the phase it is in."""
        request = rq.Cancel(job_id=self.job_id, force=force, by=by)
        return self.session.ask("cancel", request, JobPhase)

    def resume(self, step: int | None = None, ranks: int | None = None, path: str = "", by: str = "") -> JobPhase:
        """Have an ended job go on from its newest checkpoint, that of `step` (0: from the start, with none), or the one
        at `path`; on `ranks` ranks.

        Does nothing while it runs. Raises `CheckpointNotFoundError` when there is no such checkpoint, listing those
        there are, and `CheckpointCorruptError` when it is damaged. Returns the phase it is in.
        """
        if step is not None and not path and self.phase.is_terminal:
            path = THE_START if step == 0 else self._checkpoint(step).path
        request = rq.Resume(
            job_id=self.job_id,
            step=step,
            path=path,
            ranks=ranks,
            by=by,
            ambient=self.session.ambient,
            origin=capture(self.spec),
        )
        return self.session.ask("resume", request, JobPhase)

    def _checkpoint(self, step: int) -> Checkpoint:
        known = self.checkpoints
        whole = dict.fromkeys(checkpoint.step for checkpoint in known if not checkpoint.problem)
        hint = f"whole are those of step {', '.join(map(str, whole))}" if whole else "none is whole"
        found = sorted((one for one in known if one.step == step), key=lambda one: bool(one.problem))
        if not found:
            hint = hint if known else "it has saved none"
            raise CheckpointNotFoundError(f"{self.job_id} has no checkpoint of step {step}", hint=hint)
        if found[0].problem:
            what = f"the checkpoint of step {step} of {self.job_id} cannot be used: {found[0].problem}"
            raise CheckpointCorruptError(what, hint=hint)
        return found[0]

    def resize(self, ranks: int, by: str = "") -> JobPhase:
        """Have a running job go on with `ranks` ranks, from a checkpoint made for it. Returns the phase it is in."""
        return self.session.ask("resize", rq.Resize(job_id=self.job_id, ranks=ranks, by=by), JobPhase)

    def inject(self, fault: str, rank: int) -> bool:
        """Do one of `workbench.faults.FAULTS` to a rank, on purpose: at once, or at what it does next.

        False: it waits for that. Raises `UsageError` when it is known soon that it cannot be done.
        """
        return self.session.ask("inject", rq.Inject(job_id=self.job_id, fault=fault, rank=rank), bool)

    def stacks(self) -> dict[int, str]:
        """The Python stack of every running rank, as text."""
        return self.session.ask("stacks", self.job_id, dict[int, str])

    def log_page(self, rank: int, tail: int | None = None, grep: str | None = None, since: int = 0) -> LogPage:
        """A page of one rank's log and where the next begins."""
        from workbench.agent.logs import LogPage

        request = rq.ReadLog(job_id=self.job_id, rank=rank, tail=tail, grep=grep, since=since)
        return self.session.ask("log", request, LogPage)

    def log_path(self, rank: int) -> Path:
        """Where the rank's log lies on its host."""
        return log_path(self.job_id, rank)

    def logs(self, rank: int | None = None, tail: int | None = 50, grep: str | None = None) -> str:
        """The last lines of a rank's output; of all ranks, each line labelled, when `rank` is None."""
        if rank is not None:
            return self.log_page(rank, tail=tail, grep=grep).text
        count = self.state.world_size
        pages = [(k, self.log_page(k, tail=tail, grep=grep).text) for k in range(count)]
        return "\n".join(
            f"[rank {k}] {line}" for k, text in pages for line in text.removesuffix("\n").split("\n") if text
        )

    def replay_check(
        self,
        steps: int = STEPS,
        timeout: float = 600.0,
        tell: Callable[[str], None] | None = None,
        **changes: Any,
    ) -> ReplayReport:
        """Whether its program gives the same bits again, from its beginning: as `Session.replay_check`.

        `changes` are fields of its spec, such as `deterministic=True`. The job itself is left alone.
        """
        spec = msgspec.structs.replace(self.spec, **changes)
        if not spec.nproc_per_node:
            spec = msgspec.structs.replace(spec, nproc_per_node=max(1, self.state.world_size // spec.nnodes))
        return replay_check(self.session.launch_spec, spec, steps=steps, timeout=timeout, tell=tell)

    # --- cells of an interactive job ---

    def execute(self, source: str, ranks: Sequence[int] | None = None) -> CellRun:
        """Run a cell on the ranks; iterate over what comes of it."""
        if not source.strip():
            raise SpecError("the cell is empty", hint="write what the ranks are to run")
        return self._begin("execute", rq.Execute(job_id=self.job_id, source=source, ranks=_ranks(ranks)))

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """KeyboardInterrupt in the ranks' running cell; ranks, job and pool live on."""
        self.session.ask("interrupt", rq.Interrupt(job_id=self.job_id, ranks=_ranks(ranks)), type(None), timeout=5.0)

    def push(self, name: str, value: Any, ranks: Sequence[int] | None = None) -> None:
        """Bind `name` to a copy of `value` in the ranks' namespaces."""
        if not name.isidentifier():
            raise UsageError(f"{name!r} is no variable name")
        payload = pickle_value(value, f"{name} cannot be sent")
        run = self._begin("push", rq.Push(job_id=self.job_id, name=name, payload=payload, ranks=_ranks(ranks)))
        run.answers_or_raise()

    def pull(self, name: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """The value of an expression in the ranks' namespaces, by rank."""
        run = self._begin("pull", rq.Pull(job_id=self.job_id, name=name, ranks=_ranks(ranks)))
        return {rank: unpickle(answer) for rank, answer in sorted(run.answers_or_raise().items())}

    def _begin(self, name: str, request: object) -> CellRun:
        return CellRun(self, self.session.ask(name, request, CellStarted, 60.0))

    # --- display ---

    def panel(self) -> Any:
        """Buttons for a notebook (ipywidgets): resume, resize, cancel, stacks, interrupt, faults on purpose."""
        try:
            module = importlib.import_module(CONTROLS)
        except ImportError as error:
            raise UsageError(
                f"there is no {error.name} here", hint="pip install 'dtrain-workbench[notebook]'"
            ) from None
        return module.panel(self)

    def __repr__(self) -> str:
        return f"<Job {self.job_id}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from workbench.views.html import snapshot_html
        from workbench.views.text import render_status

        view = self.view()
        return {"text/plain": render_status(view), "text/html": snapshot_html(view)}


class CellRun:
    """A cell on its way: iterate for output and answers as they come; ends when every rank has answered.

    Raises the job's error when a rank that has not answered is gone.
    """

    def __init__(self, job: Job, started: CellStarted) -> None:
        self.job, self.cell_id, self.ranks = job, started.cell_id, started.ranks
        self.answers: dict[int, CellFinished] = {}
        self.last: Update | None = None
        self._cursor = started.cursor

    def __iter__(self) -> Iterator[OutputWritten | CellFinished]:
        while len(self.answers) < len(self.ranks):
            yield from self.poll(POLL)

    def poll(self, timeout: float) -> list[OutputWritten | CellFinished]:
        """What has come since the last call, waiting at most `timeout` seconds for something."""
        update = self.job.follow(self._cursor, timeout)
        self._cursor, self.last = update.cursor, update
        news: list[OutputWritten | CellFinished] = list(update.output)
        for answer in update.cells:
            if answer.cell_id == self.cell_id:
                self.answers[answer.rank] = answer
                news.append(answer)
        self._check(update.state)
        return news

    @property
    def is_done(self) -> bool:
        return len(self.answers) == len(self.ranks)

    def answers_or_raise(self) -> dict[int, CellFinished]:
        """All answers; the first that is an error is raised."""
        for item in self:
            if isinstance(item, CellFinished) and not item.ok:
                raise RankFailedError(
                    f"rank {item.rank}: {item.error}",
                    job_id=self.job.job_id,
                    rank=item.rank,
                    traceback=item.traceback,
                )
        return self.answers

    def _check(self, state: JobState) -> None:
        """How a rank ended says more than that it did not answer."""
        gone = {rank.rank for rank in state.ranks if rank.phase.has_exited}
        if any(rank not in self.answers or not self.answers[rank].ok for rank in gone.intersection(self.ranks)):
            raise error_of(state)
        if state.phase.is_terminal and not self.is_done:
            raise error_of(state)


def error_of(state: JobState, earlier: Sequence[str] = ()) -> JobError:
    """The exception that a job which did not succeed stands for. `earlier`: of attempts before, a line each."""
    failure = state.failure or (first_cause(state.failures) if state.failures else None)
    if failure is None:
        return JobError(f"{state.job_id}: {state.reason}", job_id=state.job_id)
    error = _error_of(state, failure)
    error.story = failure_text(msgspec.structs.replace(state, failure=failure), earlier=earlier)
    return error


def _error_of(state: JobState, failure: Failure) -> JobError:
    job_id = state.job_id
    reason = f"{job_id}: {state.reason}"
    match failure.kind:
        case FailureKind.TIMEOUT if failure.stall is not None:
            return HangError(reason, job_id=job_id, rank=failure.rank, hint=failure.stall.where)
        case FailureKind.TIMEOUT:
            return RendezvousTimeoutError(reason, job_id=job_id, rank=failure.rank)
        case FailureKind.MISMATCH if failure.mismatch is not None:
            fix = explain(failure.mismatch, failure.step or 0).fix
            return GradientMismatchError(
                reason, job_id=job_id, rank=failure.rank, hint=fix, step=failure.step, mismatch=failure.mismatch
            )
        case FailureKind.LAUNCH | FailureKind.WORKER_LOST:
            return JobError(reason, job_id=job_id, rank=failure.rank)
    is_spent = 0 < state.spec.max_restarts <= state.fruitless
    kind = RestartsExhaustedError if is_spent else RankFailedError
    return kind(
        reason,
        job_id=job_id,
        rank=failure.rank,
        traceback=failure.traceback,
        log_path=failure.log_path,
    )


def stop_pool(name: str = "default", timeout: float = 10.0) -> bool:
    """End a pool of this machine with all its jobs; False when it did not run."""
    mark = local.find_pool(name)
    if mark is None:
        local.stop_dashboard_if_unused()
        return False
    with contextlib.suppress(Exception), Session(pool=name, start=False, timeout=5.0) as session:
        session.ask("shutdown", timeout, type(None), timeout + 5.0)
    local.await_end(local.pool_dir(name))
    local.stop_dashboard_if_unused()
    return True


def _default_slots() -> int:
    """0 leaves it to the worker where there are GPUs; else one slot a core."""
    from workbench.pool.worker import find_gpus

    return 0 if find_gpus() else len(os.sched_getaffinity(0))


def _ranks(ranks: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if ranks is None else tuple(ranks)

"""A job by name: what is asked of it, and what is done to it; see `workbench.session`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

import workbench.requests as rq
from workbench.capture import capture
from workbench.entrypoint import pickle_value, unpickle
from workbench.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    JobError,
    SpecError,
    UsageError,
)
from workbench.events import Event
from workbench.feed import BeatFrame, Bucket, CellStarted, Cursor, Update
from workbench.policy.replay import STEPS, ReplayReport
from workbench.replays import replay_check
from workbench.session.cells import POLL, CellRun, which
from workbench.session.controls import job_panel
from workbench.session.failed import error_of
from workbench.spec import EntrypointKind, JobSpec
from workbench.state import THE_START, Checkpoint, JobPhase, JobState, RankState
from workbench.store.home import log_path

if TYPE_CHECKING:
    from workbench.agent.logs import LogPage
    from workbench.past import Past
    from workbench.session import Session
    from workbench.views.job import JobView
    from workbench.views.spans import Timeline

T = TypeVar("T")


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

        builder = ViewBuilder(is_past=at is not None, is_saved=self.is_saved and at is None)
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
        from workbench.store.beats import unpacked

        past = past or self.past()
        asked = (self.history(one.width, since=one.since, until=one.until) for one in past.wanted(time))
        frames = self.session.ask("frames", rq.ReadFrames(job_id=self.job_id, until=time), list[BeatFrame])
        return past.at(time, next(filter(None, asked), ()), [beat for frame in frames for beat in unpacked(frame)])

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
        return self._begin("execute", rq.Execute(job_id=self.job_id, source=source, ranks=which(ranks)))

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """KeyboardInterrupt in the ranks' running cell; ranks, job and pool live on."""
        self.session.ask("interrupt", rq.Interrupt(job_id=self.job_id, ranks=which(ranks)), type(None), timeout=5.0)

    def push(self, name: str, value: Any, ranks: Sequence[int] | None = None) -> None:
        """Bind `name` to a copy of `value` in the ranks' namespaces."""
        if not name.isidentifier():
            raise UsageError(f"{name!r} is no variable name")
        payload = pickle_value(value, f"{name} cannot be sent")
        run = self._begin("push", rq.Push(job_id=self.job_id, name=name, payload=payload, ranks=which(ranks)))
        run.answers_or_raise()

    def pull(self, name: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """The value of an expression in the ranks' namespaces, by rank."""
        run = self._begin("pull", rq.Pull(job_id=self.job_id, name=name, ranks=which(ranks)))
        return {rank: unpickle(answer) for rank, answer in sorted(run.answers_or_raise().items())}

    def _begin(self, name: str, request: object) -> CellRun:
        return CellRun(self, self.session.ask(name, request, CellStarted, 60.0))

    # --- display ---

    def panel(self) -> Any:
        """Buttons for a notebook (ipywidgets): resume, resize, cancel, stacks, interrupt, faults on purpose."""
        return job_panel(self)

    def __repr__(self) -> str:
        return f"<Job {self.job_id}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from workbench.views.html import snapshot_html
        from workbench.views.text import render_status

        view = self.view()
        return {"text/plain": render_status(view), "text/html": snapshot_html(view)}

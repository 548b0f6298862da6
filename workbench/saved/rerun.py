"""A saved session run again: plans are made and told, the user agrees, then jobs run one after another, sweeps at once.

Code runs only when the file was saved from this DTRAIN_HOME or the caller says so, and only code that is, bit for bit,
what the file's digests name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from workbench.capture import digest_of
from workbench.errors import JobError, SavedFileError, UsageError
from workbench.events import CheckpointRefused, RunResumed
from workbench.saved.beginning import NEWEST, Beginning
from workbench.saved.plan import Attempt, Changes, Plan, is_inside, make_plan
from workbench.saved.session import SavedJob, SavedSession, load_session
from workbench.saved.traces import trace_of
from workbench.session import Job, Session
from workbench.spec import EntrypointKind
from workbench.state import JobPhase
from workbench.store.home import atomic_write, home_dir, private_dir
from workbench.views.compare import TOLERANCE, Line, check

Follow = Callable[[Job], object]  # waits for a job's end, showing it or not
START: Final = 120.0  # s that ranks of an interactive job may take to wait for cells


@dataclass(frozen=True)
class Done:
    """One job that was run again. `lines`: how it compares with the saved one; empty: that was not asked for."""

    saved: SavedJob
    job: Job
    attempt: Attempt
    is_well: bool
    reason: str
    lines: tuple[Line, ...] = ()

    @property
    def is_deviation(self) -> bool:
        return any(line.verdict.is_deviation for line in self.lines)


@dataclass(frozen=True)
class Rerun:
    """What came of it; `is_well` when every job ended well and none deviated."""

    done: tuple[Done, ...]

    @property
    def is_well(self) -> bool:
        return all(one.is_well and not one.is_deviation for one in self.done)

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(one.job for one in self.done)


@dataclass(frozen=True)
class Checking:
    """How a rerun is held against the saved run; `tolerance` where it need not be bit for bit (`exact`)."""

    tolerance: float = TOLERANCE
    exact: bool = False


def rerun(
    path: str | os.PathLike[str],
    *,
    job: str | None = None,
    set: Mapping[str, Any] | None = None,
    nproc_per_node: int | None = None,
    steps: int | None = None,
    from_checkpoint: int | bool | None = None,
    check: bool | Checking = False,
    out: str | os.PathLike[str] | None = None,
    yes: bool = False,
    session: Session | None = None,
) -> Rerun:
    """Run a saved session's jobs again (or one of them) and wait for their ends.

    `set`: other values for parameters and options by name; a list of values is a sweep. `steps`: end well at that one.
    `from_checkpoint`: begin from the saved one of that step, or (True) the newest. `yes`: run code that was not saved
    from this DTRAIN_HOME. `check`: compare each with the saved run. `out`: save what was run. `session`: where; this
    machine's default pool if None. Raises `UsageError` before anything starts; a job that fails is in the answer.
    """
    given = {name: value if isinstance(value, list | tuple) else [value] for name, value in (set or {}).items()}
    step = NEWEST if from_checkpoint is True else None if from_checkpoint is False else from_checkpoint
    settings = tuple((name, tuple(map(str, values))) for name, values in given.items())
    changes = Changes(settings, nproc_per_node, steps, checkpoint=step)
    saved = load_session(path)
    plans = prepare(saved, job, changes)
    demand(saved, plans, yes=yes)
    demand_folder(out)
    live = session or Session(slots=slots_for(plans))  # stays open: the jobs in the answer ask it
    checking = check if isinstance(check, Checking) else Checking() if check else None
    result = perform(plans, live, lambda one: one.exception(), checking)
    if out is not None:
        live.save(out, list(result.jobs))
    return result


def prepare(saved: SavedSession, job_id: str | None, changes: Changes) -> tuple[Plan, ...]:
    """Plans for all jobs of the file, or one, in the order in which they were launched."""
    ids = [saved.attach(job_id).job_id] if job_id else [entry.job_id for entry in saved.document.jobs]
    if not ids:
        raise UsageError(f"{saved.archive.path.name} has no job")
    return tuple(make_plan(saved, saved.attach(one), changes) for one in ids)


def demand(saved: SavedSession, plans: Sequence[Plan], *, yes: bool) -> None:
    """Raise `UsageError` unless all of it can start and may."""
    wrong = [f"{plan.job.job_id}: {problem}" for plan in plans for problem in plan.problems]
    if wrong:
        others = [plan.job.job_id for plan in plans if not plan.problems]
        hint = f"run another alone with: --job {others[0]}" if others else "nothing was started"
        raise UsageError("; ".join(wrong), hint=hint)
    if not yes and not saved.is_ours:
        name = saved.archive.path.name
        raise UsageError(
            f"{name} was not saved here, and a rerun runs its code as you",
            hint=f"read it with: %dtrain show {name} --code; then add --yes",
        )


def demand_folder(out: str | os.PathLike[str] | None) -> None:
    """Raise before anything starts when what is run could not be saved there."""
    if out is not None and not Path(out).absolute().parent.is_dir():
        raise SavedFileError(f"there is no directory {Path(out).absolute().parent}", hint="make it, or save elsewhere")


def other_hardware(saved: SavedSession, session: Session) -> str:
    """What the pool computes on, where that is not what the saved one had; or ''."""
    was = saved.document.pool
    here = {worker.accelerator for worker in session.pool_status().workers}
    if was is None or was.accelerator in here:
        return ""
    return (
        f"it ran on {was.accelerator}s, and the pool has {' and '.join(sorted(here))}s: nothing will be the same bits"
    )


def slots_for(plans: Sequence[Plan]) -> int | None:
    """How many a pool must be started with; None: as many as it would have anyway."""
    most = max(attempt.spec.world_size for plan in plans for attempt in plan.attempts)
    return most if most > len(os.sched_getaffinity(0)) else None


def demand_slots(plans: Sequence[Plan], session: Session) -> None:
    """Raise `UsageError` when the pool could never run one of them."""
    slots = session.pool_status().slots
    for plan in plans:
        most = max(attempt.spec.world_size for attempt in plan.attempts)
        if most > slots:
            raise UsageError(
                f"{plan.job.job_id} needs {most} slots and the pool has {slots}",
                hint=f"give --nproc-per-node {slots}, or start a larger pool",
            )


def perform(
    plans: Sequence[Plan], session: Session, follow: Follow, checking: Checking | None = None
) -> Rerun:  # fmt: skip
    """Run them; a job that fails does not keep the next from running."""
    demand_slots(plans, session)
    return Rerun(tuple(done for plan in plans for done in _perform(plan, session, follow, checking)))


def _perform(plan: Plan, session: Session, follow: Follow, checking: Checking | None) -> Iterator[Done]:
    begin = "" if plan.beginning is None else plan.beginning.place(plan.job.session.archive)
    specs = [(attempt, replace(placed(attempt), resume_from=begin)) for attempt in plan.attempts]
    started = [(attempt, session.launch_spec(spec)) for attempt, spec in specs]
    for attempt, job in started:
        reason = _cells(job, attempt) if attempt.spec.kind is EntrypointKind.INTERACTIVE else ""
        follow(job)
        state = job.state
        is_well = not reason if attempt.spec.kind is EntrypointKind.INTERACTIVE else state.phase is JobPhase.SUCCEEDED
        if is_well and plan.beginning is not None and (reason := _not_begun(job, plan.beginning)):
            is_well = False
        lines = _checked(plan.job, job, checking) if checking is not None else ()
        yield Done(plan.job, job, attempt, is_well, reason or state.reason, lines)


def _not_begun(job: Job, beginning: Beginning) -> str:
    """Why it was not a run from that checkpoint, or ''."""
    events = job.events()
    if any(isinstance(event, RunResumed) and event.step == beginning.step for event in events):
        return ""
    refused = next((e.checkpoint.problem for e in events if isinstance(e, CheckpointRefused)), "")
    why = refused or "its program restores nothing with Run.steps or Run.load"
    return f"it did not go on from the checkpoint of step {beginning.step:,}: {why}"


def _checked(saved: SavedJob, job: Job, checking: Checking) -> tuple[Line, ...]:
    found = check(trace_of(saved), trace_of(job), tolerance=checking.tolerance, exact=checking.exact)
    return tuple(found)


def _cells(job: Job, attempt: Attempt) -> str:
    """The cells of an interactive job, in order, then its end; why it did not go well, or ''."""
    try:
        _await_ranks(job)
        for cell in attempt.cells:
            ranks = [rank for rank in cell.ranks if rank < job.state.world_size]
            job.execute(cell.source, ranks).answers_or_raise()
    except JobError as error:
        return str(error.args[0])
    finally:
        if not job.phase.is_terminal:
            job.cancel(by="the rerun's end")
    return ""


def _await_ranks(job: Job) -> None:
    update = job.follow(timeout=0.0)
    while update.state.phase in (JobPhase.INIT, JobPhase.LAUNCHING):
        update = job.follow(update.cursor, timeout=START)


# --- code -------------------------------------------------------------------------------------------------------------


def placed(attempt: Attempt) -> Any:
    """The spec with its code where it says; files go to a folder of DTRAIN_HOME that is named by what is in it."""
    if not attempt.files:
        return attempt.spec
    listing = "\0".join(f"{name}\0{digest_of(text.encode())}" for name, text in sorted(attempt.files.items()))
    folder = private_dir(home_dir() / "reruns" / digest_of(listing.encode())[:16])
    for name, text in attempt.files.items():
        if not is_inside(name):
            raise UsageError(f"{name!r} is no path for code")
        target = folder / name
        private_dir(target.parent)
        atomic_write(target, text.encode())
    spec = attempt.spec
    if spec.kind is EntrypointKind.SCRIPT:
        return replace(spec, entrypoint=str(folder / spec.entrypoint))
    return replace(spec, cwd=str(folder)) if not Path(spec.cwd).is_absolute() else spec

"""What a reader may have done to a job, and why not now: the same for the page, the notebook's controls and texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from workbench.faults import FAULTS
from workbench.state import CheckpointTier
from workbench.views.job import JobView
from workbench.views.wording import plural

FAULT_HELP: Final[Mapping[str, str]] = {name: f"{fault.help} ({fault.place.value})" for name, fault in FAULTS.items()}
FAULT_WHEN: Final[Mapping[str, str]] = {name: fault.place.value for name, fault in FAULTS.items()}
GOES_ON: Final = "the job runs: it goes on by itself"


class Act(NamedTuple):
    """`name`: cancel, interrupt, stacks, resume, resize or inject; the rest as its like of `Job` takes it."""

    name: str
    step: int | None = None
    path: str = ""
    ranks: int | None = None
    rank: int | None = None
    fault: str = ""


def why_not(act: Act, view: JobView | None) -> str:
    """Why the act makes no sense now, in words; empty when it does."""
    if view is None:
        return "the job is not known yet"
    if act.name not in _CHECKS:
        return f"there is no action {act.name!r}"
    if view.phase.is_terminal is not (act.name == "resume"):
        return GOES_ON if act.name == "resume" else f"the job has ended: {view.phase.value}"
    return _CHECKS[act.name](act, view)


def _cancel(act: Act, view: JobView) -> str:
    return "the job is being ended already" if view.phase.value == "STOPPING" else ""


def _interrupt(act: Act, view: JobView) -> str:
    if not view.is_interactive:
        return "only a cell on an interactive job can be interrupted; this job runs a program: cancel it to end it"
    return _nobody(view)


def _stacks(act: Act, view: JobView) -> str:
    return _nobody(view)


def _resume(act: Act, view: JobView) -> str:
    if view.is_interactive:
        return "an interactive job has nothing to go on with: launch it anew"
    chosen = next((c for c in view.checkpoints if (c.step, c.path) == (act.step, act.path)), None)
    if chosen is not None and chosen.problem:
        return f"the checkpoint of step {chosen.step:,} cannot be used: {chosen.problem}"
    if chosen is not None and chosen.tier is CheckpointTier.MEMORY:
        return "that one was held in memory, and went when the job ended"
    return _ranks(act.ranks) if act.ranks is not None else ""


def _resize(act: Act, view: JobView) -> str:
    if view.is_interactive:
        return "an interactive job's ranks hold what no checkpoint has"
    if act.ranks is None:
        return "say first on how many ranks"
    return _ranks(act.ranks) or (f"it has {plural(act.ranks, 'rank')} already" if act.ranks == view.world_size else "")


def _inject(act: Act, view: JobView) -> str:
    if act.fault not in FAULTS:
        return f"there is no fault {act.fault!r}"
    row = next((row for row in view.rows if row.rank == act.rank), None)
    if row is None:
        return f"there is no rank {act.rank}: the job has {plural(view.world_size, 'rank')}, from 0 on"
    return "" if row.pid and not row.phase.has_exited else f"rank {act.rank} does not run now"


def _ranks(ranks: int) -> str:
    return "" if ranks > 0 else "a job has at least 1 rank"


def _nobody(view: JobView) -> str:
    runs = any(row.pid and not row.phase.has_exited for row in view.rows)
    return "" if runs else "no rank runs now"


_CHECKS: Final[Mapping[str, Callable[[Act, JobView], str]]] = {
    "cancel": _cancel,
    "interrupt": _interrupt,
    "stacks": _stacks,
    "resume": _resume,
    "resize": _resize,
    "inject": _inject,
}

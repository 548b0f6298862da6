"""What buttons do to a job; each answers in words what it did, or why it could not. Clicking twice does it once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from workbench import Job, WorkbenchError
from workbench.views.acts import FAULT_WHEN, Act, why_not
from workbench.views.job import JobView
from workbench.views.wording import plural, ranks_text

AGAIN: Final = 2.0  # s after an act in which the same one is taken for the second click of two
logger = logging.getLogger(__name__)


class Once:
    """Of acts that are asked for again while they are under way, or just after, only the first is done.

    A look that changes nothing ("stacks") may follow the last one at once.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._under_way: set[Act] = set()
        self._done: dict[Act, float] = {}

    def begin(self, act: Act) -> str:
        """Empty: go on, and say `end` when it is over; else why not."""
        if act in self._under_way:
            return f"{act.name} is under way already"
        if self._now() - self._done.get(act, float("-inf")) < AGAIN:
            return f"{act.name} was done just now"
        self._under_way.add(act)
        return ""

    def end(self, act: Act) -> None:
        self._under_way.discard(act)
        if act.name != "stacks":
            self._done = {done: at for done, at in self._done.items() if self._now() - at < AGAIN}
            self._done[act] = self._now()


def perform(act: Act, job: Job | None, view: JobView | None, *, by: str) -> str:
    """Do it, waiting for the pool's answer. Never raises."""
    if reason := why_not(act, view):
        return f"Nothing done: {reason}."
    if job is None:
        return "Nothing done: the pool does not answer. Is it running? See: %dtrain pool"
    try:
        return _DO[act.name](act, job, by)
    except WorkbenchError as error:
        return f"It did not work: {error}"
    except Exception as error:
        logger.exception("%s %s", act.name, job.job_id)
        return f"It did not work: {type(error).__name__}: {error}"


def _cancel(act: Act, job: Job, by: str) -> str:
    return f"Cancel was asked for; the job is {job.cancel(by=by).value} now."


def _interrupt(act: Act, job: Job, by: str) -> str:
    job.interrupt()
    return "Interrupt was sent: the running cell gets KeyboardInterrupt; ranks, variables and job live on."


def _stacks(act: Act, job: Job, by: str) -> str:
    found = job.stacks()
    if not found:
        return "Nothing to show: no rank runs now."
    return f"Stacks of {ranks_text(found)}:\n\n" + "\n\n".join(
        f"rank {rank}\n{text.rstrip()}" for rank, text in sorted(found.items())
    )


def _resume(act: Act, job: Job, by: str) -> str:
    state = job.state
    newest = " from its newest checkpoint" if state.checkpoints or state.spec.resume_from else ""
    phase = job.resume(step=act.step, ranks=act.ranks, path=act.path, by=by)
    where = newest if act.step is None else f" from the checkpoint of step {act.step:,}"
    on = "" if act.ranks is None else f" on {plural(act.ranks, 'rank')}"
    return f"Resume{where}{on} was asked for; the job is {phase.value} now."


def _resize(act: Act, job: Job, by: str) -> str:
    assert act.ranks is not None
    phase = job.resize(act.ranks, by=by)
    return (
        f"Resize to {plural(act.ranks, 'rank')} was asked for; the job is {phase.value} now, and begins anew on them "
        "once it has saved a checkpoint."
    )


def _inject(act: Act, job: Job, by: str) -> str:
    assert act.rank is not None
    if job.inject(act.fault, act.rank):
        return f"{act.fault} was done to rank {act.rank}."
    return f"{act.fault} awaits rank {act.rank}, {FAULT_WHEN[act.fault]}: the timeline tells when it is done."


_DO: Final[Mapping[str, Callable[[Act, Job, str], str]]] = {
    "cancel": _cancel,
    "interrupt": _interrupt,
    "stacks": _stacks,
    "resume": _resume,
    "resize": _resize,
    "inject": _inject,
}

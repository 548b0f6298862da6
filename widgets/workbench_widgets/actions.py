"""What the page's buttons do to a job; each answers in words what it did, or why it could not."""

from __future__ import annotations

import logging

from workbench import Job, WorkbenchError
from workbench.views.job import JobView
from workbench.views.wording import ranks_text

logger = logging.getLogger(__name__)


def why_not(action: str, view: JobView | None) -> str:
    """Why the action makes no sense now, in words; empty when it does."""
    if view is None:
        return "the job is not known yet"
    if view.phase.is_terminal:
        return f"the job has ended: {view.phase.value}"
    if action == "cancel":
        return "the job is being ended already" if view.phase.value == "STOPPING" else ""
    if action == "interrupt" and not view.is_interactive:
        return "only a cell on an interactive job can be interrupted; this job runs a program: cancel it to end it"
    if not any(row.pid and not row.phase.has_exited for row in view.rows):
        return "no rank runs now"
    return ""


def perform(action: str, job: Job | None, view: JobView | None, *, by: str) -> str:
    """Do it, waiting for the pool's answer. Never raises."""
    if reason := why_not(action, view):
        return f"Nothing done: {reason}."
    if job is None:
        return "Nothing done: the pool does not answer. Is it running? See: %dtrain pool"
    try:
        return _perform(action, job, by)
    except WorkbenchError as error:
        return f"It did not work: {error}"
    except Exception as error:
        logger.exception("%s %s", action, job.job_id)
        return f"It did not work: {type(error).__name__}: {error}"


def _perform(action: str, job: Job, by: str) -> str:
    match action:
        case "cancel":
            return f"Cancel was asked for; the job is {job.cancel(by=by).value} now."
        case "interrupt":
            job.interrupt()
            return "Interrupt was sent: the running cell gets KeyboardInterrupt; ranks, variables and job live on."
        case "stacks":
            found = job.stacks()
            if not found:
                return "Nothing to show: no rank runs now."
            return f"Stacks of {ranks_text(found)}:\n\n" + "\n\n".join(
                f"rank {rank}\n{text.rstrip()}" for rank, text in sorted(found.items())
            )
    return f"Nothing done: there is no action {action!r}."

"""Verbs that follow a job: wait, top, and `launch --wait`.

All of it happens in the thread that typed the verb; an interrupt ends the watching and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from workbench.errors import JobError
from workbench.state import JobPhase
from workbench.verbs.context import Context, WaitInterrupted
from workbench.verbs.declare import Arguments, Outcome

if TYPE_CHECKING:
    from workbench.session import Job
    from workbench.views.job import JobView

PAUSE: Final = 0.1  # s between two requests for news, however much there is
POLL: Final = 1.0  # s that one request waits when there is none


def wait(context: Context, args: Arguments) -> Outcome:
    """Wait for the job's end."""
    return to_the_end(context, context.job(args), args)


def top(context: Context, args: Arguments) -> Outcome:
    """A table that is drawn anew until the job ends; in a notebook the job shows itself."""
    job = context.job(args)
    if not context.is_shell:
        return Outcome(value=job)
    return to_the_end(context, job, args, raises=False)


def to_the_end(context: Context, job: Job, args: Arguments, *, raises: bool = True) -> Outcome:
    """Follow the job, showing where it stands, until it has ended or --timeout has passed.

    Raises its error when it FAILED, `WaitInterrupted` when the wait was interrupted.
    """
    limit = getattr(args, "timeout", None)
    view = follow(context, job, timeout=limit, is_quiet=context.quiet(args))
    document = msgspec.to_builtins(view)
    if not view.phase.is_terminal:
        text = f"{job.job_id} is still {view.phase.value} after {limit:g} s; it goes on"
        return Outcome(value=job if args.verb == "launch" else None, text=text, document=document, code=1)
    error = job.exception(timeout=10.0)
    if error is not None and raises and view.phase is JobPhase.FAILED:
        raise _with_document(error, document)
    code = 0 if view.phase is JobPhase.SUCCEEDED else 1
    if not context.is_shell:  # the last picture has said how it ended
        return Outcome(value=job if args.verb == "launch" else None, document=document, code=code)
    text = f"{job.job_id} {view.phase.value}" + (f": {view.reason}" if view.reason else "")
    return Outcome(text=text, document=document, code=code)


def _with_document(error: JobError, document: Any) -> JobError:
    """What --json prints of a job that failed is the job."""
    error.document = document  # type: ignore[attr-defined]
    return error


def follow(
    context: Context,
    job: Job,
    *,
    timeout: float | None = None,
    is_quiet: bool = False,
    above: Callable[[JobView], str] | None = None,
) -> JobView:
    """The job's view at its end, or when `timeout` s have passed; `above` gives a line to stand over each picture."""
    try:
        return _follow(context, job, timeout, is_quiet, above)
    except KeyboardInterrupt:
        context.screen.settle()
        raise WaitInterrupted(f"stopped waiting; {job.job_id} goes on") from None


def _follow(
    context: Context, job: Job, timeout: float | None, is_quiet: bool, above: Callable[[JobView], str] | None
) -> JobView:
    from workbench.views.job import ViewBuilder

    builder, began, shown = ViewBuilder(), context.clock(), float("-inf")
    update = job.follow(timeout=0.0)
    while True:
        builder.add(update)
        now = context.clock()
        has_ended, is_late = update.state.phase.is_terminal, timeout is not None and now - began >= timeout
        if not is_quiet and (now - shown >= context.screen.interval or has_ended or is_late):
            view = builder.view()
            head = above(view) if above is not None else ""
            context.screen.update("\n".join(filter(None, [head, _picture(context, view)])))
            shown = now
        if has_ended or is_late:
            context.screen.settle()
            return builder.view()
        context.sleep(PAUSE)
        left = POLL if timeout is None else max(began + timeout - context.clock(), 0.0)
        update = job.follow(update.cursor, timeout=min(POLL, left))


def _picture(context: Context, view: JobView) -> str:
    from workbench.views.text import one_line, render_status

    if context.is_shell and context.screen.redraws:
        return render_status(view, width=context.screen.width, color=context.screen.has_color)
    return one_line(view, width=200)

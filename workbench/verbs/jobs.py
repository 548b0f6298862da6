"""Verbs about jobs: jobs, status, stacks, cancel, interrupt, inject, push, pull."""

from __future__ import annotations

import ast
import getpass
import re
from typing import Any

import msgspec

from workbench.errors import UsageError
from workbench.faults import FAULTS
from workbench.verbs.context import Context
from workbench.verbs.declare import Arguments, Outcome
from workbench.verbs.lines import name_ranks
from workbench.verbs.parse import nearest
from workbench.verbs.shown import Listing, Text
from workbench.verbs.story import clock_of, launches

LIMIT = 20


def listing(context: Context, args: Arguments) -> Outcome:
    """The job list, newest first."""
    from workbench.views.text import render_jobs

    session = context.session(args)
    limit = 1_000_000 if args.all else (LIMIT if args.limit is None else args.limit)
    found = session.jobs(limit=limit + 1, phase=args.phase)
    jobs = found[:limit]
    text = render_jobs(
        jobs,
        launches(context),
        width=context.screen.width,
        color=context.screen.has_color,
    )
    if not jobs:
        start = f"no job has run here yet; start one with: {context.prefix} launch train.py"
        text = start if args.phase is None else f"no job is {args.phase.value}; all there are: {context.prefix} jobs"
    if len(found) > limit:
        text += f"\n… older ones: {context.prefix} jobs --all"
    return Outcome(value=Listing(jobs, text), text=text, document=msgspec.to_builtins(jobs))


def status(context: Context, args: Arguments) -> Outcome:
    """Where a job stands, by rank."""
    from workbench.views.text import render_status

    view = context.job(args).view()
    screen = context.screen
    text = render_status(view, width=screen.width, color=screen.has_color, clock=clock_of(view.timeline))
    return Outcome(value=Text(text), text=text, document=msgspec.to_builtins(view))


def stacks(context: Context, args: Arguments) -> Outcome:
    """Every rank's Python stack; equal ones once."""
    job = context.job(args)
    found = job.stacks()
    if args.rank is not None:
        found = {rank: text for rank, text in found.items() if rank in args.rank}
    document = {"job_id": job.job_id, "stacks": {str(rank): text for rank, text in sorted(found.items())}}
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(found.items()):
        groups.setdefault(text.strip(), []).append(rank)
    parts = [f"--- {name_ranks(ranks)} ---\n{text}" for text, ranks in groups.items()]
    text = "\n\n".join(parts) or f"no rank of {job.job_id} runs"
    return Outcome(value=Text(text), text=text, document=document)


def cancel(context: Context, args: Arguments) -> Outcome:
    """End a job."""
    job = context.job(args)
    if job.phase.is_terminal:
        return _said(f"{job.job_id} had ended already: {job.phase.value}", {"job_id": job.job_id, "phase": job.phase})
    phase = job.cancel(force=args.force, by=_who())
    return _said(f"{job.job_id} {phase.value}", {"job_id": job.job_id, "phase": phase})


def resume(context: Context, args: Arguments) -> Outcome:
    """Have an ended job go on."""
    job = context.job(args)
    if not job.phase.is_terminal:
        return _said(f"{job.job_id} runs: {job.reason}", {"job_id": job.job_id, "phase": job.phase})
    phase = job.resume(step=args.step, ranks=args.ranks, by=_who())
    context.adopt(job)
    text = f"{job.job_id} {phase.value}: {job.reason}"
    return Outcome(value=job, text=text, document=msgspec.to_builtins({"job_id": job.job_id, "phase": phase}))


def resize(context: Context, args: Arguments) -> Outcome:
    """Have a running job go on with another number of ranks."""
    job = context.job(args)
    phase = job.resize(args.ranks, by=_who())
    return _said(f"{job.job_id} {phase.value}: {job.reason}", {"job_id": job.job_id, "phase": phase})


def interrupt(context: Context, args: Arguments) -> Outcome:
    """KeyboardInterrupt in the ranks' cell."""
    job = context.job(args)
    job.interrupt(args.rank)
    where = name_ranks(args.rank) if args.rank else "all ranks"
    return _said(f"interrupted the cell on {where} of {job.job_id}", {"job_id": job.job_id, "ranks": args.rank})


def inject(context: Context, args: Arguments) -> Outcome:
    """Do a fault to a rank, on purpose."""
    job = context.job(args)
    is_done = job.inject(args.fault, args.rank)
    done = f"{args.fault} done to rank {args.rank} of {job.job_id}"
    waits = f"{args.fault} awaits rank {args.rank} of {job.job_id}: {FAULTS[args.fault].place.value}"
    return _said(
        done if is_done else waits,
        {"job_id": job.job_id, "fault": args.fault, "rank": args.rank, "done": is_done},
    )


# --- values -----------------------------------------------------------------------------------------------------------


def push(context: Context, args: Arguments) -> Outcome:
    """Bind a name in the ranks to a value of the notebook's, or to a literal."""
    name, value = _pushed(context, args.value)
    job = context.job(args)
    job.push(name, value, args.rank)
    return _said(f"{name} is on {name_ranks(args.rank) if args.rank else 'all ranks'}", {"name": name})


def pull(context: Context, args: Arguments) -> Outcome:
    """The value of an expression in the ranks; a plain name is bound in the notebook as well."""
    found = context.job(args).pull(args.expression, args.rank)
    value = next(iter(found.values())) if args.rank and len(args.rank) == 1 else found
    if context.namespace is not None and args.expression.isidentifier():
        context.namespace[args.expression] = value
    text = "\n".join(f"[rank {rank}] {item!r}" for rank, item in found.items())
    return Outcome(value=value, text=text, document={str(rank): repr(item) for rank, item in found.items()})


def _pushed(context: Context, text: str) -> tuple[str, Any]:
    """`x` → the notebook's x; `x=3` → 3."""
    name, equals, literal = text.partition("=")
    name = name.strip()
    if not name.isidentifier():
        raise UsageError(f"{name!r} is no variable name", hint="write: push x, or push x=VALUE")
    if equals:
        try:
            return name, ast.literal_eval(literal.strip())
        except (ValueError, SyntaxError):
            raise UsageError(
                f"{literal!r} is no literal", hint="a number, a quoted string, a list or the like"
            ) from None
    if context.namespace is None:
        raise UsageError("a shell has no variables to push", hint=f"write: {context.prefix} push {name}=VALUE")
    if name not in context.namespace:
        near = nearest(name, [key for key in context.namespace if not re.match("_|In$|Out$", key)])
        raise UsageError(f"there is no variable {name!r} here", hint=f"did you mean {near}?" if near else "")
    return name, context.namespace[name]


def _said(text: str, document: dict[str, Any]) -> Outcome:
    """An act that gives nothing back but word that it was done."""
    return Outcome(text=text, document=msgspec.to_builtins(document))


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return ""

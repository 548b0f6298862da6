"""The verb about what a job has saved."""

from __future__ import annotations

import time

import msgspec

from workbench.verbs.context import Context
from workbench.verbs.declare import Arguments, Outcome
from workbench.verbs.shown import Listing


def listing(context: Context, args: Arguments) -> Outcome:
    """A job's checkpoints, newest first; exit code 1 when not even one can be used."""
    from workbench.views.text import render_checkpoints

    job = context.job(args)
    found = job.verify_checkpoints() if args.verify else job.checkpoints
    text = render_checkpoints(found, time.time(), width=context.screen.width, color=context.screen.has_color)
    is_hopeless = bool(found) and all(each.problem for each in found)
    return Outcome(
        value=Listing(found, text), text=text, document=msgspec.to_builtins(found), code=1 if is_hopeless else 0
    )

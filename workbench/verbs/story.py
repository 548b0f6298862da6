"""The verb timeline: a job's attempts, failures and recoveries; and the times of day that texts of a shell tell."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from workbench.verbs.context import Context
from workbench.verbs.declare import Arguments, Outcome
from workbench.verbs.shown import Text

if TYPE_CHECKING:
    from workbench.views.spans import Timeline
    from workbench.views.wording import Clock

DAY: Final = 86_400.0


def timeline(context: Context, args: Arguments) -> Outcome:
    """What became of a job so far: lanes by rank, attempts, and all that happened."""
    from workbench.views.lane_text import render_timeline

    job = context.job(args)
    told = job.timeline
    screen = context.screen
    text = render_timeline(told, job.job_id, clock_of(told), screen.width, color=screen.has_color)
    return Outcome(value=Text(text), text=text, document=msgspec.to_builtins(told))


def clock_of(told: Timeline | None) -> Clock:
    """Times of day here; with the date where the job lasted, or lies, a day or more back."""
    is_today = told is not None and time.time() - told.start < DAY
    form = "%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S"
    return lambda value: time.strftime(form, time.localtime(value))


def launches(context: Context | None = None) -> Clock:
    """When jobs were launched. In a shell with how long ago; what a notebook keeps is read at any time later."""
    from workbench.views.wording import ago, when

    if context is None or not context.is_shell:
        return lambda value: when(time.localtime(value))
    now = time.time()
    return lambda value: f"{when(time.localtime(value), time.localtime(now))}, {ago(now - value)}"

"""What the job is and how it is doing: name, state and why, step, throughput, what is left, and how it failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from workbench.views.error_report import error_report
from workbench.views.job import JobView
from workbench.views.table import hints, in_short, notes, nothing_yet
from workbench.views.wording import bare_rate, count, number, percent, seconds, span
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import esc, phase_badge
from workbench_widgets.source import Picture
from workbench_widgets.style import PANEL

COPIED: Final = "The error report is in the clipboard."
NOT_COPIED: Final = "The browser does not let this page copy: mark the traceback, and copy it by keyboard."
TRACEBACK: Final = 8000  # characters, of its end


class Header:
    """See the module."""

    def __init__(self, job_id: str) -> None:
        self._job_id, self._picture, self._copied = job_id, Picture(), ""
        self._silence: float | None = None
        self.root = Live(
            name="header", stylesheets=[PANEL], markup=header_html(job_id, Picture()), on_action=self._pressed
        )

    def update(self, picture: Picture, silence: float | None = None) -> None:
        """`silence`: s for which nothing has come."""
        self._picture, self._silence = picture, silence
        self.root.markup = header_html(self._job_id, picture, self._copied, silence)

    def _pressed(self, name: str, value: str) -> None:
        if name == "copied":
            self._copied = COPIED if value else NOT_COPIED
            self.update(self._picture, self._silence)


def header_html(job_id: str, picture: Picture, copied: str = "", silence: float | None = None) -> str:
    view = picture.view
    stale = _stale(picture, silence) if picture.notice else ""
    if view is None:
        wait = "" if picture.notice else '<p class="muted" role="status">reading the job’s record …</p>'
        return f'<div class="head"><h1>{esc(job_id.rpartition(":")[2])}</h1></div>{wait}{stale}'
    told = {*hints(view), " ".join(view.failure.reason.split()) if view.failure else ""}  # by the findings below
    lines = "".join(f'<p class="muted">{esc(line)}</p>' for line in notes(view) if line not in told)
    was = '<span class="muted">last known:</span>' if picture.notice else ""
    failed = _failure(view, picture.more.packages, copied, has_logs=not picture.is_saved)
    return (
        f'<div class="head" data-now="{view.now:.3f}"><h1>{esc(view.job_id)}</h1>{was}{phase_badge(view.phase.value)}'
        f'<span class="muted">{esc(in_short(view))}</span></div>'
        f"{stale}{_then(picture)}{_spoken(view)}{_stats(view)}{_progress(view)}{lines}{failed}"
    )


def _then(picture: Picture) -> str:
    """Of a moment of the past; not spoken, the slider says where it is."""
    if picture.view is None or picture.at is None:
        return ""
    return f'<p class="notice">◷ As it stood {esc(span(picture.at - picture.view.submitted_at))} after the start.</p>'


def _stale(picture: Picture, silence: float | None) -> str:
    """A screen reader hears of it once, not of each second."""
    last = " Below is the last that was heard." if picture.view is not None else ""
    long = f'<div class="muted">No data for {esc(span(silence))}.</div>' if silence is not None else ""
    said = esc(f"No news: {picture.notice}.{last} Trying again.")
    return f'<div class="notice"><span role="status">{said}</span>{long}</div>'


def _spoken(view: JobView) -> str:
    """For a screen reader: only what changes seldom, so that it does not talk without end."""
    return (
        f'<p class="hidden" role="status" aria-live="polite">Job {esc(view.job_id)} is {esc(view.phase.value)}. '
        f"{esc(view.reason)}</p>"
    )


def _stats(view: JobView) -> str:
    """The numbers that matter, large; what there is none of is left out."""
    if not view.step and not view.throughput:
        return f'<p class="muted">{esc(nothing_yet(view))}</p>'
    of = f"of {count(view.progress[1])}" if view.progress and view.counts_steps else ""
    found = [("step", count(view.step), of)]
    if view.throughput:
        found.append(("throughput", bare_rate(view.throughput), "samples/s"))
    if view.tokens_per_s:
        found.append(("tokens", bare_rate(view.tokens_per_s), "tokens/s"))
    if view.step_time:
        value, _, unit = seconds(view.step_time).partition(" ")
        found.append(("step time", value, unit))
    if view.loss is not None:
        found.append(("loss", number(view.loss), ""))
    if view.left is not None:
        found.append(("left, about", span(view.left), ""))
    pairs = (f"<div><dt>{esc(t)}</dt><dd>{esc(v)} <small>{esc(u)}</small></dd></div>" for t, v, u in found)
    return f'<dl class="stats">{"".join(pairs)}</dl>'


def _progress(view: JobView) -> str:
    if not view.progress:
        return ""
    done, total = view.progress
    share = min(1.0, done / total)
    return (
        f'<div class="bar" role="progressbar" aria-label="progress" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{share * 100:.0f}" title="{esc(percent(share))}">'
        f'<i style="width:{share * 100:.1f}%"></i></div>'
    )


def _failure(view: JobView, packages: Mapping[str, str], copied: str, *, has_logs: bool) -> str:
    """The first cause, and that rank's own traceback; all of it to be copied for somebody else."""
    failure = view.failure
    if failure is None:
        return ""
    is_told = has_logs and failure.rank is not None
    where = f" · its log: %dtrain logs {view.job_id} -r {failure.rank}" if is_told else ""
    words = esc(failure.traceback[-TRACEBACK:])
    trace = (
        f"<details open><summary>traceback of rank {failure.rank}</summary><pre>{words}</pre></details>"
        if words
        else ""
    )
    copy = (
        '<div class="tools"><button data-copy="error" title="reason, likely cause, versions and traceback, as text">'
        f'Copy error report</button><span class="small muted" role="status">{esc(copied)}</span></div>'
        f'<pre id="error" hidden>{esc(error_report(view, packages))}</pre>'
    )
    told = f'{esc(failure.reason)}<span class="muted">{esc(where)}</span>'
    if view.has_recovered:  # the findings and the timeline tell it; here it is kept for those who look for its cause
        return f'<details class="notice good"><summary>recovered from: {told}</summary>{trace}{copy}</details>'
    return f'<div class="notice bad"><p>{told}</p>{trace}{copy}</div>'

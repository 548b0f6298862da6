"""The jobs, a screenful at a time, with links to their pages, a search and a filter; and the pools they run on.

Jobs can be chosen, on any of the screenfuls, to be seen beside each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import panel as pn

from workbench import JobPhase, JobSummary
from workbench.views.sides import MOST as LARGEST
from workbench.views.table import Column, jobs_table
from workbench.views.wording import ago, count, percent, plural, when
from workbench_widgets.live import Live
from workbench_widgets.overview import MOST, Listing, Query
from workbench_widgets.panels.comparison import job_address
from workbench_widgets.panels.launch import COPIED, LAUNCH, NOT_COPIED
from workbench_widgets.panels.markup import esc, phase_badge, table_html
from workbench_widgets.style import PANEL

NO_POOL = "no pool has run here yet; start one with: %dtrain up"
FIRST = "%dtrain launch train.py --nproc-per-node 2"
NO_MATCH = "No job is like that. Other words, or another state?"


class Jobs:
    """See the module. `query` is what the reader wants to see; `on_query` hears when that changes.

    `above`: what stands between the heading and the list.
    """

    def __init__(self, theme: str, on_query: Callable[[], None] = lambda: None, *, above: Sequence[Any] = ()) -> None:
        self.query = Query()
        self._theme, self._on_query, self._listing = theme, on_query, Listing()
        self._said, self._has_form = "", bool(above)
        self._picked: list[str] = []
        self._head = Live(stylesheets=[PANEL], markup=head_html(Listing()))
        self._bar = Live(stylesheets=[PANEL], markup=bar_html(Listing(), self.query), on_action=self._chosen)
        self._compare = Live(stylesheets=[PANEL], markup=compare_html((), theme), on_action=self._turned)
        self._list = Live(stylesheets=[PANEL], markup="", on_action=self._turned)
        parts = (self._head, *above, self._bar, self._compare, self._list)
        self.root = pn.Column(*parts, name="jobs", sizing_mode="stretch_width")
        self.update(Listing())

    def update(self, listing: Listing) -> None:
        self._listing = listing
        self._head.markup = head_html(listing)
        self._bar.markup = bar_html(listing, self.query)
        self._compare.markup = compare_html(self._picked, self._theme) if listing.jobs else ""
        if listing.jobs == () and self.query == Query():
            self._list.markup = none_html(self._said, has_form=self._has_form)
        else:
            self._list.markup = list_html(listing, self.query, self._theme, self._picked)

    def paint(self, theme: str) -> None:
        """Take on a theme: the links pass it on."""
        self._theme = theme
        self.update(self._listing)

    def _chosen(self, name: str, value: str) -> None:
        if name == "search":
            self._want(Query(self.query.phase, value.strip()))
        elif name == "phase":
            self._want(Query(JobPhase(value) if value in JobPhase.__members__ else None, self.query.search))

    def _turned(self, name: str, value: str) -> None:
        match name:
            case "pick":
                self._picked = picked(self._picked, value)
            case "none":
                self._picked = []
            case "copied":
                self._said = COPIED if value else NOT_COPIED
            case "newer" | "older":
                step = MOST if name == "older" else -MOST
                self._want(self.query._replace(offset=max(0, self.query.offset + step)))
                return
        self.update(self._listing)

    def _want(self, query: Query) -> None:
        if query != self.query:
            self.query = query
            self._on_query()


def head_html(listing: Listing) -> str:
    head = '<div class="head"><h1>dtrain jobs</h1></div>'
    if listing.jobs is None:
        return f'{head}<p class="muted" role="status">asking the pools …</p>'
    return head + "".join(f'<p class="muted">{esc(line)}</p>' for line in listing.pools or (NO_POOL,))


def bar_html(listing: Listing, query: Query) -> str:
    """Search, and a filter that says how many jobs are in which state."""
    phases = [phase for phase in JobPhase if listing.total(phase) or phase is query.phase]
    options = "".join(
        f'<option value="{phase.value}"{" selected" if phase is query.phase else ""}>'
        f"{phase.value} ({count(listing.total(phase))})</option>"
        for phase in phases
    )
    return (
        '<div class="tools" role="search" aria-label="which jobs">'
        '<input type="search" data-set="search" placeholder="name contains …" aria-label="jobs whose name contains">'
        f'<select data-set="phase" aria-label="state"><option value="">all states ({count(listing.total(None))})'
        f"</option>{options}</select></div>"
    )


def picked(before: Sequence[str], job_id: str) -> list[str]:
    """With that job, or without it when it was there; one too many is left out."""
    if job_id in before:
        return [one for one in before if one != job_id]
    return [*before, job_id][:LARGEST]


def compare_html(chosen: Sequence[str], theme: str) -> str:
    """What is chosen, and the way to see it."""
    if not chosen:
        return '<p class="small muted" role="status">Choose two to six jobs to see them beside each other.</p>'
    names = esc(", ".join(chosen))
    if len(chosen) == 1:
        told = f'<span class="small muted" role="status">{names}: choose another one to compare it with</span>'
    else:
        many = f" ({LARGEST} at most)" if len(chosen) == LARGEST else ""
        told = (
            f'<a class="button" href="{compare_address(chosen, theme)}">Compare {len(chosen)} jobs</a>'
            f'<span class="small muted" role="status">{names}{many}</span>'
        )
    return f'<div class="tools" role="group" aria-label="comparison">{told}<button data-do="none">None</button></div>'


def compare_address(chosen: Sequence[str], theme: str) -> str:
    """Of the page of jobs beside each other; escaped."""
    pairs = [("id", job_id) for job_id in chosen] + ([("theme", theme)] if theme else [])
    return "compare?" + esc(urlencode(pairs, quote_via=quote))


def none_html(said: str = "", *, has_form: bool = False) -> str:
    """Before the first job: how to launch one, with a line to copy."""
    form = f"Open “{LAUNCH}” above, or run" if has_form else "Run"
    return (
        f'<p role="status">No job has run here yet.</p><p class="muted">{form} this in a notebook, or without the % in '
        f'a shell:</p><pre id="first" tabindex="0" aria-label="a line that launches a job">{esc(FIRST)}</pre>'
        '<div class="tools"><button data-copy="first" title="copy the line">Copy</button>'
        f'<span class="small muted" role="status" aria-live="polite">{esc(said)}</span></div>'
    )


def list_html(listing: Listing, query: Query, theme: str, chosen: Sequence[str] = ()) -> str:
    if listing.jobs is None:
        return ""
    if not listing.jobs:
        return f'<p role="status">{esc(NO_MATCH)}</p>'
    table = jobs_table(listing.jobs, lambda moment: launched(moment, listing.at))

    def cell(column: Column, index: int) -> str:
        text = column.cells[index]
        match column.title:
            case "job":
                return f'{_box(text, is_picked=text in chosen)}<a href="{job_address(text, theme)}">{esc(text)}</a>'
            case "state":
                return phase_badge(text.rpartition(" ")[2])
            case "launched":
                return f'<span title="{esc(_dated(listing, index))}">{esc(text)}</span>'
            case "":
                return f'<span class="why">{esc(text)}</span>'
            case "progress":
                return _bar(listing.jobs[index] if listing.jobs else None, text)
        return esc(text)

    label = "jobs, newest first"
    shown = table_html(table, cell=cell)
    return f'<div class="scroll tall" tabindex="0" role="group" aria-label="{label}">{shown}</div>' + _pager(
        listing, query
    )


def launched(moment: float, now: float) -> str:
    """Where the page is served, and how long ago."""
    return f"{when(time.localtime(moment), time.localtime(now))}, {ago(now - moment)}"


def _dated(listing: Listing, index: int) -> str:
    moment = listing.jobs[index].submitted_at if listing.jobs else 0.0
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(moment))


def _box(job_id: str, *, is_picked: bool) -> str:
    is_pressed, mark = ("true", "☑") if is_picked else ("false", "☐")
    return (
        f'<button class="pick box" data-do="pick" value="{esc(job_id)}" aria-pressed="{is_pressed}" '
        f'aria-label="compare {esc(job_id)}" title="choose it to be compared">{mark}</button>'
    )


def _bar(job: JobSummary | None, text: str) -> str:
    if job is None or job.progress is None:
        return esc(text)
    share = min(1.0, job.progress[0] / job.progress[1])
    of = f"{count(job.progress[0])} of {count(job.progress[1])}"
    return (
        f'<span class="done" title="{esc(of)}"><span class="bar" aria-hidden="true">'
        f'<i style="width:{share * 100:.1f}%"></i></span><span class="share">{percent(share)}</span></span>'
    )


def _pager(listing: Listing, query: Query) -> str:
    """Which of how many, and the way to the others."""
    shown, total = len(listing.jobs or ()), listing.total(query.phase)
    first, last = query.offset + 1, query.offset + shown
    if shown >= total and not query.offset:
        return f'<p class="muted small" role="status">{plural(shown, "job")}</p>'
    newer = '<button data-do="newer"' + (' aria-disabled="true"' if query.offset == 0 else "") + ">← Newer</button>"
    older = '<button data-do="older"' + (' aria-disabled="true"' if last >= total else "") + ">Older →</button>"
    told = f'<span class="muted small" role="status">{count(first)}–{count(last)} of {count(total)}</span>'
    return f'<div class="tools pager">{newer}{older}{told}</div>'

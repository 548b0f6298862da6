"""Whether replicas agree: ranks by time, what was found and what to do, which parameters, what is checked how often.

A state is a mark and a pattern besides its colour; the same is there as tables. Many ranks with one story share a lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from workbench.views.found import Found
from workbench.views.gradients import (
    WORDS,
    Agreement,
    AgreementLane,
    GradientsView,
    cadence_text,
)
from workbench.views.job import JobView
from workbench.views.table import Column, Table
from workbench.views.wording import count, number, plural, ranks_text
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import Empty, esc, scrolled, table_html
from workbench_widgets.panels.statistics import STYLE as STATISTICS
from workbench_widgets.panels.statistics import statistics_html
from workbench_widgets.style import PANEL

_WHAT: Final = (
    "A job of two ranks or more whose model is in DistributedDataParallel, or that calls <code>all_reduce</code> on "
    "its gradients, is compared here by rank from its first <code>optimizer.step()</code> on."
)
EMPTY: Final = Empty(f"Nothing is checked yet. {_WHAT}", f"Nothing was checked. {_WHAT}")
AGAIN: Final = 3  # earlier times of the same finding whose steps are told
SHOWN: Final = 4  # findings above the fold
# By a finding's severity: the mark beside the word, and the style.
MARKS: Final = {"error": ("✗", " bad"), "warning": ("!", ""), "notice": ("·", " quiet")}
GOOD: Final = ("↻", " good")
TEXT_FROM: Final = 2  # columns a block has room for its mark from


class Gradients:
    """See the module."""

    def __init__(self) -> None:
        self.root = Live(name="gradients", stylesheets=[PANEL, STYLE, STATISTICS], markup=EMPTY.html())

    def update(self, view: JobView) -> None:
        self.root.markup = gradients_html(view.gradients, is_over=view.is_over)


def gradients_html(view: GradientsView, *, is_over: bool = False) -> str:
    if not view.has_begun:
        return (
            f'<p class="muted">Not checked: {esc(view.why_not)}.</p>' if view.why_not else EMPTY.html(is_over=is_over)
        )
    head = _head(view, is_over=is_over)
    parts = (head, _findings(view), _lanes(view), *_tables(view), statistics_html(view.statistics))
    return "".join(parts)


def _head(view: GradientsView, *, is_over: bool) -> str:
    is_good = view.agreed == view.checked
    tone, mark = ("good", "✓") if is_good else ("bad", "✗")
    said = f"{count(view.agreed)} of {plural(view.checked, 'check')} agreed"
    if not view.checked:
        tone, mark, said = "muted", "·", "no check was made" if is_over else "no check yet"
    elif is_good:
        said = f"all ranks agreed at all of {plural(view.checked, 'check')}"
    pace = cadence_text(view) if view.every else f"not checked any more: {view.why_not}" if view.why_not else ""
    digest = f' · digest of gradients <span class="mono">{esc(view.digest)}</span>' if view.digest else ""
    more = f' <span class="muted">· {esc(pace)}{digest}</span>' if pace or digest else ""
    return f'<p><span class="tone-{tone}"><b aria-hidden="true">{mark}</b> {esc(said)}</span>{more}</p>'


def _findings(view: GradientsView) -> str:
    """What was found again, as each time after a restart, is told once, the newest time."""
    alike: dict[tuple[str, ...], list[Found]] = {}
    for found in view.found:
        one = found.finding
        alike.setdefault((one.symptom, one.cause, one.severity.value), []).append(found)
    told = [_finding(newest, before) for newest, *before in alike.values()]
    older = f"<details><summary>{count(len(told) - SHOWN)} older</summary>{''.join(told[SHOWN:])}</details>"
    return "".join(told[:SHOWN]) + (older if told[SHOWN:] else "")


def _finding(found: Found, before: Sequence[Found]) -> str:
    one = found.finding
    mark, tone = GOOD if found.is_good else MARKS[one.severity.value]
    kind = f"<b>{mark} {'repaired' if found.is_good else one.severity.value}</b> · "
    advice = "".join(f'<div class="muted">{esc(line)}</div>' for line in one.remedy())
    evidence = "".join(f"<li>{esc(line)}</li>" for line in one.evidence)
    steps = ", ".join(count(other.step) for other in before[:AGAIN] if other.step is not None)
    more = f" and {plural(len(before) - AGAIN, 'more time')}" if len(before) > AGAIN else ""
    again = f'<span class="muted"> (also at step {steps}{more})</span>' if steps else ""
    why = f"<details><summary>evidence</summary><ul>{evidence}</ul></details>" if evidence else ""
    return f'<div class="notice{tone}" role="note">{kind}{esc(one.dated())}{again}{advice}{why}</div>'


# --- ranks by time ----------------------------------------------------------------------------------------------------


def _lanes(view: GradientsView) -> str:
    if not view.lanes:
        return ""
    wide = min(24, max(9, *(len(lane.label) for lane in view.lanes)))
    rows = "".join(
        f'<div class="agree-row"><span class="agree-who" style="width:{wide}ch">{esc(lane.label)}</span>'
        f'<div class="agree" role="img" aria-label="{esc(lane.label)}: {esc(story(lane, view))}">'
        f"{_blocks(lane, view)}</div></div>"
        for lane in view.lanes
    )
    seen = {state for lane in view.lanes for state in lane.states}
    items = "".join(
        f'<span><i class="agree-{state.name}">{state.value}</i> {esc(words)}</span>'
        for state, words in WORDS.items()
        if state in seen
    )
    first, last = view.columns[0].first_step, view.columns[-1].last_step
    ends = f"<span>step {count(first)}</span><span>step {count(last)}</span>"
    axis = f'<div class="agree-axis muted small" style="padding-left:calc({wide}ch + 8px)">{ends}</div>'
    return (
        f'<div class="scroll agree-all" tabindex="0" role="group" aria-label="ranks by time">{rows}</div>'
        f'{axis}<div class="legend" aria-hidden="true">{items}</div>'
    )


def _blocks(lane: AgreementLane, view: GradientsView) -> str:
    """Columns in which a lane stays the same, as one."""
    parts, at = [], 0
    for state, run in groupby(lane.states):
        length = len(list(run))
        first, last = view.columns[at], view.columns[at + length - 1]
        words = f"steps {count(first.first_step)}–{count(last.last_step)}: {lane.label} {WORDS[state]}"
        text = state.value if state is not Agreement.AGREES or length >= TEXT_FROM else ""
        parts.append(f'<i class="agree-{state.name}" style="flex:{length}" title="{esc(words)}">{text}</i>')
        at += length
    return "".join(parts)


def story(lane: AgreementLane, view: GradientsView) -> str:
    """A lane in words: "agrees; steps 40–49: deviates"."""
    odd, at = [], 0
    for state, run in groupby(lane.states):
        length = len(list(run))
        if state is not Agreement.AGREES:
            first, last = view.columns[at], view.columns[at + length - 1]
            odd.append(f"steps {count(first.first_step)}–{count(last.last_step)}: {WORDS[state]}")
        at += length
    return "; ".join(odd) if odd else WORDS[Agreement.AGREES]


# --- as tables --------------------------------------------------------------------------------------------------------


def _tables(view: GradientsView) -> list[str]:
    parts = []
    if view.worst:
        parts.append(f"<h2>Parameters that differed</h2>{_scroll(worst_table(view))}")
    if view.sides:
        parts.append(f"<h2>Digests at the last difference</h2>{_scroll(sides_table(view))}")
    if view.lanes:
        shown = _scroll(lanes_table(view))
        parts.append(f"<details><summary>Ranks by time as a table</summary>{shown}</details>")
    return parts


def _scroll(table: Table) -> str:
    return scrolled(table.caption, table_html(table))


def worst_table(view: GradientsView) -> Table:
    rows = view.worst
    return Table(
        "parameters that differed",
        (
            Column("parameter", False, 0, tuple(row.name for row in rows)),
            Column("differences", True, 0, tuple(count(row.times) for row in rows)),
            Column("last at step", True, 0, tuple(count(row.step) for row in rows)),
            Column("ranks", False, 0, tuple(ranks_text(row.ranks) if row.ranks else "not known" for row in rows)),
            Column("by up to", True, 0, tuple(number(row.deviation or None, 3) for row in rows)),
            Column("of its RMS", True, 3, tuple(number(row.relative or None, 2) for row in rows)),
        ),
    )


def sides_table(view: GradientsView) -> Table:
    sides = view.sides
    return Table(
        "digests by rank",
        (
            Column("ranks", False, 0, tuple(ranks_text(side.ranks) for side in sides)),
            Column("digest", False, 0, tuple(side.digest or "–" for side in sides)),
            Column("how many", True, 0, tuple(count(len(side.ranks)) for side in sides)),
        ),
    )


def lanes_table(view: GradientsView) -> Table:
    lanes = view.lanes
    return Table(
        "ranks by time",
        (
            Column("ranks", False, 0, tuple(lane.label for lane in lanes)),
            Column("state", False, 0, tuple(f"{lane.worst.value} {WORDS[lane.worst]}" for lane in lanes)),
            Column("when", False, 0, tuple(story(lane, view) for lane in lanes)),
        ),
    )


STYLE: Final = """
.notice ul{margin:2px 0 0 18px} h2{margin:10px 0 2px}
.agree-all{margin:8px 0 0;max-height:300px}
.agree-row{display:flex;align-items:center;gap:8px;margin:2px 0}
.agree-who{flex:0 0 auto;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.agree{display:flex;flex:1 1 auto;min-width:120px;height:18px;border-radius:3px;overflow:hidden}
.agree>i,.legend .agree-AGREES,.legend .agree-DEVIATES,.legend .agree-REPAIRED,.legend .agree-UNCLEAR,
.legend .agree-UNCHECKED{font:600 11px/18px system-ui,sans-serif;text-align:center;overflow:hidden;min-width:3px}
.agree>i+i{border-left:1px solid var(--dt-page)}
.legend i{width:16px!important;height:16px!important;font-style:normal;line-height:16px!important}
.agree-AGREES{background:var(--dt-lane-STEPPING);color:#000}
.agree-DEVIATES{color:#fff;background:repeating-linear-gradient(45deg,#b3261e 0 5px,#7d1a14 5px 9px)}
.agree-REPAIRED{color:#000;background:repeating-linear-gradient(-45deg,#f0b04a 0 5px,#d99420 5px 9px)}
.agree-UNCLEAR{color:#000;background:repeating-linear-gradient(90deg,#cc79a7 0 4px,#b8618f 4px 8px)}
.agree-UNCHECKED{color:var(--dt-muted);background:var(--dt-raised);box-shadow:inset 0 0 0 1px var(--dt-line)}
.agree-axis{display:flex;justify-content:space-between}
"""

"""HTML made of text. Whatever comes from a job goes through `esc`; the page lies within the user's Jupyter."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any, Final, NamedTuple

from workbench.views.table import Column, Table
from workbench.views.wording import MARKS
from workbench_widgets.theme import RANK_COLOURS


class Empty(NamedTuple):
    """What a panel says that has nothing to show, as HTML: what will fill it; once all is over, what would have."""

    now: str
    over: str

    def html(self, *, is_over: bool = False) -> str:
        return f'<p class="muted">{self.over if is_over else self.now}</p>'


TONES: Final = {  # what a state looks like, besides its mark and word
    "HEALTHY": "accent",
    "SUCCEEDED": "good",
    "FAILED": "bad",
    "RECOVERING": "warn",
    "STOPPING": "warn",
    "STOPPED": "warn",
}


def esc(text: object) -> str:
    return escape(str(text), quote=True)


def phase_badge(phase: str) -> str:
    """A state: mark, word and colour."""
    tone = TONES.get(phase, "muted")
    return f'<span class="phase tone-{tone}"><span aria-hidden="true">{MARKS.get(phase, "")}</span> {esc(phase)}</span>'


def scrolled(label: str, inside: str) -> str:
    """What scrolls where there is no room, by keyboard too; `inside` is HTML."""
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{esc(label)}">{inside}</div>'


def unfolding(title: str, *tables: Table) -> str:
    """Tables that the reader unfolds."""
    shown = "".join(scrolled(table.caption, table_html(table)) for table in tables)
    return f'<details><summary class="muted small">{esc(title)}</summary>{shown}</details>'


def _heading(column: Column, text: str) -> str:
    """A column without a title has no heading: an empty one would be read out."""
    return f'<th scope="col"{_kind(column)}>{text}</th>' if text else f"<td{_kind(column)}></td>"


def table_html(
    table: Table,
    *,
    cell: Callable[[Column, int], str] | None = None,
    css_class: str = "",
    chosen: int | None = None,
    head: Callable[[int, Column], str] | None = None,
) -> str:
    """A table with its headings; `cell` and `head` make the HTML of a cell and of a heading (escaped), else it is text.

    `chosen`: the row that the reader points at.
    """
    made = cell or (lambda column, index: esc(column.cells[index]))
    titled = head or (lambda place, column: esc(column.title))
    heads = "".join(_heading(column, titled(place, column)) for place, column in enumerate(table.columns))
    rows = []
    for index in range(table.length):
        first, *rest = table.columns
        cells = "".join(f"<td{_kind(column)}>{made(column, index)}</td>" for column in rest)
        names = [*(["marked"] if index in table.marked else []), *(["chosen"] if index == chosen else [])]
        kind = f' class="{" ".join(names)}"' if names else ""
        rows.append(f'<tr{kind}><th scope="row"{_kind(first)}>{made(first, index)}</th>{cells}</tr>')
    return (
        f'<table class="{css_class}"><caption class="hidden">{esc(table.caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def rank_button(rank: int, *, is_chosen: bool = False) -> str:
    """A rank in its colour; pressing it points at that rank in all panels, pressing it again at none."""
    return (
        f'<button class="pick" data-do="rank" value="{rank}" aria-pressed="{"true" if is_chosen else "false"}" '
        f'aria-label="rank {rank}" title="show rank {rank} in all panels"><span class="dot" '
        f'style="background:var(--dt-rank{rank % RANK_COLOURS})"></span>{rank}</button>'
    )


def swatch(colour: str, dash: Any) -> str:
    """A piece of a chart's line, for its legend: a colour of the theme by name, and a dash as Bokeh has it."""
    dashes = f' stroke-dasharray="{" ".join(map(str, dash))}"' if not isinstance(dash, str) else ""
    return (
        f'<svg width="22" height="8" class="swatch" aria-hidden="true"><line x1="0" y1="4" x2="22" y2="4" '
        f'style="stroke:var(--dt-{colour});stroke-width:2.5"{dashes}/></svg>'
    )


def _kind(column: Column) -> str:
    """How it is set, and how soon it goes when there is no room."""
    names = [*(["n"] if column.is_number else []), *([f"need{column.need}"] if column.need else [])]
    if column.title == "now":
        names = ["now"]
    return f' class="{" ".join(names)}"' if names else ""

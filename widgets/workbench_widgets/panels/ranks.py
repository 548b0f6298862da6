"""The ranks: state, speed, where their time goes, what they do now; the one that keeps the others waiting is marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from workbench.views.job import JobView
from workbench.views.table import FOLD_ABOVE, PHASE_COLUMNS, Column, Table, rank_table
from workbench.views.wording import percent
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import Empty, esc, phase_badge, rank_button, scrolled, table_html
from workbench_widgets.source import Choice
from workbench_widgets.style import PANEL

SHARES: Final = "where a step goes"
NAMES: Final = dict(PHASE_COLUMNS)
TEXT_FROM: Final = 0.22  # of a bar: narrower parts have no room for their number
EMPTY: Final = Empty(
    "The ranks appear here once the job has been given slots.", "It had no ranks: it was never given slots."
)


class Ranks:
    """See the module. `on_rank` hears of a rank that the reader chose."""

    def __init__(self, on_rank: Callable[[str, str], None]) -> None:
        self._rank: int | None = None
        self.root = Live(name="ranks", stylesheets=[PANEL], markup=EMPTY.html(), on_action=on_rank)

    def choose(self, choice: Choice) -> None:
        self._rank = choice.rank

    def update(self, view: JobView) -> None:
        self.root.markup = ranks_html(view, self._rank)


def ranks_html(view: JobView, chosen: int | None = None) -> str:
    if not view.rows:
        return EMPTY.html(is_over=view.is_over)
    table = rank_table(view)
    is_folded = len(view.rows) > FOLD_ABOVE
    if not is_folded:
        table = _with_bars(table, view)

    def cell(column: Column, index: int) -> str:
        text = column.cells[index]
        if column.title == "rank" and not is_folded:
            return rank_button(view.rows[index].rank, is_chosen=view.rows[index].rank == chosen)
        if column.title == "state":
            return phase_badge(text.rpartition(" ")[2])
        if column.title == SHARES:
            return _bar(view.rows[index].shares)
        return esc(text)

    legend = "" if is_folded else _legend(view)
    row = next((k for k, row in enumerate(view.rows) if row.rank == chosen), None) if not is_folded else None
    shown = table_html(table, cell=cell, chosen=row)
    return scrolled(table.caption, shown) + legend


def _with_bars(table: Table, view: JobView) -> Table:
    """The columns of shares as one."""
    titles = set(NAMES.values())
    columns = [column for column in table.columns if column.title not in titles]
    if len(columns) == len(table.columns):
        return table
    at = next(k for k, column in enumerate(table.columns) if column.title in titles)
    columns.insert(at, Column(SHARES, False, 5, tuple(_words(row.shares) for row in view.rows)))
    return Table(table.caption, tuple(columns), table.marked)


def _words(shares: dict[str, float]) -> str:
    return ", ".join(f"{NAMES[name]} {percent(share)}" for name, share in shares.items() if share >= 0.005)


def _bar(shares: dict[str, float]) -> str:
    if not shares:
        return ""
    words = esc(_words(shares))
    parts = "".join(
        f'<i class="phase-{name}" style="width:{share * 100:.1f}%">{percent(share) if share >= TEXT_FROM else ""}</i>'
        for name, share in shares.items()
        if share >= 0.005
    )
    return f'<div class="shares" role="img" aria-label="{words}" title="{words}">{parts}</div>'


def _legend(view: JobView) -> str:
    seen = [name for name in NAMES if any(row.shares.get(name, 0.0) >= 0.005 for row in view.rows)]
    items = "".join(f'<span><i class="phase-{name}"></i>{esc(NAMES[name])}</span>' for name in seen)
    return f'<div class="legend" aria-hidden="true">{items}</div>' if seen else ""

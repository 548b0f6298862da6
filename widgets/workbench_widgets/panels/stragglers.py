"""The slowest ranks: each against the fastest and against itself at its best, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from workbench.views.job import JobView
from workbench.views.ranking import Ranked, pattern, ranking
from workbench.views.table import Column, Table
from workbench.views.wording import NOTHING, seconds
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import Empty, esc, rank_button, scrolled, table_html
from workbench_widgets.source import Choice
from workbench_widgets.style import PANEL

MOST: Final = 10
EMPTY: Final = Empty(
    "Once ranks have taken steps, they are compared here by their own part of a step.",
    "Nothing to compare: no rank was seen to take a step.",
)


class Stragglers:
    """See the module. `on_rank` hears of a rank that the reader chose."""

    def __init__(self, on_rank: Callable[[str, str], None]) -> None:
        self._rank: int | None = None
        self.root = Live(name="stragglers", stylesheets=[PANEL], markup=EMPTY.html(), on_action=on_rank)

    def choose(self, choice: Choice) -> None:
        self._rank = choice.rank

    def update(self, view: JobView, best: Mapping[int, float]) -> None:
        self.root.markup = stragglers_html(ranking(view.rows, best), self._rank, is_over=view.is_over)


def stragglers_html(ranked: tuple[Ranked, ...], chosen: int | None = None, *, is_over: bool = False) -> str:
    if not ranked:
        return EMPTY.html(is_over=is_over)
    shown = ranked[:MOST]
    columns = (
        Column("rank", False, 0, tuple(str(one.rank) for one in shown)),
        Column("own work a step", True, 0, tuple(seconds(one.own_time) for one in shown)),
        Column("to the fastest", True, 0, tuple(_score(one.to_fastest) for one in shown)),
        Column("to its own best", True, 0, tuple(_score(one.to_itself) for one in shown)),
        Column("host", False, 3, tuple(one.host for one in shown)),
        Column("", False, 0, tuple("◀ slow" if one.is_slow else "" for one in shown)),
    )
    marked = frozenset(k for k, one in enumerate(shown) if one.is_slow)
    row = next((k for k, one in enumerate(shown) if one.rank == chosen), None)

    def cell(column: Column, index: int) -> str:
        if column.title == "rank":
            return rank_button(shown[index].rank, is_chosen=shown[index].rank == chosen)
        return esc(column.cells[index])

    table = table_html(Table("The slowest ranks", columns, marked), cell=cell, chosen=row)
    more = f"; the slowest {MOST} of {len(ranked):,}" if len(ranked) > MOST else ""
    return (
        f'<p role="status">{esc(pattern(ranked, is_over=is_over))}</p>{scrolled("slowest ranks", table)}'
        f'<p class="muted small">1× is as fast as the fastest rank, or as itself at its best{more}</p>'
    )


def _score(score: float | None) -> str:
    return NOTHING if score is None else f"{score:.2f}×"

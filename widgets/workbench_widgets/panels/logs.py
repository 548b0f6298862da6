"""What the ranks print: the newest lines, by rank, level and text; it says what is not shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import panel as pn

from workbench.views.logs import Level, LogLine
from workbench.views.wording import count
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import Empty, esc
from workbench_widgets.source import Filter, LogTail
from workbench_widgets.style import PANEL

MOST: Final = 400  # lines in the page
CHARACTERS: Final = 400  # of a line; the file has all
LEVELS: Final = (("0", "all lines"), ("1", "warnings"), ("2", "errors"))
SELECTABLE: Final = 1024  # ranks in the filter
EMPTY: Final = Empty(
    "Nothing has been printed yet. What the ranks print appears here, and stays in their log files.",
    "Nothing was printed, or it was not kept.",
)
_ID: Final = "log-lines"


class Logs:
    """See the module. `filter` is what the reader chose; `on_filter` hears when that changes."""

    def __init__(self, on_filter: Callable[[], None]) -> None:
        self.filter = Filter()
        self._on_filter, self._ranks = on_filter, 0
        self._bar = Live(stylesheets=[PANEL], markup=bar_html(0), on_action=self._chosen)
        self._list = Live(stylesheets=[PANEL], markup=lines_html(LogTail((), ""), self.filter))
        self.root = pn.Column(self._bar, self._list, name="logs", sizing_mode="stretch_width")

    def update(self, tail: LogTail, ranks: int, *, is_over: bool = False) -> None:
        if ranks != self._ranks:
            self._ranks = ranks
            self._bar.markup = bar_html(ranks, self.filter.ranks[0] if self.filter.ranks else None)
        self._list.markup = lines_html(tail, self.filter, is_over=is_over)

    def choose(self, rank: int | None) -> None:
        """Show that rank's lines, or all."""
        self.filter = self.filter._replace(ranks=None if rank is None else (rank,))
        self._bar.markup = bar_html(self._ranks, rank)

    def _chosen(self, name: str, value: str) -> None:
        match name:
            case "rank":
                self.filter = self.filter._replace(ranks=(int(value),) if value.isdigit() else None)
            case "level" if value in ("0", "1", "2"):
                self.filter = self.filter._replace(level=Level(int(value)))
            case "text":
                self.filter = self.filter._replace(text=value.strip())
            case _:
                return
        self._on_filter()


def bar_html(ranks: int, chosen: int | None = None) -> str:
    """The filters; made anew only when the number of ranks changes."""
    choices = "".join(
        f'<option value="{rank}"{" selected" if rank == chosen else ""}>rank {rank}</option>'
        for rank in range(min(ranks, SELECTABLE))
    )
    levels = "".join(f'<option value="{value}">{text}</option>' for value, text in LEVELS)
    return (
        '<div class="tools" role="group" aria-label="which lines">'
        f'<select data-set="rank" aria-label="ranks"><option value="">all ranks</option>{choices}</select>'
        f'<select data-set="level" aria-label="at least this level">{levels}</select>'
        '<input type="search" data-set="text" placeholder="containing …" aria-label="lines that contain">'
        "</div>"
    )


def lines_html(tail: LogTail, chosen: Filter, *, is_over: bool = False) -> str:
    lines = "".join(map(_line, tail.lines)) or f'<div class="empty">{esc(_nothing(chosen, is_over=is_over))}</div>'
    more = f"the newest {count(len(tail.lines))} lines" if len(tail.lines) >= MOST else ""
    note = "; ".join(filter(None, (more, tail.note)))
    return (
        f'<div class="logwrap"><div class="log" id="{_ID}" data-tail="1" tabindex="0" role="log" aria-live="off" '
        f'aria-label="output of the ranks">{lines}</div>'
        f'<button class="jump" data-tail-of="{_ID}" hidden>↓ newest</button></div>'
        f'<p class="muted small">{esc(note)}</p>'
    )


def _nothing(chosen: Filter, *, is_over: bool) -> str:
    if chosen == Filter():
        return EMPTY.over if is_over else EMPTY.now
    return "No line here is of this choice; older ones may be in the log files: %dtrain logs --grep TEXT"


def _line(line: LogLine) -> str:
    key = f"{hash((line.time, line.text)) & 0xFFFFFFFF:x}"
    who = line.label.removeprefix("ranks ").removeprefix("rank ")
    text = line.text if len(line.text) <= CHARACTERS else line.text[: CHARACTERS - 1] + "…"
    level = f' class="level{int(line.level)}"' if line.level else ""
    return (
        f'<div data-key="{key}"{level}><span class="who" title="{esc(line.label)}">{esc(who)}</span>'
        f'<span class="what">{esc(text)}</span></div>'
    )

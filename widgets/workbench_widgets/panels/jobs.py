"""The list of jobs with links to their pages, and the pools they run on."""

from __future__ import annotations

from urllib.parse import quote

from workbench.views.table import NO_JOB, Column
from workbench_widgets.live import Live
from workbench_widgets.overview import Listing
from workbench_widgets.panels.markup import esc, phase_badge, table_html
from workbench_widgets.style import PANEL

NO_POOL = "no pool has run here yet; start one with: %dtrain up"


class Jobs:
    """See the module."""

    def __init__(self, theme: str) -> None:
        self._theme, self._listing = theme, Listing()
        self.root = Live(name="jobs", stylesheets=[PANEL], markup=jobs_html(Listing(), theme))

    def update(self, listing: Listing) -> None:
        self._listing = listing
        self.root.markup = jobs_html(listing, self._theme)

    def paint(self, theme: str) -> None:
        """Take on a theme: the links pass it on."""
        self._theme = theme
        self.update(self._listing)


def jobs_html(listing: Listing, theme: str) -> str:
    head = '<div class="head"><h1>dtrain jobs</h1></div>'
    if listing.jobs is None:
        return f'{head}<p class="muted" role="status">asking the pools …</p>'
    pools = "".join(f'<p class="muted">{esc(line)}</p>' for line in listing.pools or (NO_POOL,))
    table = listing.jobs
    if not table.length:
        return f"{head}{pools}<p>{esc(NO_JOB)}</p>"

    def cell(column: Column, index: int) -> str:
        text = column.cells[index]
        if column.title == "job":
            return f'<a href="job?id={quote(text, safe="")}&amp;theme={theme}">{esc(text)}</a>'
        return phase_badge(text.rpartition(" ")[2]) if column.title == "state" else esc(text)

    return f'{head}{pools}<div class="scroll tall">{table_html(table, cell=cell)}</div>'

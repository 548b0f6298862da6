"""What the ranks' processes use: processor, memory, disk, GPU; now as a table, over time as a chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import panel as pn
from bokeh.models import ColumnDataSource

from workbench.views.job import JobView, RankRow
from workbench.views.resources import Usage
from workbench.views.table import Column, Table
from workbench.views.wording import plural, size
from workbench_widgets.charts import TimeAxis, chart_pane
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import Empty, esc, scrolled, table_html
from workbench_widgets.style import PANEL
from workbench_widgets.theme import colour

HEIGHT: Final = 130  # px
EMPTY: Final = Empty(
    "It appears here a second after the ranks have started.",
    "Its record has none: it was over before what its ranks use was first looked at.",
)


class Measure(NamedTuple):
    """`scale`: what a number is divided by in the chart, whose unit is `unit`."""

    title: str
    unit: str
    scale: float
    text: Callable[[float], str]


MEASURES: Final[dict[str, Measure]] = {
    "cpu": Measure("CPU", "% of a core", 1.0, lambda value: f"{value:.0f} %"),
    "rss": Measure("memory", "GB", 1e9, size),
    "gpu": Measure("GPU", "% of the time", 1.0, lambda value: f"{value:.0f} %"),
    "gpu_memory": Measure("GPU memory", "GB", 1e9, size),
    "disk_read": Measure("read from disk", "MB/s", 1e6, lambda value: f"{size(value)}/s"),
    "disk_write": Measure("written to disk", "MB/s", 1e6, lambda value: f"{size(value)}/s"),
}


class Resources:
    """See the module."""

    def __init__(self, theme: str, axis: TimeAxis) -> None:
        self._measure = "cpu"
        self._last: tuple[JobView, Usage] | None = None
        self._shown: object = None
        self._source = ColumnDataSource(data={"x": [], "least": [], "mean": [], "most": []}, name="resources")
        tips = [
            ("after", "@x{00:00:00}"),
            ("least", "@least{0,0.[00]}"),
            ("mean", "@mean{0,0.[00]}"),
            ("most", "@most{0,0.[00]}"),
        ]
        self.figure = axis.chart("what ranks use over time", height=HEIGHT, tips=tips, number="0,0.[00]")
        area = {"x": "x", "y1": "least", "y2": "most", "source": self._source, "fill_alpha": 0.25}
        self._band = self.figure.varea(**area, fill_color=colour("accent", theme))
        self._line = self.figure.line(
            "x", "mean", source=self._source, line_width=2, line_color=colour("accent", theme)
        )
        self._head = Live(stylesheets=[PANEL], markup=EMPTY.html(), on_action=self._chosen)
        self._table = Live(stylesheets=[PANEL], markup="")
        chart = chart_pane(self.figure, HEIGHT)
        self.root = pn.Column(self._head, chart, self._table, name="resources", sizing_mode="stretch_width")

    def update(self, view: JobView, moments: Usage) -> None:
        self._last = view, moments
        self._table.markup = now_html(view.rows)
        newest = (len(moments), moments[-1] if moments else None, self._measure, view.is_over)
        if newest != self._shown:
            self._shown = newest
            self._draw()

    def paint(self, theme: str) -> None:
        self._band.glyph.fill_color = self._line.glyph.line_color = colour("accent", theme)

    def _chosen(self, name: str, value: str) -> None:
        if name == "measure" and value in MEASURES:
            self._measure = value
            self._draw()

    def _draw(self) -> None:
        if self._last is None:
            return
        view, moments = self._last
        known = [name for name in MEASURES if any(name in moment.spreads for moment in moments)]
        self._head.markup = head_html(known, self._measure) if known else EMPTY.html(is_over=view.is_over)
        self.figure.visible = bool(known)
        self._source.data = points_of(moments, self._measure, view.submitted_at)


def points_of(moments: Usage, name: str, start: float) -> dict[str, Any]:
    found = [(moment.start - start, moment.spreads[name]) for moment in moments if name in moment.spreads]
    scale = MEASURES[name].scale
    return {
        "x": [max(0.0, x) for x, _ in found],
        "least": [spread.least / scale for _, spread in found],
        "mean": [spread.mean / scale for _, spread in found],
        "most": [spread.most / scale for _, spread in found],
    }


def head_html(known: Sequence[str], chosen: str) -> str:
    options = "".join(
        f'<option value="{name}"{" selected" if name == chosen else ""}>{MEASURES[name].title}</option>'
        for name in known
    )
    told = f"{MEASURES[chosen].unit} over time since the start: the mean rank, and from the least to the most"
    return (
        f'<div class="tools"><select data-set="measure" aria-label="what is charted">{options}</select>'
        f'<span class="small muted told">{esc(told)}</span></div>'
    )


def _cores(percents: float) -> str:
    """Of a core each, of all ranks; of a hundred cores tenths are noise."""
    return f"{percents / 100:,.1f} cores" if percents < 10_000 else f"{percents / 100:,.0f} cores"


def now_html(rows: Sequence[RankRow]) -> str:
    """Least, mean and most of the ranks that run, and whose the most is."""
    made: list[tuple[str, ...]] = []
    for name, measure in MEASURES.items():
        values = {row.rank: float(value) for row in rows if (value := getattr(row, name)) is not None}
        if values:
            most = max(values, key=lambda rank: values[rank])
            mean, whole = sum(values.values()) / len(values), sum(values.values())
            total = "" if name == "gpu" else _cores(whole) if name == "cpu" else measure.text(whole)
            numbers = (min(values.values()), mean, values[most])
            made.append((measure.title, *map(measure.text, numbers), f"rank {most}", total))
    if not made:
        return ""
    titles = ("", "least", "mean", "most", "of", "all together")
    columns = tuple(
        Column(title, k in (1, 2, 3, 5), 0 if k != 4 else 3, cells)
        for k, (title, cells) in enumerate(zip(titles, zip(*made, strict=True), strict=True))
    )
    shown = table_html(Table(f"What {plural(len(rows), 'rank')} use", columns))
    return scrolled("what ranks use", shown)

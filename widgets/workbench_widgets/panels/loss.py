"""The loss over time: the mean of the ranks as it was said, and smoothed; by rank when the reader asks for it.

Below it, on the same axis, the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import panel as pn
from bokeh.models import BasicTickFormatter, ColumnDataSource, DataRange1d, Range1d

from workbench.views.job import JobView
from workbench.views.series import RankPoint, SeriesPoint
from workbench.views.smoothing import smooth
from workbench.views.table import Column, Table
from workbench.views.wording import count, number, span
from workbench_widgets.charts import TimeAxis, chart_pane
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import Empty, esc, unfolding
from workbench_widgets.source import Choice
from workbench_widgets.style import PANEL
from workbench_widgets.theme import CHART_HEIGHT, colour, rank_colour, rank_dash

SMOOTHINGS: Final = {"0": "not smoothed", "0.8": "smoothed", "0.95": "smoothed much"}
IN_TABLE: Final = 20
RATE_HEIGHT: Final = 92  # px
EMPTY: Final = Empty(
    "A script that says <code>run.report(loss=loss)</code> shows its loss here.",
    "No loss was reported: a script does so with <code>run.report(loss=loss)</code>.",
)


class Loss:
    """See the module."""

    def __init__(self, theme: str, axis: TimeAxis) -> None:
        self._weight, self._by_rank = 0.8, False
        self._shown: object = None
        self._view: JobView | None = None
        tips = [("", "$name"), ("loss", "@y{0.[0000]}"), ("step", "@step{0,0}"), ("after", "@x{00:00:00}")]
        self.figure = axis.chart("loss over time", tips=tips, y_range=DataRange1d(), number="0.[000]")
        self._lines = {name: self._line(name, theme) for name in ("as said", "smoothed")}
        self._theme = theme
        self._rank: int | None = None
        self._ranks = self.figure.multi_line(
            "x", "y", source=ColumnDataSource(data=NO_LINES), name="by rank", line_width=2,
            line_color="colour", line_dash="dash", line_alpha="alpha",
        )  # fmt: skip
        self._lines["as said"].glyph.update(line_alpha=0.35, line_width=1)
        self.rates = self._chart_of_rates(axis, theme)
        self._head = Live(stylesheets=[PANEL], markup=empty_html(), on_action=self._chosen)
        self._table = Live(stylesheets=[PANEL], markup="")
        charts = chart_pane(self.figure, CHART_HEIGHT), self._rate_head, chart_pane(self.rates, RATE_HEIGHT)
        self.root = pn.Column(self._head, *charts, self._table, name="loss", sizing_mode="stretch_width")

    def update(self, view: JobView) -> None:
        newest = (len(view.series), view.series[-1] if view.series else None, view.is_over)
        if newest != self._shown:
            self._view, self._shown = view, newest
            self._draw()

    def choose(self, choice: Choice) -> None:
        self._rank = choice.rank
        self._draw()

    def paint(self, theme: str) -> None:
        for line in (*self._lines.values(), self._rate):
            line.glyph.line_color = colour("accent", theme)
        self._theme = theme
        self._draw()

    def _line(self, name: str, theme: str) -> Any:
        source = ColumnDataSource(data={"x": [], "y": [], "step": []})
        return self.figure.line("x", "y", source=source, name=name, line_width=2, line_color=colour("accent", theme))

    def _chart_of_rates(self, axis: TimeAxis, theme: str) -> Any:
        tips = [("learning rate", "@y{%.4g}"), ("step", "@step{0,0}"), ("after", "@x{00:00:00}")]
        made = axis.chart(
            "learning rate over time", height=RATE_HEIGHT, tips=tips, y_range=Range1d(start=0.0, end=1.0),
            formatters={"@y": "printf"},
        )  # fmt: skip
        made.yaxis.formatter = BasicTickFormatter(precision=2)
        made.yaxis.ticker.desired_num_ticks = 3
        source = ColumnDataSource(data={"x": [], "y": [], "step": []})
        self._rate = made.step("x", "y", source=source, mode="after", line_width=2, line_color=colour("accent", theme))
        self._rate_head = Live(stylesheets=[PANEL], markup="")
        return made

    def _chosen(self, name: str, value: str) -> None:
        if name == "smoothing" and value in SMOOTHINGS:
            self._weight = float(value)
        elif name == "ranks":
            self._by_rank = value == "1"
        self._draw()

    def _draw(self) -> None:
        view = self._view
        if view is None:
            return
        points = curve_of(view.series, view.submitted_at)
        self.figure.visible = bool(points["x"])
        raw, soft = points["y"], smooth(points["y"], self._weight)
        is_soft = self._weight > 0 and not self._by_rank
        self._lines["as said"].data_source.data = points if not self._by_rank else NOTHING
        self._lines["smoothed"].data_source.data = {**points, "y": soft} if is_soft else NOTHING
        self._ranks.data_source.data = self._by_ranks(view) if self._by_rank else NO_LINES
        self._lines["as said"].glyph.line_alpha = 0.35 if is_soft else 1.0
        rates = rates_of(view.series, view.submitted_at)
        self.rates.visible = bool(rates["x"])
        self._rate.data_source.data = rates
        self.rates.y_range.end = 1.1 * max(rates["y"], default=0.0) or 1.0  # a constant rate is no chart of rounding
        self._rate_head.markup = rates_html(view, rates["y"])
        self._head.markup = head_html(view, raw, self._weight, by_rank=self._by_rank)
        self._table.markup = as_table_html(points, soft, dict(zip(rates["x"], rates["y"], strict=True)))

    def _by_ranks(self, view: JobView) -> dict[str, list[Any]]:
        curves = {rank: curve_of(series, view.submitted_at) for rank, series in view.rank_series.items()}
        return {
            "x": [curve["x"] for curve in curves.values()],
            "y": [smooth(curve["y"], self._weight) for curve in curves.values()],
            "colour": [rank_colour(rank, self._theme) for rank in curves],
            "dash": [rank_dash(rank) for rank in curves],
            "alpha": [0.2 if self._rank not in (None, rank) else 1.0 for rank in curves],
        }


NO_LINES: Final[dict[str, list[Any]]] = {"x": [], "y": [], "colour": [], "dash": [], "alpha": []}
NOTHING: Final[dict[str, list[float]]] = {"x": [], "y": [], "step": []}


def curve_of(series: Sequence[SeriesPoint | RankPoint], start: float) -> dict[str, list[float]]:
    """The points that have a loss; one that is not a number breaks the line."""
    known = [point for point in series if point.loss is not None]
    return {
        "x": [point.start + point.width / 2 - start for point in known],
        "y": [
            float(point.loss) if point.loss is not None and math.isfinite(point.loss) else math.nan for point in known
        ],
        "step": [float(point.step) for point in known],
    }


def rates_of(series: Sequence[SeriesPoint], start: float) -> dict[str, list[float]]:
    """Where a learning rate is known."""
    known = [(point, point.learning_rate) for point in series if point.learning_rate is not None]
    return {
        "x": [point.start + point.width / 2 - start for point, _ in known],
        "y": [rate for _, rate in known],
        "step": [float(point.step) for point, _ in known],
    }


def at_end(view: JobView) -> str:
    """When the newest value is of."""
    return "at the end" if view.is_over else "now"


def rates_html(view: JobView, rates: Sequence[float]) -> str:
    """The title of the lower chart, which tells what it shows; none without a learning rate."""
    if not rates:
        return ""
    most = f", {number(max(rates))} at most" if max(rates) > rates[-1] else ""
    return f'<div class="charthead"><h2>Learning rate: {number(rates[-1])} {at_end(view)}{most}</h2></div>'


def empty_html(*, is_over: bool = False) -> str:
    return f'<div class="charthead"><h2>Loss</h2></div>{EMPTY.html(is_over=is_over)}'


def head_html(view: JobView, raw: Sequence[float], weight: float, *, by_rank: bool) -> str:
    known = [value for value in raw if not math.isnan(value)]
    if not known:
        return empty_html(is_over=view.is_over)
    can = bool(view.rank_series)
    options = "".join(
        f'<option value="{value}"{" selected" if float(value) == weight else ""}>{text}</option>'
        for value, text in SMOOTHINGS.items()
    )
    ranks = (
        f'<select data-set="ranks" aria-label="whose loss"><option value="">mean of the ranks</option><option value="1"'
        f"{' selected' if by_rank else ''}>by rank</option></select>"
        if can
        else ""
    )
    first, least, last = map(number, (known[0], min(known), known[-1]))
    told = f"Chart of the loss: {first} at first, {least} at least, {last} {at_end(view)}."
    return (
        '<div class="charthead"><h2>Loss over time since the start</h2><div class="tools">'
        f'<select data-set="smoothing" aria-label="smoothing">{options}</select>{ranks}</div></div>'
        f'<p class="hidden">{esc(told)}</p>'
    )


def as_table_html(points: dict[str, list[float]], soft: Sequence[float], rates: Mapping[float, float]) -> str:
    if not points["x"]:
        return ""
    beside = [rates.get(x, math.nan) for x in points["x"]]

    def cells(values: Sequence[float], text: Callable[[float], str]) -> tuple[str, ...]:
        return tuple(text(value) for value in values[-IN_TABLE:])

    table = Table(
        "Loss in numbers",
        (
            Column("after", True, 0, cells(points["x"], span)),
            Column("step", True, 0, cells(points["step"], count)),
            Column("loss", True, 0, cells(points["y"], number)),
            Column("smoothed", True, 0, cells(soft, number)),
            Column("learning rate", True, 0, cells(beside, number)),
        ),
    )
    return unfolding("the newest points as a table", table)

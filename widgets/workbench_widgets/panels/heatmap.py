"""Ranks × time as colours (Cividis, which all eyes tell apart): dark is quick, yellow is slow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import panel as pn
from bokeh.models import BasicTicker, ColumnDataSource, CustomJSHover, LinearColorMapper, Range1d
from bokeh.models.annotations import BoxAnnotation
from bokeh.palettes import Cividis256

from workbench.views.heat import METRICS, HeatView
from workbench.views.job import JobView
from workbench.views.table import Column, Table
from workbench.views.wording import bounds, plural, ranks_text, seconds, span
from workbench_widgets.charts import TimeAxis, chart_pane
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import esc, unfolding
from workbench_widgets.panels.throughput import EMPTY
from workbench_widgets.source import Choice
from workbench_widgets.style import PANEL
from workbench_widgets.theme import colour

LEAST_HEIGHT: Final = 120  # px
MOST_HEIGHT: Final = 300
A_ROW: Final = 16  # px
NOUGHT: Final = 0.01  # a lower bound that is less of the upper one is 0: the colours would be the same
SHORTEST: Final = 1e-3  # ms that a scale reaches
NOISE: Final = 1.2  # what is no more than so many times the least is not to look like much
IN_TABLE: Final = 10  # rows
STEP_TIME, OWN_WORK = METRICS.index("step time"), METRICS.index("own work")
ALIKE: Final = "Ranks wait for the slowest, so that their steps take alike; own work tells which one that is."
_STOPS: Final = ",".join(Cividis256[k] for k in range(0, 256, 51))


class Heatmap:
    """See the module. `on_point` hears of a place that was pressed: rank, seconds since the job was submitted."""

    def __init__(self, theme: str, axis: TimeAxis, on_point: Callable[[int, float], None]) -> None:
        self._metric, self._rank = 0, _NOBODY
        self._shown: object = None
        self._heat = HeatView()
        self._submitted_at, self._is_over = 0.0, False
        self._mapper = LinearColorMapper(palette=Cividis256, low=0.0, high=1.0, nan_color="rgba(0,0,0,0)")
        self._source = ColumnDataSource(data={name: [] for name in ("image", "x", "y", "dw", "dh")}, name="heat")
        self._fold = CustomJSHover(args={"fold": 1}, code=_RANKS)
        self._y = Range1d(start=1, end=0)
        tips = [("rank", "$y{custom}"), ("a step", "@image{custom}"), ("after", "$x{00:00:00}")]
        self.figure = axis.chart(
            "ranks over time, coloured by the time of a step", tips=tips, y_range=self._y, number="0",
            height=LEAST_HEIGHT, formatters={"$y": self._fold, "@image": CustomJSHover(code=_SECONDS)},
        )  # fmt: skip
        self.figure.ygrid.grid_line_color = None
        self.figure.yaxis.ticker = BasicTicker(min_interval=1, desired_num_ticks=8)
        self.figure.image("image", "x", "y", "dw", "dh", source=self._source, color_mapper=self._mapper)
        self._box = BoxAnnotation(fill_alpha=0.0, line_width=2, visible=False, line_color=colour("text", theme))
        self.figure.add_layout(self._box)
        self.figure.on_event("tap", lambda event: self._tapped(on_point, event))
        self._head = Live(stylesheets=[PANEL], markup=head_html(HeatView(), 0, 0.0, 1.0), on_action=self._chosen)
        self._table = Live(stylesheets=[PANEL], markup="")
        chart = chart_pane(self.figure)
        self.root = pn.Column(self._head, chart, self._table, name="heatmap", sizing_mode="stretch_width")

    def update(self, view: JobView, heat: HeatView) -> None:
        if heat is self._heat and heat.columns:
            return
        self._heat, self._submitted_at, self._is_over = heat, view.submitted_at, view.is_over
        self._draw()

    def choose(self, choice: Choice) -> None:
        self._rank = _NOBODY if choice.rank is None else choice.rank
        self._mark()

    def paint(self, theme: str) -> None:
        self._box.line_color = colour("text", theme)

    def _tapped(self, on_point: Callable[[int, float], None], event: Any) -> None:
        rank = math.floor(event.y + 0.5) if event.x is not None and event.y is not None else _NOBODY
        if 0 <= rank < self._heat.ranks:
            on_point(rank // self._heat.fold * self._heat.fold, float(event.x))

    def _chosen(self, name: str, value: str) -> None:
        if name == "metric" and value.isdigit() and int(value) < len(METRICS):
            self._metric = int(value)
            self._draw()

    def _mark(self) -> None:
        is_there = 0 <= self._rank < self._heat.ranks
        row = self._rank // self._heat.fold * self._heat.fold
        self._box.update(bottom=row - 0.5, top=row + self._heat.fold - 0.5, visible=is_there)

    def _draw(self) -> None:
        heat = self._heat
        image = image_of(heat, self._metric) * 1000
        low, high = scale_of(image)
        hides = self._metric == STEP_TIME and _spread(image) < NOISE <= _spread(image_of(heat, OWN_WORK))
        hint = ALIKE if hides else ""  # all take as long as the slowest, while their own work differs
        self._head.markup = head_html(heat, self._metric, low, high, hint=hint, is_over=self._is_over)
        self.figure.visible = bool(heat.columns)
        if not heat.columns:
            return
        self._mapper.update(low=low, high=high)
        self._fold.args = {"fold": heat.fold}
        first = heat.columns[0].start - self._submitted_at
        self._source.data = {
            "image": [image], "x": [first], "y": [-0.5],
            "dw": [image.shape[1] * heat.width], "dh": [heat.rows * heat.fold],
        }  # fmt: skip
        self._y.update(start=heat.rows * heat.fold - 0.5, end=-0.5)  # a rank's number stands beside its middle
        self.figure.height = max(LEAST_HEIGHT, min(MOST_HEIGHT, heat.rows * A_ROW + 40))
        self._table.markup = as_table_html(heat, image)
        self._mark()


_NOBODY: Final = -1
_RANKS: Final = """
const first = Math.floor((value + 0.5) / fold) * fold;
return fold > 1 ? first + '–' + (first + fold - 1) : '' + first;
"""


_SECONDS: Final = """
const [size, unit] = value >= 1000 ? [value / 1000, 's'] : value >= 1 ? [value, 'ms'] : [value * 1000, 'µs'];
return Number(size.toPrecision(3)) + ' ' + unit;
"""


def image_of(heat: HeatView, metric: int) -> Any:
    """Seconds as float32, rows × columns; NaN where nothing is known."""
    if not heat.columns:
        return np.full((1, 1), np.nan, dtype=np.float32)
    first = heat.columns[0].start
    places = [round((column.start - first) / heat.width) for column in heat.columns]
    image = np.full((heat.rows, places[-1] + 1), np.nan, dtype=np.float32)
    for place, column in zip(places, heat.columns, strict=True):
        image[:, place] = np.frombuffer(column.cells[metric], dtype=np.float32)
    return image


def scale_of(image: Any) -> tuple[float, float]:
    """What the darkest and the brightest colour stand for: all but the rarest, rounded so that it holds still.

    Each is rounded by its own size: of 0.15 s to 2 s the lower one is not 0.
    """
    known = image[np.isfinite(image)]
    if not known.size:
        return 0.0, 1.0
    low, high = (float(value) for value in np.percentile(known, (1, 99.5)))
    high = max(high, NOISE * low, SHORTEST)
    above, below = _step(high), _step(low) if low > NOUGHT * high else math.inf
    low = math.floor(low / below + 1e-9) * below if below < math.inf else 0.0
    return low, max(math.ceil(high / above - 1e-9) * above, low + above)


def _step(value: float) -> float:
    """To what a bound is rounded: two of its digits, by fifths of the first."""
    return float(10.0 ** math.floor(math.log10(value)) / 5)


def _spread(image: Any) -> float:
    """The slowest row over the median one, by what most of a row's time is like; 1: there is too little."""
    rows = [float(np.median(row[np.isfinite(row)])) for row in image if np.isfinite(row).any()]
    middle = float(np.median(rows)) if rows else 0.0
    return max(rows) / middle if middle > 0.0 else 1.0


def head_html(
    heat: HeatView, metric: int, low: float, high: float, *, hint: str = "", is_over: bool = False
) -> str:  # fmt: skip
    options = "".join(
        f'<option value="{k}"{" selected" if k == metric else ""}>{name}</option>' for k, name in enumerate(METRICS)
    )
    tools = f'<select data-set="metric" aria-label="what is coloured">{options}</select>'
    if not heat.columns:
        return f'<div class="charthead"><h2>Ranks over time</h2></div>{EMPTY.html(is_over=is_over)}'
    folded = f"; a row is {heat.fold} ranks, and shows the slowest of them" if heat.fold > 1 else ""
    first, last = bounds(low / 1000, high / 1000)
    scale = (
        f'<span class="scale"><span>{esc(first)}</span><i aria-hidden="true" '
        f'style="background:linear-gradient(90deg,{_STOPS})"></i>'
        f"<span>{esc(last)} and more</span></span>"
    )
    title = f"{plural(heat.ranks, 'rank')} over time since the start, a column {span(heat.width)}{folded}"
    told = f'<p class="muted small">{esc(hint)}</p>' if hint else ""
    return f'<div class="charthead"><h2>{esc(title)}</h2><div class="tools">{tools}{scale}</div>{told}</div>'


def as_table_html(heat: HeatView, image: Any) -> str:
    """The slowest rows in numbers, in ms."""
    known = np.isfinite(image)
    counts = np.maximum(known.sum(axis=1), 1)
    means = np.where(known, image, 0.0).sum(axis=1) / counts
    rows = [int(row) for row in np.argsort(-means)[:IN_TABLE] if known[row].any()]

    def cells(get: Callable[[Any], float]) -> tuple[str, ...]:
        return tuple(seconds(float(get(image[row][known[row]])) / 1000) for row in rows)

    names = (ranks_text(range(row * heat.fold, min((row + 1) * heat.fold, heat.ranks))) for row in rows)
    table = Table(
        "The slowest ranks in numbers",
        (
            Column("who", False, 0, tuple(names)),
            Column("least", True, 0, cells(np.min)),
            Column("mean", True, 0, cells(np.mean)),
            Column("most", True, 0, cells(np.max)),
            Column("newest", True, 0, cells(lambda values: values[-1])),
        ),
    )
    return unfolding("the slowest as a table", table)

"""Throughput over time: a line a rank, up to the number of ranks of which the history is kept singly; else all as one.

Ranks in step lie on each other; their dashes let each shine through. The same numbers are there as text and as a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import panel as pn
from bokeh.models import ColumnDataSource

from workbench.views.efficiency import efficiency, efficiency_text
from workbench.views.job import RANKS_WITH_SERIES, JobView
from workbench.views.series import RankPoint, SeriesPoint
from workbench.views.table import Column, Table
from workbench.views.wording import bare_rate, plural, span
from workbench_widgets.charts import TimeAxis, chart_pane
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import Empty, esc, swatch, unfolding
from workbench_widgets.source import Choice
from workbench_widgets.style import PANEL
from workbench_widgets.theme import CHART_HEIGHT, RANK_COLOURS, colour, rank_colour, rank_dash

EMPTY: Final = Empty(
    "It appears here after the first seconds with a finished step.",
    "Its record has none: it was over before the first seconds with a finished step.",
)
ALL: Final = -1  # the line of all ranks together
GAP: Final = 2.5  # widths without a point: the line is broken
IN_TABLE: Final = 20  # newest points


class Line(NamedTuple):
    """One curve: seconds since the job was submitted, rate, step."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    step: tuple[int, ...]


def lines_of(view: JobView) -> tuple[dict[int, Line], str]:
    """The curves by rank (or `ALL`), and their unit: samples/s where samples are known, else steps/s."""
    points: dict[int, Sequence[RankPoint | SeriesPoint]] = dict(view.rank_series) or {ALL: view.series}
    has_samples = any(point.samples_per_s for series in points.values() for point in series)
    return (
        {rank: _line(series, view.submitted_at, has_samples) for rank, series in points.items() if series},
        "samples/s" if has_samples else "steps/s",
    )


def _line(points: Sequence[RankPoint | SeriesPoint], start: float, has_samples: bool) -> Line:
    rows: list[tuple[float, float, int]] = []
    end = math.inf
    for point in points:
        x = point.start + point.width / 2 - start
        if x - end > GAP * point.width:
            rows.append((end + point.width / 2, math.nan, 0))
        rate = point.samples_per_s if has_samples else (1 / point.step_time if point.step_time else 0.0)
        rows.append((x, rate, point.step))
        end = x
    xs, ys, steps = zip(*rows, strict=True)
    return Line(xs, ys, steps)


class Throughput:
    """See the module."""

    def __init__(self, theme: str, axis: TimeAxis | None = None) -> None:
        self._shown: object = None
        self._drawn: set[int] = set()
        tips = [("", "$name"), ("rate", "@y{0,0.[0]}"), ("step", "@step{0,0}"), ("after", "@x{00:00:00}")]
        self.figure = (axis or TimeAxis(theme)).chart("throughput over time", tips=tips)
        # All lines there can be: a model that is added once the browser is connected may come after what refers to it.
        self._renderers = {rank: _draw(self.figure, rank, theme) for rank in (ALL, *range(RANKS_WITH_SERIES))}
        self._head = Live(stylesheets=[PANEL], markup=head_html({}, "samples/s"))
        self._table = Live(stylesheets=[PANEL], markup="")
        chart = chart_pane(self.figure, CHART_HEIGHT)
        self.root = pn.Column(self._head, chart, self._table, name="throughput", sizing_mode="stretch_width")

    def update(self, view: JobView) -> None:
        newest = view.series[-1] if view.series else None
        if (news := (newest, len(view.series), view.is_over)) == self._shown:
            return  # history comes once a second, views more often
        self._shown = news
        lines, unit = lines_of(view)
        self.figure.visible = bool(lines)
        for rank in self._drawn - lines.keys():  # a moment at which it had not run yet
            self._renderers[rank].data_source.data = {name: [] for name in Line._fields}
        for rank, line in lines.items():
            self._renderers[rank].data_source.data = {name: list(values) for name, values in line._asdict().items()}
        self._drawn = set(lines)
        self._head.markup = head_html(lines, unit, efficiency_text(efficiency(view.rows)), is_over=view.is_over)
        self._table.markup = as_table_html(lines, unit)

    def choose(self, choice: Choice) -> None:
        """The other ranks' lines step back."""
        for rank, renderer in self._renderers.items():
            is_back = choice.rank is not None and rank not in (ALL, choice.rank)
            renderer.glyph.line_alpha = 0.25 if is_back else 1.0
            renderer.glyph.line_width = 3 if rank == choice.rank else 2

    def paint(self, theme: str) -> None:
        """Take on a theme."""
        for rank, renderer in self._renderers.items():
            renderer.glyph.line_color = _colour(rank, theme)


def _draw(chart: Any, rank: int, theme: str) -> Any:
    source = ColumnDataSource(data={"x": [], "y": [], "step": []}, name=_name(rank))
    line = {"line_width": 2, "line_color": _colour(rank, theme), "line_dash": _dash(rank)}
    return chart.line("x", "y", source=source, name=_name(rank), **line)


def _colour(rank: int, theme: str) -> str:
    return colour("accent", theme) if rank == ALL else rank_colour(rank, theme)


def _variable(rank: int) -> str:
    return "accent" if rank == ALL else f"rank{rank % RANK_COLOURS}"


def _dash(rank: int) -> Any:
    return "solid" if rank == ALL else rank_dash(rank)


def _name(rank: int) -> str:
    return "all ranks" if rank == ALL else f"rank {rank}"


def head_html(lines: dict[int, Line], unit: str, scaling: str = "", *, is_over: bool = False) -> str:
    """The title, what the chart says in words, and which line is whose."""
    if not lines:
        return f'<div class="charthead"><h2>Throughput</h2></div>{EMPTY.html(is_over=is_over)}'
    keys = "".join(f"<span>{swatch(_variable(rank), _dash(rank))}{esc(_name(rank))}</span>" for rank in lines)
    title = f"Throughput {'of all ranks' if ALL in lines else 'by rank'}, {unit} over time since the start"
    return (
        f'<div class="charthead"><h2>{title}</h2><div class="legend" aria-hidden="true">{keys}</div></div>'
        f'<p class="hidden">{esc(summary(lines, unit, is_over=is_over))}</p>'
        + (f'<p class="muted small">{esc(scaling)}</p>' if scaling else "")
    )


def summary(lines: dict[int, Line], unit: str, *, is_over: bool = False) -> str:
    """The chart in one sentence, for those who do not see it."""
    ends = [line.y[-1] for line in lines.values()]
    length = max(line.x[-1] for line in lines.values()) - min(line.x[0] for line in lines.values())
    low, high = bare_rate(min(ends)), bare_rate(max(ends))
    now = f"{low} {unit}" if low == high else f"{low} to {high} {unit}"
    is_one = ALL in lines
    whose = "all ranks together" if is_one else plural(len(lines), "rank")
    when = "at last" if is_over else "now"
    return f"Chart of {whose} over {span(length)}; {'' if is_one else 'each '}{when} at {now}."


def as_table_html(lines: dict[int, Line], unit: str) -> str:
    """The newest points in numbers."""
    if not lines:
        return ""
    first = next(iter(lines.values()))
    rows = [k for k in range(len(first.x)) if not math.isnan(first.y[k])][-IN_TABLE:]
    times = Column("after", True, 0, tuple(span(first.x[k]) for k in rows))
    rates = (
        Column(f"{_name(rank)}, {unit}", True, 1, tuple(_near(line, first.x[k]) for k in rows))
        for rank, line in lines.items()
    )
    return unfolding("the newest points as a table", Table("Throughput in numbers", (times, *rates)))


def _near(line: Line, x: float) -> str:
    """The rate at a time, where the line has one."""
    return next(
        (bare_rate(y) for at, y in zip(reversed(line.x), reversed(line.y), strict=True) if abs(at - x) < 0.5), "–"
    )

"""Jobs beside each other: their losses and throughputs laid over each other, and tables of what else is not the same.

A job is a colour and a dash, the same in both charts and in the tables' headings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

import panel as pn
from bokeh.models import ColumnDataSource, DataRange1d

from workbench.views.sides import (
    MOST,
    By,
    Curve,
    Measure,
    Side,
    asked_table,
    curve_of,
    curves_table,
    outcome_table,
    unit_of,
)
from workbench.views.table import Table
from workbench.views.wording import bare_rate, count, number, span
from workbench_widgets.charts import TimeAxis, chart_pane
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import esc, swatch, table_html, unfolding
from workbench_widgets.style import PANEL
from workbench_widgets.theme import RANK_COLOURS, rank_colour, rank_dash

HEIGHT: Final = 240  # px
AXES: Final = {By.STEP: "by step", By.TIME: "by time since the start"}
TITLES: Final = {Measure.LOSS: "Loss, mean of the ranks", Measure.THROUGHPUT: "Throughput of all ranks"}
EMPTY: Final = {
    Measure.LOSS: "None of these jobs has reported a loss: see <code>run.report(loss=loss)</code>.",
    Measure.THROUGHPUT: "None of these jobs has finished a step.",
}
TOO_FEW: Final = "Give two to six jobs to compare: choose them in the list of all jobs."


class Told(NamedTuple):
    """A job that was asked for: its id in addresses, its name, and what is known of it, or why nothing is."""

    job_id: str
    name: str
    side: Side | None
    notice: str = ""


class Head:
    """Which jobs, which axis, and what cannot be shown. `on_by` hears that the reader chose another axis."""

    def __init__(self, on_by: Callable[[By], None], on_all: Callable[[], None]) -> None:
        self._on_by, self._on_all = on_by, on_all
        self.root = Live(name="head", stylesheets=[PANEL], markup="", on_action=self._chosen)

    def update(self, told: Sequence[Told], by: By, theme: str, *, is_zoomed: bool) -> None:
        self.root.markup = head_html(told, by, theme, is_zoomed=is_zoomed)

    def _chosen(self, name: str, value: str) -> None:
        if name == "by" and value in (by.value for by in By):
            self._on_by(By(value))
        elif name == "all":
            self._on_all()


class Curves:
    """One measure of all jobs."""

    def __init__(self, measure: Measure, theme: str, axis: TimeAxis) -> None:
        self.measure, self._theme = measure, theme
        self._shown: object = None
        value = "0.[0000]" if measure is Measure.LOSS else "0,0.[0]"
        tips = [("", "$name"), (measure.value, f"@y{{{value}}}"), ("step", "@step{0,0}"), ("after", "@after{00:00:00}")]
        y_range = DataRange1d() if measure is Measure.LOSS else None
        label = f"{measure.value} of the jobs laid over each other"
        self.figure = axis.chart(label, height=HEIGHT, tips=tips, y_range=y_range, number=value)
        self.lines = [self._line(place) for place in range(MOST)]
        self._head = Live(stylesheets=[PANEL], markup="")
        self._table = Live(stylesheets=[PANEL], markup="")
        chart = chart_pane(self.figure, HEIGHT)
        self.root = pn.Column(self._head, chart, self._table, name=measure.value, sizing_mode="stretch_width")

    def update(self, sides: Sequence[tuple[int, Side]], by: By) -> None:
        """`sides` with their places, which their colours come from."""
        news = (by, *((place, len(side.view.series), side.view.series[-1:]) for place, side in sides))
        if news == self._shown:
            return
        self._shown = news
        unit = unit_of([side for _, side in sides]) if self.measure is Measure.THROUGHPUT else ""
        curves = {place: curve_of(side.view, self.measure, by, unit) for place, side in sides}
        names = {place: side.name for place, side in sides}
        self.figure.visible = any(curve.y for curve in curves.values())
        for place, line in enumerate(self.lines):
            line.name = names.get(place, "")
            curve = curves.get(place, Curve())
            line.data_source.data = {"x": list(curve.x(by)), **{k: list(v) for k, v in curve._asdict().items()}}
        self._head.markup = curves_html(self.measure, by, names, curves, unit)
        told = {names[place]: curve for place, curve in curves.items()}
        self._table.markup = as_table_html(curves_table(told, self.measure, by, unit)) if self.figure.visible else ""

    def paint(self, theme: str) -> None:
        for place, line in enumerate(self.lines):
            line.glyph.line_color = rank_colour(place, theme)

    def _line(self, place: int) -> Any:
        source = ColumnDataSource(data={"x": [], "step": [], "after": [], "y": []})
        look = {"line_width": 2, "line_color": rank_colour(place, self._theme), "line_dash": rank_dash(place)}
        return self.figure.line("x", "y", source=source, **look)


class Tables:
    """How they went, and what was asked for differently."""

    def __init__(self) -> None:
        self.root = Live(name="tables", stylesheets=[PANEL], markup="")

    def update(self, sides: Sequence[tuple[int, Side]]) -> None:
        told = [side for _, side in sides]
        self.root.markup = tables_html(told, [place for place, _ in sides]) if told else ""


def head_html(told: Sequence[Told], by: By, theme: str, *, is_zoomed: bool) -> str:
    jobs = "".join(
        f'<li>{job_swatch(place)}<a href="{job_address(one.job_id, theme)}">{esc(one.name)}</a>{_wrong(one)}</li>'
        for place, one in enumerate(told)
    )
    options = "".join(
        f'<option value="{one.value}"{" selected" if one is by else ""}>{text}</option>' for one, text in AXES.items()
    )
    whole = '<button data-do="all">Show all again</button>' if is_zoomed else ""
    few = f'<p class="notice" role="status">{TOO_FEW}</p>' if len(told) < 2 else ""
    return (
        f'<div class="head"><h1>Jobs beside each other</h1></div><ul class="story">{jobs}</ul>{few}'
        f'<div class="tools" role="group" aria-label="axis"><select data-set="by" aria-label="what the axis counts">'
        f"{options}</select>{whole}"
        '<span class="small muted hint">drag over a chart to zoom in</span></div>'
    )


def _wrong(one: Told) -> str:
    if one.notice:
        return f' <span class="muted">no news: {esc(one.notice)}</span>'
    return "" if one.side is not None else ' <span class="muted" role="status">reading the record …</span>'


def job_address(job_id: str, theme: str) -> str:
    """Of a job's page, from the pages beside it; escaped."""
    return "job?" + esc(urlencode({"id": job_id, **({"theme": theme} if theme else {})}, quote_via=quote))


def job_swatch(place: int) -> str:
    return swatch(f"rank{place % RANK_COLOURS}", rank_dash(place))


def curves_html(measure: Measure, by: By, names: dict[int, str], curves: dict[int, Curve], unit: str) -> str:
    """Title and legend; what the chart shows in words."""
    title = f"{TITLES[measure]}{f', {unit}' if unit else ''} {AXES[by]}"
    if not any(curve.y for curve in curves.values()):
        return f'<div class="charthead"><h2>{esc(TITLES[measure])}</h2></div><p class="muted">{EMPTY[measure]}</p>'
    keys = "".join(f"<span>{job_swatch(place)}{esc(names[place])}</span>" for place in curves)
    told = "; ".join(f"{names[place]}: {_words(curve, measure, by)}" for place, curve in curves.items())
    return (
        f'<div class="charthead"><h2>{esc(title)}</h2><div class="legend" aria-hidden="true">{keys}</div></div>'
        f'<p class="hidden">{esc(f"Chart. {told}.")}</p>'
    )


def _words(curve: Curve, measure: Measure, by: By) -> str:
    known = [(x, y) for x, y in zip(curve.x(by), curve.y, strict=True) if y == y]
    if not known:
        return "nothing"
    text = number if measure is Measure.LOSS else bare_rate
    end = f"step {count(known[-1][0])}" if by is By.STEP else f"after {span(known[-1][0])}"
    return f"{text(known[0][1])} at first, {text(known[-1][1])} at {end}"


def as_table_html(table: Table) -> str:
    return unfolding("the same as a table", table)


def tables_html(sides: Sequence[Side], places: Sequence[int]) -> str:
    """Both tables, under headings that say whose a column is."""
    went = f"<h2>How they went</h2>{_wide(outcome_table(sides), places)}"
    if len(sides) < 2:
        return went
    asked = asked_table(sides)
    alike = '<p class="muted">Nothing: the same program with the same options.</p>'
    told = _wide(asked, places) if asked.length else alike
    return f'{went}<h2 class="next">What was asked for differently</h2>{told}'


def _wide(table: Table, places: Sequence[int]) -> str:
    """Beside each other, and scrolled where there is no room."""
    shown = table_html(
        table, css_class="sides", head=lambda k, one: (job_swatch(places[k - 1]) if k else "") + esc(one.title)
    )
    return f'<div class="scroll tall" tabindex="0" role="group" aria-label="{esc(table.caption)}">{shown}</div>'

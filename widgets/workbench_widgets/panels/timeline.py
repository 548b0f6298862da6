"""Failures and recoveries over time: a lane a row of ranks that did the same, and above them what happened, as letters.

Colour never speaks alone: what means trouble has a pattern, a mark its letter, and hovering tells the story in words.
The same is there as text: the newest failures in a line each, attempts and events as tables.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import panel as pn
from bokeh.models import AdaptiveTicker, ColumnDataSource, FixedTicker, HoverTool, NumeralTickFormatter, Range1d
from bokeh.plotting import figure

from workbench.views.job import JobView
from workbench.views.lane_rows import Row, rows_of, worst_first
from workbench.views.lane_text import NOTHING_EVER, NOTHING_YET, mark_text, span_text
from workbench.views.spans import LETTERS, Mark, MarkKind, SpanKind, Timeline
from workbench.views.story import attempts_table, ended_text, numbers_line, story_lines
from workbench.views.table import Column, Table
from workbench.views.wording import Clock, plural, span
from workbench_widgets.charts import CLIP
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import Empty, esc, unfolding
from workbench_widgets.style import PANEL
from workbench_widgets.theme import LANE_HATCHES, SMALL_SIZE, colour, lane_colour, paint_chart

ROW: Final = 24  # px
AROUND: Final = 62  # px: marks, axis
NEAR: Final = 0.014  # of the width: marks that are nearer to each other are one
ATTEMPTS: Final = 50  # in the table
EVENTS: Final = 60
# Of marks in one place the first of these gives letter and shape; all are told when hovering.
WEIGHT: Final = (
    MarkKind.FAILED,
    MarkKind.STALLED,
    MarkKind.NON_FINITE,
    MarkKind.MISMATCH,
    MarkKind.REFUSED,
    MarkKind.SAVE_FAILED,
    MarkKind.INJECTED,
    MarkKind.STANDS_OUT,
    MarkKind.STRAGGLER,
    MarkKind.ENDED,
    MarkKind.RECOVERED,
    MarkKind.REPAIRED,
    MarkKind.DECIDED,
    MarkKind.REQUESTED,
    MarkKind.STALL_ENDED,
    MarkKind.SAVED,
)
EMPTY: Final = Empty(f"{NOTHING_YET}.", f"{NOTHING_EVER}.")
CALM: Final = Empty("No failure so far.", "No failure.")
BAD: Final = frozenset(WEIGHT[:6])
SHAPES: Final = dict.fromkeys(BAD, "square") | {  # all with room for a letter
    MarkKind.INJECTED: "square_pin",
    MarkKind.RECOVERED: "circle",
    MarkKind.SAVED: "circle",
}
_LANES: Final = ("y", "left", "right", "kind", "words", "colour", "hatch")
_MARKS: Final = ("x", "y", "letter", "shape", "words", "colour")


class Cluster(NamedTuple):
    """Marks in one place of the chart."""

    x: float
    marks: tuple[Mark, ...]

    @property
    def kind(self) -> MarkKind:
        return min((mark.kind for mark in self.marks), key=WEIGHT.index)


class Lanes:
    """See the module."""

    def __init__(self, theme: str) -> None:
        self._theme, self._shown = theme, ""
        self._timeline: Timeline | None = None
        self._lanes = ColumnDataSource(data={name: [] for name in _LANES}, name="lanes")
        self._marks = ColumnDataSource(data={name: [] for name in _MARKS}, name="marks")
        self.figure = _figure()
        self.figure.visible = False  # until there is something in it
        self._draw_glyphs()
        paint_chart(self.figure, theme)
        self._head = Live(stylesheets=[PANEL], markup=head_html(None))
        self._tables = Live(stylesheets=[PANEL], markup="")
        chart = pn.pane.Bokeh(  # type: ignore[no-untyped-call]
            self.figure, sizing_mode="stretch_width"
        )
        self.root = pn.Column(self._head, chart, self._tables, name="timeline", sizing_mode="stretch_width")

    def update(self, view: JobView) -> None:
        timeline = view.timeline
        if timeline is None or (news := _version(timeline, is_over=view.is_over)) == self._shown:
            return  # nothing moves by as much as can be seen
        self._shown, self._timeline = news, timeline
        self._head.markup = head_html(timeline, is_over=view.is_over)
        self._tables.markup = tables_html(timeline)
        self._draw(timeline)

    def paint(self, theme: str) -> None:
        """Take on a theme."""
        self._theme = theme
        paint_chart(self.figure, theme)
        self._letters.glyph.text_color = colour("page", theme)
        if self._timeline is not None:
            self._draw(self._timeline)

    def _draw_glyphs(self) -> None:
        bars = self.figure.hbar(
            y="y", left="left", right="right", height=0.72, source=self._lanes, fill_color="colour",
            line_color="colour", line_width=1, hatch_pattern="hatch", hatch_color="white", hatch_alpha=0.55,
            hatch_scale=7,
        )  # fmt: skip
        shapes = self.figure.scatter(
            "x", "y", size=18, marker="shape", source=self._marks, fill_color="colour", line_color="colour"
        )
        text = {"text_font_size": "10px", "text_font_style": "bold", "text_align": "center"}
        self._letters = self.figure.text(
            "x",
            "y",
            text="letter",
            source=self._marks,
            text_baseline="middle",
            text_color=colour("page", self._theme),
            **text,
        )
        self._bars = bars
        self.figure.add_tools(
            HoverTool(renderers=[bars], tooltips=_tip("@words"), point_policy="follow_mouse"),
            HoverTool(renderers=[shapes], tooltips=_tip("@words{safe}"), point_policy="follow_mouse"),
        )

    def _draw(self, timeline: Timeline) -> None:
        rows = rows_of(timeline.spans)
        if not rows:
            return
        self.figure.visible = True
        lasted = max(timeline.end - timeline.start, 1e-3)
        self.figure.x_range.update(start=-0.005 * lasted, end=1.01 * lasted)  # an ending mark is whole
        self.figure.y_range.update(start=len(rows) - 0.5, end=-1.6)
        self.figure.yaxis.ticker.ticks = [-1, *range(len(rows))]
        self.figure.yaxis.major_label_overrides = {-1: "events"} | {k: row.label for k, row in enumerate(rows)}
        self.figure.height = len(rows) * ROW + AROUND
        self._bars.glyph.hatch_color = colour("page", self._theme)
        self._lanes.data = lanes_data(rows, timeline, self._theme)
        self._marks.data = marks_data(timeline, self._theme)


def _tip(words: str) -> str:
    """A tooltip that is not wider than the page."""
    return f'<div style="max-width:min(420px,70vw);white-space:normal;overflow-wrap:anywhere">{words}</div>'


def _version(timeline: Timeline, *, is_over: bool) -> str:
    """Differs when the chart would, by a pixel or more, or its words."""
    lasted = timeline.end - timeline.start
    moved = round(timeline.end / max(1.0, lasted / 600))
    marks = sum(mark.count for mark in timeline.marks)
    return f"{moved} {len(timeline.spans)} {marks} {len(timeline.attempts)} {is_over} {numbers_line(timeline)}"


def _figure() -> Any:
    made = figure(
        height=ROW + AROUND,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        min_border=4,
        x_range=Range1d(start=0, end=1),
        y_range=Range1d(start=0.5, end=-1.6),
        stylesheets=[CLIP],
        html_attributes={"role": "group", "aria-label": "timeline; the same is in words and tables below"},
    )
    made.xaxis.ticker = AdaptiveTicker(base=60, mantissas=[1, 2, 5, 10, 20, 30], min_interval=1, desired_num_ticks=6)
    made.xaxis.formatter = NumeralTickFormatter(format="00:00:00")
    made.yaxis.ticker = FixedTicker(ticks=[])
    made.xgrid.grid_line_color = made.ygrid.grid_line_color = None
    for axis in (*made.xaxis, *made.yaxis):
        axis.major_label_text_font_size = SMALL_SIZE
        axis.major_label_text_font = "system-ui"
        axis.minor_tick_line_color = None
    made.yaxis.axis_line_color = made.yaxis.major_tick_line_color = None
    return made


# --- what the chart shows ---------------------------------------------------------------------------------------------


def lanes_data(rows: Sequence[Row], timeline: Timeline, theme: str) -> dict[str, list[Any]]:
    """Bars; what is worse is painted over what is better, where a row is of ranks that did different things."""
    items = [
        (index, one)
        for index, row in enumerate(rows)
        for one in (reversed(worst_first(row.spans)) if row.is_mixed else row.spans)
    ]
    return {
        "y": [index for index, _ in items],
        "left": [one.start - timeline.start for _, one in items],
        "right": [one.end - timeline.start for _, one in items],
        "kind": [one.kind.value for _, one in items],
        "words": [span_text(one) for _, one in items],
        "colour": [lane_colour(one.kind.name, theme) for _, one in items],
        "hatch": [LANE_HATCHES.get(one.kind.name, "blank") for _, one in items],
    }


def clusters_of(timeline: Timeline) -> list[Cluster]:
    """Marks, those as one that would lie on each other."""
    near = NEAR * (timeline.end - timeline.start)
    made: list[Cluster] = []
    for mark in timeline.marks:
        x = mark.time - timeline.start
        if made and x - made[-1].x < near:
            made[-1] = Cluster(made[-1].x, (*made[-1].marks, mark))
        else:
            made.append(Cluster(x, (mark,)))
    return made


def marks_data(timeline: Timeline, theme: str) -> dict[str, list[Any]]:
    clusters, clock = clusters_of(timeline), clock_of(timeline)
    return {
        "x": [cluster.x for cluster in clusters],
        "y": [-1.0] * len(clusters),
        "letter": [LETTERS[cluster.kind] for cluster in clusters],
        "shape": [SHAPES.get(cluster.kind, "hex") for cluster in clusters],
        "words": [_told(cluster, clock) for cluster in clusters],
        "colour": [_mark_colour(cluster.kind, theme) for cluster in clusters],
    }


def _told(cluster: Cluster, clock: Clock) -> str:
    """The newest dozen of a place, a line each; HTML."""
    lines = [f"<b>{LETTERS[m.kind]}</b> {esc(clock(m.time))} {esc(mark_text(m))}" for m in cluster.marks[-12:]]
    more = len(cluster.marks) - len(lines)
    return "<br>".join([*([f"… {plural(more, 'earlier event')}"] if more > 0 else []), *lines])


def _mark_colour(kind: MarkKind, theme: str) -> str:
    is_doubtful = kind in (MarkKind.INJECTED, MarkKind.STANDS_OUT)
    name = "bad" if kind in BAD else "warn" if is_doubtful else "good" if kind is MarkKind.RECOVERED else ""
    return colour(name or ("accent" if kind is not MarkKind.SAVED else "muted"), theme)


def clock_of(timeline: Timeline) -> Clock:
    """Times of day where the page is served; with the date when the job lasted longer than a day."""
    form = "%H:%M:%S" if timeline.end - timeline.start < 86_400 else "%m-%d %H:%M:%S"
    return lambda value: time.strftime(form, time.localtime(value))


# --- the same in words ------------------------------------------------------------------------------------------------


def head_html(timeline: Timeline | None, *, is_over: bool = False) -> str:
    """The title with its numbers, the newest failures, and what colours and letters mean."""
    if timeline is None or not timeline.spans:
        return f'<div class="charthead"><h2>Failures and recoveries</h2></div>{EMPTY.html(is_over=is_over)}'
    numbers = numbers_line(timeline)
    title = f"Failures and recoveries over time since the start{f' · {esc(numbers)}' if numbers else ''}"
    lines = story_lines(timeline, clock_of(timeline))[:-1]
    story = "".join(f"<li>{esc(line)}</li>" for line in lines)
    calm = CALM.html(is_over=is_over) if not lines and _is_calm(timeline) else ""
    return (
        f'<div class="charthead"><h2>{title}</h2>'
        f'<div class="legend" aria-hidden="true">{_kinds_legend(timeline)}{_marks_legend(timeline)}</div></div>'
        f'<p class="hidden">{esc(summary(timeline))}</p>'
        + (f'<ul class="story" aria-label="the newest failures and recoveries">{story}</ul>' if story else calm)
    )


def _is_calm(timeline: Timeline) -> bool:
    return all(attempt.cause is None for attempt in timeline.attempts)


def _kinds_legend(timeline: Timeline) -> str:
    used = {one.kind for one in timeline.spans}
    return "".join(
        f'<span><i class="key" style="background:{_background(kind)}"></i>{esc(kind.value)}</span>'
        for kind in SpanKind
        if kind in used
    )


def _background(kind: SpanKind) -> str:
    """As the chart's pattern, in CSS."""
    own = f"var(--dt-lane-{kind.name})"
    angles = {"LAUNCHING": "90deg", "WAITING": "0deg", "STALLED": "45deg", "RECOVERING": "135deg", "DEAD": "45deg"}
    if kind.name not in angles:
        return own
    return f"repeating-linear-gradient({angles[kind.name]},{own} 0 3px,var(--dt-page) 3px 4px)"


def _marks_legend(timeline: Timeline) -> str:
    used = {cluster.kind for cluster in clusters_of(timeline)}
    return "".join(
        f'<span><b class="key mark">{LETTERS[kind]}</b>{esc(kind.value)}</span>' for kind in MarkKind if kind in used
    )


def summary(timeline: Timeline) -> str:
    """The chart in a sentence or two, for those who do not see it."""
    attempts = len(timeline.attempts) + timeline.earlier
    last = timeline.attempts[-1]
    return (
        f"Timeline of {plural(attempts, 'attempt')} over {span(timeline.end - timeline.start)}; "
        f"{numbers_line(timeline)}. The newest: {ended_text(last, timeline)}."
    )


def tables_html(timeline: Timeline) -> str:
    """Attempts, and what happened, newest last."""
    clock = clock_of(timeline)
    attempts = attempts_table(timeline, clock, most=ATTEMPTS)
    marks = [mark for mark in timeline.marks if mark.kind is not MarkKind.SAVED][-EVENTS:]
    events = Table(
        "Events",
        (
            Column("when", False, 0, tuple(clock(mark.time) for mark in marks)),
            Column("", False, 0, tuple(LETTERS[mark.kind] for mark in marks)),
            Column("what", False, 0, tuple(mark.kind.value for mark in marks)),
            Column("in words", False, 0, tuple(mark_text(mark) for mark in marks)),
        ),
    )
    return unfolding("attempts and events as tables", attempts, *([events] if marks else []))

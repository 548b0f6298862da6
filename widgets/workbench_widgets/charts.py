"""Charts over time that belong together: one axis of seconds since the job was submitted, one line under the pointer.

Zooming one (drag over it) zooms all and lets the page stand still there; a chosen step is a line in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import panel as pn
from bokeh.core.validation import silence
from bokeh.core.validation.warnings import MISSING_RENDERERS
from bokeh.models import (
    AdaptiveTicker,
    BoxZoomTool,
    CrosshairTool,
    DataRange1d,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from workbench_widgets.theme import CHART_HEIGHT, SMALL_SIZE, colour, paint_chart

LEAST: Final = 10.0  # s that an axis shows
ROOM: Final = 0.01  # of an axis, after its newest moment: marks there are whole
# The leftmost pixel of a canvas keeps what was painted before the layout: Bokeh clears from half a pixel on. Tooltips
# may stand out on all sides.
CLIP: Final = ":host{clip-path:inset(-100vh -100vw -100vh 1px)}"
silence(MISSING_RENDERERS, True)  # a chart waits for its first line


class TimeAxis:
    """`on_zoom` hears that the reader chose a part; the page then says `follow` no more."""

    def __init__(self, theme: str, on_zoom: Callable[[], None] = lambda: None) -> None:
        self.range = Range1d(start=0.0, end=LEAST)
        self._set, self._on_zoom = (0.0, LEAST), on_zoom
        self._pointer = Span(dimension="height", line_dash="dotted", line_width=1, line_color=colour("muted", theme))
        self._step: list[Any] = []
        self._figures: list[Any] = []
        self._theme = theme
        self.range.on_change("start", self._moved)
        self.range.on_change("end", self._moved)

    def follow(self, end: float, length: float | None) -> None:
        """Show the last `length` s before `end` (None: all)."""
        start = 0.0 if length is None else max(0.0, end - length)
        self._set = (start, max(end + ROOM * (end - start), start + LEAST))
        self.range.update(start=self._set[0], end=self._set[1])

    def point_at(self, time: float | None) -> None:
        """Mark a moment, or none, in all charts."""
        for span in self._step:
            span.update(visible=time is not None, location=time or 0.0)

    def paint(self, theme: str) -> None:
        self._theme = theme
        self._pointer.line_color = colour("muted", theme)
        for chart, span in zip(self._figures, self._step, strict=True):
            paint_chart(chart, theme)
            span.line_color = colour("accent", theme)

    def chart(
        self,
        label: str,
        *,
        height: int = CHART_HEIGHT,
        tips: Sequence[tuple[str, str]] = (),
        y_range: Any = None,
        number: str = "0,0.[0]",
        formatters: dict[str, Any] | None = None,
    ) -> Any:
        """A figure on this axis, without lines; `label` tells what is seen without seeing."""
        made = figure(
            height=height,
            sizing_mode="stretch_width",
            toolbar_location=None,
            tools="",
            min_border=4,
            min_border_left=58,
            stylesheets=[CLIP],
            x_range=self.range,
            y_range=DataRange1d(start=0) if y_range is None else y_range,
            html_attributes={"role": "group", "aria-label": f"{label}; the same numbers are in the table below"},
        )
        made.xaxis.ticker = AdaptiveTicker(
            base=60, mantissas=[1, 2, 5, 10, 20, 30], min_interval=1, desired_num_ticks=4
        )
        made.xaxis.formatter = NumeralTickFormatter(format="00:00:00")
        made.yaxis.formatter = NumeralTickFormatter(format=number)
        made.xgrid.grid_line_color = None
        for axis in (*made.xaxis, *made.yaxis):
            axis.major_label_text_font_size = SMALL_SIZE
            axis.major_label_text_font = "system-ui"
            axis.minor_tick_line_color = None
        zoom = BoxZoomTool(dimensions="width")
        made.add_tools(CrosshairTool(overlay=self._pointer), zoom)
        made.toolbar.active_drag = zoom
        if tips:
            made.add_tools(HoverTool(tooltips=list(tips), mode="mouse", formatters=formatters or {}))
        step = Span(
            dimension="height", line_width=2, visible=False, location=0.0, line_color=colour("accent", self._theme)
        )
        made.add_layout(step)
        made.visible = False  # until there is something in it
        self._step.append(step)
        self._figures.append(made)
        paint_chart(made, self._theme)
        return made

    def _moved(self, name: str, old: float, new: float) -> None:
        if (self.range.start, self.range.end) != self._set and new not in self._set:
            self._on_zoom()


def chart_pane(chart: Any, height: int | None = None) -> Any:
    """The chart as a part of a panel."""
    room = {} if height is None else {"height": height}
    return pn.pane.Bokeh(chart, sizing_mode="stretch_width", **room)  # type: ignore[no-untyped-call]

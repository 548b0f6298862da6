"""Which time the charts show, and whether the page goes on or stands still."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from workbench.views.wording import span
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import esc
from workbench_widgets.style import PANEL

LENGTHS: Final = {"": "all time", "60": "the last minute", "300": "the last 5 minutes", "1800": "the last half hour"}


class Period:
    """`length`: seconds that are shown, None: all. `paused_at`: since when the page stands still, or None."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.length: float | None = None
        self.paused_at: float | None = None
        self._now, self._on_change = 0.0, on_change
        self.root = Live(name="period", stylesheets=[PANEL], markup="", on_action=self._pressed)
        self._draw()

    def update(self, now: float) -> None:
        """`now`: seconds since the job was submitted."""
        self._now = now
        self._draw()

    def pause(self) -> None:
        if self.paused_at is None:
            self.paused_at = self._now
            self._draw()

    def _pressed(self, name: str, value: str) -> None:
        if name == "length" and value in LENGTHS:
            self.length = float(value) if value else None
        elif name == "pause" and self.paused_at is None:
            self.paused_at = self._now
        elif name == "pause":
            self.paused_at = None
        self._draw()
        self._on_change()

    def _draw(self) -> None:
        self.root.markup = period_html(self.length, self.paused_at, self._now)


def period_html(length: float | None, paused_at: float | None, now: float) -> str:
    chosen = "" if length is None else f"{length:g}"
    options = "".join(
        f'<option value="{value}"{" selected" if value == chosen else ""}>{text}</option>'
        for value, text in LENGTHS.items()
    )
    is_paused = paused_at is not None
    told = f"stands still since {span(now - paused_at)} ago; the job goes on" if paused_at is not None else ""
    return (
        '<div class="tools" role="group" aria-label="time"><select data-set="length" aria-label="time shown in the '
        f'charts">{options}</select><button data-do="pause" aria-pressed="{"true" if is_paused else "false"}">'
        f"{'▶ Go on' if is_paused else '❚❚ Pause'}</button>"
        f'<span class="small muted" role="status">{esc(told)}</span>'
        '<span class="small muted hint">drag over a chart to zoom in</span></div>'
    )

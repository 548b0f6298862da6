"""Which time the page shows: now, a moment of the past that the reader slides to, or a picture that stands still."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from workbench.views.wording import span
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import esc
from workbench_widgets.style import PANEL

LENGTHS: Final = {"": "all time", "60": "the last minute", "300": "the last 5 minutes", "1800": "the last half hour"}
PLACES: Final = 1000  # of the slider, at most
MANTISSAS: Final = (1, 2, 5)


class Period:
    """`length`: seconds that are shown, None: all. `paused_at`: since when the page stands still, or None.

    `at`: the moment that is shown, in s since the job was submitted; None: now. `on_travel` hears of another one.
    """

    def __init__(
        self,
        on_change: Callable[[], None],
        on_travel: Callable[[], None] = lambda: None,
        at: float | None = None,
    ) -> None:
        self.length: float | None = None
        self.paused_at: float | None = None
        self.at = at
        self._now, self._runs, self._said = 0.0, True, ""
        self._on_change, self._on_travel = on_change, on_travel
        self.root = Live(name="period", stylesheets=[PANEL], markup="", on_action=self._pressed)
        self._draw()

    def update(self, now: float, *, runs: bool = True) -> None:
        """`now`: seconds since the job was submitted, up to its end where it has ended (not `runs`)."""
        self._now, self._runs = now, runs
        self._draw()

    def pause(self) -> None:
        if self.paused_at is None:
            self.paused_at = self._now
            self._draw()

    def stay(self, why: str) -> None:
        """Back to now: the moment cannot be shown."""
        self.at, self._said = None, why
        self._draw()

    def _pressed(self, name: str, value: str) -> None:
        if name == "time" or (name == "live" and (self.at, self.paused_at) != (None, None)):
            self._travel(seconds_of(value) if name == "time" else math.inf)
            return
        if name == "length" and value in LENGTHS:
            self.length = float(value) if value else None
        elif name == "pause" and self.paused_at is None:
            self.paused_at = self._now
        elif name == "pause":
            self.paused_at = None
        self._draw()
        self._on_change()

    def _travel(self, to: float | None) -> None:
        """The end of the slider is now."""
        if to is None:
            return
        self.at = max(0.0, to) if to < self._now - step_of(self._now) / 2 else None
        self.paused_at, self._said = None, ""
        self._draw()
        self._on_travel()

    def _draw(self) -> None:
        told = self._said
        if self.paused_at is not None and self._runs:
            told = f"stands still since {span(self._now - self.paused_at)} ago; the job goes on"
        is_paused = self.paused_at is not None
        self.root.markup = period_html(self.length, self._now, told, at=self.at, runs=self._runs, is_paused=is_paused)


def seconds_of(value: str) -> float | None:
    """What a slider says; None for what none says."""
    try:
        found = float(value)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def step_of(length: float) -> float:
    """How far one place of the slider is from the next, s: a round number."""
    least = max(length, 1.0) / PLACES
    power = 10.0 ** math.floor(math.log10(least))
    return max(0.1, next((m * power for m in MANTISSAS if m * power >= least - 1e-9), 10 * power))


def period_html(
    length: float | None, now: float, told: str, *, at: float | None = None, runs: bool = True, is_paused: bool = False
) -> str:
    chosen = "" if length is None else f"{length:g}"
    options = "".join(
        f'<option value="{value}"{" selected" if value == chosen else ""}>{text}</option>'
        for value, text in LENGTHS.items()
    )
    return (
        '<div class="tools" role="group" aria-label="time">'
        f'{_slider(now, at)}<button data-do="live"{_off(at is None and not is_paused)}>'
        f"{'● Live' if runs else '▶❘ End'}</button>"
        f'<button data-do="pause" aria-pressed="{"true" if is_paused else "false"}">'
        f"{'▶ Go on' if is_paused else '❚❚ Pause'}</button>"
        f'<select data-set="length" aria-label="time shown in the charts">{options}</select>'
        f'<span class="small muted" role="status">{esc(told)}</span>'
        '<span class="small muted hint">drag over a chart to zoom in</span></div>'
    )


def _slider(now: float, at: float | None) -> str:
    """Its end is now: at least a place beyond all that can be slid to."""
    step = step_of(now)
    most = max(step, math.ceil(now / step - 1e-9) * step)
    value = most if at is None else min(at, most)
    where = f"now, {span(now)} after the start" if at is None else f"{span(value)} after the start"
    live = " data-live" if at is None else ""
    return (
        f'<span class="moment" aria-hidden="true">{esc(span(now if at is None else value))}</span>'
        f'<input type="range" data-set="time" min="0" max="{most:.1f}" step="{step:.1f}" value="{value:.1f}"{live} '
        f'aria-label="moment that is shown" aria-valuetext="{esc(where)}" '
        'title="slide to a moment of the past: all panels show it (arrow keys, Page up and down, Home, End)">'
    )


def _off(is_off: bool) -> str:
    return ' aria-disabled="true" title="the page shows how it stands now"' if is_off else ""

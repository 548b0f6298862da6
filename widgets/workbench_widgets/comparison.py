"""The page of jobs beside each other, over the same sources as the pages of each: it shows, and acts on nothing.

All of it runs on the page's event loop; `later` hands over what comes from other threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import panel as pn

from workbench.views.sheets import sides_sheet
from workbench.views.sides import MOST, By, Measure, Side
from workbench_widgets.charts import TimeAxis
from workbench_widgets.dashboard import Later
from workbench_widgets.exports import Exports
from workbench_widgets.live import Frame
from workbench_widgets.pacer import Pacer
from workbench_widgets.panels.comparison import Curves, Head, Tables, Told
from workbench_widgets.source import Source
from workbench_widgets.theme import known_theme

FORMATS: Final = {By.STEP: "0,0", By.TIME: "00:00:00"}
TICKS: Final = {By.STEP: (10.0, [1.0, 2.0, 5.0]), By.TIME: (60.0, [1.0, 2.0, 5.0, 10.0, 20.0, 30.0])}


class Comparison:
    """`sources` are in the order of the address; the first is what the others are measured against.

    `theme`: that of the address, '' for the system's.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        theme: str,
        later: Later,
        now: Callable[[], float] = time.monotonic,
        *,
        by: By = By.STEP,
    ) -> None:
        self._sources, self._theme, self._by = sources[:MOST], theme, by
        self._is_zoomed = False
        self._names = names_of([source.job_id for source in self._sources])
        self._axis = TimeAxis(known_theme(theme), self._zoomed)
        self._head, self._tables = Head(self._choose, self._show_all), Tables()
        self._curves = [Curves(measure, known_theme(theme), self._axis) for measure in Measure]
        self.pacer = Pacer(self.draw, later, now)
        self.frame = Frame(self.pacer.shown, self._paint)
        self._exports = Exports(
            "-".join(self._names).replace(" of ", "-"), tuple(m.value for m in Measure), self.frame.send
        )
        self._ends = [source.subscribe(lambda: later(0.0, self.pacer.want)) for source in self._sources]
        self._set_axis()
        self.draw()

    @property
    def roots(self) -> dict[str, Any]:
        """What the page places, by the names that its template uses."""
        panels: tuple[Any, ...] = (self._head, *self._curves, self._tables)
        menus = {str(menu.name): menu for menu in self._exports.menus.values()}
        return {str(panel.root.name): panel.root for panel in panels} | menus | {"frame": self.frame}

    def draw(self) -> None:
        """Bring all of it up to what the sources say now."""
        told = [_told(source, name) for source, name in zip(self._sources, self._names, strict=True)]
        sides = [(place, one.side) for place, one in enumerate(told) if one.side is not None]
        with pn.io.hold():
            self._head.update(told, self._by, self._theme, is_zoomed=self._is_zoomed)
            for curves in self._curves:
                curves.update(sides, self._by)
            self._tables.update(sides)
            known = [side for _, side in sides]
            self._exports.update(
                {
                    curves.measure.value: partial(sides_sheet, known, curves.measure, self._by)
                    for curves in self._curves
                    if curves.figure.visible
                }
            )
            if not self._is_zoomed:
                self._axis.follow(_end([side for _, side in sides], self._by), None)
            self.frame.pulse += 1

    def close(self) -> None:
        """The page is gone."""
        for end in self._ends:
            end()
        self.pacer.close()

    def _choose(self, by: By) -> None:
        self._by, self._is_zoomed = by, False
        self._set_axis()
        self.frame.where = f"by={by.value}"
        self.pacer.want()

    def _set_axis(self) -> None:
        base, mantissas = TICKS[self._by]
        for curves in self._curves:
            curves.figure.xaxis.formatter.format = FORMATS[self._by]
            curves.figure.xaxis.ticker.update(base=base, mantissas=mantissas)

    def _zoomed(self) -> None:
        self._is_zoomed = True
        self.pacer.want()

    def _show_all(self) -> None:
        self._is_zoomed = False
        self.pacer.want()

    def _paint(self, theme: str) -> None:
        self._axis.paint(theme)
        for curves in self._curves:
            curves.paint(theme)
        if self._theme:
            self._theme = theme  # links pass it on
            self.pacer.want()


def names_of(ids: Sequence[str]) -> list[str]:
    """What to call jobs; of saved sessions (`KEY:JOB`) with the file's name where the job's alone is not enough."""
    split = [one.partition(":")[::2] if ":" in one else ("", one) for one in ids]
    known = [job for _, job in split]
    files = {key: key.rpartition("-")[0] for key, _ in split}  # a key is the file's name and a digest
    names = [f"{job} of {files[key]}" if key and known.count(job) > 1 else job for key, job in split]
    again = [names[:place].count(name) + 1 for place, name in enumerate(names)]
    return [f"{name} ({k})" if k > 1 else name for name, k in zip(names, again, strict=True)]


def _told(source: Source, name: str) -> Told:
    picture = source.picture
    side = None if picture.view is None else Side(name, picture.view, picture.more)
    return Told(source.job_id, name, side, picture.notice)


def _end(sides: Sequence[Side], by: By) -> float:
    points = [(side.view.series[-1], side.view) for side in sides if side.view.series]
    if by is By.STEP:
        return max((float(point.step) for point, _ in points), default=0.0)
    return max((point.start + point.width - view.submitted_at for point, view in points), default=0.0)

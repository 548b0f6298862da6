"""One page of one job: the panels, when they draw, and what the reader's acts set going.

All of it runs on the page's event loop; what comes from other threads (a change, the answer to an act) is handed over
with `later`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

import panel as pn

from workbench.views.acts import Act
from workbench.views.job import JobView
from workbench.views.panels import PanelView
from workbench.views.sheets import SHEETS
from workbench_widgets.charts import TimeAxis
from workbench_widgets.exports import Exports, plain_name
from workbench_widgets.files import SUFFIXES, Made
from workbench_widgets.live import Frame
from workbench_widgets.notices import Notices
from workbench_widgets.pacer import Pacer
from workbench_widgets.panels.checkpoints import Checkpoints
from workbench_widgets.panels.communication import Communication
from workbench_widgets.panels.controls import Controls
from workbench_widgets.panels.events import Events
from workbench_widgets.panels.findings import Findings
from workbench_widgets.panels.gradients import Gradients
from workbench_widgets.panels.header import Header
from workbench_widgets.panels.heatmap import Heatmap
from workbench_widgets.panels.keeping import Keeping
from workbench_widgets.panels.logs import MOST, Logs
from workbench_widgets.panels.loss import Loss
from workbench_widgets.panels.period import Period
from workbench_widgets.panels.ranks import Ranks
from workbench_widgets.panels.resources import Resources
from workbench_widgets.panels.stragglers import Stragglers
from workbench_widgets.panels.throughput import Throughput
from workbench_widgets.panels.timeline import Lanes
from workbench_widgets.source import NO_CHOICE, Choice, Picture, Source

LOG_EVERY: Final = 0.5  # s between two flushes of log lines
NO_LOG: Final = (-1, False)  # what was drawn last, and whether as of a job that is over
BY: Final = "the live page"
Later = Callable[[float, Callable[[], None]], object]


class Dashboard:
    """`later(seconds, call)` runs `call` on the page's event loop and may be used from any thread."""

    def __init__(
        self,
        source: Source,
        theme: str,
        later: Later,
        now: Callable[[], float] = time.monotonic,
        *,
        may_act: bool = True,
        choice: Choice = NO_CHOICE,
        at: float | None = None,
    ) -> None:
        self._source, self._later, self._now, self._may_act = source, later, now, may_act
        self.choice = NO_CHOICE
        self._log_version, self._log_at, self._is_log_planned = NO_LOG, float("-inf"), False
        self._is_waiting = False  # for the next second of a silence
        self._then: Picture | None = None  # the moment that the reader went back to
        self._asked: float | None = None  # the one that is being found out
        self._period = Period(self._period_changed, self._travelled, at)
        self._axis = axis = TimeAxis(theme, self._period.pause)
        self._header, self._ranks, self._throughput = (
            Header(source.job_id),
            Ranks(self._pointed),
            Throughput(theme, axis),
        )
        self._logs, self._controls = Logs(self._filtered), Controls(self._act, may_act=may_act)
        self._heatmap, self._loss = Heatmap(theme, axis, self._pointed_in_time), Loss(theme, axis)
        self._stragglers, self._communication = Stragglers(self._pointed), Communication()
        self._events, self._resources = Events(), Resources(theme, axis)
        self._findings = Findings(self._controls.begin, self._pointed, may_act=may_act)
        self._lanes, self._checkpoints = Lanes(theme), Checkpoints(self._controls.begin, may_act=may_act)
        self._notices, self._gradients = Notices(), Gradients()
        self.pacer = Pacer(self.draw, later, now)
        self.frame = Frame(self.pacer.shown, self._paint)
        self._exports = Exports(source.job_id, tuple(SHEETS), self.frame.send)
        self._keeping = Keeping(self._make, may_act=may_act)
        self._end = source.subscribe(lambda: later(0.0, self.pacer.want))  # before the first look: nothing is missed
        self.choose(choice)
        self._say_where()
        self.draw()

    @property
    def roots(self) -> dict[str, Any]:
        """What the page places, by the names that its template uses."""
        panels = (
            self._header, self._controls, self._ranks, self._lanes, self._checkpoints, self._throughput, self._logs,
            self._notices, self._period, self._heatmap, self._loss, self._stragglers, self._communication, self._events,
            self._resources, self._findings, self._gradients, self._keeping,
        )  # fmt: skip
        menus = {str(menu.name): menu for menu in self._exports.menus.values()}
        return {str(panel.root.name): panel.root for panel in panels} | menus | {"frame": self.frame}

    def draw(self) -> None:
        """Bring every panel up to what the source says now, in one message to the browser."""
        now = self._source.picture
        picture = self._then or now
        with pn.io.hold():
            self._header.update(picture, self._silence(now))
            self._controls.update(now.view)  # what is done is done now, whatever is looked at
            if now.view is not None and picture.view is not None:
                self._notices.update(now.view, is_over=now.is_saved)
                self._period.update(length_of(now.view), runs=now.view.ended_at is None)
                self._go_back(now.view)
                if self._period.paused_at is None:
                    self._follow(picture.view, now.view)
                    self._draw_panels(picture.view, picture.more, is_past=picture.at is not None)
            if self._period.paused_at is None:
                self._draw_logs(picture.view, picture.at)
            self.frame.pulse += 1

    def _silence(self, now: Picture) -> float | None:
        """How long nothing has come where something should, s; drawn again as it grows."""
        if not now.notice or now.heard is None:
            return None
        if not self._is_waiting:
            self._is_waiting = True
            self._later(1.0, self._waited)
        return self._now() - now.heard

    def _waited(self) -> None:
        self._is_waiting = False
        self.pacer.want()

    def _follow(self, view: JobView, now: JobView) -> None:
        """The past is shown on all of the time that there is, so that curves grow and nothing else moves."""
        is_past, newest = view is not now, view.series[-1] if view.series else None
        end = (newest.start + newest.width if newest is not None else view.now) - view.submitted_at
        end = length_of(now) if is_past and self._period.length is None else end
        self._axis.follow(end, self._period.length)

    def _draw_panels(self, view: JobView, more: PanelView, *, is_past: bool = False) -> None:
        """All that stands still while the page is paused."""
        self._findings.update(view, more, is_past=is_past)
        self._ranks.update(view)
        self._throughput.update(view)
        self._lanes.update(view)
        self._checkpoints.update(view, is_past=is_past)
        self._gradients.update(view)
        self._heatmap.update(view, more.heat)
        self._loss.update(view)
        self._stragglers.update(view, more.best)
        self._communication.update(view)
        self._events.update(view, more)
        self._resources.update(view, more.resources)
        self._axis.point_at(time_of_step(view, self.choice.step))
        charts = {"throughput": self._throughput.figure, "loss": self._loss.figure, "heatmap": self._heatmap.figure,
                  "timeline": self._lanes.figure, "resources": self._resources.figure}  # fmt: skip
        seen = [name for name, chart in charts.items() if chart.visible]
        seen += ["gradients"] if view.gradients.lanes else []
        self._exports.update({name: partial(SHEETS[name], view, more) for name in seen})

    def choose(self, choice: Choice) -> None:
        """Point at a rank or a step in all panels, and in the page's address."""
        if choice == self.choice:
            return
        if choice.rank != self.choice.rank:
            self._logs.choose(choice.rank)
            self._filtered()
        self.choice = choice
        for panel in (self._ranks, self._throughput, self._heatmap, self._loss, self._stragglers, self._findings):
            panel.choose(choice)
        self._say_where()
        self.pacer.want()

    def close(self) -> None:
        """The page is gone: nothing draws, and the source has one reader less."""
        self._end()
        self.pacer.close()

    # --- going back in time ---

    def _travelled(self) -> None:
        """The reader went to another moment, or back to now."""
        view = self._source.picture.view
        if self._period.at is None:
            self._then = None
        elif view is not None:
            self._go_back(view)
        self._say_where()
        self._filtered()

    def _go_back(self, view: JobView) -> None:
        """Have the moment found out that is wanted, one at a time: a slider that moves asks no more than it gets."""
        at = self._period.at
        is_shown = self._then is not None and at is not None and self._then.at == view.submitted_at + at
        if at is None or self._asked is not None or is_shown:
            return
        self._asked = view.submitted_at + at
        self._source.travel(self._asked, lambda picture: self._later(0.0, lambda: self._arrived(picture)))

    def _arrived(self, picture: Picture) -> None:
        asked, self._asked = self._asked, None
        if picture.view is None:
            self._period.stay(picture.notice)
            self._then = None
        elif self._period.at is not None:
            self._then = picture._replace(at=asked)
        self._filtered()

    def _say_where(self) -> None:
        told = {**self.choice._asdict(), "at": None if self._period.at is None else f"{self._period.at:g}"}
        self.frame.where = urlencode({name: value for name, value in told.items() if value is not None})

    def _draw_logs(self, view: JobView | None, until: float | None) -> None:
        ranks, is_over = (view.world_size, view.is_over) if view is not None else (0, False)
        version = (self._source.log_version, is_over)
        if version == self._log_version:
            return
        wait = self._log_at + LOG_EVERY - self._now()
        if wait <= 0:
            self._log_version, self._log_at = version, self._now()
            self._logs.update(self._source.log(self._logs.filter, MOST, until), ranks, is_over=is_over)
        elif not self._is_log_planned:
            self._is_log_planned = True
            self._later(wait, self._log_planned)

    def _log_planned(self) -> None:
        self._is_log_planned = False
        self.pacer.want()

    def _filtered(self) -> None:
        """The reader chose other lines: show them at once."""
        self._log_version, self._log_at = NO_LOG, float("-inf")
        self.pacer.want()

    def _paint(self, theme: str) -> None:
        for panel in (self._axis, self._throughput, self._lanes, self._heatmap, self._loss, self._resources):
            panel.paint(theme)

    def _period_changed(self) -> None:
        """Another length, or on from a pause: all is drawn anew, what was chosen in the pause too."""
        self.pacer.want()

    def _pointed(self, name: str, value: str) -> None:
        """A rank was pressed: once to choose it, again to choose none."""
        if name == "rank" and value.isdigit() and len(value) < 6:
            rank = int(value)
            self.choose(self.choice._replace(rank=None if rank == self.choice.rank else rank))

    def _pointed_in_time(self, rank: int, time: float) -> None:
        """A place was pressed: that rank, and the step that was taken then."""
        view = (self._then or self._source.picture).view
        step = step_at(view, time) if view is not None else None
        self.choose(Choice(rank, step))

    def _act(self, act: Act) -> None:
        if not self._may_act:  # whatever its browser sends
            return

        def done(text: str) -> None:
            self._later(0.0, lambda: self._controls.said(text))

        self._source.act(act, done, by=BY)

    def _make(self, what: str) -> None:
        def done(made: Made) -> None:
            self._later(0.0, lambda: arrived(made))

        def arrived(made: Made) -> None:
            self._keeping.said(made.said)
            if made.data:
                self.frame.send(f"{plain_name(self._source.job_id)}{SUFFIXES[what]}", made.kind, made.data)

        self._source.make(what, done, with_code=self._may_act)


def length_of(view: JobView) -> float:
    """How much of the job can be shown, s: until now, or its end."""
    return (view.now if view.ended_at is None else view.ended_at) - view.submitted_at


def step_at(view: JobView, time: float) -> int | None:
    """The step that was taken `time` s after the job was submitted."""
    middle = view.submitted_at + time
    near = min(view.series, key=lambda point: abs(point.start + point.width / 2 - middle), default=None)
    return near.step if near is not None else None


def time_of_step(view: JobView, step: int | None) -> float | None:
    """When the step was taken, in s since the job was submitted; None for one that is not known."""
    after = next((point for point in view.series if step is not None and point.step >= step), None)
    return after.start + after.width / 2 - view.submitted_at if after is not None else None

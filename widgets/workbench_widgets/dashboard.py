"""One page of one job: the panels, when they draw, and what the reader's acts set going.

All of it runs on the page's event loop; what comes from other threads (a change, the answer to an act) is handed over
with `later`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlencode

import panel as pn

from workbench.views.acts import Act
from workbench_widgets.live import Frame
from workbench_widgets.notices import Notices
from workbench_widgets.pacer import Pacer
from workbench_widgets.panels.checkpoints import Checkpoints
from workbench_widgets.panels.controls import Controls
from workbench_widgets.panels.header import Header
from workbench_widgets.panels.logs import MOST, Logs
from workbench_widgets.panels.ranks import Ranks
from workbench_widgets.panels.throughput import Throughput
from workbench_widgets.panels.timeline import Lanes
from workbench_widgets.source import NO_CHOICE, Choice, Source

LOG_EVERY: Final = 0.5  # s between two flushes of log lines
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
    ) -> None:
        self._source, self._later, self._now, self._may_act = source, later, now, may_act
        self.choice = NO_CHOICE
        self._log_version, self._log_at, self._is_log_planned = -1, float("-inf"), False
        self._header, self._ranks, self._throughput = Header(source.job_id), Ranks(self._pointed), Throughput(theme)
        self._logs, self._controls = Logs(self._filtered), Controls(self._act, may_act=may_act)
        self._lanes, self._checkpoints = Lanes(theme), Checkpoints(self._controls.begin)
        self._notices = Notices()
        self.pacer = Pacer(self.draw, later, now)
        self.frame = Frame(self.pacer.shown, self._paint)
        self._end = source.subscribe(lambda: later(0.0, self.pacer.want))  # before the first look: nothing is missed
        self.choose(choice)
        self.draw()

    @property
    def roots(self) -> dict[str, Any]:
        """What the page places, by the names that its template uses."""
        panels = (
            self._header, self._controls, self._ranks, self._lanes, self._checkpoints, self._throughput, self._logs,
            self._notices,
        )  # fmt: skip
        return {str(panel.root.name): panel.root for panel in panels} | {"frame": self.frame}

    def draw(self) -> None:
        """Bring every panel up to what the source says now, in one message to the browser."""
        picture = self._source.picture
        with pn.io.hold():
            self._header.update(picture)
            self._controls.update(picture.view)
            if picture.view is not None:
                self._ranks.update(picture.view)
                self._throughput.update(picture.view)
                self._lanes.update(picture.view)
                self._checkpoints.update(picture.view)
                self._notices.update(picture.view)
            self._draw_logs(picture.view.world_size if picture.view else 0)
            self.frame.pulse += 1

    def choose(self, choice: Choice) -> None:
        """Point at a rank or a step in all panels, and in the page's address."""
        if choice == self.choice:
            return
        if choice.rank != self.choice.rank:
            self._logs.choose(choice.rank)
            self._filtered()
        self.choice = choice
        for panel in (self._ranks, self._throughput):
            panel.choose(choice)
        self.frame.where = urlencode({name: value for name, value in choice._asdict().items() if value is not None})
        self.pacer.want()

    def close(self) -> None:
        """The page is gone: nothing draws, and the source has one reader less."""
        self._end()
        self.pacer.close()

    def _draw_logs(self, ranks: int) -> None:
        version = self._source.log_version
        if version == self._log_version:
            return
        wait = self._log_at + LOG_EVERY - self._now()
        if wait <= 0:
            self._log_version, self._log_at = version, self._now()
            self._logs.update(self._source.log(self._logs.filter, MOST), ranks)
        elif not self._is_log_planned:
            self._is_log_planned = True
            self._later(wait, self._log_planned)

    def _log_planned(self) -> None:
        self._is_log_planned = False
        self.pacer.want()

    def _filtered(self) -> None:
        """The reader chose other lines: show them at once."""
        self._log_version, self._log_at = -1, float("-inf")
        self.pacer.want()

    def _paint(self, theme: str) -> None:
        self._throughput.paint(theme)
        self._lanes.paint(theme)

    def _pointed(self, name: str, value: str) -> None:
        """A rank was pressed: once to choose it, again to choose none."""
        if name == "rank" and value.isdigit() and len(value) < 6:
            rank = int(value)
            self.choose(self.choice._replace(rank=None if rank == self.choice.rank else rank))

    def _act(self, act: Act) -> None:
        if not self._may_act:  # whatever its browser sends
            return

        def done(text: str) -> None:
            self._later(0.0, lambda: self._controls.said(text))

        self._source.act(act, done, by=BY)

"""What other hosts' agents tell, in the scheduler's time: their clocks may be wrong by an hour.

Times of several hosts are compared when the first cause of a failure is sought, deadlines begin at them, and pictures
put them on one axis. So they are put right where they arrive, and nowhere else has to know. A host's messages carry its
time of day; what lies between sending and arrival only ever makes them late, so the earliest of many tells how far its
clock is ahead. Clocks that agree within `TRUSTED` are left as they are: they agree better than can be measured so.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec.structs import replace

from workbench.blackbox import shifted
from workbench.events import CheckpointSaved, Event
from workbench.pool.messages import Message
from workbench.telemetry import CellFinished, ConsistencyReport, GradientStatistics, Report, StepsTaken

TRUSTED: Final = 0.05  # s
WINDOW: Final = 30.0  # s; a clock that was set is known anew after two of these at most


class HostClock:
    """How far another host's clock is ahead of this one's."""

    def __init__(self) -> None:
        self._begun = math.inf
        self._now = self._before = -math.inf  # the most seen in this window, and in the one before

    def heard(self, sent: float, received: float) -> None:
        """A message came, sent by that clock, received by ours."""
        if not 0.0 <= received - self._begun < WINDOW:  # also when our own clock was set
            self._begun, self._before, self._now = received, self._now, -math.inf
        self._now = max(self._now, sent - received)

    @property
    def ahead(self) -> float:
        """Seconds; 0 where it may as well be trusted."""
        most = max(self._now, self._before)
        return most if math.isfinite(most) and abs(most) > TRUSTED else 0.0


def by_our_clock(message: Message, ahead: float) -> Message:
    """The message with its times put right, from a host whose clock is `ahead` s ahead."""
    if not ahead:
        return message
    if message.event is not None:
        return Message(message.job_id, _event(message.event, ahead), None)
    return Message(message.job_id, None, message.report and _report(message.report, ahead))


def _event(event: Event, ahead: float) -> Event:
    moved = replace(event, time=event.time - ahead)
    if isinstance(moved, CheckpointSaved):
        saved = replace(moved.checkpoint, saved_at=moved.checkpoint.saved_at - ahead)
        return replace(moved, checkpoint=saved)
    return moved


def _report(report: Report, ahead: float) -> Report:
    if isinstance(report, StepsTaken):
        return replace(report, block=shifted(report.block, -ahead))
    if isinstance(report, ConsistencyReport | GradientStatistics):
        return replace(report, start=report.start - ahead, end=report.end - ahead)
    return report if isinstance(report, CellFinished) else replace(report, time=report.time - ahead)

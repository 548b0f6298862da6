"""What panels show beyond `JobView`: folded once for all pages that look at a job, and only where something is new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from workbench.events import OriginRecorded
from workbench.feed import Bucket, Update
from workbench.spec import JobSpec
from workbench.views.happenings import Happening, HappeningList
from workbench.views.heat import HeatBuilder, HeatView
from workbench.views.resources import ResourceBuilder, Usage


class PanelView(NamedTuple):
    """`best`: the least own work that each rank ever needed for a step in this generation, s. `packages`: versions by
    distribution, as they were at the last launch.
    """

    heat: HeatView = HeatView()
    best: Mapping[int, float] = MappingProxyType({})
    resources: Usage = ()
    happenings: tuple[Happening, ...] = ()
    happened: int = 0  # lines there ever were
    spec: JobSpec | None = None
    packages: Mapping[str, str] = MappingProxyType({})


class PanelBuilder:
    """Add every update of a job in turn, beginning with one from an empty cursor."""

    def __init__(self) -> None:
        self._heat, self._resources, self._happenings = HeatBuilder(), ResourceBuilder(), HappeningList()
        self._best: dict[int, float] = {}
        self._restart_count = 0
        self._view = PanelView()

    def add(self, update: Update) -> None:
        if update.state.restart_count != self._restart_count:
            self._restart_count = update.state.restart_count
            self._best = {}  # on other ranks, or other hosts, a step may be other work
        self._resources.extend(update.usage)
        self._resources.add(update.beats)
        self._happenings.add(update.events)
        if update.buckets:
            self._heat.add(update.buckets)
            self._best = better(self._best, update.buckets)
            self._view = self._view._replace(heat=self._heat.view(), best=self._best)
        packages = [event.origin.packages for event in update.events if isinstance(event, OriginRecorded)]
        self._view = self._view._replace(
            spec=update.state.spec,
            packages=packages[-1] if packages else self._view.packages,
            best=self._best,
            resources=self._resources.view(),
            happenings=self._happenings.view() if update.events else self._view.happenings,
            happened=self._happenings.seen,
        )

    def view(self) -> PanelView:
        return self._view


def better(best: Mapping[int, float], buckets: Iterable[Bucket]) -> dict[int, float]:
    """`PanelView.best` with what these tell."""
    found = dict(best)
    for bucket in buckets:
        if bucket.steps:
            own = max(0.0, bucket.duration - bucket.comm) / bucket.steps
            if own > 0:
                found[bucket.rank] = min(own, found.get(bucket.rank, own))
    return found


def panels_at(whole: PanelView, update: Update) -> PanelView:
    """`whole` as it was at a time: that of an update of the past, as `workbench.past` makes it.

    `best` is of what the update holds: of many ranks only their last seconds.
    """
    events, now = HappeningList(), update.now
    events.add(update.events)
    columns = tuple(column for column in whole.heat.columns if column.start + whole.heat.width <= now)
    return whole._replace(
        heat=whole.heat._replace(columns=columns),
        best=better({}, update.buckets),
        resources=tuple(moment for moment in whole.resources if moment.start < now),
        happenings=events.view(),
        happened=events.seen,
    )

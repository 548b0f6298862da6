"""The facts of a job's record that a reader wants to hear of, in words, the newest `MOST` of them.

Ranks start and end by the hundred: those of one generation and one manner are one line, with the ranks in it.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from workbench.events import (
    Event,
    LaunchFailed,
    LaunchRefused,
    LaunchRequested,
    PhaseChanged,
    PoolLost,
    RankExited,
    RankStarted,
    RunResumed,
    SlotsAwaited,
    StoreAwaited,
    WorkerLost,
)
from workbench.views.marks import mark_of
from workbench.views.spans import MarkKind
from workbench.views.wording import exit_text, plural

MOST: Final = 300
TROUBLE: Final = frozenset(
    (
        MarkKind.FAILED,
        MarkKind.STALLED,
        MarkKind.SAVE_FAILED,
        MarkKind.REFUSED,
        MarkKind.STRAGGLER,
        MarkKind.NON_FINITE,
        MarkKind.MISMATCH,
        MarkKind.STANDS_OUT,
    )
)


_KINDS: Final[dict[type, str]] = {
    SlotsAwaited: "waiting",
    StoreAwaited: "waiting",
    LaunchRefused: "refused",
    LaunchFailed: "not started",
    PoolLost: "pool lost",
    WorkerLost: "worker lost",
}


class Happening(NamedTuple):
    """One line. `kind` is a word for it; `ranks` whom it is about (none: the job)."""

    time: float
    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    step: int | None = None
    is_trouble: bool = False


class HappeningList:
    """Add events as they come."""

    def __init__(self) -> None:
        self._lines: deque[Happening] = deque(maxlen=MOST)
        self.seen = 0  # lines, those that fell out too
        self._restart_count = 0

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            self._restart_count = getattr(event, "restart_count", self._restart_count)
            line = told(event, self._restart_count)
            if line is None:
                continue
            last = self._lines[-1] if self._lines else None
            if last is not None and line.ranks and (last.kind, last.text) == (line.kind, line.text):
                self._lines[-1] = last._replace(ranks=(*last.ranks, *line.ranks))
            else:
                self._lines.append(line)
                self.seen += 1

    def view(self) -> tuple[Happening, ...]:
        """The newest first."""
        return tuple(reversed(self._lines))


def told(event: Event, restart_count: int) -> Happening | None:
    """The event in words, None when it is none of a reader's business."""
    mark = mark_of(event, restart_count)
    if mark is not None:
        ranks = tuple(rank for first, last in mark.ranks for rank in range(first, last + 1))
        text = " ".join(mark.title.split())
        return Happening(mark.time, mark.kind.value, text, ranks, mark.step, mark.kind in TROUBLE)
    match event:
        case LaunchRequested():
            return Happening(event.time, "launched", event.spec.entrypoint or event.spec.label)
        case PhaseChanged():
            return Happening(event.time, "phase", f"{event.phase.value}: {' '.join(event.reason.split())}".rstrip(": "))
        case RankStarted():
            return Happening(event.time, "started", event.cold or "forked from the warm zygote", (event.rank,))
        case RankExited():
            is_ours = event.stop_signal is not None and event.signal in (event.stop_signal, signal.SIGTERM)
            how = exit_text(event.exit_code, event.signal, is_ours=is_ours) or "finished"
            return Happening(event.time, "exited", how, (event.rank,), event.step)
        case RunResumed():
            return Happening(
                event.time, "resumed", f"from {plural(event.step, 'step')} ({event.tier.value})", step=event.step
            )
        case SlotsAwaited() | StoreAwaited() | LaunchRefused() | LaunchFailed() | PoolLost() | WorkerLost():
            is_trouble = not isinstance(event, SlotsAwaited | StoreAwaited)
            return Happening(event.time, _KINDS[type(event)], event.reason, is_trouble=is_trouble)
    return None

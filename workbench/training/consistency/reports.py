"""What checking tells the job: facts of differences, repairs and the pace at once, and a report now and then.

One of the replicas speaks for all, the lowest rank: their verdicts are the same. What is said goes to the log as well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from workbench.training.consistency.looks import Numbers
from workbench.training.consistency.repair import Repair
from workbench.training.consistency.replicas import Unit
from workbench.training.consistency.summary import Summary

EVERY: Final = 2.0  # s between two reports
MOST_PACES: Final = 16  # changes of pace that are put into the record
Fact = Callable[..., None]
Send = Callable[..., object]


class Window:
    """What was found since the last report of one optimizer."""

    def __init__(self, first: int, now: float) -> None:
        self.start, self.first, self.last = now, first, first
        self.checked = self.agreed = self.unclear = self.repaired = 0
        self.deviating: dict[int, int] = {}


class Reports:
    """`fact(name of an event, **fields)`; `send(fields of a ConsistencyReport or a GradientStatistics)`."""

    def __init__(self, fact: Fact, send: Send, clock: Callable[[], float] = time.time) -> None:
        self._fact, self._send, self._clock = fact, send, clock
        self._windows: dict[int, Window] = {}
        self._summaries: dict[int, Summary] = {}  # by unit
        self._who: dict[int, tuple[int, ...]] = {}  # by unit: who deviated at the last difference
        self._paces = 0
        self.shares: dict[int, float] = {}

    def agreed(self, unit: Unit, step: int, digest: int) -> None:
        window = self._window(unit, step)
        window.agreed += 1
        self._close(unit, window, digest)

    def deviated(self, unit: Unit, step: int, ranks: tuple[int, ...] | None) -> None:
        """`ranks` None: the difference is the one that was told before."""
        who = self._who.get(unit.number, ()) if ranks is None else ranks
        self._who[unit.number] = who
        window = self._window(unit, step)
        for rank in who:
            window.deviating[rank] = window.deviating.get(rank, 0) + 1
        window.unclear += not who
        self._close(unit, window, 0)

    def mismatched(self, unit: Unit, step: int, mismatch: Mapping[str, Any], response: str) -> None:
        self.deviated(unit, step, tuple(mismatch["ranks"]))
        if unit.room.leads:
            self._fact("GradientMismatched", step=step, mismatch=dict(mismatch), response=response)

    def repaired(self, unit: Unit, step: int, ranks: tuple[int, ...], source: int, done: Repair) -> None:
        self._window(unit, step, is_new=False).repaired += 1
        if unit.room.leads:
            say(f"step {step}: {who(ranks)} has what rank {source} has again, {done.tensors} tensors, bit for bit")
            fields = {"ranks": list(ranks), "source": source, "tensors": done.tensors, "size": done.size}
            self._fact("ReplicasRepaired", step=step, **fields)

    def doubted(self, unit: Unit, step: int, doubt: Mapping[str, Any]) -> None:
        if unit.room.leads:
            self._fact("DataDoubted", step=step, doubt=dict(doubt))

    def paced(self, unit: Unit, step: int, reason: str = "") -> None:
        if unit.room.leads and self._paces < MOST_PACES:
            self._paces += 1
            every = 0 if reason else unit.every
            count = len(unit.members) + len(unit.frozen)
            self._fact("ConsistencyPaced", step=step, every=every, parts=unit.parts, tensors=count, reason=reason)

    def looked(self, unit: Unit, step: int, rows: list[Numbers]) -> None:
        """Of the rank that speaks for all: what each rank's gradients were like."""
        summary = self._summaries.setdefault(unit.number, Summary(self._clock(), step))
        summary.add(rows, step)
        if self._clock() - summary.start >= EVERY:
            self._tell_looks(unit)

    def _tell_looks(self, unit: Unit) -> None:
        if (summary := self._summaries.pop(unit.number, None)) is not None:
            layers = unit.has_told.layers() if unit.has_told is not None else ()
            fields = summary.fields(unit.room.ranks, layers)
            self._send(end=self._clock(), optimizer=unit.number, every=unit.look_every, **fields)

    def nothing(self, rank: int, step: int, reason: str) -> None:
        """Nothing is checked in this job."""
        if rank == 0:
            self._fact("ConsistencyPaced", step=step, every=0, reason=reason)

    def structure(self, leads: bool, step: int, mismatch: Mapping[str, Any], response: str) -> None:
        """Of what ranks wrap, before there is anything else to compare."""
        if leads:
            self._fact("GradientMismatched", step=step, mismatch=dict(mismatch), response=response)

    def flush(self, unit: Unit) -> None:
        if (window := self._windows.get(unit.number)) is not None and window.checked:
            self._close(unit, window, 0, is_due=True)
        self._tell_looks(unit)

    def _window(self, unit: Unit, step: int, *, is_new: bool = True) -> Window:
        window = self._windows.get(unit.number)
        if window is None:
            window = self._windows[unit.number] = Window(step, self._clock())
        window.last = max(window.last, step)
        window.checked += is_new
        return window

    def _close(self, unit: Unit, window: Window, digest: int, *, is_due: bool = False) -> None:
        now = self._clock()
        if not (is_due or now - window.start >= EVERY):
            return
        self._windows[unit.number] = Window(window.last + 1, now)
        if not unit.room.leads:
            return
        self._send(
            start=window.start, end=now, first_step=window.first, last_step=window.last, ranks=list(unit.room.ranks),
            optimizer=unit.number, checked=window.checked, agreed=window.agreed,
            deviating=[list(pair) for pair in sorted(window.deviating.items())], unclear=window.unclear,
            repaired=window.repaired, every=unit.every, parts=unit.parts, share=self.shares.get(unit.number, 0.0),
            tensors=len(unit.members) + len(unit.frozen), digest=f"{digest & (2**64 - 1):016x}" if digest else "",
        )  # fmt: skip


def who(ranks: tuple[int, ...] | list[int]) -> str:
    """`rank 1`, `ranks 0, 2 and 3`."""
    named = [str(rank) for rank in ranks[:8]] + ([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])
    if len(named) == 1:
        return f"rank {named[0]}"
    return f"ranks {', '.join(named[:-1])} and {named[-1]}" if named else "no rank"


def say(text: str) -> None:
    """A line for the job's log."""
    sys.stderr.write(f"dtrain: {text}\n")

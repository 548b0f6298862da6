"""One job in the runner's memory: its state, its record, and what clients may still ask of its recent past.

Bounded: output for display and answers of cells by bytes; what falls out is counted, and the log files have all output.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

from msgspec.structs import replace

from workbench.commands import Command
from workbench.controller import transition
from workbench.events import CheckpointSaved, Event, PhaseChanged
from workbench.feed import Bucket, Cursor, JobSummary, Total, Update
from workbench.state import CheckpointTier, JobState
from workbench.store.coverage import TIERS
from workbench.store.jobfile import JobFile
from workbench.telemetry import (
    CellFinished,
    Check,
    ConsistencyReport,
    GradientStatistics,
    OutputWritten,
    RankBeat,
    Report,
    StepsTaken,
)
from workbench.views.buckets import throughput

OUTPUT_BYTES: Final = 4 * 2**20
CHECK_BYTES: Final = 4 * 2**20
CELL_BYTES: Final = 256 * 2**20
WINDOW: Final = 5.0  # s over which a running job's throughput is taken
FEW_RANKS: Final = 16  # up to here a client gets the whole history by rank
RECENT: Final = 30.0  # s
PAST: Final = 32_768  # buckets by rank of the time before that, as coarse as they must be: 4 MB at most

T = TypeVar("T")


class Ring(Generic[T]):
    """The newest items, numbered from 1, bounded by their size in bytes."""

    def __init__(self, limit: int, size: Callable[[T], int]) -> None:
        self._items: deque[T] = deque()
        self._limit, self._size, self._held = limit, size, 0
        self.last = 0  # number of the newest
        self.lost = 0  # bytes that fell out

    def add(self, item: T) -> None:
        self._items.append(item)
        self.last += 1
        self._held += self._size(item)
        while self._held > self._limit and len(self._items) > 1:
            gone = self._size(self._items.popleft())
            self._held -= gone
            self.lost += gone

    def since(self, number: int) -> Iterator[T]:
        """Items numbered above `number` that are still here."""
        first = self.last - len(self._items)
        skip = max(0, number - first)
        return (item for index, item in enumerate(self._items) if index >= skip)


class LiveJob:
    """What the runner knows of a job. Used from the scheduler's loop alone."""

    def __init__(self, job_id: str, file: JobFile) -> None:
        self.job_id, self.file = job_id, file
        self.ambient: dict[str, str] = {}
        self.on_record: Callable[[LiveJob, Event], object] = lambda job, event: None
        self._state: JobState | None = None
        self._events: list[Event] = []
        self._beats: dict[int, tuple[int, RankBeat]] = {}
        self._beat = 0
        self._output = Ring[OutputWritten](OUTPUT_BYTES, lambda chunk: len(chunk.text) + 64)
        self._cells = Ring[CellFinished](CELL_BYTES, lambda cell: len(cell.payload) + len(cell.traceback) + 256)
        self._checks = Ring[Check](CHECK_BYTES, _size_of)
        self._memory = secrets.randbits(48)  # cursors of another life of this job count what is not here
        self._checked = 0  # number of the record's row of checks up to which it is known
        self._restored = 0  # reports of checks that came from the record
        self._output_dropped = self._telemetry_dropped = 0
        self._waiters: set[asyncio.Future[None]] = set()
        self.tick: asyncio.TimerHandle | None = None

    @property
    def state(self) -> JobState:
        assert self._state is not None
        return self._state

    def restore(self) -> None:
        """Fold what the file holds and is not known yet: all, or what another pool's runner has added."""
        for _, event in self.file.events(since=len(self._events)):
            self._state, _ = transition(self._state, event)
            self._events.append(event)
        checks, self._checked = self.file.checks(self._checked)
        for report in checks:
            self._checks.add(report)
        self._restored = self._checks.last

    def apply(self, event: Event) -> tuple[Command, ...]:
        """Record a fact, then let it change the state; the commands that follow are the caller's to carry out."""
        old = self._state
        new, commands = transition(old, event)  # first: an event that cannot be must not get into the record
        self.record(event)
        self._state = new
        if old is None or self._state.phase is not old.phase:
            state = self._state
            self.record(
                PhaseChanged(time=event.time, phase=state.phase, reason=state.reason, restart_count=state.restart_count)
            )
        return commands

    def record(self, event: Event) -> None:
        """Keep a fact that changes nothing."""
        self.file.append(event)
        self._events.append(event)
        self.on_record(self, event)
        self.wake()

    @property
    def event_count(self) -> int:
        return len(self._events)

    def events_since(self, number: int) -> list[Event]:
        """Those after the first `number`."""
        return self._events[number:]

    def newest_checkpoint(self) -> str:
        """Where the newest one on disk lies, or in memory where there is none on disk; empty: nowhere."""
        saved = [event.checkpoint for event in self._events if isinstance(event, CheckpointSaved)]
        on_disk = [checkpoint for checkpoint in saved if checkpoint.tier is CheckpointTier.DISK]
        return (on_disk or saved)[-1].path if saved else ""  # not the one of the highest step: it may have gone back

    def report(self, report: Report) -> None:
        """Take in telemetry of the current generation; an older one's tells nothing of now."""
        match report:
            case StepsTaken():
                self.file.add_steps(report)
                self._telemetry_dropped += report.dropped
                return  # clients hear of it with the second's bucket
            case RankBeat() if report.restart_count == self.state.restart_count:
                self._beat += 1
                self._beats[report.rank] = (self._beat, report)
                self.file.add_beat(report)
            case OutputWritten():
                self._output_dropped += report.dropped
                self._output.add(report)
            case CellFinished():
                self._cells.add(report)
            case ConsistencyReport() | GradientStatistics():
                self._checks.add(report)
                self.file.add_check(report)
        self.wake()

    def flush(self, now: float) -> None:
        """Once a second, and at the end: what came of telemetry goes to disk, and clients hear of it."""
        self.file.flush(now, final=self.state.phase.is_terminal)
        self.wake()

    # --- followers ---

    def wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def changed(self, timeout: float) -> None:
        """Return when something has come in, or after `timeout` seconds."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            pass
        finally:
            self._waiters.discard(waiter)

    def update(self, cursor: Cursor, now: float) -> Update:
        """What is new since `cursor`."""
        cursor = self._known_here(cursor)
        beats = tuple(beat for number, beat in self._beats.values() if number > cursor.beat)
        buckets, totals = self._history(cursor.bucket, now)
        ends = [b.start + b.width for b in buckets] + [t.start + t.width for t in totals]
        return Update(
            state=self.state,
            cursor=self.cursor(max(ends, default=cursor.bucket)),
            now=now,
            events=tuple(self._events[cursor.event :]),
            beats=beats,
            usage=self.file.usage() if cursor.event == 0 else (),
            buckets=buckets,
            totals=totals,
            output=tuple(self._output.since(cursor.output)),
            cells=tuple(self._cells.since(cursor.cells)),
            checks=self._checks_since(cursor.checks),
            output_dropped=self._output_dropped + self._output.lost,
            telemetry_dropped=self._telemetry_dropped + self.file.dropped,
            problems=self.file.problems,
        )

    def _known_here(self, cursor: Cursor) -> Cursor:
        """The cursor of a client that knew the job before it came into this memory: the record's part of it counts."""
        if cursor.memory in (0, self._memory):
            return cursor
        return replace(cursor, beat=0, output=0, cells=0, checks=self._restored)

    def cursor(self, bucket: float) -> Cursor:
        """Where a client is that knows all there is now, buckets up to `bucket`."""
        return Cursor(
            event=len(self._events),
            beat=self._beat,
            output=self._output.last,
            cells=self._cells.last,
            checks=self._checks.last,
            bucket=bucket,
            memory=self._memory,
        )

    def _checks_since(self, number: int) -> tuple[Check, ...]:
        """Of the beginning, where that has fallen out of memory, the record tells in longer stretches."""
        if number == 0 and self._checks.lost:
            return tuple(self.file.checks()[0])
        return tuple(self._checks.since(number))

    def _history(self, since: float, now: float) -> tuple[tuple[Bucket, ...], tuple[Total, ...]]:
        """By rank where that is little; else all ranks folded, and by rank what is recent, with a coarse past."""
        if self.state.world_size <= FEW_RANKS:
            return tuple(self.file.buckets(since=since)), ()
        start = max(since, math.floor((self.state.ended_at or now) - RECENT))  # no bucket lies on both sides
        return (*self._past(since, start), *self.file.buckets(since=start)), tuple(self.file.totals(since=since))

    def _past(self, since: float, until: float) -> list[Bucket]:
        """By rank, in rows of a width that is kept: nothing has to be folded."""
        seconds = until - max(since, self.state.submitted_at)
        if seconds <= 0:
            return []
        width = next((w for w in TIERS if self.state.world_size * seconds <= w * PAST), TIERS[-1])
        return self.file.buckets(since=since, until=until, width=width)

    def summary(self, now: float) -> JobSummary:
        """The job's line in the list; throughput of the last seconds while it runs, of the whole run afterwards."""
        ended = self.state.ended_at is not None
        is_new = not self._beats  # nothing came in since the record was opened
        totals = self.file.totals(since=0.0 if ended or is_new else now - WINDOW)
        steps = [beat.step for _, beat in self._beats.values()] + [total.last_step for total in totals]
        told = [beat.progress for _, beat in self._beats.values() if beat.progress and beat.progress[1] > 0]
        return JobSummary.of(
            self.state,
            step=max(steps, default=0),
            throughput=throughput(totals),
            progress=min(told, key=lambda progress: progress[0] / progress[1], default=None),
        )

    def close(self) -> None:
        if self.tick is not None:
            self.tick.cancel()
        self.file.close()
        self.wake()


def _size_of(check: Check) -> int:
    each = 8 if isinstance(check, ConsistencyReport) else 40
    return each * len(check.ranks) + (512 if isinstance(check, ConsistencyReport) else 8192)

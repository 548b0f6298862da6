"""One job's record, one SQLite file: events (facts, durable, in order) and samples (telemetry, thinned with age).

Threads: a `JobFile` belongs to the thread that opened it (the runner's event loop); SQLite refuses any other. Readers,
also of other processes, open it `read_only` and never block the writer.

What the disk does never stops a job: events that cannot be written stay in memory, are tried again with every append
and flush, and `problems` says so.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from workbench.blackbox import StepRecord
from workbench.events import Event, decode_event, encode_event
from workbench.feed import BeatFrame, Bucket, Moment, StepPage, Total
from workbench.store import samples
from workbench.store.beats import SCHEMA as BEATS
from workbench.store.beats import BeatStore
from workbench.store.checks import SCHEMA as CHECKS
from workbench.store.checks import CheckStore
from workbench.store.database import Kind, create, damaged, open_existing, transaction
from workbench.telemetry import Check, RankBeat, StepsTaken

KIND: Final = Kind(
    what="the record of a job",
    remedy="the job's logs are not affected, and workbench.store.jobfile.salvage(path) reads the events still whole",
    application_id=0x6474_726A,  # "dtrj"
    version=1,
    schema=(
        "CREATE TABLE job(job_id TEXT NOT NULL)",
        "CREATE TABLE events(number INTEGER PRIMARY KEY, data BLOB NOT NULL)",
        *samples.SCHEMA,
        *CHECKS,
        *BEATS,
    ),
)


class JobFile:
    """See the module; make one with `create` or `open`. `path` and `job_id` say what it is."""

    def __init__(self, path: Path, connection: sqlite3.Connection, *, read_only: bool) -> None:
        self.path, self.read_only = path, read_only
        self._connection = connection
        self._unwritten: list[tuple[int, Event]] = []
        self._problem = ""
        self._samples = samples.SampleStore(connection)
        self._checks, self._beats = CheckStore(connection), BeatStore(connection)
        try:
            self.job_id: str = connection.execute("SELECT job_id FROM job").fetchone()[0]
            self._last: int = connection.execute("SELECT coalesce(max(number), 0) FROM events").fetchone()[0]
            if not read_only:
                self._samples.resume()
                self._checks.resume()
                self._beats.resume()
        except (sqlite3.Error, TypeError) as error:
            connection.close()
            raise damaged(path, KIND, error) from error

    @classmethod
    def create(cls, path: Path, job_id: str) -> Self:
        """Begin a record. `StoreError`, and nothing left behind, when the disk is full or cannot be written."""
        connection = create(path, KIND, ("INSERT INTO job VALUES (?)", (job_id,)))
        return cls(path, connection, read_only=False)

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Self:
        """Take up a record. `JobFileError` when it is missing, damaged, or of a newer version."""
        return cls(path, open_existing(path, KIND, read_only=read_only), read_only=read_only)

    def close(self) -> None:
        """Write what still waits, then let go of the file; a second call does nothing."""
        if self._connection is None:
            return
        try:
            if not self.read_only:
                self._write()
                self._checks.flush()
                self._beats.flush(final=True)
                self._samples.flush(math.inf, final=True)
        finally:
            self._connection.close()
            self._connection = None  # type: ignore[assignment]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- events ---

    def append(self, event: Event) -> int:
        """Record a fact; on disk when this returns (else `problems` tells). Returns its number, counted from 1."""
        return self.append_all((event,))

    def append_all(self, events: Sequence[Event]) -> int:
        """Record facts that belong together, all or none; returns the last one's number."""
        for event in events:
            self._last += 1
            self._unwritten.append((self._last, event))
        self._write()
        return self._last

    def events(self, since: int = 0) -> list[tuple[int, Event]]:
        """Facts numbered above `since`, in order. `JobFileError` when the file is damaged."""
        query = "SELECT number, data FROM events WHERE number > ? ORDER BY number"
        try:
            written = [(number, decode_event(data)) for number, data in self._connection.execute(query, (since,))]
        except (sqlite3.Error, msgspec.DecodeError, TypeError) as error:
            raise damaged(self.path, KIND, error) from error
        return written + [(number, event) for number, event in self._unwritten if number > since]

    def _write(self) -> None:
        if not self._unwritten:
            return
        try:
            with transaction(self._connection):
                rows = [(number, encode_event(event)) for number, event in self._unwritten]
                self._connection.executemany("INSERT INTO events VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            count = len(self._unwritten)
            self._problem = (
                f"{count} events of this job are in memory only, {self.path.name} cannot be written: {error}"
            )
        else:
            self._unwritten.clear()
            self._problem = ""

    # --- samples ---

    def add_steps(self, report: StepsTaken) -> None:
        """Take in telemetry; costs an append to a list, never raises, drops rather than block when too much waits."""
        self._samples.add(report)

    def flush(self, now: float, *, final: bool = False) -> None:
        """About once a second: write the buckets that have ended by `now` (all, when `final`), and what waits.

        Takes a few ms at 1,000 ranks. `final` is for a job that has ended: its last second is not over yet.
        """
        self._write()
        self._checks.flush()
        self._beats.flush(final=final)
        self._samples.flush(now, final=final)

    def add_check(self, report: Check) -> None:
        """Take in what comparing replicas has told; never raises, on disk with the next flush."""
        self._checks.add(report)

    def checks(self, since: int = 0) -> tuple[list[Check], int]:
        """What rows above `since` tell, by time, and the last row's number; what is old comes in longer stretches."""
        return self._checks.since(since)

    def add_beat(self, beat: RankBeat) -> None:
        """Take in what a rank is doing and uses; one every few seconds is kept. Never raises."""
        self._beats.add(beat)

    def frames(self, until: float | None = None) -> list[BeatFrame]:
        """Beats of all ranks by time; of `until` (epoch s) the newest that is not later, if there is one."""
        return self._beats.frames(until)

    def usage(self) -> tuple[Moment, ...]:
        """What all ranks used over time, as finely as a chart can show it."""
        return self._beats.usage()

    def buckets(
        self,
        *,
        since: float = 0.0,
        until: float = math.inf,
        ranks: Collection[int] | None = None,
        width: float | None = None,
        most: int = 5000,
    ) -> list[Bucket]:
        """Buckets that start in `[since, until)` and are closed: one that was returned once never changes.

        They do not overlap. `width` in s folds to that width; None picks what gives at most `most` (but at least one a
        rank): the newest seconds by second, the past coarser. Where a finer tier is no longer kept, wider ones come.
        """
        return self._samples.buckets(since, until, ranks, width, most)

    def totals(
        self, *, since: float = 0.0, until: float = math.inf, width: float | None = None, most: int = 2000
    ) -> list[Total]:
        """As `buckets`, all ranks folded: the whole history of 1,000 ranks in some ms."""
        return self._samples.totals(since, until, width, most)

    def steps(self, rank: int, *, since: float = 0.0, until: float = math.inf, most: int = 100_000) -> list[StepRecord]:
        """One rank's single steps that ended in `[since, until)`: the newest `most` of those still kept."""
        return self._samples.steps(rank, since, until, most)

    def step_page(self, after: int, most: int = 2**22) -> StepPage:
        """All ranks' single steps still kept, about `most` bytes at a time; `after`: 0, then the `next` of the last."""
        return self._samples.step_page(after, most)

    # --- how it goes ---

    @property
    def dropped(self) -> int:
        """Steps that came too fast, or could not be read or written."""
        return self._samples.dropped

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the disk, in words; empty when all is well."""
        return tuple(filter(None, (self._problem, self._samples.problem, self._checks.problem, self._beats.problem)))


def salvage(path: Path) -> list[Event]:
    """The events of a damaged record that can still be read, in order, up to the first that cannot."""
    found: list[Event] = []
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        connection.execute("PRAGMA writable_schema=ON")  # else SQLite refuses a file that is shorter than it should be
        for (data,) in connection.execute("SELECT data FROM events ORDER BY number"):
            found.append(decode_event(data))
    except (sqlite3.Error, msgspec.DecodeError, TypeError):
        pass
    finally:
        connection.close()
    return found

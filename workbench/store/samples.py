"""The telemetry half of a job's record: may be dropped, never raises into its caller, thins out with age.

Steps wait in memory for `flush`, which folds them to one bucket a rank and second; closed buckets become rows, and rows
of each tier become those of the next (`coverage.TIERS`). The steps themselves are kept too, in a ring bounded by bytes
and age. A step that comes after its second was closed counts in the oldest one still open: a client that has read up to
the end of a bucket never has to look back.
"""

from __future__ import annotations

import math
import sqlite3
import struct
import zlib
from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import Final

import msgspec

from workbench.blackbox import STEP, StepRecord, iter_steps
from workbench.feed import Bucket, StepPage, Total
from workbench.store.coverage import TIERS, Key, choose, plan
from workbench.store.database import quick_transaction
from workbench.store.packing import (
    pack_buckets,
    pack_steps,
    time_span,
    unpack_blocks,
    unpack_buckets,
    unpack_steps,
)
from workbench.telemetry import StepsTaken
from workbench.views.buckets import OpenBuckets, fold_steps, join, merge, merge_totals, total_of

SCHEMA: Final = (
    "CREATE TABLE steps(id INTEGER PRIMARY KEY, first REAL, last REAL, size INTEGER, data BLOB)",
    "CREATE INDEX steps_key ON steps(last, first, size)",
    "CREATE TABLE buckets(start REAL, width REAL, ranks INTEGER, size INTEGER, data BLOB)",
    "CREATE UNIQUE INDEX buckets_key ON buckets(start, width, ranks, size)",
    "CREATE TABLE totals(start REAL, width REAL, data BLOB, PRIMARY KEY(start, width)) WITHOUT ROWID",
)
LAG: Final = 0.5  # s after its end that a bucket waits for late reports
BUFFER_BYTES: Final = 24 * 2**20  # of steps between two flushes: 250,000 steps
RAW_BYTES: Final = 64 * 2**20
RAW_AGE: Final = 86_400.0
# Tier, for how many s and how many bytes; wider tiers are kept for ever.
KEEP: Final = ((1.0, 3600.0, 128 * 2**20), (10.0, 86_400.0, 128 * 2**20))
_WHOLE: Final = 60.0  # s; deleting up to a whole minute leaves no row of the next tiers half covered
_PRUNE_EVERY: Final = 30.0

_encode = msgspec.msgpack.encode
_total = msgspec.msgpack.Decoder(Total)


class SampleStore:
    """See the module. Shares its connection, and the one thread that may use it, with the `JobFile` that owns it."""

    def __init__(self, connection: sqlite3.Connection, *, raw_bytes: int = RAW_BYTES) -> None:
        self._connection, self._raw_bytes = connection, raw_bytes
        self._buffer: dict[int, list[bytes]] = {}
        self._rates: dict[int, float | None] = {}  # the newest learning rate of each rank
        self._held = 0
        self._tiers: dict[float, OpenBuckets] = {width: {} for width in TIERS}
        self._closed = -math.inf  # buckets that start before this time are closed
        self._pruned = -math.inf
        self.dropped = 0  # steps that are in no bucket, or whose bucket could not be written
        self.problem = ""

    # --- writing ---

    def add(self, report: StepsTaken) -> None:
        """Keep for the next flush; dropped when too much waits already."""
        size = len(report.block)
        if self._held + size > BUFFER_BYTES:
            self.dropped += size // STEP.size
            return
        self._held += size
        self._buffer.setdefault(report.rank, []).append(report.block)
        self._rates[report.rank] = report.learning_rate

    def flush(self, now: float, *, final: bool = False) -> None:
        """Fold what has come and write the buckets that have ended; all of them when `final`."""
        blocks = [(rank, b"".join(parts)) for rank, parts in self._buffer.items()]
        self._buffer, self._held = {}, 0
        folded = [(rank, block) for rank, block in blocks if self._fold(rank, block, now)]
        rows = self._close(math.inf if final else float(math.floor(now - LAG)))
        if not rows and not folded and now - self._pruned < _PRUNE_EVERY:
            return
        try:
            with quick_transaction(self._connection):
                self._write(folded, rows)
                self._prune(now)
            self.problem = ""
        except (sqlite3.Error, OverflowError) as error:
            self.dropped += sum(bucket.steps for width, _, ranks in rows if width == TIERS[0] for bucket in ranks)
            self.problem = f"telemetry of this job cannot be written: {error}"

    def _fold(self, rank: int, block: bytes, now: float) -> bool:
        latest = max(float(math.floor(now)), self._closed) if math.isfinite(now) else math.inf
        try:
            rate = self._rates.get(rank)
            tier = self._tiers[TIERS[0]]
            fold_steps(tier, rank, block, earliest=self._closed, latest=latest, learning_rate=rate)
        except (struct.error, ValueError, OverflowError):
            self.dropped += len(block) // STEP.size
            return False
        return bool(block)

    def _close(self, until: float) -> list[tuple[float, float, list[Bucket]]]:
        """Take the buckets that end by `until` out of memory, tier by tier: rows as (width, start, buckets)."""
        rows = []
        for width, wider in zip(TIERS, (*TIERS[1:], None), strict=True):
            # Only whole buckets of the narrowest tier close at the end: a wider row must never be followed by its rest.
            ended = [s for s in self._tiers[width] if s + width <= (until if width == TIERS[0] else self._closed)]
            for start in sorted(ended):
                ranks = self._tiers[width].pop(start)
                rows.append((width, start, list(ranks.values())))
                if width == TIERS[0]:
                    self._closed = max(self._closed, start + width)
                if wider is not None:
                    _add(self._tiers[wider].setdefault(math.floor(start / wider) * wider, {}), ranks.values())
            if width == TIERS[0] and math.isfinite(until):
                self._closed = max(self._closed, until)
        return rows

    def _write(self, blocks: list[tuple[int, bytes]], rows: list[tuple[float, float, list[Bucket]]]) -> None:
        if blocks:
            data = pack_steps(blocks)
            row = (*time_span(blocks), len(data), data)
            self._connection.execute("INSERT INTO steps(first, last, size, data) VALUES (?, ?, ?, ?)", row)
        for width, start, ranks in rows:
            data = pack_buckets(ranks)
            total = _encode(total_of(ranks, start, width))
            self._connection.execute(
                "INSERT OR REPLACE INTO buckets VALUES (?, ?, ?, ?, ?)", (start, width, len(ranks), len(data), data)
            )
            self._connection.execute("INSERT OR REPLACE INTO totals VALUES (?, ?, ?)", (start, width, total))

    def _prune(self, now: float) -> None:
        if not math.isfinite(now) or now - self._pruned < _PRUNE_EVERY:
            return
        self._pruned = now
        cut = max(now - RAW_AGE, self._overflow("last", "steps", "1", self._raw_bytes))
        self._connection.execute("DELETE FROM steps WHERE last < ?", (cut,))
        for width, age, most in KEEP:
            cut = max(now - age, self._overflow("start", "buckets", f"width = {width}", most))
            cut = math.ceil(cut / _WHOLE) * _WHOLE if math.isfinite(cut) else cut
            self._connection.execute("DELETE FROM buckets WHERE width = ? AND start < ?", (width, cut))
            cut = math.ceil((now - age) / _WHOLE) * _WHOLE
            self._connection.execute("DELETE FROM totals WHERE width = ? AND start < ?", (width, cut))

    def _overflow(self, when: str, table: str, where: str, most: int) -> float:
        """The time before which rows have to go so that `most` bytes stay."""
        (held,) = self._connection.execute(f"SELECT coalesce(sum(size), 0) FROM {table} WHERE {where}").fetchone()
        if held <= most:
            return -math.inf
        for time, size in self._connection.execute(f"SELECT {when}, size FROM {table} WHERE {where} ORDER BY {when}"):
            held -= size
            if held <= most * 0.9:
                return math.nextafter(time, math.inf)
        return math.inf

    def resume(self) -> None:
        """Take up the record where an earlier process left it: rows of each tier that no wider row holds yet."""
        last = self._connection.execute("SELECT max(start + width) FROM buckets").fetchone()[0]
        self._closed = -math.inf if last is None else last
        for width, wider in pairwise(TIERS):
            query = "SELECT coalesce(max(start + width), -1e300) FROM buckets WHERE width = ?"
            (held,) = self._connection.execute(query, (wider,)).fetchone()
            for key in self._keys(held, math.inf):
                if key.width == width:
                    start = math.floor(key.start / wider) * wider
                    _add(self._tiers[wider].setdefault(start, {}), self._read(key, None))

    # --- reading ---

    def buckets(
        self, since: float, until: float, ranks: Collection[int] | None, width: float | None, most: int
    ) -> list[Bucket]:
        """See `JobFile.buckets`."""
        keys = self._keys(since, until)
        wanted = None if ranks is None else frozenset(ranks)
        if width is not None:
            found = self._fetch(choose(keys, width, until), wanted)
            return merge(found, width) if width > TIERS[0] else found
        answer = plan(keys, ranks=None if wanted is None else len(wanted), most=most)
        older = self._fetch([key for key in answer.keys if key.start < answer.fine_from], wanted)
        recent = self._fetch([key for key in answer.keys if key.start >= answer.fine_from], wanted)
        return (merge(older, answer.width) if answer.width > TIERS[0] else older) + recent

    def totals(self, since: float, until: float, width: float | None, most: int) -> list[Total]:
        """See `JobFile.totals`."""
        query = "SELECT start, width, data FROM totals WHERE start >= ? AND start < ? ORDER BY start"
        rows = {(start, w): data for start, w, data in self._connection.execute(query, (since, until))}
        keys = [Key(start, w, 1) for start, w in rows]
        if width is not None:
            found = [_total.decode(rows[key.start, key.width]) for key in choose(keys, width, until)]
            return merge_totals(found, width) if width > TIERS[0] else found
        answer = plan(keys, ranks=1, most=most)
        found = [_total.decode(rows[key.start, key.width]) for key in answer.keys]
        older = [total for total in found if total.start < answer.fine_from]
        return merge_totals(older, answer.width) + [total for total in found if total.start >= answer.fine_from]

    def steps(self, rank: int, since: float, until: float, most: int) -> list[StepRecord]:
        """See `JobFile.steps`."""
        found: list[StepRecord] = []
        query = "SELECT data FROM steps WHERE last >= ? AND first <= ? ORDER BY last DESC"
        for (data,) in self._connection.execute(query, (since, until)):
            records = iter_steps(unpack_steps(data, rank))
            found[:0] = [record for record in records if since <= record.end < until]
            if len(found) >= most:
                break
        return found[-most:]

    def step_page(self, after: int, most: int) -> StepPage:
        """See `JobFile.step_page`."""
        blocks: list[tuple[int, bytes]] = []
        held = 0
        for row, data in self._connection.execute("SELECT id, data FROM steps WHERE id > ? ORDER BY id", (after,)):
            try:
                blocks += unpack_blocks(data)
            except (ValueError, zlib.error, msgspec.DecodeError):
                continue  # a flipped bit costs this row, not the history
            held = sum(len(block) for _, block in blocks)
            if held >= most:
                return StepPage(blocks=tuple(blocks), next=row)
        return StepPage(blocks=tuple(blocks), next=None)

    def _keys(self, since: float, until: float) -> list[Key]:
        query = "SELECT start, width, ranks FROM buckets WHERE start >= ? AND start < ? ORDER BY start"
        return [Key(*row) for row in self._connection.execute(query, (since, until))]

    def _fetch(self, keys: Iterable[Key], ranks: Collection[int] | None) -> list[Bucket]:
        return [bucket for key in keys for bucket in self._read(key, ranks)]

    def _read(self, key: Key, ranks: Collection[int] | None) -> list[Bucket]:
        query = "SELECT data FROM buckets WHERE start = ? AND width = ?"
        row = self._connection.execute(query, (key.start, key.width)).fetchone()
        try:
            return [] if row is None else unpack_buckets(row[0], key.start, key.width, ranks)
        except (ValueError, zlib.error):
            return []  # a flipped bit costs this row, not the history


def _add(ranks: dict[int, Bucket], buckets: Iterable[Bucket]) -> None:
    for bucket in buckets:
        old = ranks.get(bucket.rank)
        ranks[bucket.rank] = bucket if old is None else join(old, bucket)

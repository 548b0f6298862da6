"""What all ranks said of themselves, every few seconds, kept in a job's record: bounded, the older further apart.

What the ranks used is folded beside it, and joined where frames go: the least and the most are never lost.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from workbench.feed import BeatFrame, Moment, Spread
from workbench.store.database import quick_transaction
from workbench.telemetry import RankBeat
from workbench.views.resources import ResourceBuilder, joined, used

SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS beats(time REAL PRIMARY KEY, used BLOB NOT NULL, data BLOB NOT NULL) WITHOUT ROWID",
)
EVERY: Final = 2.0  # s between two frames
MOST: Final = 2 * 2**20  # bytes on disk
FRAMES: Final = 2048
LARGEST: Final = 32 * 2**20  # bytes of a frame, unpacked: 100,000 ranks

_encode = msgspec.msgpack.encode
_beats = msgspec.msgpack.Decoder(list[RankBeat])
_spreads = msgspec.msgpack.Decoder(dict[str, Spread])


class BeatStore:
    """Shares its connection, and the one thread that may use it, with the `JobFile` that owns it."""

    def __init__(self, connection: sqlite3.Connection, *, most: int = MOST, frames: int = FRAMES) -> None:
        self._connection, self._most, self._frames = connection, most, frames
        self._waiting: dict[int, RankBeat] = {}
        self._written = 0.0  # when the newest frame is of
        self.problem = ""

    def resume(self) -> None:
        """A record that is older than this has no place for it yet."""
        for statement in SCHEMA:
            self._connection.execute(statement)

    def add(self, beat: RankBeat) -> None:
        """Keep for the next frame."""
        self._waiting[beat.rank] = beat

    def flush(self, *, final: bool = False) -> None:
        """Write a frame where one is due; `final`: what waits comes last."""
        time = max((beat.time for beat in self._waiting.values()), default=0.0)
        if not self._waiting or not (final or abs(time - self._written) >= EVERY):
            return
        frame = list(self._waiting.values())
        self._waiting, self._written = {}, time
        try:
            with quick_transaction(self._connection):
                row = time, _encode(_used(frame)), packed(frame)
                self._connection.execute("INSERT OR REPLACE INTO beats VALUES (?, ?, ?)", row)
                self._fit()
            self.problem = ""
        except sqlite3.Error as error:
            self.problem = f"what the ranks of this job use cannot be written: {error}"

    def frames(self, until: float | None = None) -> list[BeatFrame]:
        """All of them by time; of `until` (epoch s) the newest that is not later, if there is one."""
        if until is None:
            rows = self._rows("SELECT time, data FROM beats ORDER BY time")
        else:
            rows = self._rows("SELECT time, data FROM beats WHERE time <= ? ORDER BY time DESC LIMIT 1", until)
        return [BeatFrame(time=time, data=data) for time, data in rows]

    def usage(self) -> tuple[Moment, ...]:
        """What all ranks used over time, as finely as a chart can show it."""
        builder = ResourceBuilder()
        builder.extend(
            Moment(time, _unpacked_spreads(data))
            for time, data in self._rows("SELECT time, used FROM beats ORDER BY time")
        )
        return builder.view()

    def _rows(self, query: str, *values: float) -> list[tuple[float, bytes]]:
        try:
            return list(self._connection.execute(query, values))
        except sqlite3.OperationalError:  # an older record, which is only read
            return []

    def _fit(self) -> None:
        """Two of the older frames become one: the later of them, with what was used in both."""
        (count, size) = self._connection.execute(
            "SELECT count(*), sum(length(data) + length(used)) FROM beats"
        ).fetchone()
        if size <= self._most and count <= self._frames:
            return
        rows = self._rows("SELECT time, used FROM beats ORDER BY time")
        older = rows[: len(rows) * 3 // 4]
        for first, second in zip(older[::2], older[1::2], strict=False):
            both = joined(_unpacked_spreads(first[1]), _unpacked_spreads(second[1]))
            self._connection.execute("DELETE FROM beats WHERE time = ?", (first[0],))
            self._connection.execute("UPDATE beats SET used = ? WHERE time = ?", (_encode(both), second[0]))


def packed(beats: Sequence[RankBeat]) -> bytes:
    return zlib.compress(_encode(beats), 1)


def unpacked(frame: BeatFrame) -> list[RankBeat]:
    """Nothing where it is damaged: beats decide nothing."""
    try:
        return _beats.decode(zlib.decompressobj().decompress(frame.data, LARGEST))
    except (zlib.error, msgspec.DecodeError):
        return []


def _used(beats: Iterable[RankBeat]) -> dict[str, Spread]:
    found: dict[str, Spread] = {}
    for beat in beats:
        found = joined(found, used(beat))
    return found


def _unpacked_spreads(data: bytes) -> dict[str, Spread]:
    try:
        return _spreads.decode(data)
    except msgspec.DecodeError:
        return {}

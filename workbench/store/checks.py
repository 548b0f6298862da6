"""What comparing replicas has told, kept in a job's record: bounded, the older in longer stretches.

A reader that has seen the rows up to a number never has to look back: rows that are told with fewer keep the numbers of
those that they stand for.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from workbench.store.database import quick_transaction
from workbench.telemetry import Check
from workbench.views.checks import thinned

SCHEMA: Final = ("CREATE TABLE IF NOT EXISTS checks(number INTEGER PRIMARY KEY, data BLOB NOT NULL)",)
MOST: Final = 2 * 2**20  # bytes on disk
ROW: Final = 64  # reports that share a row once they are old
WAITING: Final = 4096  # reports that wait for the disk

_encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(list[Check])


class CheckStore:
    """Shares its connection, and the one thread that may use it, with the `JobFile` that owns it."""

    def __init__(self, connection: sqlite3.Connection, *, most: int = MOST) -> None:
        self._connection, self._most = connection, most
        self._waiting: list[Check] = []
        self.problem = ""

    def resume(self) -> None:
        """A record that is older than this has no place for it yet."""
        for statement in SCHEMA:
            self._connection.execute(statement)

    def add(self, report: Check) -> None:
        """Keep for the next flush; the oldest that waits gives way."""
        self._waiting.append(report)
        del self._waiting[:-WAITING]

    def flush(self) -> None:
        if not self._waiting:
            return
        try:
            with quick_transaction(self._connection):
                self._connection.execute("INSERT INTO checks(data) VALUES (?)", (packed(self._waiting),))
                self._fit()
            self._waiting, self.problem = [], ""
        except sqlite3.Error as error:
            self.problem = f"checks of this job's replicas cannot be written: {error}"

    def since(self, number: int = 0) -> tuple[list[Check], int]:
        """What rows above `number` tell and what waits, by time, and the number of the last row."""
        rows = self._rows(number)
        found = [report for _, data in rows for report in unpacked(data)]
        return found + self._waiting, max([number, *(row for row, _ in rows)])

    def _rows(self, number: int) -> list[tuple[int, bytes]]:
        query = "SELECT number, data FROM checks WHERE number > ? ORDER BY number"
        try:
            return list(self._connection.execute(query, (number,)))
        except sqlite3.OperationalError:  # an older record, which is only read
            return []

    def _fit(self) -> None:
        (size,) = self._connection.execute("SELECT sum(length(data)) FROM checks").fetchone()
        if size <= self._most:
            return
        rows = self._rows(0)
        reports = [report for _, data in rows for report in unpacked(data)]
        each = size / len(reports)
        kept = thinned(reports, self._most // 2, lambda _: round(each))
        parts = [packed(kept[at : at + ROW]) for at in range(0, len(kept), ROW)]
        last = rows[-1][0]
        self._connection.execute("DELETE FROM checks")
        numbered = zip(range(last - len(parts) + 1, last + 1), parts, strict=True)
        self._connection.executemany("INSERT INTO checks VALUES (?, ?)", numbered)


def packed(reports: Sequence[Check]) -> bytes:
    return zlib.compress(_encode(reports), 1)


def unpacked(data: bytes) -> Iterable[Check]:
    """Nothing where it is damaged: checks decide nothing."""
    try:
        return _decoder.decode(zlib.decompress(data))
    except (zlib.error, msgspec.DecodeError):
        return ()

"""The list of jobs of a home: one row a job, so that ten thousand are listed without opening ten thousand files.

It only repeats what the jobs' records say: a row that cannot be written is tried again, a damaged list is set aside and
made anew (`rebuild`). Several processes, one a pool, may have it open.
"""

from __future__ import annotations

import difflib
import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from workbench.controller import transition
from workbench.errors import JobFileError, StoreError
from workbench.feed import JobSummary
from workbench.state import JobPhase, JobState
from workbench.store.database import Kind, create, open_existing
from workbench.store.jobfile import JobFile

KIND: Final = Kind(
    what="the list of jobs",
    remedy="it is made anew from the jobs' records",
    application_id=0x6474_7269,  # "dtri"
    version=1,
    schema=(
        "CREATE TABLE jobs(job_id TEXT PRIMARY KEY, pool TEXT, phase TEXT, submitted_at REAL, data BLOB)",
        "CREATE INDEX jobs_by_time ON jobs(submitted_at DESC, job_id)",
        "CREATE INDEX jobs_by_phase ON jobs(phase, submitted_at DESC)",
    ),
)
NEAR: Final = 1000  # newest jobs among which a mistyped id is looked for
_UNFINISHED: Final = ", ".join(f"'{phase.value}'" for phase in JobPhase if not phase.is_terminal)
_SEARCHED: Final = "instr(lower(job_id), lower(?)) > 0"
_Summaries = list[JobSummary]  # `list` is a method below
_Ids = list[str]
_Rows = list[Any]
_encode = msgspec.msgpack.encode
_summary = msgspec.msgpack.Decoder(JobSummary)


class JobIndex:
    """See the module. One thread, as with `JobFile`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._unwritten: dict[str, tuple[JobSummary, str]] = {}
        self._connection, is_new = _connect(path)
        if is_new:
            self.rebuild(path.parent / "jobs")

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def put(self, summary: JobSummary, pool: str) -> None:
        """Keep a job's line, in place of its last one. Never raises: `problem` says what the disk does."""
        self._unwritten[summary.job_id] = (summary, pool)
        rows = [(s.job_id, p, s.phase.value, s.submitted_at, _encode(s)) for s, p in self._unwritten.values()]
        try:
            self._connection.execute("PRAGMA synchronous=NORMAL")  # the record has it, durably
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?)", rows)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self.problem = f"the list of jobs cannot be written: {error}"
        else:
            self._unwritten.clear()
            self.problem = ""

    def get(self, job_id: str) -> JobSummary | None:
        if job_id in self._unwritten:
            return self._unwritten[job_id][0]
        found = self._rows("SELECT data FROM jobs WHERE job_id = ?", job_id)
        return next((_summary.decode(data) for (data,) in found), None)

    def list(
        self,
        *,
        pool: str | None = None,
        phase: JobPhase | None = None,
        unfinished: bool = False,
        prefix: str = "",
        search: str = "",
        limit: int = 50,
        offset: int = 0,
    ) -> _Summaries:
        """Newest first. A job whose pool is no longer known (the list was rebuilt) counts in every pool."""
        terms: dict[str, tuple[str, ...]] = {"1": ()}
        if pool is not None:
            terms["pool IN (?, '')"] = (pool,)
        if phase is not None:
            terms["phase = ?"] = (phase.value,)
        if unfinished:
            terms[f"phase IN ({_UNFINISHED})"] = ()
        if prefix:
            terms["job_id >= ? AND job_id < ?"] = (prefix, prefix + "\U0010ffff")
        if search:
            terms[_SEARCHED] = (search,)
        query = f"SELECT data FROM jobs WHERE {' AND '.join(terms)} ORDER BY submitted_at DESC, job_id LIMIT ? OFFSET ?"
        values = [value for group in terms.values() for value in group]
        return [_summary.decode(data) for (data,) in self._rows(query, *values, limit, offset)]

    def counts(self, search: str = "") -> dict[str, int]:
        """How many jobs whose id holds `search` are in each phase."""
        where, values = (f"WHERE {_SEARCHED} ", (search,)) if search else ("", ())
        return dict(self._rows(f"SELECT phase, count(*) FROM jobs {where}GROUP BY phase", *values))

    def ids(self, prefix: str = "", limit: int = 200) -> _Ids:
        """Ids that begin with `prefix`, newest first."""
        where = "WHERE job_id >= ? AND job_id < ? " if prefix else ""
        values = (prefix, prefix + "\U0010ffff") if prefix else ()
        query = f"SELECT job_id FROM jobs {where}ORDER BY submitted_at DESC, job_id LIMIT ?"
        return [job_id for (job_id,) in self._rows(query, *values, limit)]

    def nearest(self, job_id: str, count: int = 5) -> _Ids:
        """Ids of recent jobs that look like this one, likeliest first; the newest ones when none does."""
        known = self.ids(limit=NEAR)
        return difflib.get_close_matches(job_id, known, n=count, cutoff=0.4) or known[:count]

    def rebuild(self, directory: Path) -> int:
        """Put in every job that has a readable record under `directory` and is not listed; returns how many."""
        if not directory.is_dir():
            return 0
        count = 0
        for path in sorted(directory.glob("*/job.sqlite")):
            if self.get(path.parent.name) is None and (summary := summary_of(path)) is not None:
                self.put(summary, pool="")
                count += 1
        return count

    def _rows(self, query: str, *values: object) -> _Rows:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(
                f"the list of jobs cannot be read: {error}", hint=f"delete {self.path}: {KIND.remedy}"
            ) from error


def summary_of(path: Path) -> JobSummary | None:
    """A job's line, from its record; None when that cannot be read."""
    try:
        with JobFile.open(path, read_only=True) as file:
            state: JobState | None = None
            for _, event in file.events():
                state, _ = transition(state, event)
            last = file.totals(width=86_400.0)
    except StoreError:
        return None
    if state is None:
        return None
    return JobSummary.of(state, step=max((total.last_step for total in last), default=0))


def _connect(path: Path) -> tuple[sqlite3.Connection, bool]:
    """The list, and whether it had to be begun; a damaged one is set aside first."""
    if path.exists():
        try:
            return open_existing(path, KIND), False
        except JobFileError:
            _set_aside(path)
    return create(path, KIND), True


def _set_aside(path: Path) -> None:
    """Keep what was there, under another name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged{number}")).exists():
        number += 1
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)

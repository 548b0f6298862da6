"""The jobs and pools of a home, asked for every few seconds while a page shows them.

A page asks for one screenful: which jobs those are is found out in the pool, where the list lies, so that ten thousand
jobs cost a page no more than fifty.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from workbench import JobPhase, JobSummary, WorkbenchError
from workbench_widgets.pools import Pools

EVERY: Final = 2.0  # s
LINGER: Final = 10.0  # s after the last page
AGED: Final = 20.0  # s between two looks at how long ago jobs were launched, which is told in minutes
MOST: Final = 50  # jobs of a screenful
logger = logging.getLogger(__name__)


class Query(NamedTuple):
    """Which jobs a page wants: in that phase (None: any), with that text in their id, those from `offset` on."""

    phase: JobPhase | None = None
    search: str = ""
    offset: int = 0


ALL: Final = Query()


class Listing(NamedTuple):
    """A line a pool; jobs, newest first (None: not known yet); how many there are in each phase, searched ones only.

    `at`: about when (epoch s) that was so; it moves seldom, so that what has not changed is not told again.
    """

    pools: tuple[str, ...] = ()
    jobs: tuple[JobSummary, ...] | None = None
    counts: tuple[tuple[str, int], ...] = ()
    at: float = 0.0

    def total(self, phase: JobPhase | None) -> int:
        """How many jobs there are in a phase, or in all."""
        return sum(number for name, number in self.counts if phase is None or name == phase.value)


class Reader(NamedTuple):
    """A page: what it wants, who hears of news, and what it was told last."""

    query: Callable[[], Query]
    changed: Callable[[Listing], object]
    told: list[tuple[Query, Listing]]


class Overview:
    """Tells every page what it wants to know, from a thread of its own that lives while there are pages."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._readers: dict[object, Reader] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._deserted_at = 0.0
        self._thread: threading.Thread | None = None

    def subscribe(self, query: Callable[[], Query], changed: Callable[[Listing], object]) -> Callable[[], None]:
        """Have `changed` told, from the thread, what `query` (asked anew each time) asks for; the answer ends it."""
        key = object()
        with self._lock:
            self._readers[key] = Reader(query, changed, [])
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="overview", daemon=True)
                self._thread.start()
        self._wake.set()

        def end() -> None:
            with self._lock:
                self._readers.pop(key, None)
                self._deserted_at = time.monotonic()

        return end

    def ask_now(self) -> None:
        """A page wants something else."""
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.clear()
            with self._lock:
                if not self._readers and time.monotonic() - self._deserted_at > LINGER:
                    self._thread = None
                    return
                readers = list(self._readers.values())
            found: dict[Query, Listing] = {}
            for reader in readers:
                try:
                    self._tell(reader, found)
                except Exception:
                    logger.exception("listing jobs")
            self._wake.wait(EVERY)

    def _tell(self, reader: Reader, found: dict[Query, Listing]) -> None:
        query = reader.query()
        if query not in found:
            found[query] = listing_of(self._pools, query)
        if reader.told != [(query, found[query])]:
            reader.told[:] = [(query, found[query])]
            reader.changed(found[query])


def listing_of(pools: Pools, query: Query = ALL) -> Listing:
    """Ask every pool. A job that runs is told by the pool that runs it, an ended one by any."""
    lines: list[str] = []
    jobs: dict[str, JobSummary] = {}
    counts: dict[str, int] = {}
    for name in pools.names():
        try:
            session = pools.session(name)
        except WorkbenchError as error:
            lines.append(str(error))
            continue
        try:
            status = session.pool_status()
            for job in session.jobs(limit=MOST, offset=query.offset, phase=query.phase, search=query.search):
                if job.job_id not in jobs or job.job_id in status.running:
                    jobs[job.job_id] = job
            counts = counts or session.job_counts(query.search)  # the pools of a home share one list
            lines.append(pools.told(status))
        except WorkbenchError as error:
            pools.forget(session)
            lines.append(f"pool {name}: {error}")
    newest = sorted(jobs.values(), key=lambda job: job.submitted_at, reverse=True)[:MOST]
    shown = tuple(msgspec.structs.replace(job, job_id=pools.shown(job.job_id)) for job in newest)
    return Listing(tuple(lines), shown, tuple(sorted(counts.items())), time.time() // AGED * AGED)

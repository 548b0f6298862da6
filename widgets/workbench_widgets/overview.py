"""The jobs and pools of a home, asked for every few seconds while a page shows them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from workbench import WorkbenchError
from workbench.views.table import Table, jobs_table, pool_line
from workbench_widgets.pools import Pools

EVERY: Final = 2.0  # s
LINGER: Final = 10.0  # s after the last page
MOST: Final = 200  # jobs
logger = logging.getLogger(__name__)


class Listing(NamedTuple):
    """A line a pool, and the jobs, newest first; `jobs` None: not known yet."""

    pools: tuple[str, ...] = ()
    jobs: Table | None = None


class Overview:
    """See the module. `listing` is replaced as a whole."""

    def __init__(self, pools: Pools) -> None:
        self.listing = Listing()
        self._pools = pools
        self._listeners: dict[object, Callable[[], object]] = {}
        self._lock = threading.Lock()
        self._deserted_at = 0.0
        self._thread: threading.Thread | None = None

    def subscribe(self, changed: Callable[[], object]) -> Callable[[], None]:
        """As `Source.subscribe`; the first one starts the asking."""
        key = object()
        with self._lock:
            self._listeners[key] = changed
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="overview", daemon=True)
                self._thread.start()

        def end() -> None:
            with self._lock:
                self._listeners.pop(key, None)
                self._deserted_at = time.monotonic()

        return end

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._listeners and time.monotonic() - self._deserted_at > LINGER:
                    self._thread = None
                    return
            try:
                found = listing_of(self._pools)
            except Exception:
                logger.exception("listing jobs")
            else:
                self._show(found)
            time.sleep(EVERY)

    def _show(self, listing: Listing) -> None:
        if listing == self.listing:
            return
        self.listing = listing
        with self._lock:
            listeners = list(self._listeners.values())
        for changed in listeners:
            changed()


def listing_of(pools: Pools) -> Listing:
    """Ask every pool. A job that runs is told by the pool that runs it, an ended one by any."""
    lines, jobs = [], {}
    for name in pools.names():
        try:
            session = pools.session(name)
        except WorkbenchError as error:
            lines.append(str(error))
            continue
        try:
            status = session.pool_status()
            for job in session.jobs(limit=MOST):
                if job.job_id not in jobs or job.job_id in status.running:
                    jobs[job.job_id] = job
            lines.append(pool_line(status))
        except WorkbenchError as error:
            pools.forget(session)
            lines.append(f"pool {name}: {error}")
    newest = sorted(jobs.values(), key=lambda job: job.submitted_at, reverse=True)[:MOST]
    return Listing(tuple(lines), jobs_table(newest))

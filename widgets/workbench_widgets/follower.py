"""One job followed for all open pages: a thread that asks for news and keeps the picture.

It begins with the first page and ends a while after the last, so that a reload finds the picture and nobody pays for a
page that is closed. A pool that goes away leaves the last picture and a notice; when one is back the job is read anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from workbench import Job, WorkbenchError
from workbench.views.acts import Act
from workbench.views.job import ViewBuilder
from workbench.views.logs import LogRing
from workbench.views.panels import PanelBuilder, PanelView, panels_at
from workbench_widgets.actions import Once, perform
from workbench_widgets.files import Made, make
from workbench_widgets.source import Filter, LogTail, Picture

LINGER: Final = 30.0  # s after the last page
POLL: Final = 5.0  # s that one request for news may wait
FASTEST: Final = 0.1  # s between two requests
RETRY: Final = (0.5, 1.0, 2.0, 3.0)  # s between attempts to reach a pool
SETTLE: Final = 2.0  # s after the end in which the last output may come
logger = logging.getLogger(__name__)


class Follower:
    """A `Source`. `find` gives the job or raises `WorkbenchError`; `lost` hears of a job whose pool went away."""

    def __init__(
        self,
        job_id: str,
        find: Callable[[str], Job],
        *,
        lost: Callable[[Job], None],
        linger: float = LINGER,
        retry: Sequence[float] = RETRY,
    ) -> None:
        self.job_id = job_id
        self.picture = Picture()
        self.log_version = 0
        self._find, self._lost, self._linger, self._retry = find, lost, linger, retry
        self._lock = threading.Lock()
        self._ring, self._once = LogRing(), Once()
        self._travelling, self._making = threading.Lock(), threading.Lock()
        self._past: Any = None  # what `Job.past` gives
        self._is_over = self._past_is_whole = False  # nothing comes any more; and it was read after that
        self._listeners: dict[object, Callable[[], object]] = {}
        self._deserted_at = time.monotonic()
        self._wake = threading.Event()
        self._job: Job | None = None
        self._thread = threading.Thread(target=self._run, name=f"follow-{job_id}", daemon=True)
        self._thread.start()

    # --- for pages ---

    def subscribe(self, changed: Callable[[], object]) -> Callable[[], None]:
        key = object()
        with self._lock:
            self._listeners[key] = changed

        def end() -> None:
            with self._lock:
                self._listeners.pop(key, None)
                self._deserted_at = time.monotonic()

        return end

    def log(self, wanted: Filter, most: int, until: float | None = None) -> LogTail:
        with self._lock:
            lines = self._ring.lines(ranks=wanted.ranks, level=wanted.level, text=wanted.text, until=until)
            note = self._ring.note(self.picture.view.output_dropped if self.picture.view else 0)
        return LogTail(tuple(lines[max(0, len(lines) - most) :]), note)

    def travel(self, time: float, done: Callable[[Picture], object]) -> None:
        """The record is read when somebody first asks, and kept for the next; one at a time."""

        def work() -> None:
            try:
                with self._travelling:
                    done(self._picture_of(time))
            except WorkbenchError as error:
                done(Picture(notice=f"how it stood then cannot be told: {error}"))
            except Exception as error:
                logger.exception("going back in %s", self.job_id)
                done(Picture(notice=f"the live page has a fault: {type(error).__name__}: {error}"))

        threading.Thread(target=work, name=f"travel-{self.job_id}", daemon=True).start()

    def _picture_of(self, moment: float) -> Picture:
        job, whole = self._job or self._find(self.job_id), self.picture.more
        if self._past is None or not (self._is_over and self._past_is_whole):
            self._past, self._past_is_whole = job.past(self._past), self._is_over
        return picture_of(job.at(moment, self._past), whole)._replace(is_saved=job.is_saved)

    def act(self, act: Act, done: Callable[[str], None], *, by: str) -> None:
        """Pages of one job share this: the second click of two may come from another one."""
        with self._lock:
            refusal = self._once.begin(act)
        if refusal:
            done(f"Nothing done: {refusal}.")
            return

        def work() -> None:
            try:
                done(perform(act, self._job, self.picture.view, by=by))
            finally:
                with self._lock:
                    self._once.end(act)

        threading.Thread(target=work, name=f"{act.name}-{self.job_id}", daemon=True).start()

    def make(self, what: str, done: Callable[[Made], None], *, with_code: bool) -> None:
        """One at a time for all pages of the job: it reads the whole record."""

        def work() -> None:
            with self._making:
                done(make(what, self._job, with_code=with_code))

        threading.Thread(target=work, name=f"{what}-{self.job_id}", daemon=True).start()

    # --- the thread ---

    @property
    def is_wanted(self) -> bool:
        with self._lock:
            return bool(self._listeners) or time.monotonic() - self._deserted_at < self._linger

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Forget all pages; the thread ends when its request for news has been answered."""
        with self._lock:
            self._listeners.clear()
            self._deserted_at = -self._linger
        self._wake.set()

    def _run(self) -> None:
        attempt = 0
        while self.is_wanted:
            try:
                self._job = self._find(self.job_id)
                attempt = 0
                while self.is_wanted:
                    self._idle(self._job, self._follow(self._job))
            except WorkbenchError as error:
                self._say(str(error))
            except Exception as error:
                logger.exception("following %s", self.job_id)
                self._say(f"the live page has a fault: {type(error).__name__}: {error}. It tries again.")
            if not self.is_wanted:
                return
            if self._job is not None:
                self._lost(self._job)
                self._job = None
            self._wake.wait(self._retry[min(attempt, len(self._retry) - 1)])
            attempt += 1

    def _follow(self, job: Job) -> Any:
        """Until the job has ended and its last words are in, or nobody looks; the cursor up to which all is known."""
        self._past, self._is_over = None, False
        builder, panels, ring, cursor = ViewBuilder(is_saved=job.is_saved), PanelBuilder(), LogRing(), None
        settled: float | None = None
        while self.is_wanted:
            asked = time.monotonic()
            update = job.follow(cursor, POLL if settled is None else SETTLE)
            if cursor is None:
                with self._lock:
                    self._ring = ring
            is_news = update.cursor != cursor
            cursor = update.cursor
            builder.add(update)
            panels.add(update)
            self._add_output(ring, update.output)
            heard = time.monotonic()
            self._show(Picture(builder.view(), more=panels.view(), is_saved=job.is_saved, heard=heard))
            if update.state.phase.is_terminal or job.is_saved:
                settled = settled or time.monotonic()
                if not is_news or time.monotonic() - settled > SETTLE:
                    self._is_over = True
                    return cursor
            self._wake.wait(max(0.0, FASTEST - (time.monotonic() - asked)))
        return cursor

    def _idle(self, job: Job, cursor: Any) -> None:
        """An ended job changes only when somebody resumes it, a saved one never."""
        while self.is_wanted:
            if not job.is_saved and job.follow(cursor, POLL).cursor != cursor:
                return
            self._wake.wait(2.0)

    def _add_output(self, ring: LogRing, output: Any) -> None:
        for chunk in output:  # one at a time: a page that reads meanwhile waits for one chunk
            with self._lock:
                ring.add((chunk,))
                self.log_version += 1

    def _say(self, notice: str) -> None:
        if notice != self.picture.notice:
            self._show(self.picture._replace(notice=notice))

    def _show(self, picture: Picture) -> None:
        self.picture = picture
        with self._lock:
            listeners = list(self._listeners.values())
        for changed in listeners:
            changed()


def picture_of(update: Any, whole: PanelView) -> Picture:
    """A moment of the past: `update` as `Job.at` gives it, `whole` what panels show now."""
    builder = ViewBuilder(is_past=True)
    builder.add(update)
    return Picture(builder.view(), more=panels_at(whole, update), at=update.now)


class Followers:
    """One follower a job, while it is wanted."""

    def __init__(self, find: Callable[[str], Job], lost: Callable[[Job], None]) -> None:
        self._find, self._lost = find, lost
        self._by_job: dict[str, Follower] = {}

    def get(self, job_id: str) -> Follower:
        """The job's follower, begun if need be. From the event loop alone."""
        self._by_job = {key: f for key, f in self._by_job.items() if f.is_alive}
        follower = self._by_job.get(job_id)
        if follower is None or not follower.is_wanted:
            follower = self._by_job[job_id] = Follower(job_id, self._find, lost=self._lost)
        return follower

    def __len__(self) -> int:
        return sum(follower.is_alive for follower in self._by_job.values())

    def close(self) -> None:
        for follower in self._by_job.values():
            follower.stop()

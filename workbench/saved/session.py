"""A saved session as a `Session`: it answers what a pool answers, and does nothing.

No pool, no process, no pickle, and no code that was saved is run. Jobs, views, timelines and logs are those of
`workbench.session`, which only get their answers from here.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import msgspec

import workbench.requests as rq
from workbench.agent.logs import LogPage
from workbench.errors import PoolError, UnknownJobError, UsageError
from workbench.feed import BeatFrame, Bucket, Cursor, JobSummary, PoolStatus, StepPage, Update
from workbench.origin import Origin
from workbench.past import Past
from workbench.pool import local
from workbench.session import Job, Session
from workbench.spec import EntrypointKind
from workbench.state import JobPhase
from workbench.store.home import home_dir, job_path
from workbench.store.saved import archive
from workbench.store.saved.archive import Archive
from workbench.store.saved.document import Document
from workbench.store.saved.records import SavedRecord
from workbench.views.buckets import across_ranks, merge, throughput
from workbench.views.trace import origin_of

TAB: Final = "workbench_widgets.tab"  # by name: it is above
START: Final = 60.0  # s that a server may take to start
QUICK: Final = 1.0  # s that one which runs may take to answer
T = TypeVar("T")


def load_session(path: str | os.PathLike[str]) -> SavedSession:
    """Open a saved session to look at. Raises `SavedFileError` for what is none, or not as it was saved."""
    return SavedSession(path)


class SavedSession(Session):
    """See the module. What would change something raises `UsageError`. Close it, or use it as a context manager."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.archive = Archive(Path(path))
        self.was_started = False
        self.touched: dict[str, None] = {}
        self.name = self.document.pool.name if self.document.pool else ""
        self._records = {entry.job_id: SavedRecord(self.archive, entry) for entry in self.document.jobs}
        self._answers: Mapping[str, Callable[[Any], Any]] = {
            "status": self._status,
            "jobs": self._list_jobs,
            "ids": lambda asked: [job_id for job_id in self._newest if job_id.startswith(asked.prefix)][: asked.limit],
            "job_counts": lambda asked: Counter(line.phase.value for line in self._found(asked.search)),
            "resolve": self._resolve,
            "state": lambda job_id: self.record(job_id).state,
            "follow": lambda asked: _update(self.record(asked.job_id), asked.cursor),
            "events": lambda job_id: list(self.record(job_id).events),
            "history": self._history,
            "frames": self._frames,
            "steps": lambda asked: StepPage(blocks=tuple(self.record(asked.job_id).step_blocks), next=None),
            "log": self._log,
            "checkpoints": lambda asked: list(self.record(asked.job_id).entry.checkpoints),
        }

    # --- what is in it ---

    @property
    def document(self) -> Document:
        """What `session.json` says: versions, pool, packages, commits, what was left out."""
        return self.archive.document

    @property
    def left_out(self) -> tuple[str, ...]:
        return self.document.left_out

    @property
    def is_ours(self) -> bool:
        """Whether it was saved from this user's DTRAIN_HOME, and is as it was then."""
        return self.archive.is_ours

    def record(self, job_id: str) -> SavedRecord:
        return self._records[self._resolve(job_id)]

    def code(self, job_id: str) -> dict[str, str]:
        """Texts of a job's code by name, its program first, as they were when it was launched."""
        record = self.record(job_id)
        spec, origin = record.state.spec, origin_of(record.events)
        own = {spec.label: spec.source} if spec.kind is EntrypointKind.SOURCE else {}
        if spec.kind is EntrypointKind.FUNCTION:
            own = {
                spec.label: spec.source
                or f"# The text of {spec.label} could not be had: it is kept as a pickle only.\n"
            }
        return own | {source.path: source.text for source in origin.sources if source.text}

    def attach(self, job_id: str) -> SavedJob:
        """A job by its id or an unambiguous beginning of it. Raises `UnknownJobError`."""
        return SavedJob(self, self._resolve(job_id))

    def save(self, path: str | os.PathLike[str], *args: Any, **options: Any) -> tuple[str, ...]:
        """The same session in another file, bit for bit. All of it: there is nothing to choose from."""
        if args or options:
            raise UsageError("a saved session is copied as a whole", hint="load_session(...).save(PATH)")
        self.archive.verify()
        files = {name: self.archive.read(name) for name in self.document.files if not name.startswith("checkpoints/")}
        if len(files) < len(self.document.files):
            raise UsageError("it holds checkpoints", hint="copy the file instead")
        archive.write(Path(path), self.document, dict(files), seal=self.archive.seal)
        return self.left_out

    def ask(self, name: str, body: object, kind: type[T], timeout: float = 30.0) -> T:
        if name not in self._answers:
            raise UsageError(
                f"a saved session is only looked at: there is nothing to {name}",
                hint=f"act on the job where it was saved, with job.live(), or run it again with: "
                f"%dtrain rerun {self.archive.path.name}",
            )
        answer: T = self._answers[name](body)
        return answer

    @property
    def address(self) -> str:
        return str(self.archive.path)

    @property
    def is_local(self) -> bool:
        return False

    def close(self) -> None:
        self.archive.close()

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        return f"<SavedSession: {len(self._records)} jobs of {self.archive.path.name}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from workbench.views.html import snapshot_saved_html
        from workbench.views.text import render_jobs

        jobs = self.jobs(limit=1000)

        def clock(moment: float, form: str = "%Y-%m-%d %H:%M UTC") -> str:
            return time.strftime(form, time.gmtime(moment))

        saved_at = clock(self.document.saved_at, "%Y-%m-%d %H:%M:%S UTC")
        head = f"{self.archive.path.name}: saved {saved_at} by dtrain {self.document.dtrain}"
        html = snapshot_saved_html(head, jobs, clock, file=show_live(self.archive.path))
        return {"text/plain": f"{head}\n{render_jobs(jobs, clock)}", "text/html": html}

    # --- answers ---

    @property
    def _newest(self) -> list[str]:
        return [entry.job_id for entry in reversed(self.document.jobs)]

    def _resolve(self, job_id: str) -> str:
        if job_id in self._records:
            return job_id
        found = [known for known in self._newest if job_id and known.startswith(job_id)]
        if len(found) == 1:
            return found[0]
        what = f"{job_id!r} could be several jobs" if found else f"no job {job_id!r} in {self.archive.path.name}"
        raise UnknownJobError(what, hint=f"there are: {', '.join((found or self._newest)[:20])}")

    def _status(self, _: None) -> PoolStatus:
        shape = self.document.pool
        slots = shape.slots if shape else 0
        return PoolStatus(
            name=self.name, version=self.document.dtrain, address=self.address, slots=slots, free=slots
        )  # fmt: skip

    def _list_jobs(self, asked: rq.ListJobs) -> list[JobSummary]:
        chosen = [line for line in self._found(asked.search) if asked.phase in (None, line.phase)]
        return chosen[asked.offset : asked.offset + asked.limit]

    def _found(self, search: str) -> list[JobSummary]:
        ids = (job_id for job_id in self._newest if search.lower() in job_id.lower())
        return [_summary(self._records[job_id]) for job_id in ids]

    def _history(self, asked: rq.History) -> list[Bucket]:
        record = self.record(asked.job_id)
        until = math.inf if asked.until is None else asked.until
        found: Sequence[Bucket] = record.telemetry.buckets if asked.width is None else record.history
        start = attrgetter("start")
        found = found[bisect_left(found, asked.since, key=start) : bisect_left(found, until, key=start)]
        chosen = [bucket for bucket in found if asked.ranks is None or bucket.rank in asked.ranks]
        return chosen if asked.width is None or asked.width <= 1.0 else merge(chosen, asked.width)

    def _frames(self, asked: rq.ReadFrames) -> list[BeatFrame]:
        found = self.record(asked.job_id).telemetry.frames
        if asked.until is None:
            return list(found)
        return list(found[: bisect_right(found, asked.until, key=attrgetter("time"))][-1:])

    def _log(self, asked: rq.ReadLog) -> LogPage:
        record = self.record(asked.job_id)
        count = max(record.entry.world_size, 1)
        if not 0 <= asked.rank < count:
            raise UsageError(f"{asked.job_id} has no rank {asked.rank}", hint=f"it has ranks 0 to {count - 1}")
        return page_of(*record.log(asked.rank), asked)


class SavedJob(Job):
    """A job of a saved session: all that can be looked at, at any moment of its life."""

    session: SavedSession
    is_saved = True

    def at(self, time: float, past: Past | None = None) -> Update:
        """As of a job; with what was printed by then, as far as it was kept."""
        output = self.session.record(self.job_id).telemetry.output
        update = super().at(time, past)
        return msgspec.structs.replace(update, output=tuple(chunk for chunk in output if chunk.time <= time))

    @property
    def origin(self) -> Origin:
        """What it was launched from."""
        return origin_of(self.events())

    @property
    def code(self) -> dict[str, str]:
        """Texts of its code by name, its program first."""
        return self.session.code(self.job_id)

    def wait(self, timeout: float | None = None) -> Any:
        """Nothing comes any more: as it stood when it was saved."""
        self._demand_end()
        return super().wait(timeout)

    def exception(self, timeout: float | None = None) -> Any:
        self._demand_end()
        return super().exception(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """None, as of a script; the values of functions are pickles, and not kept."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        if self.spec.kind is EntrypointKind.FUNCTION:
            raise UsageError("what the function returned is not in a saved session")
        return None

    def updates(self) -> Any:
        yield self.follow(timeout=0.0)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from workbench.views.html import snapshot_html
        from workbench.views.text import render_status

        view = self.view()
        html = snapshot_html(view, file=show_live(self.session.archive.path))
        return {"text/plain": render_status(view), "text/html": html}

    def live(self) -> Job:
        """The same job at its pool, to act on, which is started if need be; while its record is in this DTRAIN_HOME.

        Raises `UnknownJobError` when it is not.
        """
        if job_path(self.job_id).exists():
            session = Session(pool=self.session.name or "default")
            job = session.attach(self.job_id)
            if job.state.submitted_at == self.state.submitted_at:  # ids are short: another home has the same ones
                return job
            session.close()
        raise UnknownJobError(
            f"the record of {self.job_id} is not in this DTRAIN_HOME, only what was saved of it",
            hint=f"run that again with: %dtrain rerun {self.session.archive.path.name}; --from-checkpoint begins there",
        )

    def resume(self, step: int | None = None, ranks: int | None = None, path: str = "", by: str = "") -> JobPhase:
        """Have the job go on, as `Job.resume`, where its record still is: see `live`."""
        return self.live().resume(step, ranks, path, by)

    def panel(self) -> Any:
        """Buttons for the job as it is now, where its record still is: see `live`."""
        return self.live().panel()

    def _demand_end(self) -> None:
        if not self.phase.is_terminal:
            raise UsageError(f"{self.job_id} was still {self.phase.value} when it was saved")


def show_live(path: Path, *, start: bool = False) -> str:
    """Have the live pages show the file as long as this process lives: its key there, '' where nothing serves them.

    `start`: begin to serve them, with no pool. Raises `PoolError` when that fails.
    """
    try:
        tab = importlib.import_module(TAB)
    except ImportError:
        return ""
    if start:
        local.start_dashboard(for_guests=True)
    elif not local.dashboard_runs():
        return ""
    try:
        return str(tab.show_saved(home_dir(), path, timeout=START if start else QUICK))
    except tab.TabError as error:
        if not start:
            return ""
        raise PoolError(str(error), hint=f"see {home_dir()}/dashboard/dashboard.log") from None


def _update(record: SavedRecord, cursor: Cursor) -> Update:
    """All there is for a follower who knows nothing yet; nothing new for any other."""
    told = record.telemetry
    bare = Update(
        state=record.state,
        cursor=told.cursor,
        now=told.now,
        output_dropped=told.output_dropped,
        telemetry_dropped=told.telemetry_dropped,
        problems=told.problems,
    )
    if cursor == told.cursor:
        return bare
    is_new = cursor == Cursor()
    return msgspec.structs.replace(
        bare,
        events=record.events[cursor.event :],
        beats=told.beats if is_new else (),
        usage=told.usage if is_new else (),
        buckets=tuple(b for b in told.buckets if b.start >= cursor.bucket),
        totals=tuple(t for t in told.totals if t.start >= cursor.bucket),
        output=told.output[cursor.output :],
        cells=told.cells[cursor.cells :],
        checks=told.checks[cursor.checks :],
    )


def _summary(record: SavedRecord) -> JobSummary:
    folded = list(record.telemetry.totals) or across_ranks(record.telemetry.buckets)
    step = max([b.last_step for b in folded] + [beat.step for beat in record.telemetry.beats], default=0)
    return JobSummary.of(record.state, step=step, throughput=throughput(folded))


def page_of(start: int, text: str, asked: rq.ReadLog) -> LogPage:
    """A page as an agent gives it, of a log whose kept end `text` begins at `start` bytes."""
    data = text.encode()
    end = start + len(data)
    begins = max(asked.since, start) if asked.tail is None else start
    lines = data[begins - start :].decode(errors="replace").splitlines(keepends=True)
    if asked.grep:
        lines = [line for line in lines if asked.grep in line]
    kept = lines if asked.tail is None else lines[max(0, len(lines) - asked.tail) :]
    is_cut = start > 0 and (asked.tail is None or len(kept) == len(lines)) and asked.since < start
    return LogPage(text="".join(kept), start=begins, next=end, truncated=is_cut)

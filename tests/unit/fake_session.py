"""A `Session` and `Job` by the letter of the real ones, fed by the test; and a screen and clock to watch verbs with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from workbench.errors import JobError, PoolUnavailableError, UnknownJobError, UsageError
from workbench.feed import Cursor, JobSummary, PoolStatus, Update, WorkerStatus
from workbench.spec import EntrypointKind, JobSpec
from workbench.state import JobPhase, JobState, RankPhase, RankState
from workbench.telemetry import CellFinished, OutputWritten
from workbench.verbs.context import Context


class Clock:
    """Seconds that pass only when somebody sleeps or polls."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeScreen:
    """Remembers what was shown: `(stream, text)`, stream being out, err, update or display."""

    width = 100
    has_color = False

    def __init__(self, *, redraws: bool = False, interval: float = 5.0) -> None:
        self.redraws, self.interval = redraws, interval
        self.shown: list[tuple[str, Any]] = []

    def write(self, text: str, *, is_error: bool = False) -> None:
        self.shown.append(("err" if is_error else "out", text))

    def update(self, text: str) -> None:
        self.shown.append(("update", text))

    def settle(self) -> None: ...

    def display(self, bundle: Mapping[str, str]) -> None:
        self.shown.append(("display", dict(bundle)))

    def text(self, stream: str) -> str:
        return "".join(text for kind, text in self.shown if kind == stream)


def state(job_id: str, phase: JobPhase = JobPhase.HEALTHY, **fields: Any) -> JobState:
    """A job of 2 ranks."""
    spec = fields.pop("spec", JobSpec(entrypoint="train.py", nproc_per_node=2))
    rank_phase = RankPhase.SUCCEEDED if phase is JobPhase.SUCCEEDED else RankPhase.HEALTHY
    ranks = tuple(
        RankState(rank=k, worker="w", phase=rank_phase, pid=100 + k, log_path=f"/logs/rank{k}.log") for k in (0, 1)
    )
    return JobState(job_id=job_id, spec=spec, phase=phase, ranks=fields.pop("ranks", ranks), **fields)


def update(job_state: JobState, at: int = 1, **fields: Any) -> Update:
    return Update(state=job_state, cursor=Cursor(event=at), now=fields.pop("now", float(at)), **fields)


@dataclass
class FakeRun:
    """A cell on its way: each `poll` gives the next batch; a callable in its place is called."""

    job: FakeJob
    ranks: tuple[int, ...]
    batches: list[Any]
    answers: dict[int, CellFinished] = field(default_factory=dict)
    last: Update | None = None

    @property
    def is_done(self) -> bool:
        return len(self.answers) == len(self.ranks)

    def poll(self, timeout: float) -> list[OutputWritten | CellFinished]:
        clock = self.job.clock
        self.last = update(self.job.state)
        if not self.batches:
            clock.now += timeout
            return []
        batch = self.batches.pop(0)
        if callable(batch):
            batch = batch()
        if isinstance(batch, float):  # nothing for that long
            clock.now += min(batch, timeout)
            if batch > timeout:
                self.batches.insert(0, batch - timeout)
            return []
        clock.now += 0.001
        self.last = update(
            self.job.state, beats=tuple(b for b in batch if not isinstance(b, OutputWritten | CellFinished))
        )
        news = [item for item in batch if isinstance(item, OutputWritten | CellFinished)]
        self.answers.update({item.rank: item for item in news if isinstance(item, CellFinished)})
        return news


@dataclass
class FakeJob:
    """`script` is what `follow` gives, one at a time; the last one stays."""

    session: FakeSession
    job_id: str
    script: list[Any] = field(default_factory=list)
    error: JobError | None = None
    pages: dict[int, str] = field(default_factory=dict)
    page: int = 10**9  # characters
    cell: list[Any] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    stack_texts: dict[int, str] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    checkpoints: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.script = self.script or [update(state(self.job_id))]

    @property
    def clock(self) -> Clock:
        return self.session.clock

    @property
    def state(self) -> JobState:
        return self.script[0].state

    @property
    def phase(self) -> JobPhase:
        return self.state.phase

    @property
    def reason(self) -> str:
        return self.state.reason

    @property
    def spec(self) -> JobSpec:
        return self.state.spec

    def follow(self, cursor: Cursor | None = None, timeout: float = 10.0) -> Update:
        current = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(current, BaseException):
            raise current
        if cursor == current.cursor:
            self.clock.now += timeout
        return current

    def view(self) -> Any:
        from workbench.views.job import ViewBuilder

        builder = ViewBuilder()
        builder.add(self.follow())
        return builder.view()

    @property
    def timeline(self) -> Any:
        return self.view().timeline

    def exception(self, timeout: float | None = None) -> JobError | None:
        return self.error

    def cancel(self, force: bool = False, by: str = "") -> JobPhase:
        self.calls.append(("cancel", force, by))
        return JobPhase.STOPPING

    def resume(self, step: int | None = None, ranks: int | None = None, path: str = "", by: str = "") -> JobPhase:
        self.calls.append(("resume", step, ranks, path))
        return JobPhase.RECOVERING

    def resize(self, ranks: int, by: str = "") -> JobPhase:
        self.calls.append(("resize", ranks))
        return JobPhase.HEALTHY

    def inject(self, fault: str, rank: int) -> bool:
        self.calls.append(("inject", fault, rank))
        return fault != "reorder"

    def verify_checkpoints(self) -> list[Any]:
        self.calls.append(("verify_checkpoints",))
        return self.checkpoints

    def replay_check(self, **asked: Any) -> Any:
        self.session.replayed.append((self.job_id, asked))
        return self.session.report

    def stacks(self) -> dict[int, str]:
        return self.stack_texts

    def log_page(self, rank: int, tail: int | None = None, grep: str | None = None, since: int = 0) -> Any:
        self.calls.append(("log_page", rank, tail, grep, since))
        whole = self.pages.get(rank, "")
        start = since if tail is None else 0
        return SimpleNamespace(
            text=whole[start : start + self.page], start=start, next=min(start + self.page, len(whole))
        )

    def execute(self, source: str, ranks: Sequence[int] | None = None) -> FakeRun:
        if self.phase is not JobPhase.HEALTHY:
            raise UsageError(f"{self.job_id} is {self.phase.value}")
        self.calls.append(("execute", source, ranks))
        return FakeRun(self, tuple(ranks) if ranks is not None else (0, 1), self.cell)

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        self.calls.append(("interrupt", ranks))

    def push(self, name: str, value: Any, ranks: Sequence[int] | None = None) -> None:
        self.calls.append(("push", name, value, ranks))

    def pull(self, name: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        return {rank: value for rank, value in self.values.items() if ranks is None or rank in ranks}


class FakeSession:
    """A pool in which the test puts jobs; `launch` remembers what it was given."""

    was_started = False
    is_local = True
    name = "default"
    address = "tls://s"

    def __init__(self, *job_ids: str, running: Iterable[str] = ()) -> None:
        self.clock = Clock()
        self.known = {job_id: FakeJob(self, job_id) for job_id in (*job_ids, *running)}
        self.running = tuple(running)
        self.launched: list[dict[str, Any]] = []
        self.replayed: list[tuple[str, dict[str, Any]]] = []
        self.report: Any = None
        self.is_closed = False
        self.is_gone = False

    def pool_status(self) -> PoolStatus:
        if self.is_gone:
            raise PoolUnavailableError("gone")
        worker = WorkerStatus(address="tls://w", host="h", pid=1, slots=4, free=2)
        return PoolStatus(
            name=self.name, version="0", address="tls://s", slots=4, free=2, workers=(worker,), running=self.running
        )

    def ask(self, name: str, body: Any, kind: Any, timeout: float = 30.0) -> Any:
        assert name == "ids"
        assert timeout <= 0.2
        return [job_id for job_id in self.known if job_id.startswith(body.prefix)]

    def launch(self, entrypoint: Any = None, **options: Any) -> FakeJob:
        self.launched.append({"entrypoint": entrypoint, **options})
        kind = EntrypointKind.INTERACTIVE if options.get("interactive") else EntrypointKind.SCRIPT
        job = self.known["new-1"] = FakeJob(self, "new-1")
        job.script = [update(state("new-1", spec=JobSpec(kind=kind, nproc_per_node=2)))]
        return job

    def replay_check(self, entrypoint: Any = None, **asked: Any) -> Any:
        self.replayed.append((entrypoint or "", asked))
        return self.report

    def attach(self, job_id: str) -> FakeJob:
        found = [known for known in self.known if known.startswith(job_id)]
        if len(found) != 1:
            raise UnknownJobError(f"no job {job_id!r} in pool default", hint=f"did you mean one of: {list(self.known)}")
        return self.known[found[0]]

    def jobs(
        self, limit: int = 50, offset: int = 0, phase: JobPhase | None = None, search: str = ""
    ) -> list[JobSummary]:
        lines = [
            JobSummary(job_id=k, label=k, phase=j.phase, reason="", world_size=2, submitted_at=0.0)
            for k, j in self.known.items()
            if phase in (None, j.phase) and search.lower() in k.lower()
        ]
        return lines[offset : offset + limit]

    def job_ids(self, prefix: str = "", limit: int = 200) -> list[str]:
        return [job_id for job_id in self.known if job_id.startswith(prefix)][:limit]

    def close(self) -> None:
        self.is_closed = True


def context_of(session: FakeSession, *, shell: bool = False, **screen: Any) -> Any:
    """A context whose every session is this one; `.opened` lists what was asked for."""
    opened: list[tuple[Any, ...]] = []

    def opener(address: str | None, pool: str, slots: int | None, *, start: bool) -> Any:
        opened.append((address, pool, slots, start))
        return session

    context = Context(
        screen=FakeScreen(**screen),
        namespace=None if shell else {},
        prefix="dtrain" if shell else "%dtrain",
        opener=opener,
        clock=session.clock,
        sleep=session.clock.sleep,
    )
    context.opened = opened  # type: ignore[attr-defined]
    return context


def answer(rank: int, value: str = "", error: str = "", traceback: str = "", **data: str) -> CellFinished:
    bundle = {"text/plain": value} if value else {}
    return CellFinished(
        job_id="j", cell_id="c", rank=rank, ok=not error, error=error, traceback=traceback, data={**bundle, **data}
    )


def output(rank: int, text: str, stream: str = "stdout", **fields: Any) -> OutputWritten:
    return OutputWritten(job_id="j", rank=rank, stream=stream, text=text, time=0.0, **fields)


def replaced(value: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(value, **fields)


def interrupt() -> Callable[[], Any]:
    """A batch that is an interrupt of the kernel's."""

    def raise_it() -> Any:
        raise KeyboardInterrupt

    return raise_it

"""The runner: a pool's jobs, from the request of a client to the last exit of a rank.

Lives on the scheduler's event loop. A fact is recorded before it is acted on, commands are carried out in order, and
how they went comes back as facts: nothing here decides, the controller and the policies do.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

import msgspec

import workbench.requests as rq
from workbench import __version__
from workbench.commands import (
    Announce,
    Command,
    ExecuteCell,
    ForgetCopies,
    ForgetJob,
    InjectFault,
    InterruptRanks,
    PullValue,
    PushValue,
    ReleaseSlots,
    RequestSlots,
    StartRanks,
)
from workbench.errors import InvalidTransitionError, NotEnoughSlotsError, PoolError, UnknownJobError, UsageError
from workbench.events import (
    CancelRequested,
    CellSent,
    Event,
    FaultHappened,
    FaultInjected,
    LaunchRefused,
    LaunchRequested,
    OriginRecorded,
    PoolLost,
    ResizeRequested,
    ResumeRequested,
    SlotsAwaited,
    SlotsGranted,
    SlotsReturned,
    Ticked,
    WorkerLost,
)
from workbench.faults import FAULTS, ON_CHECKPOINT
from workbench.feed import Bucket, CellStarted, JobSummary, PoolStatus, Update
from workbench.origin import Origin
from workbench.policy.placement import Granted, Refused, Waiting, place
from workbench.policy.recovery import least_ranks
from workbench.pool.messages import PROTOCOL, Hello, Message, decode, encode
from workbench.pool.scheduler import SchedulerLink
from workbench.runner.health import Health
from workbench.runner.live import LiveJob
from workbench.runner.notify import VARIABLE as NOTIFY
from workbench.runner.notify import Notifier
from workbench.runner.slots import SlotTable
from workbench.spec import EntrypointKind, JobSpec, check_spec
from workbench.state import JobPhase
from workbench.store.home import index_path, job_path
from workbench.store.index import JobIndex
from workbench.store.jobfile import JobFile

KEEP: Final = 64  # ended jobs whose output and answers stay in memory
THOROUGH: Final = 600.0  # s that reading all of a job's checkpoints may take
FLUSH_EVERY: Final = 1.0
CELL_KEPT: Final = 2**16  # characters of a cell that the record keeps
LAST_WORD: Final = 1.0  # s that notes of jobs' ends may keep a pool that is to end
ANSWER: Final = 0.5  # s that an injected fault's asker waits to hear that it cannot be done
logger = logging.getLogger(__name__)


def make_service(pool: str, link: SchedulerLink) -> Runner:
    """The runner of pool `pool`, with the jobs that its record holds."""
    return Runner(pool, link, JobIndex(index_path()))


class Runner:
    """See the module. `worker_*`, `received` and `request` are called by the pool."""

    def __init__(self, pool: str, link: SchedulerLink, index: JobIndex) -> None:
        self._pool, self._link, self._index = pool, link, index
        self._slots = SlotTable(link.may_be_cut_off)
        self._jobs: dict[str, LiveJob] = {}
        self._inbox: deque[tuple[str, Event]] = deque()
        self._busy = False
        self._cells = 0
        self._requests: Mapping[str, Callable[[bytes], Awaitable[bytes]]] = {
            "status": _request(type(None), self._status),
            "launch": _request(rq.Launch, self._launch),
            "jobs": _request(rq.ListJobs, self._list_jobs),
            "ids": _request(rq.ListIds, self._list_ids),
            "job_counts": _request(rq.CountJobs, lambda request: self._index.counts(request.search)),
            "resolve": _request(str, self._resolve),
            "state": _request(str, lambda job_id: self._job(job_id).state),
            "follow": _request(rq.Follow, self._follow),
            "events": _request(str, lambda job_id: [event for _, event in self._job(job_id).file.events()]),
            "history": _request(rq.History, self._history),
            "steps": _request(rq.ReadSteps, lambda asked: self._job(asked.job_id).file.step_page(asked.after)),
            "log": _request(rq.ReadLog, self._read_log),
            "checkpoints": _request(rq.ListCheckpoints, self._list_checkpoints),
            "stacks": _request(str, self._stacks),
            "cancel": _request(rq.Cancel, self._cancel),
            "resume": _request(rq.Resume, self._resume),
            "resize": _request(rq.Resize, self._resize),
            "execute": _request(rq.Execute, self._execute),
            "push": _request(rq.Push, self._push),
            "pull": _request(rq.Pull, self._pull),
            "interrupt": _request(rq.Interrupt, self._interrupt),
            "inject": _request(rq.Inject, self._inject),
            "shutdown": _request(float, self._shutdown),
        }
        self._notifier = Notifier(link.now)
        self._rebuild()
        self._health = Health(link, lambda: tuple(self._jobs.values()), self._feed)
        self._flusher = link.spawn(self._keep_flushing())

    # --- what the pool says ---

    def worker_joined(self, worker: str, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            logger.error("worker %s speaks protocol %s, not %s: ignored", worker, hello.protocol, PROTOCOL)
        elif self._slots.join(worker, hello):
            self._dispatch()
            self._offer_slots()

    def worker_lost(self, worker: str, reason: str) -> None:
        self._slots.leave(worker)
        for job_id in tuple(self._jobs):
            self._feed(job_id, WorkerLost(time=self._link.now(), worker=worker, reason=reason))

    def received(self, worker: str, batch: Sequence[Message]) -> None:
        for message in batch:
            job = self._jobs.get(message.job_id)
            if job is None:
                continue
            if message.event is not None:
                self._feed(message.job_id, message.event)
            elif message.report is not None:
                job.report(message.report)
                self._health.report(job, message.report)

    async def request(self, name: str, body: bytes) -> bytes:
        if name not in self._requests:
            raise UsageError(f"the pool knows no request {name!r}", hint="client and pool may be of different versions")
        return await self._requests[name](body)

    def close(self) -> None:
        self._flusher.cancel()
        self._notifier.close(LAST_WORD)
        self._health.close()
        for job in self._jobs.values():
            job.flush(self._link.now())
            job.close()
        self._index.close()

    # --- the one path of facts and commands ---

    def _feed(self, job_id: str, event: Event) -> None:
        """Take facts in order, one at a time, also those that carrying out a command brings about."""
        self._inbox.append((job_id, event))
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                self._take(*self._inbox.popleft())
        finally:
            self._busy = False

    def _take(self, job_id: str, event: Event) -> None:
        job = self._jobs[job_id]
        phase = None if isinstance(event, LaunchRequested) else job.state.phase
        if phase is not None and phase.is_terminal and not isinstance(event, ResumeRequested):
            return
        try:
            commands = job.apply(event)
        except InvalidTransitionError:
            logger.exception("job %s: an event that cannot be", job_id)
            return
        for command in commands:
            self._carry_out(job, command)
        self._set_tick(job)
        if job.state.phase is not phase:
            self._phase_changed(job)

    def _carry_out(self, job: LiveJob, command: Command) -> None:
        match command:
            case RequestSlots():
                self._slots.enqueue(command)
                self._dispatch()
            case ReleaseSlots():
                self._forget_on_workers(job.job_id)
                self._slots.release(job.job_id)
                self._dispatch()
            case ForgetCopies():
                self._forget_on_workers(job.job_id)
            case Announce():
                job.record(command.event)
            case StartRanks():
                env = {**job.ambient, **command.spec.env}
                env.pop(NOTIFY, None)
                self._send(job, msgspec.structs.replace(command, spec=msgspec.structs.replace(command.spec, env=env)))
            case _:
                self._send(job, command)

    def _send(self, job: LiveJob, command: Any) -> None:
        if not self._link.send(command.worker, command):
            lost = WorkerLost(time=self._link.now(), worker=command.worker, reason="it is not connected")
            self._inbox.append((job.job_id, lost))

    def _forget_on_workers(self, job_id: str) -> None:
        """Every worker: ranks of any generation may have left something there. Whoever is not connected has nothing."""
        for worker in self._slots.workers:
            self._link.send(worker, ForgetJob(job_id=job_id, worker=worker))

    def _dispatch(self) -> None:
        for job_id, decision in self._slots.dispatch(lambda job_id: self._jobs[job_id].state.spec):
            now = self._link.now()
            event: Event
            if isinstance(decision, Granted):
                event = SlotsGranted(time=now, placements=decision.placements)
            elif isinstance(decision, Waiting):
                event = SlotsAwaited(time=now, reason=decision.reason)
            else:
                event = LaunchRefused(time=now, reason=decision.reason)
            self._feed(job_id, event)

    def _offer_slots(self) -> None:
        """Slots have come free: an elastic job that runs on fewer ranks than it wants could have more."""
        for job_id, job in tuple(self._jobs.items()):
            state = job.state
            if state.phase is not JobPhase.HEALTHY or not least_ranks(state) or state.reform:
                continue
            ranks = self._slots.could_have(job_id, state.spec)
            if ranks > len(state.ranks):
                self._feed(job_id, SlotsReturned(time=self._link.now(), ranks=ranks))

    def _set_tick(self, job: LiveJob) -> None:
        if job.tick is not None:
            job.tick.cancel()
            job.tick = None
        if job.state.deadline is not None:
            delay = job.state.deadline - self._link.now()
            job.tick = self._link.call_later(delay, functools.partial(self._on_tick, job.job_id, job.state.deadline))

    def _on_tick(self, job_id: str, deadline: float) -> None:
        # The timer runs on the monotonic clock: a wall clock that was set back must not make the tick come too early.
        self._feed(job_id, Ticked(time=max(self._link.now(), deadline)))

    def _phase_changed(self, job: LiveJob) -> None:
        now = self._link.now()
        if job.state.phase.is_terminal:
            job.flush(now)
            self._forget_old()
            self._offer_slots()
        self._index.put(job.summary(now), self._pool)

    def _forget_old(self) -> None:
        ended = [job for job in self._jobs.values() if job.state.phase.is_terminal]
        for job in ended[:-KEEP]:  # in the order in which they came into memory
            del self._jobs[job.job_id]
            job.close()

    async def _keep_flushing(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY)
            for job in tuple(self._jobs.values()):
                if not job.state.phase.is_terminal:
                    job.flush(self._link.now())

    # --- the record ---

    def _rebuild(self) -> None:
        """Jobs that ran when an earlier scheduler of this pool went away: their ranks are gone, and they say so."""
        for summary in self._index.list(pool=self._pool, limit=10_000, unfinished=True):
            try:
                job = self._open(summary.job_id, read_only=False)
            except Exception:
                logger.exception("job %s cannot be read", summary.job_id)
                continue
            self._jobs[job.job_id] = job
            step = job.summary(self._link.now()).step
            at = f" at step {step}" if step else ""
            reason = f"the pool's scheduler went away{at}; the ranks ended with it"
            self._feed(job.job_id, PoolLost(time=self._link.now(), reason=reason))

    def _open(self, job_id: str, *, read_only: bool) -> LiveJob:
        job = LiveJob(job_id, JobFile.open(job_path(job_id), read_only=read_only))
        job.restore()
        job.on_record = self._notifier.heard
        return job

    def _job(self, job_id: str) -> LiveJob:
        """A job in memory, or an ended one from its record."""
        known = self._jobs.get(job_id)
        if known is not None:
            if known.file.read_only and not known.state.phase.is_terminal:
                known.restore()  # it runs in another pool, which goes on writing
            return known
        full = self._resolve(job_id)
        if full not in self._jobs:
            self._jobs[full] = self._open(full, read_only=True)
            self._forget_old()
        return self._jobs[full]

    def _resolve(self, job_id: str) -> str:
        """The full id of a job, given whole or by an unambiguous beginning."""
        if job_id in self._jobs or self._index.get(job_id) is not None:
            return job_id
        ids = self._index.ids(prefix=job_id, limit=20) if job_id else []
        if len(ids) == 1:
            return ids[0]
        listed = ", ".join(ids or self._index.nearest(job_id))
        what = f"{job_id!r} could be several jobs" if ids else f"no job {job_id!r} in pool {self._pool}"
        raise UnknownJobError(what, hint=f"did you mean one of: {listed}" if listed else "no job has run here yet")

    # --- requests ---

    def _status(self, _: None) -> PoolStatus:
        workers = self._slots.status()
        return PoolStatus(
            name=self._pool,
            version=__version__,
            address=self._link.address,
            slots=sum(worker.slots for worker in workers),
            free=sum(worker.free for worker in workers),
            workers=workers,
            waiting=self._slots.waiting(),
            running=tuple(job_id for job_id, job in self._jobs.items() if not job.state.phase.is_terminal),
        )

    def _launch(self, request: rq.Launch) -> str:
        spec = check_spec(request.spec)
        decision = place(spec, self._slots.free())
        if isinstance(decision, Refused):
            raise NotEnoughSlotsError(decision.reason)
        job_id = self._new_id(spec)
        job = LiveJob(job_id, JobFile.create(job_path(job_id), job_id))
        job.ambient, job.on_record = request.ambient, self._notifier.heard
        self._jobs[job_id] = job
        self._feed(job_id, LaunchRequested(time=self._link.now(), job_id=job_id, spec=spec))
        self._keep_origin(job, request.origin)
        return job_id

    def _keep_origin(self, job: LiveJob, origin: Origin | None) -> None:
        if origin is not None:
            job.record(OriginRecorded(time=self._link.now(), origin=origin))

    def _new_id(self, spec: JobSpec) -> str:
        while True:
            job_id = f"{spec.label}-{secrets.token_hex(2)}"
            if job_id not in self._jobs and self._index.get(job_id) is None:
                return job_id

    def _list_jobs(self, request: rq.ListJobs) -> list[JobSummary]:
        now = self._link.now()
        listed = self._index.list(
            limit=request.limit, offset=request.offset, phase=request.phase, search=request.search
        )
        return [
            self._jobs[line.job_id].summary(now) if line.job_id in self._jobs and not line.phase.is_terminal else line
            for line in listed
        ]

    def _list_ids(self, request: rq.ListIds) -> list[str]:
        return self._index.ids(prefix=request.prefix, limit=request.limit)

    async def _follow(self, request: rq.Follow) -> Update:
        job = self._job(request.job_id)
        deadline = asyncio.get_running_loop().time() + request.timeout
        while True:
            update = job.update(request.cursor, self._link.now())
            left = deadline - asyncio.get_running_loop().time()
            if update.cursor != request.cursor or left <= 0:
                return update
            await job.changed(left)

    def _history(self, request: rq.History) -> list[Bucket]:
        return self._job(request.job_id).file.buckets(
            since=request.since,
            until=float("inf") if request.until is None else request.until,
            ranks=request.ranks,
            width=request.width,
        )

    async def _read_log(self, request: rq.ReadLog) -> msgspec.Raw:
        job = self._job(request.job_id)
        count = len(job.state.ranks) or job.state.world_size
        if not 0 <= request.rank < max(count, 1):
            raise UsageError(f"{job.job_id} has no rank {request.rank}", hint=f"it has ranks 0 to {count - 1}")
        return msgspec.Raw(await self._link.ask(self._worker_of(job, request.rank), "log", encode(request)))

    def _worker_of(self, job: LiveJob, rank: int) -> str:
        """Who can read what that rank has written."""
        where = next(((p.worker, p.host) for p in job.state.placements if p.rank == rank), ("", ""))
        worker = self._slots.near(*where)
        if worker is None:
            raise PoolError("no worker is there to read the job's files", hint="start one with: %dtrain up")
        return worker

    async def _list_checkpoints(self, request: rq.ListCheckpoints) -> msgspec.Raw:
        job = self._job(request.job_id)
        spec = job.state.spec
        folder = str(PurePath(spec.cwd, spec.checkpoint_dir)) if spec.checkpoint_dir else ""
        question = msgspec.structs.replace(request, job_id=job.job_id, folder=folder)
        answer = await self._link.ask(self._worker_of(job, 0), "checkpoints", encode(question), THOROUGH)
        return msgspec.Raw(answer)

    async def _stacks(self, job_id: str) -> dict[int, str]:
        job = self._job(job_id)
        workers = dict.fromkeys(r.worker for r in job.state.ranks if not r.phase.has_exited)
        answers = await asyncio.gather(*(self._link.ask(worker, "stacks", encode(job.job_id)) for worker in workers))
        return {rank: text for answer in answers for rank, text in decode(answer, dict[int, str]).items()}

    def _cancel(self, request: rq.Cancel) -> JobPhase:
        job = self._job(request.job_id)
        self._feed(job.job_id, CancelRequested(time=self._link.now(), force=request.force, by=request.by))
        return job.state.phase

    def _resume(self, request: rq.Resume) -> JobPhase:
        """Asked again while the job runs, it does nothing: the second click of two."""
        job = self._job(request.job_id)
        if job.state.spec.kind is EntrypointKind.INTERACTIVE:
            raise UsageError(f"{job.job_id} is interactive: there is nothing to go on with", hint="launch it anew")
        if not job.state.phase.is_terminal:
            if job.file.read_only:
                raise UsageError(f"{job.job_id} runs in another pool", hint="see: %dtrain pool list")
            return job.state.phase
        self._check_ranks(job, request.ranks)
        job = self._reopen(job)
        job.ambient = request.ambient
        event = ResumeRequested(
            time=self._link.now(), step=request.step, path=request.path, ranks=request.ranks, by=request.by
        )
        self._feed(job.job_id, event)
        self._keep_origin(job, request.origin)
        return job.state.phase

    def _resize(self, request: rq.Resize) -> JobPhase:
        job = self._job(request.job_id)
        if job.state.phase.is_terminal:
            hint = f"resume it on other ranks with: %dtrain resume {job.job_id} -n {request.ranks}"
            raise UsageError(f"{job.job_id} has ended: {job.state.phase.value}", hint=hint)
        if job.state.spec.kind is EntrypointKind.INTERACTIVE:
            raise UsageError(f"{job.job_id} is interactive: its ranks hold what no checkpoint has")
        self._check_ranks(job, request.ranks)
        self._feed(job.job_id, ResizeRequested(time=self._link.now(), ranks=request.ranks, by=request.by))
        return job.state.phase

    def _check_ranks(self, job: LiveJob, ranks: int | None) -> None:
        if ranks is None:
            return
        if ranks < 1:
            raise UsageError(f"{ranks} ranks", hint="a job has at least 1")
        wish = RequestSlots(job_id=job.job_id, ranks=ranks)
        decision = place(job.state.spec, self._slots.free(besides=job.job_id), wish=wish)
        if isinstance(decision, Refused):
            raise NotEnoughSlotsError(decision.reason)

    def _reopen(self, job: LiveJob) -> LiveJob:
        """An ended job whose record is to be written again."""
        if not job.file.read_only:
            return job
        job.close()
        again = self._jobs[job.job_id] = self._open(job.job_id, read_only=False)
        return again

    def _execute(self, request: rq.Execute) -> CellStarted:
        started = self._on_ranks(
            request.job_id,
            request.ranks,
            lambda where, cell_id: ExecuteCell(**where, cell_id=cell_id, source=request.source),
        )
        job = self._job(request.job_id)
        sent = CellSent(
            time=self._link.now(),
            restart_count=job.state.restart_count,
            cell_id=started.cell_id,
            ranks=started.ranks,
            source=request.source if len(request.source) <= CELL_KEPT else "",
        )
        job.record(sent)
        return started

    def _push(self, request: rq.Push) -> CellStarted:
        return self._on_ranks(
            request.job_id,
            request.ranks,
            lambda where, cell_id: PushValue(**where, cell_id=cell_id, name=request.name, payload=request.payload),
        )

    def _pull(self, request: rq.Pull) -> CellStarted:
        return self._on_ranks(
            request.job_id,
            request.ranks,
            lambda where, cell_id: PullValue(**where, cell_id=cell_id, name=request.name),
        )

    def _interrupt(self, request: rq.Interrupt) -> None:
        job = self._running(request.job_id)
        for where in self._by_worker(job, request.ranks):
            self._link.send(where["worker"], InterruptRanks(**where))

    async def _inject(self, request: rq.Inject) -> bool:
        """Have it done; False: it waits for its moment. Raises `UsageError` when it is told soon that it cannot be."""
        job = self._running(request.job_id)
        if request.fault not in FAULTS:
            raise UsageError(f"there is no fault {request.fault!r}", hint=f"faults: {', '.join(FAULTS)}")
        (where,) = self._by_worker(job, (request.rank,))
        path = job.newest_checkpoint() if request.fault in ON_CHECKPOINT else ""
        known = job.event_count
        self._feed(job.job_id, FaultInjected(time=self._link.now(), fault=request.fault, rank=request.rank))
        fault = InjectFault(
            job_id=job.job_id, worker=where["worker"], rank=request.rank, fault=request.fault, path=path
        )
        self._link.send(where["worker"], fault)
        told = await self._happened(job, request, known)
        if told is not None and told.problem:
            raise UsageError(f"{request.fault} cannot be done to rank {request.rank}: {told.problem}")
        return told is not None

    async def _happened(self, job: LiveJob, request: rq.Inject, since: int) -> FaultHappened | None:
        """What was told of the fault; None when nothing is within `ANSWER` s: it waits for its moment."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ANSWER
        while True:
            for event in job.events_since(since):
                if isinstance(event, FaultHappened) and (event.fault, event.rank) == (request.fault, request.rank):
                    return event
            since, left = job.event_count, deadline - loop.time()
            if left <= 0 or job.state.phase.is_terminal:
                return None
            await job.changed(left)

    def _on_ranks(
        self, job_id: str, ranks: tuple[int, ...] | None, make: Callable[[dict[str, Any], str], Any]
    ) -> CellStarted:
        """Send a cell-like command to the ranks of an interactive job; its id is what the answers carry."""
        job = self._running(job_id)
        if job.state.spec.kind is not EntrypointKind.INTERACTIVE:
            raise UsageError(
                f"{job.job_id} is not interactive", hint="start one with: %dtrain launch --interactive -n 2"
            )
        self._cells += 1
        cell_id = f"cell-{self._cells}"
        places, cursor = self._by_worker(job, ranks), job.cursor(self._link.now())
        for where in places:
            self._link.send(where["worker"], make(where, cell_id))
        return CellStarted(
            cell_id=cell_id, cursor=cursor, ranks=tuple(sorted(rank for where in places for rank in where["ranks"]))
        )

    def _running(self, job_id: str) -> LiveJob:
        job = self._job(job_id)
        if job.state.phase is not JobPhase.HEALTHY:
            hint = "" if job.state.phase.is_terminal else "wait until its ranks run"
            raise UsageError(f"{job.job_id} is {job.state.phase.value}: {job.state.reason}", hint=hint)
        return job

    def _by_worker(self, job: LiveJob, ranks: tuple[int, ...] | None) -> list[dict[str, Any]]:
        """`{job_id, worker, ranks}` for each worker that has some of these ranks; all have to be there and alive."""
        alive = {r.rank: r.worker for r in job.state.ranks if not r.phase.has_exited}
        wanted = tuple(alive) if ranks is None else tuple(dict.fromkeys(ranks))
        if missing := [rank for rank in wanted if rank not in alive]:
            there = f"ranks that run: {', '.join(map(str, list(alive)[:16]))}" if alive else "no rank runs"
            raise UsageError(f"{job.job_id} has no running rank {missing[0]}", hint=there)
        workers = dict.fromkeys(alive[rank] for rank in wanted)
        return [
            {"job_id": job.job_id, "worker": worker, "ranks": tuple(r for r in wanted if alive[r] == worker)}
            for worker in workers
        ]

    async def _shutdown(self, timeout: float) -> None:
        """End every job, wait for their ranks, then the pool."""
        running = [job for job in self._jobs.values() if not job.state.phase.is_terminal]
        for job in running:
            self._feed(job.job_id, CancelRequested(time=self._link.now(), force=True, by="pool stop"))
        deadline = self._link.now() + timeout
        while any(not job.state.phase.is_terminal for job in running) and self._link.now() < deadline:
            await asyncio.sleep(0.02)
        self._link.close_pool()


def _request(kind: Any, handler: Callable[[Any], Any]) -> Callable[[bytes], Awaitable[bytes]]:
    """Wrap a handler of values as one of bytes."""

    async def answer(body: bytes) -> bytes:
        result = handler(decode(body, kind))
        if isinstance(result, Awaitable):
            result = await result
        return encode(result)

    return answer

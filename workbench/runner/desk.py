"""What clients ask of the runner about pool and jobs: looking, launching, ending, going on.

A handler takes the request's body as a value and gives the answer as one; `as_request` makes both bytes.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

import msgspec

import workbench.requests as rq
from workbench import __version__
from workbench.commands import (
    RequestSlots,
)
from workbench.errors import NotEnoughSlotsError, PoolError, UsageError
from workbench.events import (
    CancelRequested,
    LaunchRequested,
    OriginRecorded,
    ResizeRequested,
    ResumeRequested,
)
from workbench.feed import Bucket, JobSummary, PoolStatus, Update
from workbench.origin import Origin
from workbench.policy.placement import Refused, place
from workbench.pool.messages import decode, encode
from workbench.runner.answers import Requests, as_request
from workbench.runner.live import LiveJob
from workbench.spec import EntrypointKind, JobSpec, check_spec
from workbench.state import JobPhase
from workbench.store.home import job_path
from workbench.store.jobfile import JobFile

if TYPE_CHECKING:
    from workbench.runner.service import Runner

THOROUGH: Final = 600.0  # s that reading all of a job's checkpoints may take


class Desk:
    """Of one runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.requests: Requests = {
            "status": as_request(type(None), self._status),
            "launch": as_request(rq.Launch, self._launch),
            "jobs": as_request(rq.ListJobs, self._list_jobs),
            "ids": as_request(rq.ListIds, self._list_ids),
            "job_counts": as_request(rq.CountJobs, lambda request: self._runner.index.counts(request.search)),
            "resolve": as_request(str, self._runner.resolve),
            "state": as_request(str, lambda job_id: self._runner.job(job_id).state),
            "follow": as_request(rq.Follow, self._follow),
            "events": as_request(str, lambda job_id: [event for _, event in self._runner.job(job_id).file.events()]),
            "history": as_request(rq.History, self._history),
            "frames": as_request(rq.ReadFrames, lambda asked: self._runner.job(asked.job_id).file.frames(asked.until)),
            "steps": as_request(rq.ReadSteps, lambda asked: self._runner.job(asked.job_id).file.step_page(asked.after)),
            "log": as_request(rq.ReadLog, self._read_log),
            "checkpoints": as_request(rq.ListCheckpoints, self._list_checkpoints),
            "stacks": as_request(str, self._stacks),
            "cancel": as_request(rq.Cancel, self._cancel),
            "resume": as_request(rq.Resume, self._resume),
            "resize": as_request(rq.Resize, self._resize),
            "shutdown": as_request(float, self._shutdown),
        }

    def _status(self, _: None) -> PoolStatus:
        workers = self._runner.slots.status()
        return PoolStatus(
            name=self._runner.pool,
            version=__version__,
            address=self._runner.link.address,
            slots=sum(worker.slots for worker in workers),
            free=sum(worker.free for worker in workers),
            workers=workers,
            waiting=self._runner.slots.waiting(),
            running=tuple(job_id for job_id, job in self._runner.jobs.items() if not job.state.phase.is_terminal),
        )

    def _launch(self, request: rq.Launch) -> str:
        spec = check_spec(request.spec)
        decision = place(spec, self._runner.slots.free())
        if isinstance(decision, Refused):
            raise NotEnoughSlotsError(decision.reason)
        job_id = self._new_id(spec)
        job = LiveJob(job_id, JobFile.create(job_path(job_id), job_id))
        job.ambient, job.on_record = request.ambient, self._runner.notifier.heard
        self._runner.jobs[job_id] = job
        self._runner.feed(job_id, LaunchRequested(time=self._runner.link.now(), job_id=job_id, spec=spec))
        self._keep(job, request.origin)
        return job_id

    def _keep(self, job: LiveJob, origin: Origin | None) -> None:
        """What is kept of who asked: the origin by the record, the environment by workers alone."""
        for worker in self._runner.slots.workers:
            self._runner.entrust(job, worker)
        if origin is not None:
            job.record(OriginRecorded(time=self._runner.link.now(), origin=origin))

    def _new_id(self, spec: JobSpec) -> str:
        while True:
            job_id = f"{spec.label}-{secrets.token_hex(2)}"
            if job_id not in self._runner.jobs and self._runner.index.get(job_id) is None:
                return job_id

    def _list_jobs(self, request: rq.ListJobs) -> list[JobSummary]:
        now = self._runner.link.now()
        listed = self._runner.index.list(
            limit=request.limit, offset=request.offset, phase=request.phase, search=request.search
        )
        return [
            self._runner.jobs[line.job_id].summary(now)
            if line.job_id in self._runner.jobs and not line.phase.is_terminal
            else line
            for line in listed
        ]

    def _list_ids(self, request: rq.ListIds) -> list[str]:
        return self._runner.index.ids(prefix=request.prefix, limit=request.limit)

    async def _follow(self, request: rq.Follow) -> Update:
        deadline = asyncio.get_running_loop().time() + request.timeout
        while True:
            job = self._runner.job(request.job_id)  # again: it may have come into memory anew, since it is resumed
            update = job.update(request.cursor, self._runner.link.now())
            left = deadline - asyncio.get_running_loop().time()
            if update.cursor != request.cursor or left <= 0:
                return update
            await job.changed(left)

    def _history(self, request: rq.History) -> list[Bucket]:
        return self._runner.job(request.job_id).file.buckets(
            since=request.since,
            until=float("inf") if request.until is None else request.until,
            ranks=request.ranks,
            width=request.width,
        )

    async def _read_log(self, request: rq.ReadLog) -> msgspec.Raw:
        job = self._runner.job(request.job_id)
        count = len(job.state.ranks) or job.state.world_size
        if not 0 <= request.rank < max(count, 1):
            raise UsageError(f"{job.job_id} has no rank {request.rank}", hint=f"it has ranks 0 to {count - 1}")
        return msgspec.Raw(await self._runner.link.ask(self._worker_of(job, request.rank), "log", encode(request)))

    def _worker_of(self, job: LiveJob, rank: int) -> str:
        """Who can read what that rank has written."""
        where = next(((p.worker, p.host) for p in job.state.placements if p.rank == rank), ("", ""))
        worker = self._runner.slots.near(*where)
        if worker is None:
            raise PoolError("no worker is there to read the job's files", hint="start one with: %dtrain up")
        return worker

    async def _list_checkpoints(self, request: rq.ListCheckpoints) -> msgspec.Raw:
        job = self._runner.job(request.job_id)
        spec = job.state.spec
        folder = str(PurePath(spec.cwd, spec.checkpoint_dir)) if spec.checkpoint_dir else ""
        question = msgspec.structs.replace(request, job_id=job.job_id, folder=folder)
        answer = await self._runner.link.ask(self._worker_of(job, 0), "checkpoints", encode(question), THOROUGH)
        return msgspec.Raw(answer)

    async def _stacks(self, job_id: str) -> dict[int, str]:
        job = self._runner.job(job_id)
        workers = dict.fromkeys(r.worker for r in job.state.ranks if not r.phase.has_exited)
        answers = await asyncio.gather(
            *(self._runner.link.ask(worker, "stacks", encode(job.job_id)) for worker in workers)
        )
        return {rank: text for answer in answers for rank, text in decode(answer, dict[int, str]).items()}

    def _cancel(self, request: rq.Cancel) -> JobPhase:
        job = self._runner.job(request.job_id)
        self._runner.feed(job.job_id, CancelRequested(time=self._runner.link.now(), force=request.force, by=request.by))
        return job.state.phase

    def _resume(self, request: rq.Resume) -> JobPhase:
        """Asked again while the job runs, it does nothing: the second click of two."""
        job = self._runner.job(request.job_id)
        if job.state.spec.kind is EntrypointKind.INTERACTIVE:
            raise UsageError(f"{job.job_id} is interactive: there is nothing to go on with", hint="launch it anew")
        if not job.state.phase.is_terminal:
            if job.file.read_only:
                raise UsageError(f"{job.job_id} runs in another pool", hint="see: %dtrain pool list")
            return job.state.phase
        self._check_ranks(job, request.ranks)
        job = self._runner.reopen(job)
        job.ambient = request.ambient
        event = ResumeRequested(
            time=self._runner.link.now(), step=request.step, path=request.path, ranks=request.ranks, by=request.by
        )
        self._runner.feed(job.job_id, event)
        self._keep(job, request.origin)
        return job.state.phase

    def _resize(self, request: rq.Resize) -> JobPhase:
        job = self._runner.job(request.job_id)
        if job.state.phase.is_terminal:
            hint = f"resume it on other ranks with: %dtrain resume {job.job_id} -n {request.ranks}"
            raise UsageError(f"{job.job_id} has ended: {job.state.phase.value}", hint=hint)
        if job.state.spec.kind is EntrypointKind.INTERACTIVE:
            raise UsageError(f"{job.job_id} is interactive: its ranks hold what no checkpoint has")
        self._check_ranks(job, request.ranks)
        self._runner.feed(job.job_id, ResizeRequested(time=self._runner.link.now(), ranks=request.ranks, by=request.by))
        return job.state.phase

    def _check_ranks(self, job: LiveJob, ranks: int | None) -> None:
        if ranks is None:
            return
        if ranks < 1:
            raise UsageError(f"{ranks} ranks", hint="a job has at least 1")
        wish = RequestSlots(job_id=job.job_id, ranks=ranks)
        decision = place(job.state.spec, self._runner.slots.free(besides=job.job_id), wish=wish)
        if isinstance(decision, Refused):
            raise NotEnoughSlotsError(decision.reason)

    async def _shutdown(self, timeout: float) -> None:
        """End every job, wait for their ranks, then the pool."""
        running = [job for job in self._runner.jobs.values() if not job.state.phase.is_terminal]
        for job in running:
            self._runner.feed(job.job_id, CancelRequested(time=self._runner.link.now(), force=True, by="pool stop"))
        deadline = self._runner.link.now() + timeout
        while any(not job.state.phase.is_terminal for job in running) and self._runner.link.now() < deadline:
            await asyncio.sleep(0.02)
        self._runner.link.close_pool()

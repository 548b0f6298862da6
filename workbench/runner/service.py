"""The runner: a pool's jobs, from the request of a client to the last exit of a rank.

Lives on the scheduler's event loop. A fact is recorded before it is acted on, commands are carried out in order, and
how they went comes back as facts: nothing here decides, the controller and the policies do.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from workbench.commands import (
    Announce,
    Command,
    ForgetCopies,
    ForgetJob,
    KeepEnvironment,
    ReleaseSlots,
    RequestSlots,
    StartRanks,
)
from workbench.errors import InvalidTransitionError, UnknownJobError, UsageError
from workbench.events import (
    Event,
    LaunchRefused,
    LaunchRequested,
    PoolLost,
    ResumeRequested,
    SlotsAwaited,
    SlotsGranted,
    SlotsReturned,
    Ticked,
    WorkerLost,
)
from workbench.policy.comeback import loss_text
from workbench.policy.placement import Granted, Waiting
from workbench.policy.recovery import least_ranks
from workbench.pool.messages import PROTOCOL, Hello, Message
from workbench.pool.scheduler import SchedulerLink
from workbench.runner.desk import Desk
from workbench.runner.health import Health
from workbench.runner.live import LiveJob
from workbench.runner.notify import VARIABLE as NOTIFY
from workbench.runner.notify import Notifier
from workbench.runner.rankdesk import RankDesk
from workbench.runner.slots import SlotTable
from workbench.state import JobPhase
from workbench.store.home import index_path, job_path
from workbench.store.index import JobIndex
from workbench.store.jobfile import JobFile

KEEP: Final = 64  # ended jobs whose output and answers stay in memory
FLUSH_EVERY: Final = 1.0
LAST_WORD: Final = 1.0  # s that notes of jobs' ends may keep a pool that is to end
logger = logging.getLogger(__name__)


def make_service(pool: str, link: SchedulerLink) -> Runner:
    """The runner of pool `pool`, with the jobs that its record holds."""
    return Runner(pool, link, JobIndex(index_path()))


class Runner:
    """See the module. `worker_*`, `received` and `request` are called by the pool."""

    def __init__(self, pool: str, link: SchedulerLink, index: JobIndex) -> None:
        self.pool, self.link, self.index = pool, link, index
        self.slots = SlotTable(link.may_be_cut_off)
        self.jobs: dict[str, LiveJob] = {}
        self._inbox: deque[tuple[str, Event]] = deque()
        self._busy = False
        self._requests = {**Desk(self).requests, **RankDesk(self).requests}
        self.notifier = Notifier(link.now)
        self._untold: list[tuple[LiveJob, Event]] = []
        self._rebuild()
        self._health = Health(link, lambda: tuple(self.jobs.values()), self.feed)
        self._flusher = link.spawn(self._keep_flushing())

    # --- what the pool says ---

    def kept(self, worker: str, environments: Mapping[str, Mapping[str, str]]) -> None:
        """A worker that was there before this scheduler has these: launchers' environments by job."""
        for job_id, env in environments.items():
            job = self.jobs.get(job_id)
            if job is None or job.state.phase.is_terminal:
                self.link.send(worker, ForgetJob(job_id=job_id, worker=worker))
            else:
                job.ambient = dict(env)

    def worker_joined(self, worker: str, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            logger.error("worker %s speaks protocol %s, not %s: ignored", worker, hello.protocol, PROTOCOL)
        elif self.slots.join(worker, hello):
            self._tell_late()
            for job in self.jobs.values():
                self.entrust(job, worker)
            self._dispatch()
            self._offer_slots()

    def worker_lost(self, worker: str, reason: str) -> None:
        self.slots.leave(worker)
        for job_id in tuple(self.jobs):
            self.feed(job_id, WorkerLost(time=self.link.now(), worker=worker, reason=reason))

    def received(self, worker: str, batch: Sequence[Message]) -> None:
        for message in batch:
            job = self.jobs.get(message.job_id)
            if job is None:
                continue
            if message.event is not None:
                self.feed(message.job_id, message.event)
            elif message.report is not None:
                job.report(message.report)
                self._health.report(job, message.report)

    async def request(self, name: str, body: bytes) -> bytes:
        if name not in self._requests:
            raise UsageError(f"the pool knows no request {name!r}", hint="client and pool may be of different versions")
        return await self._requests[name](body)

    def close(self) -> None:
        self._flusher.cancel()
        self._tell_late()
        self.notifier.close(LAST_WORD)
        self._health.close()
        for job in self.jobs.values():
            job.flush(self.link.now())
            job.close()
        self.index.close()

    # --- the one path of facts and commands ---

    def feed(self, job_id: str, event: Event) -> None:
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
        job = self.jobs[job_id]
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
                self.slots.enqueue(command)
                self._dispatch()
            case ReleaseSlots():
                self._forget_on_workers(job.job_id)
                self.slots.release(job.job_id)
                self._dispatch()
            case ForgetCopies():
                self._forget_on_workers(job.job_id)
                for worker in self.slots.workers:
                    self.entrust(job, worker)
            case Announce():
                job.record(command.event)
            case StartRanks():
                env = {**job.ambient, **command.spec.env}
                env.pop(NOTIFY, None)
                self._send(job, msgspec.structs.replace(command, spec=msgspec.structs.replace(command.spec, env=env)))
            case _:
                self._send(job, command)

    def _send(self, job: LiveJob, command: Any) -> None:
        if not self.link.send(command.worker, command):
            lost = WorkerLost(time=self.link.now(), worker=command.worker, reason="it is not connected")
            self._inbox.append((job.job_id, lost))

    def _forget_on_workers(self, job_id: str) -> None:
        """Every worker: ranks of any generation may have left something there. Whoever is not connected has nothing."""
        for worker in self.slots.workers:
            self.link.send(worker, ForgetJob(job_id=job_id, worker=worker))

    def entrust(self, job: LiveJob, worker: str) -> None:
        """What is in no record, and what another scheduler of this pool would need."""
        if self.link.comeback is not None and not job.state.phase.is_terminal:
            self.link.send(worker, KeepEnvironment(job_id=job.job_id, worker=worker, env=job.ambient))

    def _dispatch(self) -> None:
        for job_id, decision in self.slots.dispatch(lambda job_id: self.jobs[job_id].state.spec):
            now = self.link.now()
            event: Event
            if isinstance(decision, Granted):
                event = SlotsGranted(time=now, placements=decision.placements)
            elif isinstance(decision, Waiting):
                event = SlotsAwaited(time=now, reason=decision.reason)
            else:
                event = LaunchRefused(time=now, reason=decision.reason)
            self.feed(job_id, event)

    def _offer_slots(self) -> None:
        """Slots have come free: an elastic job that runs on fewer ranks than it wants could have more."""
        for job_id, job in tuple(self.jobs.items()):
            state = job.state
            if state.phase is not JobPhase.HEALTHY or not least_ranks(state) or state.reform:
                continue
            ranks = self.slots.could_have(job_id, state.spec)
            if ranks > len(state.ranks):
                self.feed(job_id, SlotsReturned(time=self.link.now(), ranks=ranks))

    def _set_tick(self, job: LiveJob) -> None:
        if job.tick is not None:
            job.tick.cancel()
            job.tick = None
        if job.state.deadline is not None:
            delay = job.state.deadline - self.link.now()
            job.tick = self.link.call_later(delay, functools.partial(self._on_tick, job.job_id, job.state.deadline))

    def _on_tick(self, job_id: str, deadline: float) -> None:
        # The timer runs on the monotonic clock: a wall clock that was set back must not make the tick come too early.
        self.feed(job_id, Ticked(time=max(self.link.now(), deadline)))

    def _phase_changed(self, job: LiveJob) -> None:
        now = self.link.now()
        if job.state.phase.is_terminal:
            job.flush(now)
            self._forget_old()
            self._offer_slots()
        self.index.put(job.summary(now), self.pool)

    def _forget_old(self) -> None:
        ended = [job for job in self.jobs.values() if job.state.phase.is_terminal]
        for job in ended[:-KEEP]:  # in the order in which they came into memory
            del self.jobs[job.job_id]
            job.close()

    async def _keep_flushing(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY)
            for job in tuple(self.jobs.values()):
                if not job.state.phase.is_terminal:
                    job.flush(self.link.now())

    # --- the record ---

    def _rebuild(self) -> None:
        """Jobs that ran or waited when an earlier scheduler of this pool went away: their ranks are gone, all know."""
        for summary in self.index.list(pool=self.pool, limit=10_000, unfinished=True):
            try:
                job = self._open(summary.job_id, read_only=False)
            except Exception:
                logger.exception("job %s cannot be read", summary.job_id)
                continue
            self.jobs[job.job_id] = job
            if self.link.comeback:
                job.on_record = lambda job, event: self._untold.append((job, event))
        # As the queue was: those that had slots, then those that waited, in the order in which they came.
        for job in sorted(self.jobs.values(), key=lambda job: (not job.state.ranks, job.state.submitted_at)):
            try:
                self.feed(job.job_id, self._loss(job))
            except Exception:  # one job must not keep the pool from coming back
                logger.exception("job %s cannot be taken up", job.job_id)

    def _loss(self, job: LiveJob) -> PoolLost:
        now, deaths = self.link.now(), self.link.comeback.deaths if self.link.comeback else ()
        return PoolLost(
            time=now,
            reason=loss_text(self.link.comeback, job.summary(now).step),
            since=deaths[-1] if deaths else None,
            comes_back=self.link.comeback is not None and self.link.comeback.goes_on,
        )

    def _tell_late(self) -> None:
        """Whom to tell was not known before a worker had said what it keeps."""
        late, self._untold = self._untold, []
        for job, event in late:
            job.on_record = self.notifier.heard
            self.notifier.heard(job, event)

    def _open(self, job_id: str, *, read_only: bool) -> LiveJob:
        job = LiveJob(job_id, JobFile.open(job_path(job_id), read_only=read_only))
        job.restore()
        job.on_record = self.notifier.heard
        return job

    def job(self, job_id: str) -> LiveJob:
        """A job in memory, or an ended one from its record."""
        known = self.jobs.get(job_id)
        if known is not None:
            if known.file.read_only and not known.state.phase.is_terminal:
                known.restore()  # it runs in another pool, which goes on writing
            return known
        full = self.resolve(job_id)
        if full not in self.jobs:
            self.jobs[full] = self._open(full, read_only=True)
            self._forget_old()
        return self.jobs[full]

    def resolve(self, job_id: str) -> str:
        """The full id of a job, given whole or by an unambiguous beginning."""
        if job_id in self.jobs or self.index.get(job_id) is not None:
            return job_id
        ids = self.index.ids(prefix=job_id, limit=20) if job_id else []
        if len(ids) == 1:
            return ids[0]
        listed = ", ".join(ids or self.index.nearest(job_id))
        what = f"{job_id!r} could be several jobs" if ids else f"no job {job_id!r} in pool {self.pool}"
        raise UnknownJobError(what, hint=f"did you mean one of: {listed}" if listed else "no job has run here yet")

    def reopen(self, job: LiveJob) -> LiveJob:
        """An ended job whose record is to be written again."""
        if not job.file.read_only:
            return job
        job.close()
        again = self.jobs[job.job_id] = self._open(job.job_id, read_only=False)
        return again

"""Looks after running jobs: who has stopped getting on, who keeps the others waiting, whose gradients are odd.

Some times a second each job's beats go to `policy.health`. On suspicion all agents are asked for evidence, `diagnosis`
names the culprit, and once the job has stood still for as long as it may, which is looked at again, `StallDetected` is
fed. Nothing here decides what becomes of the job.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from msgspec.structs import replace

from workbench import blackbox
from workbench.errors import PoolError
from workbench.events import (
    Event,
    GradientsStoodOut,
    StallDetected,
    StallEnded,
    StepsBegan,
    StragglerDetected,
    StragglerGone,
)
from workbench.evidence import RankEvidence
from workbench.policy import standing
from workbench.policy.diagnosis import as_stall, diagnose
from workbench.policy.health import EARLY, KEPT_WAITING, Pace, is_kept_waiting, is_stalled, patience
from workbench.policy.stacks import fold
from workbench.policy.straggler import Marks, advance
from workbench.pool.messages import decode, encode
from workbench.pool.scheduler import SchedulerLink
from workbench.requests import AskEvidence
from workbench.runner.live import LiveJob
from workbench.spec import EntrypointKind
from workbench.state import JobPhase, RankPhase
from workbench.telemetry import GradientStatistics, RankBeat, Report, StepsTaken

LOOK_EVERY: Final = 0.25
LEAD: Final = 0.65  # s before its patience is over that evidence is gathered: it is to be told in time
AHEAD: Final = 1.0  # s that a rank's age is thought on after its last beat
SOONEST: Final = 0.4  # of the patience, before which nobody is suspected
SHORTEST: Final = 0.02  # s between two looks
ANSWER: Final = 1.0  # s that an agent may gather evidence
WITHIN: Final = 1.5  # s until it is here
AGAIN: Final = 2.0  # s after which what was no stall is looked at again; then ever longer
WINDOW: Final = 1.0  # s over which ranks are compared
KEPT: Final = 101  # step times kept for the median


class Monitor:
    """What is known of one job's health; a new generation begins anew, but for what was learned of its pace."""

    def __init__(self, now: float) -> None:
        self.pace = Pace()
        self.restart_count = -1
        self.task: asyncio.Task[Any] | None = None
        self.durations: deque[float] = deque(maxlen=KEPT)
        self.marks = Marks()
        self.odd = standing.Marks()
        self.begin(0, now)

    def begin(self, restart_count: int, now: float) -> None:
        self.restart_count, self.since = restart_count, now
        self.pace = self.pace.restart()
        self.beats: dict[int, tuple[RankBeat, float]] = {}
        self.first: dict[int, tuple[int, float]] = {}  # each rank's first step and its end
        self.own: dict[int, list[float]] = {}  # of this window
        self.window = now
        self.marks = Marks()
        self.stalled_at: float | None = None
        self.is_patient = False  # what was told is no stall yet: the job has not begun
        self.not_before, self.delay = 0.0, AGAIN

    def report(self, report: RankBeat | StepsTaken, now: float) -> None:
        if report.restart_count > self.restart_count:
            self.begin(report.restart_count, now)
        if report.restart_count < self.restart_count:
            return
        if isinstance(report, RankBeat):
            self.pace = self.pace.learn(report)
            self.beats[report.rank] = (report, now)
            return
        if report.rank not in self.first:
            first = blackbox.StepRecord._make(blackbox.STEP.unpack_from(report.block))
            self.first[report.rank] = (first.step, first.end)
        # The newest of a report stands for all: some ten a second are enough.
        last = blackbox.StepRecord._make(
            blackbox.STEP.unpack_from(report.block, len(report.block) - blackbox.STEP.size)
        )
        if last.duration > 0.0:
            self.durations.append(last.duration)
            self.own.setdefault(report.rank, []).append(max(0.0, last.duration - last.comm - last.checkpoint))

    def standing(self, alive: Iterable[int], now: float) -> dict[int, RankBeat]:
        """The newest beat of each of these ranks, its age as of now."""
        return {
            rank: replace(beat, age=beat.age + min(now - at, AHEAD))
            for rank in alive
            if (known := self.beats.get(rank)) is not None
            for beat, at in (known,)
        }

    def paced(self) -> Pace:
        return replace(self.pace, step=statistics.median(self.durations) if self.durations else 0.0)


class Health:
    """Of all jobs of a runner. `feed(job_id, event)` records and acts."""

    def __init__(
        self, link: SchedulerLink, jobs: Callable[[], Sequence[LiveJob]], feed: Callable[[str, Event], None]
    ) -> None:
        self._link, self._jobs, self._feed = link, jobs, feed
        self._monitors: dict[str, Monitor] = {}
        self._task = link.spawn(self._keep_looking())

    def close(self) -> None:
        self._task.cancel()
        for monitor in self._monitors.values():
            if monitor.task is not None:
                monitor.task.cancel()

    def report(self, job: LiveJob, report: Report) -> None:
        """Telemetry of a job that runs."""
        if isinstance(report, RankBeat | StepsTaken):
            self._monitor(job).report(report, self._now())
        elif isinstance(report, GradientStatistics) and report.restart_count == job.state.restart_count:
            self._stand(job, self._monitor(job), report)

    def _now(self) -> float:
        """Seconds of a clock that is never set."""
        return asyncio.get_running_loop().time()

    def _monitor(self, job: LiveJob) -> Monitor:
        monitor = self._monitors.get(job.job_id)
        if monitor is None:
            monitor = self._monitors[job.job_id] = Monitor(self._now())
        return monitor

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            running = [job for job in self._jobs() if not job.state.phase.is_terminal]
            names = {job.job_id for job in running}
            self._monitors = {name: monitor for name, monitor in self._monitors.items() if name in names}
            for job in running:
                if job.state.phase is JobPhase.HEALTHY and job.job_id in self._monitors:
                    self._look(job, self._monitors[job.job_id])

    def _look(self, job: LiveJob, monitor: Monitor) -> None:
        if monitor.restart_count != job.state.restart_count:
            return
        now, alive = self._now(), _alive(job)
        self._begin(job, monitor, now)
        self._compare(job, monitor, alive, now)
        if monitor.task is not None and not monitor.task.done():
            return
        pace, standing, spec = monitor.paced(), monitor.standing(alive, now), job.state.spec
        most = patience(standing, pace, spec)
        is_late = is_stalled(standing, pace, spec, max(SOONEST, EARLY - LEAD / most)) is not None
        is_waiting = is_kept_waiting(standing, pace, spec) is not None
        if monitor.stalled_at is not None and not (monitor.is_patient and is_late):
            if not is_waiting and is_stalled(standing, pace, spec, EARLY / 2) is None:
                seconds, monitor.stalled_at = now - monitor.stalled_at, None
                self._tell(job, StallEnded(time=self._link.now(), restart_count=monitor.restart_count, seconds=seconds))
        elif not (is_late or is_waiting):
            monitor.not_before, monitor.delay = 0.0, AGAIN
        elif now >= monitor.not_before:
            monitor.task = self._link.spawn(self._investigate(job, monitor, is_patient=not is_late))

    def _tell(self, job: LiveJob, event: Event) -> None:
        self._feed(job.job_id, event)

    # --- stalls ---

    async def _investigate(self, job: LiveJob, monitor: Monitor, *, is_patient: bool) -> None:
        """`is_patient`: it is only to be told who keeps the others waiting at the start."""
        count, spec = monitor.restart_count, job.state.spec
        evidence = await self._gather(job, count, deep=True)
        if is_patient:
            reason = is_kept_waiting(_by_rank(evidence), monitor.paced(), spec)
        else:
            evidence, reason = await self._confirm(job, monitor, evidence)
        if reason is None or job.state.phase is not JobPhase.HEALTHY or job.state.restart_count != count:
            return
        pace = monitor.paced()
        most = patience(_by_rank(evidence), pace, spec)
        limit = KEPT_WAITING if is_patient else EARLY * most
        if any(self._link.may_be_cut_off(rank.worker) for rank in job.state.ranks):
            monitor.not_before = self._now() + LEAD  # the pool will say that its host is lost, or it gets on
            return
        finished = tuple(rank.rank for rank in job.state.ranks if rank.phase is RankPhase.SUCCEEDED)
        blamed_only = spec.kind is EntrypointKind.INTERACTIVE or not pace.has_begun
        verdict = diagnose(evidence, limit=limit, finished=finished, blamed_only=blamed_only)
        now, wall = self._now(), self._link.now()
        if verdict is None:  # it may take its time; looked at again while the same pause lasts
            monitor.not_before, monitor.delay = now + monitor.delay, 1.5 * monitor.delay
            return
        stood = min(rank.age for rank in evidence if rank.age >= limit)
        monitor.stalled_at, monitor.is_patient, monitor.delay = now - stood, is_patient, AGAIN
        stall = replace(
            as_stall(verdict, evidence, since=wall - stood),
            patience=max(1.0, most - stood) if is_patient else 0.0,
            stacks=fold(evidence, verdict.culprits or verdict.suspects),
            evidence=(*verdict.evidence, reason),
        )
        self._tell(job, StallDetected(time=wall, restart_count=count, stall=stall))

    async def _confirm(
        self, job: LiveJob, monitor: Monitor, found: list[RankEvidence]
    ) -> tuple[list[RankEvidence], str | None]:
        """Wait until the job has stood still for as long as it may; no reason: it got on meanwhile."""
        last = max((rank.age for rank in found), default=0.0)
        while True:
            evidence = _renewed(found, await self._gather(job, monitor.restart_count, deep=False))
            pace, spec = monitor.paced(), job.state.spec
            reason = is_stalled(_by_rank(evidence), pace, spec)
            oldest = max((rank.age for rank in evidence), default=0.0)
            if reason is not None or oldest < last or job.state.phase is not JobPhase.HEALTHY:
                return evidence, reason
            last, missing = oldest, EARLY * patience(_by_rank(evidence), pace, spec) - oldest
            if missing > 2 * LEAD:  # it may take longer than was thought
                return evidence, None
            await asyncio.sleep(min(max(missing, SHORTEST), LEAD))

    async def _gather(self, job: LiveJob, count: int, *, deep: bool) -> list[RankEvidence]:
        """Of every rank that runs, in rank order; one whose agent does not answer says so."""
        alive = set(_alive(job))
        workers = dict.fromkeys(rank.worker for rank in job.state.ranks if rank.rank in alive)
        answers = await asyncio.gather(*(self._ask(worker, job.job_id, count, deep) for worker in workers))
        known = {rank.rank: rank for answer in answers if isinstance(answer, list) for rank in answer}
        silent = {worker: answer for worker, answer in zip(workers, answers, strict=True) if isinstance(answer, str)}
        return [
            known.get(rank.rank)
            or RankEvidence(rank=rank.rank, missing=silent.get(rank.worker, "its process is not there any more"))
            for rank in job.state.ranks
            if rank.rank in alive
        ]

    async def _ask(self, worker: str, job_id: str, count: int, deep: bool) -> list[RankEvidence] | str:
        wish = AskEvidence(job_id=job_id, restart_count=count, deep=deep, timeout=ANSWER)
        try:
            answer = await self._link.ask(worker, "evidence", encode(wish), timeout=WITHIN)
        except PoolError:
            return f"worker {worker} did not answer within {WITHIN:g} s"
        except Exception as error:  # whatever is wrong there, the other hosts' evidence counts
            return f"worker {worker} failed to look: {type(error).__name__}: {error}"
        return decode(answer, list[RankEvidence])

    # --- gradients ---

    def _stand(self, job: LiveJob, monitor: Monitor, report: GradientStatistics) -> None:
        monitor.odd, found = standing.advance(monitor.odd, report)
        for one in found:
            told = GradientsStoodOut(
                time=self._link.now(), restart_count=report.restart_count, step=report.last_step, ranks=one.ranks,
                about=one.about, score=one.score, finding=one.finding,
            )  # fmt: skip
            self._tell(job, told)

    # --- first steps, stragglers ---

    def _begin(self, job: LiveJob, monitor: Monitor, now: float) -> None:
        ranks = [rank.rank for rank in job.state.ranks]
        if monitor.pace.has_begun or not ranks or any(rank not in monitor.first for rank in ranks):
            return
        monitor.pace = monitor.pace.begin(now - monitor.since)
        step, end = max(monitor.first.values(), key=lambda first: first[1])
        self._tell(job, StepsBegan(time=end, restart_count=monitor.restart_count, step=step))

    def _compare(self, job: LiveJob, monitor: Monitor, alive: list[int], now: float) -> None:
        if len(alive) < 2 or now - monitor.window < WINDOW or any(rank not in monitor.own for rank in alive):
            return
        own = {rank: statistics.median(monitor.own[rank]) for rank in alive}
        hosts = {place.rank: place.host for place in job.state.placements}
        monitor.marks, named, gone = advance(monitor.marks, own, monitor.paced().step, hosts)
        monitor.own, monitor.window = {}, now
        time, count = self._link.now(), monitor.restart_count
        for one in named:
            self._tell(
                job,
                StragglerDetected(time=time, restart_count=count, rank=one.rank, score=one.score, reason=one.reason),
            )
        for rank in gone:
            self._tell(job, StragglerGone(time=time, restart_count=count, rank=rank))


def _alive(job: LiveJob) -> list[int]:
    return [rank.rank for rank in job.state.ranks if not rank.phase.has_exited]


def _by_rank(evidence: list[RankEvidence]) -> dict[int, RankEvidence]:
    return {rank.rank: rank for rank in evidence if not rank.missing}


def _renewed(evidence: list[RankEvidence], fresh: list[RankEvidence]) -> list[RankEvidence]:
    """What was found, with what the boxes say now."""
    newer = {rank.rank: rank for rank in fresh}
    return [
        replace(
            old,
            age=new.age,
            cpu=100.0 * (new.cpu_time - old.cpu_time) / max(new.clock - old.clock, 0.01),
            step=new.step,
            activity=new.activity,
            state=new.state,
            is_evaluating=new.is_evaluating,
            expected=new.expected,
        )
        if (new := newer.get(old.rank)) is not None and not new.missing and not old.missing
        else new or old
        for old in evidence
    ]

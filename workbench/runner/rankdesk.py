"""What clients ask of a job's ranks: cells, values, interrupts, faults."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import workbench.requests as rq
from workbench.commands import (
    ExecuteCell,
    InjectFault,
    InterruptRanks,
    PullValue,
    PushValue,
)
from workbench.errors import UsageError
from workbench.events import (
    CellSent,
    FaultHappened,
    FaultInjected,
)
from workbench.faults import FAULTS, ON_CHECKPOINT, Place
from workbench.feed import CellStarted
from workbench.runner.answers import Requests, as_request
from workbench.runner.live import LiveJob
from workbench.spec import EntrypointKind
from workbench.state import JobPhase

if TYPE_CHECKING:
    from workbench.runner.service import Runner

CELL_KEPT: Final = 2**16  # characters of a cell that the record keeps
NOTICE: Final = 0.05  # s in which an answer gets out before the scheduler is killed
ANSWER: Final = 0.5  # s that an injected fault's asker waits to hear that it cannot be done


class RankDesk:
    """Of one runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._cells = 0
        self.requests: Requests = {
            "execute": as_request(rq.Execute, self._execute),
            "push": as_request(rq.Push, self._push),
            "pull": as_request(rq.Pull, self._pull),
            "interrupt": as_request(rq.Interrupt, self._interrupt),
            "inject": as_request(rq.Inject, self._inject),
        }

    def _execute(self, request: rq.Execute) -> CellStarted:
        started = self._on_ranks(
            request.job_id,
            request.ranks,
            lambda where, cell_id: ExecuteCell(**where, cell_id=cell_id, source=request.source),
        )
        job = self._runner.job(request.job_id)
        sent = CellSent(
            time=self._runner.link.now(),
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
            self._runner.link.send(where["worker"], InterruptRanks(**where))

    async def _inject(self, request: rq.Inject) -> bool:
        """Have it done; False: it waits for its moment. Raises `UsageError` when it is told soon that it cannot be."""
        job = self._running(request.job_id)
        if request.fault not in FAULTS:
            raise UsageError(f"there is no fault {request.fault!r}", hint=f"faults: {', '.join(FAULTS)}")
        (where,) = self._by_worker(job, (request.rank,))
        path = job.newest_checkpoint() if request.fault in ON_CHECKPOINT else ""
        known = job.event_count
        is_own = FAULTS[request.fault].place is Place.POOL
        if is_own and self._runner.link.comeback is None:
            raise UsageError(f"{request.fault} cannot be done: this pool is not one of ours, and would not come back")
        self._runner.feed(
            job.job_id, FaultInjected(time=self._runner.link.now(), fault=request.fault, rank=request.rank)
        )
        if is_own:
            self._die(job, request)
            return True
        fault = InjectFault(
            job_id=job.job_id, worker=where["worker"], rank=request.rank, fault=request.fault, path=path
        )
        self._runner.link.send(where["worker"], fault)
        told = await self._happened(job, request, known)
        if told is not None and told.problem:
            raise UsageError(f"{request.fault} cannot be done to rank {request.rank}: {told.problem}")
        return told is not None

    def _die(self, job: LiveJob, request: rq.Inject) -> None:
        """Once who asked has heard that it is done: the time told is that of the kill."""
        happened = FaultHappened(
            time=self._runner.link.now() + NOTICE,
            restart_count=job.state.restart_count,
            fault=request.fault,
            rank=request.rank,
            detail=f"scheduler process {os.getpid()}",
        )
        self._runner.feed(job.job_id, happened)
        self._runner.link.call_later(NOTICE, lambda: os.kill(os.getpid(), signal.SIGKILL))

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
        places, cursor = self._by_worker(job, ranks), job.cursor(self._runner.link.now())
        for where in places:
            self._runner.link.send(where["worker"], make(where, cell_id))
        return CellStarted(
            cell_id=cell_id, cursor=cursor, ranks=tuple(sorted(rank for where in places for rank in where["ranks"]))
        )

    def _running(self, job_id: str) -> LiveJob:
        job = self._runner.job(job_id)
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

"""The pool's slots and the queue for them. Placement itself is `policy.placement`; here is who holds what."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from workbench.commands import RequestSlots
from workbench.feed import WorkerStatus
from workbench.policy.placement import Decision, Granted, Waiting, WorkerSlots, place
from workbench.pool.messages import Hello
from workbench.spec import JobSpec
from workbench.state import Placement


class SlotTable:
    """Workers, what each job holds, and the jobs that wait, in order."""

    def __init__(self, may_be_cut_off: Callable[[str], bool] = lambda worker: False) -> None:
        """No slot is granted on a worker of which `may_be_cut_off` is true."""
        self._may_be_cut_off = may_be_cut_off
        self._passed_over: set[str] = set()  # for that reason
        self._workers: dict[str, Hello] = {}
        self._held: dict[str, tuple[Placement, ...]] = {}
        self._queue: list[str] = []
        self._wishes: dict[str, RequestSlots] = {}
        self._reasons: dict[str, str] = {}

    def join(self, worker: str, hello: Hello) -> bool:
        """Note a worker; False when it is no news, nor could there be a slot for anybody that there was not."""
        is_back = worker in self._passed_over
        self._passed_over.discard(worker)
        if self._workers.get(worker) == hello:
            return is_back
        self._workers[worker] = hello
        return True

    def leave(self, worker: str) -> None:
        self._workers.pop(worker, None)
        self._passed_over.discard(worker)

    def enqueue(self, wish: RequestSlots) -> None:
        """Queue a job; one that held slots (it restarts) gives them back and goes first. The newest wish counts."""
        job_id = wish.job_id
        is_restart = self._held.pop(job_id, None) is not None
        self._wishes[job_id] = wish
        if job_id not in self._queue:
            self._queue.insert(0 if is_restart else len(self._queue), job_id)

    def release(self, job_id: str) -> None:
        """The job wants and holds nothing any more."""
        self._held.pop(job_id, None)
        self._reasons.pop(job_id, None)
        self._wishes.pop(job_id, None)
        if job_id in self._queue:
            self._queue.remove(job_id)

    def dispatch(self, spec_of: Callable[[str], JobSpec]) -> Iterator[tuple[str, Decision]]:
        """What is new for the queue: granted and refused jobs leave it, waiting ones say once why they wait."""
        ahead = ""
        for job_id in tuple(self._queue):
            if job_id not in self._queue:  # what an earlier decision brought about has dealt with it
                continue
            decision = place(spec_of(job_id), self._grantable(), ahead=ahead, wish=self._wishes[job_id])
            if isinstance(decision, Waiting):
                ahead = ahead or job_id
                if self._reasons.get(job_id) != decision.reason:
                    self._reasons[job_id] = decision.reason
                    yield job_id, decision
                continue
            self._queue.remove(job_id)
            self._reasons.pop(job_id, None)
            if isinstance(decision, Granted):
                self._held[job_id] = decision.placements
            yield job_id, decision

    def _grantable(self) -> list[WorkerSlots]:
        self._passed_over = {worker for worker in self._workers if self._may_be_cut_off(worker)}
        # Not left out: a job that needs them too can run here, only not now.
        return [replace(slots, free=()) if slots.worker in self._passed_over else slots for slots in self.free()]

    def could_have(self, job_id: str, spec: JobSpec) -> int:
        """How many ranks a running job would get if it asked for all that it wants; 0: not those.

        Not on a worker that is not warm yet: the job would stand still until it is.
        """
        if self._queue:  # others wait
            return 0
        warm = [
            slots for slots in self.free(besides=job_id) if slots.is_warm and not self._may_be_cut_off(slots.worker)
        ]
        decision = place(spec, warm, wish=RequestSlots(job_id=job_id))
        return len(decision.placements) if isinstance(decision, Granted) else 0

    def free(self, *, besides: str = "") -> tuple[WorkerSlots, ...]:
        """The workers' slots that no job holds, but for the one named."""
        held = (placements for job_id, placements in self._held.items() if job_id != besides)
        taken = {(p.worker, p.slot) for placements in held for p in placements}
        return tuple(
            WorkerSlots(
                worker=worker,
                host=hello.host,
                total=hello.slots,
                free=tuple(slot for slot in range(hello.slots) if (worker, slot) not in taken),
                is_warm=hello.is_warm,
            )
            for worker, hello in self._workers.items()
        )

    def near(self, worker: str, host: str) -> str | None:
        """That worker; when it is gone another one of its host, which sees the same files, or any, which may."""
        if worker in self._workers:
            return worker
        there = (other for other, hello in self._workers.items() if hello.host == host)
        return next(there, next(iter(self._workers), None))

    def status(self) -> tuple[WorkerStatus, ...]:
        return tuple(
            WorkerStatus(
                address=slots.worker,
                host=slots.host,
                pid=self._workers[slots.worker].pid,
                slots=slots.total,
                free=len(slots.free),
                accelerator=self._workers[slots.worker].accelerator,
            )
            for slots in self.free()
        )

    def waiting(self) -> tuple[tuple[str, str], ...]:
        return tuple((job_id, self._reasons.get(job_id, "waiting")) for job_id in self._queue)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self._workers)

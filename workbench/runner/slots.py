"""The pool's slots and the queue for them. Placement itself is `policy.placement`; here is who holds what."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from workbench.commands import RequestSlots
from workbench.feed import WorkerStatus
from workbench.policy.placement import Decision, Granted, Waiting, WorkerSlots, place
from workbench.pool.messages import Hello
from workbench.spec import JobSpec
from workbench.state import Placement


class SlotTable:
    """Workers, what each job holds, and the jobs that wait, in order."""

    def __init__(self) -> None:
        self._workers: dict[str, Hello] = {}
        self._held: dict[str, tuple[Placement, ...]] = {}
        self._queue: list[str] = []
        self._wishes: dict[str, RequestSlots] = {}
        self._reasons: dict[str, str] = {}

    def join(self, worker: str, hello: Hello) -> bool:
        """Note a worker; False when it said the same before."""
        if self._workers.get(worker) == hello:
            return False
        self._workers[worker] = hello
        return True

    def leave(self, worker: str) -> None:
        self._workers.pop(worker, None)

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
            decision = place(spec_of(job_id), self.free(), ahead=ahead, wish=self._wishes[job_id])
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

    def could_have(self, job_id: str, spec: JobSpec) -> int:
        """How many ranks a running job would get if it asked for all that it wants; 0: not those.

        Not on a worker that is not warm yet: the job would stand still until it is.
        """
        if self._queue:  # others wait
            return 0
        warm = [slots for slots in self.free(besides=job_id) if slots.is_warm]
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

"""A simulated pool for tests: the real controller and placement, but no process, socket, file or waiting.

    pool = FakePool({"tcp://a:1": 2})
    job_id = pool.launch(JobSpec(entrypoint="train.py", nproc_per_node=2))
    pool.run()                          # all messages arrive, all deadlines that matter pass
    pool.kill(job_id, rank=1)
    pool.run()
    assert pool.states[job_id].reason == "rank 1 killed by SIGKILL"

Time is `pool.now` and passes only in `advance` and `run`. Commands and events wait in their agent's two queues until
`carry`, `deliver` or `settle` moves them, so that a test decides what crosses what. `pool.record[job_id]` is what a
runner would have recorded. The pool raises `AssertionError` when the controller breaks its contract with agents.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Mapping
from functools import reduce

from workbench.commands import (
    Announce,
    Command,
    ReleaseSlots,
    RequestCheckpoint,
    RequestSlots,
    StartRanks,
    StartStore,
    StopRanks,
)
from workbench.controller import transition
from workbench.events import (
    CancelRequested,
    Event,
    LaunchRefused,
    LaunchRequested,
    PhaseChanged,
    PoolLost,
    ResizeRequested,
    ResumeRequested,
    SlotsAwaited,
    SlotsGranted,
    Ticked,
    WorkerLost,
)
from workbench.policy.placement import Granted, Waiting, WorkerSlots, place
from workbench.spec import JobSpec
from workbench.state import JobState, Placement
from workbench.testing.agent import AgentCommand, FakeAgent, FakeRank


class FakePool:
    """See the module. `workers` are slots by address, all on one host unless `hosts` names another."""

    def __init__(
        self, workers: Mapping[str, int], *, hosts: Mapping[str, str] | None = None, start: float = 0.0
    ) -> None:
        self.now = start
        self.agents: dict[str, FakeAgent] = {}
        self.states: dict[str, JobState] = {}
        self.record: dict[str, list[Event]] = {}
        self.commands: list[Command] = []  # all that the controller ever wanted, in order
        self.held: dict[str, tuple[Placement, ...]] = {}
        self.queue: list[str] = []
        self.wishes: dict[str, RequestSlots] = {}
        self.stray: list[tuple[str, Event]] = []  # what lost agents had still to say
        self._inbox: deque[tuple[str, Event]] = deque()
        self._is_busy = False
        for worker, slots in workers.items():
            self.join(worker, slots, host=(hosts or {}).get(worker, "127.0.0.1"))

    # --- what people do ---

    def launch(self, spec: JobSpec, job_id: str = "") -> str:
        """Ask for a job; its id."""
        job_id = job_id or f"job-{len(self.states)}"
        self.feed(job_id, LaunchRequested(time=self.now, job_id=job_id, spec=spec))
        return job_id

    def cancel(self, job_id: str, *, force: bool = False, by: str = "") -> None:
        self.feed(job_id, CancelRequested(time=self.now, force=force, by=by))

    def resume(self, job_id: str, *, step: int | None = None, path: str = "", ranks: int | None = None) -> None:
        self.feed(job_id, ResumeRequested(time=self.now, step=step, path=path, ranks=ranks))

    def resize(self, job_id: str, ranks: int) -> None:
        self.feed(job_id, ResizeRequested(time=self.now, ranks=ranks))

    # --- what happens to ranks and workers ---

    def exit(self, job_id: str, rank: int, code: int = 0) -> None:
        """The rank ends of itself."""
        agent, process = self._find(job_id, rank)
        agent.end(process, self.now, exit_code=code)

    def kill(self, job_id: str, rank: int, number: int = signal.SIGKILL) -> None:
        """Somebody else ends the rank."""
        agent, process = self._find(job_id, rank)
        agent.end(process, self.now, number=int(number))

    def raise_error(
        self, job_id: str, rank: int, error: str = "ValueError: bad", *, is_collective: bool = False
    ) -> None:
        """An exception leaves the rank's program; it exits with `exit(job_id, rank, 1)`."""
        agent, process = self._find(job_id, rank)
        agent.say_raised(process, self.now, error, is_collective=is_collective)

    def join(self, worker: str, slots: int, *, host: str = "127.0.0.1") -> None:
        self.agents[worker] = FakeAgent(worker, slots, host)
        self._dispatch()

    def lose(self, worker: str, reason: str = "") -> None:
        """The worker is gone at once, and its ranks with it; what it had still to say is in `stray`."""
        self.stray += self.agents.pop(worker).events
        for job_id in tuple(self.states):
            self.feed(job_id, WorkerLost(time=self.now, worker=worker, reason=reason))

    def lose_pool(self, reason: str = "the pool's scheduler went away", *, comes_back: bool = False) -> None:
        """Every worker is gone, and the scheduler was: jobs learn it from their records.

        `comes_back`: jobs go on, as soon as a worker has joined again.
        """
        self.agents.clear()
        self.held.clear()
        self.queue.clear()
        for job_id in tuple(self.states):
            self.feed(job_id, PoolLost(time=self.now, reason=reason, comes_back=comes_back))

    def start_ranks(self, worker: str) -> None:
        """The ranks that a slow agent was told to start run now."""
        self.agents[worker].start_ranks(self.now)

    # --- time and messages ---

    def carry(self, worker: str) -> bool:
        """The agent takes its next command; whether there was one."""
        return self.agents[worker].carry(self.now)

    def deliver(self, worker: str) -> bool:
        """The agent's next event reaches the controller; whether there was one."""
        agent = self.agents[worker]
        if not agent.events:
            return False
        self.feed(*agent.events.popleft())
        return True

    def settle(self) -> None:
        """All messages arrive, in both directions, until none is left; no time passes."""
        while any(self.carry(worker) or self.deliver(worker) for worker in tuple(self.agents)):
            pass

    def advance(self, seconds: float) -> None:
        """Time passes: stopped ranks are killed when their grace ends, jobs get the ticks they asked for."""
        target = self.now + seconds
        while (due := self.next_due()) is not None and due <= target:
            self.now = max(self.now, due)
            self._fire()
        self.now = target

    def run(self, limit: float = 3600.0) -> None:
        """Let everything that needs nobody happen, for at most `limit` simulated seconds."""
        end = self.now + limit
        self.settle()
        while (due := self.next_due()) is not None and due <= end:
            self.advance(max(0.0, due - self.now))
            self.settle()

    def next_due(self) -> float | None:
        """When time alone would next change something."""
        ends = [p.kill_at for agent in self.agents.values() for p in agent.ranks if p.kill_at is not None]
        ticks = [state.deadline for state in self.states.values() if state.deadline is not None]
        return min([*ends, *ticks], default=None)

    def feed(self, job_id: str, event: Event) -> None:
        """An event reaches the controller, after those that are on their way already."""
        self._inbox.append((job_id, event))
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._inbox:
                for command in self.apply(*self._inbox.popleft()):
                    self._carry_out(command)
        finally:
            self._is_busy = False

    def apply(self, job_id: str, event: Event) -> tuple[Command, ...]:
        """Record one event and change the job's state by it; a place for a test's own checks."""
        old = self.states.get(job_id)
        new, commands = transition(old, event)
        self.states[job_id] = new
        story = self.record.setdefault(job_id, [])
        story.append(event)
        if old is None or old.phase is not new.phase:
            changed = PhaseChanged(time=event.time, phase=new.phase, reason=new.reason, restart_count=new.restart_count)
            story.append(changed)
        return commands

    # --- looking ---

    def alive(self, job_id: str) -> list[FakeRank]:
        """The job's processes, of whatever generation."""
        return [p for agent in self.agents.values() for p in agent.ranks if p.job_id == job_id]

    def replay(self, job_id: str) -> JobState | None:
        """The state that the job's record tells."""
        start: JobState | None = None
        return reduce(lambda state, event: transition(state, event)[0], self.record[job_id], start)

    # --- commands ---

    def _carry_out(self, command: Command) -> None:
        self.commands.append(command)
        match command:
            case RequestSlots():
                is_restart = self.held.pop(command.job_id, None) is not None
                self.wishes[command.job_id] = command
                if command.job_id not in self.queue:
                    self.queue.insert(0 if is_restart else len(self.queue), command.job_id)
                self._dispatch()
            case ReleaseSlots():
                self.held.pop(command.job_id, None)
                self.queue = [job_id for job_id in self.queue if job_id != command.job_id]
                self._dispatch()
            case Announce():
                self.record[command.job_id].append(command.event)
            case StartStore() | StartRanks() | StopRanks() | RequestCheckpoint():
                self._send(command)

    def _send(self, command: AgentCommand) -> None:
        if isinstance(command, StartRanks):
            self._check_generation(command)
        if command.worker in self.agents:
            self.agents[command.worker].commands.append(command)
        else:
            lost = WorkerLost(time=self.now, worker=command.worker, reason="it is not connected")
            self._inbox.append((command.job_id, lost))

    def _check_generation(self, command: StartRanks) -> None:
        queued = [x for agent in self.agents.values() for x in agent.commands if isinstance(x, StartRanks)]
        there = [p.restart_count for p in self.alive(command.job_id)]
        coming = [x.restart_count for x in queued if x.job_id == command.job_id]
        old = [count for count in (*there, *coming) if count != command.restart_count]
        assert not old, f"generation {command.restart_count} starts while another lives: {old}"

    def _dispatch(self) -> None:
        ahead = ""
        for job_id in tuple(self.queue):
            if job_id not in self.queue:  # what an earlier decision brought about has dealt with it
                continue
            decision = place(self.states[job_id].spec, tuple(self._free()), ahead=ahead, wish=self.wishes[job_id])
            if isinstance(decision, Waiting):
                ahead = ahead or job_id
                self.feed(job_id, SlotsAwaited(time=self.now, reason=decision.reason))
                continue
            self.queue.remove(job_id)
            if isinstance(decision, Granted):
                self.held[job_id] = decision.placements
                self.feed(job_id, SlotsGranted(time=self.now, placements=decision.placements))
            else:
                self.feed(job_id, LaunchRefused(time=self.now, reason=decision.reason))

    def _free(self) -> Iterator[WorkerSlots]:
        taken = {(p.worker, p.slot) for placements in self.held.values() for p in placements}
        for worker, agent in self.agents.items():
            free = tuple(slot for slot in range(agent.slots) if (worker, slot) not in taken)
            yield WorkerSlots(worker=worker, host=agent.host, total=agent.slots, free=free)

    def _find(self, job_id: str, rank: int) -> tuple[FakeAgent, FakeRank]:
        return next(
            (agent, process)
            for agent in self.agents.values()
            for process in agent.ranks
            if (process.job_id, process.rank) == (job_id, rank)
        )

    def _fire(self) -> None:
        """Do what is due now."""
        for agent in self.agents.values():
            agent.end_graces(self.now)
        for job_id, state in tuple(self.states.items()):
            if state.deadline is not None and state.deadline <= self.now:
                self.feed(job_id, Ticked(time=self.now))

"""The job state machine against a simulated pool in which anything happens at any moment.

Ranks start slowly or not at all, raise, leave, are killed; workers and the pool go away; cancels come at any time;
messages cross, come late, twice or from an old generation. What must hold whatever happens is checked at every event
(`Watched.apply`), and at the end of a story, when all agents have answered everything (`teardown`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workbench.commands import Command
from workbench.controller import HANDLERS
from workbench.events import (
    CancelRequested,
    CheckpointFailed,
    CheckpointRefused,
    CheckpointSaved,
    Event,
    FailureDetected,
    GradientMismatched,
    LaunchFailed,
    LaunchRefused,
    LaunchRequested,
    NonFiniteFound,
    PoolLost,
    RankExited,
    RankRaised,
    RankStarted,
    ResizeRequested,
    ResumeRequested,
    RunResumed,
    SlotsAwaited,
    SlotsGranted,
    SlotsReturned,
    StallDetected,
    StallEnded,
    StoreAwaited,
    StoreStarted,
    Ticked,
    WorkerLost,
    decode_event,
    encode_event,
)
from workbench.policy.failure import SETTLE
from workbench.policy.recovery import least_ranks
from workbench.spec import JobSpec, NanPolicy
from workbench.state import (
    Checkpoint,
    CheckpointTier,
    Compared,
    FailureKind,
    JobPhase,
    JobState,
    Mismatch,
    RankPhase,
    Stall,
    StallKind,
)
from workbench.testing import FakeAgent, FakePool, FakeRank

WORKERS = ("a", "b", "c")
OWN_KINDS = [kind for kind in FailureKind if kind is not FailureKind.COLLECTIVE]
RARELY = st.integers(0, 5).map(lambda n: n == 5)  # for what ends most of a story
OFTEN = st.integers(0, 2).map(lambda n: n == 2)
RESPONSES = st.sampled_from(["warn", "stop", "repair", "rollback"])
Told = tuple[float, FailureKind, int | None]


class Watched(FakePool):
    """Checks every single transition, and notes what each generation was told of its end before it was over."""

    def __init__(self, workers: dict[str, int], hosts: dict[str, str]) -> None:
        self.told: dict[tuple[str, int], list[Told]] = {}
        super().__init__(workers, hosts=hosts, start=1000.0)

    def apply(self, job_id: str, event: Event) -> tuple[Command, ...]:
        old = self.states.get(job_id)
        if old is not None:
            self._note(job_id, old, event)
        commands = super().apply(job_id, event)
        self._check(old, self.states[job_id], event)
        return commands

    def _check(self, old: JobState | None, new: JobState, event: Event) -> None:
        assert new.reason
        assert 0 <= new.fruitless <= min(new.restart_count, new.spec.max_restarts)
        assert new.phase.is_terminal == (new.ended_at is not None)
        if new.phase.is_terminal:
            assert not self.alive(new.job_id), "a terminal job has a process"
            assert new.deadline is None
            assert new.phase is not JobPhase.FAILED or new.failure is not None
            assert new.phase is not JobPhase.STOPPED or new.cancelled
        if old is None:
            return
        is_resumed = isinstance(event, ResumeRequested)
        assert not old.phase.is_terminal or new == old or is_resumed, "a terminal job changed"
        assert old.restart_count <= new.restart_count <= old.restart_count + 1
        assert not old.cancelled or new.restart_count == old.restart_count or is_resumed
        if new.ranks and not old.ranks:
            self._check_world(new)
        if getattr(event, "restart_count", old.restart_count) != old.restart_count:
            assert new == old, "an event of another generation changed something"
        if new.restart_count == old.restart_count and old.ranks:
            for before, after in zip(old.ranks, new.ranks, strict=True):
                assert not before.phase.has_exited or after == before, "an exited rank changed"

    def _check_world(self, state: JobState) -> None:
        """As many ranks as were wanted; an elastic job may have fewer."""
        wanted, least = state.ranks_wanted or state.spec.world_size, least_ranks(state)
        assert not wanted or len(state.ranks) == wanted or least <= len(state.ranks) < wanted

    def _note(self, job_id: str, state: JobState, event: Event) -> None:
        """What a person who reads the record would hold to be possible causes; our own signals are none."""
        if state.phase.is_terminal or getattr(event, "restart_count", state.restart_count) != state.restart_count:
            return
        told = self.told.setdefault((job_id, state.restart_count), [])
        match event:
            case RankRaised() if not any(rank == event.rank for _, _, rank in told):
                kind = FailureKind.COLLECTIVE if event.is_collective else FailureKind.EXCEPTION
                told.append((event.time, kind, event.rank))
            case RankExited() if event.stop_signal is None and event.exit_code != 0:
                if not state.ranks[event.rank].phase.has_exited and all(rank != event.rank for _, _, rank in told):
                    kind = FailureKind.EXIT if event.signal is None else FailureKind.SIGNAL
                    told.append((event.time, kind, event.rank))
            case WorkerLost():
                lost = [r for r in state.ranks if r.worker == event.worker and not r.phase.has_exited]
                told += [(event.time, FailureKind.WORKER_LOST, r.rank) for r in lost]
            case LaunchFailed():
                told.append((event.time, FailureKind.LAUNCH, event.rank))
            case StallDetected() if state.phase is JobPhase.HEALTHY and state.spec.max_restarts:
                told.append((event.time, FailureKind.TIMEOUT, event.stall.ranks[0]))
            case NonFiniteFound() if state.phase is JobPhase.HEALTHY and state.spec.on_nan is not NanPolicy.WARN:
                told.append((event.time, FailureKind.DIVERGED, event.rank))
            case GradientMismatched() if event.response in ("stop", "rollback") and state.ranks:
                told.append((event.time, FailureKind.MISMATCH, event.mismatch.ranks[0]))


class AnyStory(RuleBasedStateMachine):
    """One or two jobs on up to three workers."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Watched({}, {})
        self.said: list[tuple[str, Event]] = []  # whatever agents said; they may say it again

    @initialize(
        slots=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        is_one_host=st.booleans(),
        ranks=st.sampled_from([2, 2, 1, 3, 0, 4]),
        nnodes=st.sampled_from([1, 1, 1, 2]),
        restarts=st.sampled_from([2, 1, 0, 3]),
        is_up=st.booleans(),
        is_elastic=OFTEN,
        on_nan=st.sampled_from(NanPolicy),
    )
    def launch_first(
        self,
        slots: list[int],
        is_one_host: bool,
        ranks: int,
        nnodes: int,
        restarts: int,
        is_up: bool,
        is_elastic: bool,
        on_nan: NanPolicy,
    ) -> None:
        named = dict(zip(WORKERS, slots, strict=False))
        named["a"] = max(named["a"], ranks)  # what can never run has its own tests
        self.pool = Watched(named, {} if is_one_host else {worker: f"host-{worker}" for worker in named})
        nodes = min(nnodes, 1 if is_one_host else len(named))
        self._launch(ranks, nodes, restarts, min_ranks=int(is_elastic), on_nan=on_nan)
        if is_up:
            self.pool.settle()

    @precondition(lambda self: len(self.pool.states) == 1)
    @rule(ranks=st.integers(0, 2), restarts=st.integers(0, 1))
    def launch_second(self, ranks: int, restarts: int) -> None:
        self._launch(ranks, 1, restarts)

    def _launch(self, ranks: int, nnodes: int, restarts: int, **options: Any) -> None:
        asked = JobSpec(
            entrypoint="train.py",
            nproc_per_node=ranks,
            nnodes=nnodes,
            max_restarts=restarts,
            startup_timeout=5.0,
            stop_grace=2.0,
            **options,
        )
        self.pool.launch(asked)

    # --- messages ---

    @rule(data=st.data(), count=st.integers(1, 4))
    def carry(self, data: st.DataObject, count: int) -> None:
        if agents := self._agents(lambda agent: bool(agent.commands)):
            worker = data.draw(st.sampled_from(agents)).worker
            for _ in range(count):
                self.pool.carry(worker)

    @rule(data=st.data(), count=st.integers(1, 4))
    def deliver(self, data: st.DataObject, count: int) -> None:
        if agents := self._agents(lambda agent: bool(agent.events)):
            agent = data.draw(st.sampled_from(agents))
            for _ in range(min(count, len(agent.events))):
                self.said.append(agent.events[0])
                self.pool.deliver(agent.worker)

    @rule()
    def settle(self) -> None:
        self.said += [event for agent in self.pool.agents.values() for event in agent.events]
        self.pool.settle()

    @precondition(lambda self: self.said or self.pool.stray)
    @rule(data=st.data())
    def say_again(self, data: st.DataObject) -> None:
        """Late or twice; of an old generation, mostly."""
        heard = [*self.said, *self.pool.stray]
        job_id, event = data.draw(st.sampled_from(heard))
        state = self.pool.states[job_id]
        # What an agent says of a generation comes after the slots for it; without them there is no such rank.
        if state.ranks or event.restart_count != state.restart_count or state.phase.is_terminal:
            self.pool.feed(job_id, event)

    @rule(data=st.data(), index=st.integers(0, 1))
    def answer_slots_out_of_turn(self, data: st.DataObject, index: int) -> None:
        job_id = list(self.pool.states)[index % len(self.pool.states)]
        state = self.pool.states[job_id]
        if not state.ranks:
            return
        time = self.pool.now
        events = [
            SlotsGranted(time=time, placements=state.placements),
            SlotsAwaited(time=time, reason="waiting"),
            LaunchRefused(time=time, reason="never"),
        ]
        self.pool.feed(job_id, data.draw(st.sampled_from(events)))
        assert self.pool.states[job_id] == state

    # --- time ---

    @rule(seconds=st.sampled_from([0.01, 0.05, SETTLE / 2, SETTLE, 1.0, 2.0, 5.0]))
    def advance(self, seconds: float) -> None:
        self.pool.advance(seconds)

    @rule(ahead=st.sampled_from([-1.0, 0.0, 0.1]))
    def tick(self, ahead: float) -> None:
        for job_id in tuple(self.pool.states):
            self.pool.feed(job_id, Ticked(time=self.pool.now + ahead))

    # --- people ---

    @rule(index=st.integers(0, 1), force=st.booleans(), is_meant=RARELY)
    def cancel(self, index: int, force: bool, is_meant: bool) -> None:
        if not is_meant:
            return
        job_id = list(self.pool.states)[index % len(self.pool.states)]
        self.pool.cancel(job_id, force=force, by="a person")

    @rule(index=st.integers(0, 1), ranks=st.none() | st.integers(1, 3), step=st.none() | st.just(4))
    def resume(self, index: int, ranks: int | None, step: int | None) -> None:
        job_id = list(self.pool.states)[index % len(self.pool.states)]
        before = self.pool.states[job_id]
        self.pool.resume(job_id, step=step, path="/c/4" if step else "", ranks=ranks)
        again = self.pool.states[job_id]
        self.pool.resume(job_id, ranks=ranks)
        assert self.pool.states[job_id] == again, "a second click did something"
        assert before.phase.is_terminal or again == before

    @rule(index=st.integers(0, 1), ranks=st.integers(1, 3), is_meant=OFTEN)
    def resize(self, index: int, ranks: int, is_meant: bool) -> None:
        if is_meant:
            self.pool.resize(list(self.pool.states)[index % len(self.pool.states)], ranks)

    # --- what ranks say of their training ---

    @rule(data=st.data(), step=st.integers(0, 9))
    def tell_of_training(self, data: st.DataObject, step: int) -> None:
        process = self._draw(data)
        if process is None:
            return
        about = {"time": self.pool.now, "restart_count": process.restart_count}
        point = Checkpoint(step=step, path=f"/c/{step}", world_size=1, saved_at=self.pool.now)
        stall = Stall(kind=StallKind.ABSENT, ranks=(process.rank,), reason=f"rank {process.rank} hangs", since=1.0)
        mismatch = Mismatch(compared=Compared.PARAMETERS, ranks=(process.rank,), told_by="majority", count=1)
        news: list[Event] = [
            CheckpointSaved(**about, checkpoint=point),
            CheckpointFailed(**about, step=step, reason="disk full"),
            CheckpointRefused(**about, checkpoint=point),
            RunResumed(**about, step=step, tier=CheckpointTier.DISK),
            NonFiniteFound(**about, rank=process.rank, step=step, what="loss"),
            GradientMismatched(**about, step=step, mismatch=mismatch, response=data.draw(RESPONSES)),
            StallDetected(**about, stall=stall),
            StallEnded(**about, seconds=3.0),
            SlotsReturned(time=self.pool.now, ranks=3),
        ]
        self.pool.feed(process.job_id, data.draw(st.sampled_from(news)))

    @rule(step=st.integers(0, 9), saves=st.booleans())
    def save_when_asked(self, step: int, saves: bool) -> None:
        for agent in self.pool.agents.values():
            agent.saves, agent.step = saves, step

    # --- ranks ---

    @rule(data=st.data(), code=st.sampled_from([0, 0, 0, 1, 3, 143]))
    def exit(self, data: st.DataObject, code: int) -> None:
        if process := self._draw(data):
            self.pool.exit(process.job_id, process.rank, code)

    @rule(is_meant=OFTEN)
    def all_finish(self, is_meant: bool) -> None:
        for process in self._running() if is_meant else ():
            self.pool.exit(process.job_id, process.rank, 0)

    @rule(data=st.data(), number=st.sampled_from([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM]))
    def kill(self, data: st.DataObject, number: signal.Signals) -> None:
        if process := self._draw(data):
            self.pool.kill(process.job_id, process.rank, number)

    @rule(is_meant=RARELY)
    def all_killed_at_once(self, is_meant: bool) -> None:
        for process in self._running() if is_meant else ():
            self.pool.kill(process.job_id, process.rank)

    @rule(data=st.data(), is_collective=st.booleans(), leaves=st.booleans())
    def raise_error(self, data: st.DataObject, is_collective: bool, leaves: bool) -> None:
        if process := self._draw(data):
            self.pool.raise_error(process.job_id, process.rank, is_collective=is_collective)
            if leaves:
                self.pool.exit(process.job_id, process.rank, 1)

    def _running(self) -> list[FakeRank]:
        return [p for agent in self.pool.agents.values() for p in agent.ranks if not p.is_starting]

    def _draw(self, data: st.DataObject) -> FakeRank | None:
        running = self._running()
        return data.draw(st.sampled_from(running)) if running else None

    # --- workers ---

    @rule(data=st.data(), is_slow=st.booleans(), is_stubborn=st.booleans())
    def change_mood(self, data: st.DataObject, is_slow: bool, is_stubborn: bool) -> None:
        if agents := self._agents():
            agent = data.draw(st.sampled_from(agents))
            agent.is_slow, agent.is_stubborn = is_slow, is_stubborn

    @rule(data=st.data())
    def start_slow_ranks(self, data: st.DataObject) -> None:
        if agents := self._agents():
            self.pool.start_ranks(data.draw(st.sampled_from(agents)).worker)

    @rule(data=st.data(), rank=st.none() | st.integers(0, 2), is_meant=RARELY)
    def refuse(self, data: st.DataObject, rank: int | None, is_meant: bool) -> None:
        if is_meant and (agents := self._agents()):
            agent = data.draw(st.sampled_from(agents))
            if rank is None:
                agent.refuse_store = "port 29500 is in use"
            else:
                agent.refuse_ranks[rank] = "out of memory"

    @rule(data=st.data(), is_meant=RARELY)
    def lose_worker(self, data: st.DataObject, is_meant: bool) -> None:
        if is_meant and (agents := self._agents()):
            self.pool.lose(data.draw(st.sampled_from(agents)).worker, "connection closed")

    @precondition(lambda self: len(self.pool.agents) < len(WORKERS))
    @rule(slots=st.integers(1, 3), name=st.integers(3, 99))
    def join_worker(self, slots: int, name: int) -> None:
        if f"w{name}" not in self.pool.agents:
            self.pool.join(f"w{name}", slots)

    @precondition(lambda self: not any(agent.commands for agent in self.pool.agents.values()))
    @rule(is_meant=RARELY, comes_back=st.booleans(), slots=st.integers(1, 3))
    def lose_pool(self, is_meant: bool, comes_back: bool, slots: int) -> None:
        if is_meant:
            self.pool.lose_pool(comes_back=comes_back)
            for state in self.pool.states.values():
                assert state.phase.is_terminal or (comes_back and state.job_id in self.pool.queue)
            if comes_back:
                self.pool.join("a", slots)

    def _agents(self, which: Callable[[FakeAgent], bool] = lambda _: True) -> list[FakeAgent]:
        return [agent for agent in self.pool.agents.values() if which(agent)]

    # --- what holds ---

    @invariant()
    def no_two_generations_live(self) -> None:
        for job_id in self.pool.states:
            assert len({process.restart_count for process in self.pool.alive(job_id)}) <= 1

    @invariant()
    def no_slot_is_held_twice(self) -> None:
        held = [(p.worker, p.slot) for placements in self.pool.held.values() for p in placements]
        assert len(held) == len(set(held))

    @invariant()
    def slots_are_held_by_jobs_that_go_on(self) -> None:
        for job_id in (*self.pool.held, *self.pool.queue):
            assert not self.pool.states[job_id].phase.is_terminal

    def teardown(self) -> None:
        """Let everything be answered; what still runs, run a while longer; then end what nobody ends."""
        for agent in self.pool.agents.values():
            agent.is_slow = False
            self.pool.start_ranks(agent.worker)
        self.pool.run()
        for state in self.pool.states.values():
            assert state.phase in (JobPhase.INIT, JobPhase.RECOVERING, JobPhase.HEALTHY) or state.phase.is_terminal
            assert state.phase is not JobPhase.RECOVERING or state.job_id in self.pool.queue
        for job_id in tuple(self.pool.states):
            self.pool.cancel(job_id)
        self.pool.run()
        for job_id, state in self.pool.states.items():
            assert state.phase.is_terminal, state
            self._check_end(state)
            self._check_replay(job_id)
        assert not self.pool.held and not self.pool.queue
        assert not any(agent.ranks or agent.stores for agent in self.pool.agents.values())

    def _check_replay(self, job_id: str) -> None:
        assert self.pool.replay(job_id) == self.pool.states[job_id]
        self.pool.record[job_id] = [decode_event(encode_event(event)) for event in self.pool.record[job_id]]
        assert self.pool.replay(job_id) == self.pool.states[job_id]

    def _check_end(self, state: JobState) -> None:
        has_succeeded = bool(state.ranks) and all(r.phase is RankPhase.SUCCEEDED for r in state.ranks)
        if state.phase is JobPhase.SUCCEEDED:
            assert has_succeeded and all(r.exit_code == 0 for r in state.ranks)
        elif has_succeeded:
            assert state.cancelled or state.failures
        if state.phase is JobPhase.FAILED:
            self._check_cause(state)

    def _check_cause(self, state: JobState) -> None:
        cause, story = state.failure, self.pool.record[state.job_id]
        assert cause is not None
        assert cause.reason
        assert cause.rank is None or f"{cause.rank}" in cause.reason
        assert cause.reason in state.reason or any(isinstance(e, PoolLost | LaunchRefused) for e in story)
        announced = [event for event in story if isinstance(event, FailureDetected)]
        assert announced and announced[-1].failure == cause
        told = self.pool.told.get((state.job_id, announced[-1].restart_count), [])
        if not told or any(isinstance(event, PoolLost) for event in story):
            return
        self._check_rank_order(cause.kind, cause.time, told)
        self._check_not_ours(state, announced[-1])

    def _check_rank_order(self, kind: FailureKind, time: float, told: list[Told]) -> None:
        """A signal outranks an exception outranks a collective error, of what happened together."""
        first = min(when for when, _, _ in told)
        if kind is FailureKind.COLLECTIVE:
            own = [k for when, k, _ in told if k is not FailureKind.COLLECTIVE and when <= first + SETTLE]
            assert not own, (kind, told)
            return
        # An exception long after a rank was told to end is none of these: it came of that.
        starts = [
            when for when, k, _ in told if k in OWN_KINDS and (k > FailureKind.EXCEPTION or when <= first + SETTLE)
        ]
        assert time <= min(starts, default=time) + SETTLE, (kind, time, told)
        together = [k for when, k, _ in told if when <= time and k in OWN_KINDS]
        assert kind >= max(together, default=kind), (kind, told)

    def _check_not_ours(self, state: JobState, announced: FailureDetected) -> None:
        cause = announced.failure
        exits = [
            event
            for event in self.pool.record[state.job_id]
            if isinstance(event, RankExited)
            and (event.restart_count, event.rank, event.time) == (announced.restart_count, cause.rank, cause.time)
        ]
        if cause.kind in (FailureKind.EXIT, FailureKind.SIGNAL):
            assert any(e.stop_signal is None or e.signal not in (None, signal.SIGTERM, e.stop_signal) for e in exits)


AnyStory.TestCase.settings = settings(
    max_examples=200,  # 3 s of processor time, of the 20 s that a busy machine is given; others every run
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyStory = AnyStory.TestCase


def test_the_stories_above_can_tell_every_event_the_controller_acts_on() -> None:
    acted_on = {
        LaunchRequested,
        SlotsAwaited,
        SlotsGranted,
        LaunchRefused,
        StoreAwaited,
        StoreStarted,
        LaunchFailed,
        RankStarted,
        RankRaised,
        RankExited,
        WorkerLost,
        PoolLost,
        CancelRequested,
        Ticked,
        ResumeRequested,
        ResizeRequested,
        SlotsReturned,
        CheckpointSaved,
        CheckpointRefused,
        RunResumed,
        NonFiniteFound,
        GradientMismatched,
        StallDetected,
        StallEnded,
    }
    assert set(HANDLERS) | {LaunchRequested} == acted_on

"""The job state machine as tables: what happens → phases, the reason's exact words, commands."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from workbench.commands import Announce, StartRanks, StartStore, StopRanks
from workbench.controller import transition
from workbench.errors import InvalidTransitionError
from workbench.events import (
    CancelRequested,
    CheckpointSaved,
    Event,
    FailureDetected,
    LaunchFailed,
    LaunchRefused,
    LaunchRequested,
    NonFiniteFound,
    PhaseChanged,
    RankExited,
    RankRaised,
    RankStarted,
    RecoveryFinished,
    RecoveryStarted,
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
from workbench.spec import EntrypointKind, JobSpec, NanPolicy
from workbench.state import (
    Checkpoint,
    CheckpointTier,
    FailureKind,
    JobPhase,
    JobState,
    Placement,
    RankPhase,
    Stall,
    StallKind,
)
from workbench.testing import FakePool

JOB = "train-1a2b"
Step = Callable[[FakePool], object]


def spec(**options: object) -> JobSpec:
    return JobSpec(**{"entrypoint": "train.py", "nproc_per_node": 2, **options})


# --- steps of a story -------------------------------------------------------------------------------------------------


def run(pool: FakePool) -> None:
    pool.run()


def settle(pool: FakePool) -> None:
    pool.settle()


def store_up(pool: FakePool) -> None:
    """The store listens and StartRanks is on its way, but no rank has started."""
    for agent in pool.agents.values():
        agent.is_slow = True
    pool.settle()


def started_unheard(pool: FakePool) -> None:
    """Ranks run, and the word of it is still on its way."""
    for worker in pool.agents:
        pool.start_ranks(worker)


def cancel(pool: FakePool) -> None:
    pool.cancel(JOB, by="%dtrain cancel")


def force(pool: FakePool) -> None:
    pool.cancel(JOB, force=True)


def stubborn(pool: FakePool) -> None:
    for agent in pool.agents.values():
        agent.is_stubborn = True


def lose_pool(pool: FakePool) -> None:
    pool.lose_pool("the pool's scheduler went away at step 7; the ranks ended with it")


def come_back(pool: FakePool) -> None:
    """The scheduler was killed; another one is there, and then a worker."""
    pool.lose_pool("the pool's scheduler died after step 7; the ranks ended with it", comes_back=True)
    pool.join("a", 2)


def kill(rank: int, number: int = signal.SIGKILL) -> Step:
    return lambda pool: pool.kill(JOB, rank, number)


def leave(rank: int, code: int = 0) -> Step:
    return lambda pool: pool.exit(JOB, rank, code)


def fail(rank: int, error: str = "ValueError: bad batch") -> Step:
    return lambda pool: pool.raise_error(JOB, rank, error)


def peer_gone(rank: int) -> Step:
    return lambda pool: pool.raise_error(JOB, rank, "RuntimeError: Connection closed by peer", is_collective=True)


def lose(worker: str, reason: str = "") -> Step:
    return lambda pool: pool.lose(worker, reason)


def after(seconds: float) -> Step:
    return lambda pool: pool.advance(seconds)


def resume(pool: FakePool) -> None:
    pool.resume(JOB)


def resize(ranks: int) -> Step:
    return lambda pool: pool.resize(JOB, ranks)


def saves(step: int) -> Step:
    """From now on ranks save when they are asked, at that step."""

    def set_step(pool: FakePool) -> None:
        for agent in pool.agents.values():
            agent.saves, agent.step = True, step

    return set_step


def tell_of(make: Callable[[int, float], Event]) -> Step:
    """An event of the current generation."""
    return lambda pool: pool.feed(JOB, make(pool.states[JOB].restart_count, pool.now))


def saved(step: int) -> Step:
    point = Checkpoint(step=step, path=f"/c/{step}", world_size=2, saved_at=1.0)
    return tell_of(lambda count, now: CheckpointSaved(time=now, restart_count=count, checkpoint=point))


def resumed(step: int) -> Step:
    return tell_of(lambda count, now: RunResumed(time=now, restart_count=count, step=step, tier=CheckpointTier.MEMORY))


def stalls(pool: FakePool) -> None:
    pool.feed(JOB, StallDetected(time=pool.now, restart_count=pool.states[JOB].restart_count, stall=STALL))


def is_kept_waiting(pool: FakePool) -> None:
    count = pool.states[JOB].restart_count
    pool.feed(JOB, StallDetected(time=pool.now, restart_count=count, stall=replace(STALL, patience=200.0)))


def gets_on(pool: FakePool) -> None:
    pool.feed(JOB, StallEnded(time=pool.now, restart_count=pool.states[JOB].restart_count, seconds=4.0))


def nan(rank: int, step: int) -> Step:
    return tell_of(lambda count, now: NonFiniteFound(time=now, restart_count=count, rank=rank, step=step, what="loss"))


def joins(worker: str, slots: int) -> Step:
    return lambda pool: pool.join(worker, slots)


def slots_return(ranks: int) -> Step:
    return lambda pool: pool.feed(JOB, SlotsReturned(time=pool.now, ranks=ranks))


def no_store(reason: str) -> Step:
    return lambda pool: setattr(pool.agents["a"], "refuse_store", reason)


def no_rank(rank: int, reason: str) -> Step:
    return lambda pool: pool.agents["a"].refuse_ranks.update({rank: reason})


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Story:
    name: str
    steps: tuple[Step, ...]
    phases: str
    reason: str
    options: dict[str, object] | None = None
    workers: tuple[tuple[str, int], ...] = (("a", 2),)
    before: tuple[Step, ...] = ()


STALL = Stall(
    kind=StallKind.ABSENT, ranks=(1,), since=1.0, reason="rank 1 did not enter all_reduce[8 float32], number 7", step=6
)
UP = "INIT LAUNCHING HEALTHY"
AGAIN = "RECOVERING LAUNCHING HEALTHY"
ELASTIC = {"max_restarts": 1, "min_ranks": 1}
GONE = "rank 1 raised RuntimeError: Connection closed by peer"
RESTART = {"max_restarts": 1}
STORIES = [
    Story("waits for slots", (), "INIT", "waiting: the pool has no worker with a slot now", workers=()),
    Story("starts", (settle,), "INIT LAUNCHING HEALTHY", "2 of 2 ranks running"),
    Story("starts one rank", (settle,), "INIT LAUNCHING HEALTHY", "1 of 1 rank running", {"nproc_per_node": 1}),
    Story(
        "is ready for cells",
        (settle,),
        "INIT LAUNCHING HEALTHY",
        "2 of 2 ranks ready for cells",
        {"kind": EntrypointKind.INTERACTIVE},
    ),
    Story("launching", (store_up,), "INIT LAUNCHING", "starting 2 ranks"),
    Story("one finished", (run, leave(1), run), "INIT LAUNCHING HEALTHY", "1 of 2 ranks running, 1 finished"),
    Story("succeeds", (run, leave(0), leave(1), run), "INIT LAUNCHING HEALTHY SUCCEEDED", "all 2 ranks finished"),
    Story(
        "succeeds alone",
        (run, leave(0), run),
        "INIT LAUNCHING HEALTHY SUCCEEDED",
        "the rank finished",
        {"nproc_per_node": 1},
    ),
    Story(
        "refused",
        (),
        "INIT FAILED",
        "needs 3 slots, the pool has 2 on 1 host; ask for fewer ranks or start a larger pool (up -n 3)",
        {"nproc_per_node": 3},
    ),
    Story(
        "killed by SIGKILL",
        (run, kill(1), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 1 killed by SIGKILL",
    ),
    Story(
        "killed by a signal without a name",
        (run, kill(1, 40), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 1 killed by signal 40",
    ),
    Story(
        "killed by SIGTERM that is not ours",
        (run, kill(1, signal.SIGTERM), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 1 killed by SIGTERM",
    ),
    Story(
        "exit code",
        (run, leave(0, 3), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 0 exited with code 3",
    ),
    Story(
        "exception",
        (run, fail(0), leave(0, 1), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 0 raised ValueError: bad batch",
    ),
    Story(
        "exception, then an abort as it unwinds",
        (run, fail(0), kill(0, signal.SIGABRT), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 0 raised ValueError: bad batch",
    ),
    Story(
        "collective error and nothing else",
        (run, peer_gone(1), leave(1, 1), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        GONE,
    ),
    Story(
        "collective error beneath the signal of another rank 50 ms later",
        (run, stubborn, peer_gone(1), settle, after(0.05), kill(0), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 0 killed by SIGKILL",
    ),
    Story(
        "collective error beneath the exception of another rank",
        (run, stubborn, peer_gone(1), settle, after(0.05), fail(0), leave(0, 1), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 0 raised ValueError: bad batch",
    ),
    Story(
        "exception beneath the signal of another rank at the same moment",
        (run, stubborn, fail(1), settle, after(0.05), kill(0), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 0 killed by SIGKILL",
    ),
    Story(
        "a signal long after the exception follows from it",
        (run, stubborn, fail(1), settle, after(1.0), kill(0), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 1 raised ValueError: bad batch",
    ),
    Story(
        "an abort as we stop the rank follows from the exception",
        (run, stubborn, fail(1), settle, after(0.05), kill(0, signal.SIGABRT), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 1 raised ValueError: bad batch",
    ),
    Story(
        "a signal long after a collective error came as we stopped the rank",
        (run, stubborn, peer_gone(1), settle, after(1.0), kill(0), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        GONE,
    ),
    Story(
        "an exception long after a collective error, of a rank that heard no word to stop, is none the more",
        (run, peer_gone(1), leave(1, 1), after(1.0), fail(0), leave(0, 1), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        GONE,
    ),
    Story(
        "the loss of a worker long after the exception follows from it",
        (run, stubborn, fail(0), settle, after(1.0), lose("b"), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 0 raised ValueError: bad batch",
        workers=(("a", 1), ("b", 1)),
    ),
    Story(
        "an exception long after a collective error came of our stopping",
        (run, stubborn, peer_gone(1), settle, after(1.0), fail(0), leave(0, 1), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        GONE,
    ),
    Story(
        "worker lost",
        (run, lose("a", "connection closed"), run),
        "INIT LAUNCHING HEALTHY FAILED",
        "rank 0 was lost with its worker a: connection closed",
    ),
    Story(
        "one of two workers lost",
        (run, lose("b"), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 1 was lost with its worker b",
        workers=(("a", 1), ("b", 1)),
    ),
    Story(
        "collective error beneath the loss of a worker that is noticed late",
        (run, stubborn, peer_gone(0), settle, after(5.0), lose("b"), run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 1 was lost with its worker b",
        workers=(("a", 1), ("b", 1)),
    ),
    Story(
        "worker lost that has no rank",
        (run, lose("b"), run),
        "INIT LAUNCHING HEALTHY",
        "2 of 2 ranks running",
        workers=(("a", 2), ("b", 2)),
    ),
    Story(
        "worker lost while launching",
        (store_up, lose("a"), run),
        "INIT LAUNCHING FAILED",
        "rank 0 was lost with its worker a",
    ),
    Story(
        "startup timeout of ranks",
        (store_up, run),
        "INIT LAUNCHING STOPPING FAILED",
        "ranks 0, 1 did not start within 5 s",
        {"startup_timeout": 5.0},
    ),
    Story(
        "startup timeout of many ranks",
        (store_up, run),
        "INIT LAUNCHING STOPPING FAILED",
        "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more did not start within 300 s",
        {"nproc_per_node": 10},
        workers=(("a", 10),),
    ),
    Story(
        "startup timeout of the store",
        (after(5.0), run),
        "INIT LAUNCHING FAILED",
        "the rendezvous store did not start within 5 s",
        {"startup_timeout": 5.0},
    ),
    Story(
        "startup timeout just before the word of a rank that was killed",
        (store_up, after(4.0), started_unheard, kill(0), after(1.0), run),
        "INIT LAUNCHING STOPPING FAILED",
        "rank 0 killed by SIGKILL",
        {"startup_timeout": 5.0},
    ),
    Story(
        "port in use",
        (run,),
        "INIT LAUNCHING FAILED",
        "port 29500 is in use on 127.0.0.1",
        {"master_port": 29500, **RESTART},
        before=(no_store("port 29500 is in use on 127.0.0.1"),),
    ),
    Story(
        "a rank cannot be started",
        (run,),
        "INIT LAUNCHING STOPPING FAILED",
        "rank 1 did not start: out of memory",
        before=(no_rank(1, "out of memory"),),
    ),
    Story("cancel while queued", (cancel,), "INIT STOPPED", "cancelled by %dtrain cancel", workers=()),
    Story("cancel while the store starts", (cancel, run), "INIT LAUNCHING STOPPED", "cancelled by %dtrain cancel"),
    Story(
        "cancel while launching",
        (store_up, cancel, run),
        "INIT LAUNCHING STOPPING STOPPED",
        "cancelled by %dtrain cancel",
    ),
    Story("cancel", (run, cancel, run), "INIT LAUNCHING HEALTHY STOPPING STOPPED", "cancelled by %dtrain cancel"),
    Story(
        "cancel, and a rank fails as it is stopped",
        (run, stubborn, cancel, settle, fail(0), leave(0, 1), run),
        "INIT LAUNCHING HEALTHY STOPPING STOPPED",
        "cancelled by %dtrain cancel",
    ),
    Story(
        "cancel while recovering",
        (run, stubborn, kill(0), settle, cancel, run),
        "INIT LAUNCHING HEALTHY RECOVERING STOPPING STOPPED",
        "cancelled by %dtrain cancel",
        RESTART,
    ),
    Story(
        "cancel while waiting for slots to restart",
        (run, lose("a"), cancel, run),
        "INIT LAUNCHING HEALTHY RECOVERING STOPPED",
        "cancelled by %dtrain cancel",
        RESTART,
    ),
    Story(
        "cancel a failed job that is on its way out",
        (run, stubborn, kill(0), settle, cancel, run),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 0 killed by SIGKILL",
    ),
    Story("force cancel", (run, stubborn, force, settle), "INIT LAUNCHING HEALTHY STOPPING STOPPED", "cancelled"),
    Story(
        "force a cancel that takes long",
        (run, stubborn, cancel, settle, force, settle),
        "INIT LAUNCHING HEALTHY STOPPING STOPPED",
        "cancelled by %dtrain cancel",
    ),
    Story(
        "cancel of ranks that ignore SIGTERM ends with their grace",
        (run, stubborn, cancel, settle, after(10.0), settle),
        "INIT LAUNCHING HEALTHY STOPPING STOPPED",
        "cancelled by %dtrain cancel",
    ),
    Story(
        "restarts",
        (run, kill(1), run),
        "INIT LAUNCHING HEALTHY RECOVERING LAUNCHING HEALTHY",
        "2 of 2 ranks running, restart 1 of 1",
        RESTART,
    ),
    Story(
        "restarts and waits",
        (run, lose("a"), run),
        "INIT LAUNCHING HEALTHY RECOVERING FAILED",
        "rank 0 was lost with its worker a; it cannot restart: no slots came back within 600 s: "
        "the pool has no worker with a slot now",
        RESTART,
    ),
    Story(
        "cannot restart in what is left of the pool",
        (run, lose("b"), run),
        "INIT LAUNCHING HEALTHY RECOVERING FAILED",
        "rank 1 was lost with its worker b; it cannot restart: no slots came back within 600 s: "
        "needs 2 slots, the pool has 1 on 1 host; ask for fewer ranks or start a larger pool (up -n 2)",
        RESTART,
        workers=(("a", 1), ("b", 1)),
    ),
    Story(
        "a restart that got further does not count",
        (run, saved(5), kill(0), run, resumed(5), saved(9), kill(0), run),
        f"{UP} {AGAIN} {AGAIN}",
        "2 of 2 ranks running, restart 2, 1 of 1 without progress",
        RESTART,
    ),
    Story(
        "one that began further neither",
        (run, kill(0), run, resumed(5), kill(0), run, resumed(6)),
        f"{UP} {AGAIN} {AGAIN}",
        "2 of 2 ranks running, restart 2",
        RESTART,
    ),
    Story(
        "gives up where no restart gets further",
        (run, kill(0), run, resumed(5), kill(0), run, resumed(5), kill(0), run),
        f"{UP} {AGAIN} {AGAIN} STOPPING FAILED",
        "rank 0 killed by SIGKILL; no restart left of 1",
        RESTART,
    ),
    Story(
        "is resumed after its failure",
        (run, kill(0), run, resume, run),
        f"{UP} STOPPING FAILED {AGAIN}",
        "2 of 2 ranks running, restart 1",
    ),
    Story(
        "is resumed after its end",
        (run, leave(0), leave(1), run, resume, run),
        f"{UP} SUCCEEDED {AGAIN}",
        "2 of 2 ranks running, restart 1",
    ),
    Story(
        "is resumed after a cancel, once",
        (run, cancel, run, resume, resume, run, resume, run),
        f"{UP} STOPPING STOPPED {AGAIN}",
        "2 of 2 ranks running, restart 1",
    ),
    Story(
        "is resumed in vain",
        (run, cancel, run, lose("a"), resume, after(700.0), run),
        f"{UP} STOPPING STOPPED RECOVERING FAILED",
        "no slots came back within 600 s: the pool has no worker with a slot now",
    ),
    Story(
        "is resized from a checkpoint",
        (run, saves(7), resize(3), run),
        f"{UP} {AGAIN}",
        "3 of 3 ranks running, restart 1",
        workers=(("a", 4),),
    ),
    Story(
        "is resized without one", (run, resize(1), after(31.0), run), f"{UP} {AGAIN}", "1 of 1 rank running, restart 1"
    ),
    Story(
        "is done before it is resized",
        (run, resize(1), leave(0), leave(1), run),
        f"{UP} SUCCEEDED",
        "all 2 ranks finished",
    ),
    Story(
        "shrinks when a worker is lost",
        (run, lose("b"), run),
        f"{UP} {AGAIN}",
        "1 of 1 rank running, restart 1 of 1",
        ELASTIC,
        workers=(("a", 1), ("b", 1)),
    ),
    Story(
        "grows at a checkpoint",
        (run, lose("b"), run, joins("c", 1), saves(9), slots_return(2), run),
        f"{UP} {AGAIN} {AGAIN}",
        "2 of 2 ranks running, restart 2",
        ELASTIC,
        workers=(("a", 1), ("b", 1)),
    ),
    Story(
        "does not grow without a checkpoint",
        (run, lose("b"), run, joins("c", 1), slots_return(2), after(40.0), run),
        f"{UP} {AGAIN}",
        "1 of 1 rank running, restart 1 of 1",
        ELASTIC,
        workers=(("a", 1), ("b", 1)),
    ),
    Story("starts small when that is all there is", (run,), UP, "1 of 1 rank running", ELASTIC, workers=(("a", 1),)),
    Story("restarts a stall", (run, stalls, run), f"{UP} {AGAIN}", "2 of 2 ranks running, restart 1 of 1", RESTART),
    Story("only tells of a stall without restarts", (run, stalls, run), UP, f"stalled: {STALL.reason}"),
    Story("only tells who is awaited", (run, is_kept_waiting, run), UP, f"kept waiting: {STALL.reason}", RESTART),
    Story(
        "restarts it when patience is over",
        (run, is_kept_waiting, stalls, run),
        f"{UP} {AGAIN}",
        "2 of 2 ranks running, restart 1 of 1",
        RESTART,
    ),
    Story("tells when it gets on", (run, stalls, gets_on, run), UP, "2 of 2 ranks running"),
    Story(
        "a limit that was asked for ends it",
        (run, stalls, run),
        f"{UP} STOPPING FAILED",
        STALL.reason,
        {"progress_timeout": 5.0},
    ),
    Story(
        "never kills cells for a stall",
        (run, stalls, run),
        UP,
        f"stalled: {STALL.reason}",
        {"kind": EntrypointKind.INTERACTIVE, "max_restarts": 2, "entrypoint": ""},
    ),
    Story("lets NaN pass", (run, nan(1, 3), run), UP, "2 of 2 ranks running", RESTART),
    Story(
        "stops at NaN",
        (run, nan(1, 3), run),
        f"{UP} STOPPING FAILED",
        "rank 1: loss is not finite at step 3; the job was to stop then",
        {"on_nan": NanPolicy.STOP, **RESTART},
    ),
    Story(
        "goes back before NaN",
        (run, saved(2), saved(4), nan(1, 3), run),
        f"{UP} {AGAIN}",
        "2 of 2 ranks running, restart 1 of 1",
        {"on_nan": NanPolicy.ROLLBACK, **RESTART},
    ),
    Story(
        "no restart left",
        (run, kill(1), run, leave(0, 7), run),
        "INIT LAUNCHING HEALTHY RECOVERING LAUNCHING HEALTHY STOPPING FAILED",
        "rank 0 exited with code 7; no restart left of 1",
        RESTART,
    ),
    Story(
        "restarts after a startup timeout",
        (after(300.0), run),
        "INIT LAUNCHING RECOVERING LAUNCHING HEALTHY",
        "2 of 2 ranks running, restart 1 of 1",
        RESTART,
    ),
    Story(
        "pool lost",
        (run, lose_pool),
        "INIT LAUNCHING HEALTHY FAILED",
        "the pool's scheduler went away at step 7; the ranks ended with it",
        RESTART,
    ),
    Story(
        "pool lost and back",
        (run, come_back, run),
        "INIT LAUNCHING HEALTHY RECOVERING LAUNCHING HEALTHY",
        "2 of 2 ranks running, restart 1 of 1",
        RESTART,
    ),
    Story(
        "pool lost and back, without restarts",
        (run, come_back, run),
        "INIT LAUNCHING HEALTHY FAILED",
        "the pool's scheduler died after step 7; the ranks ended with it",
    ),
    Story(
        "pool lost and back again and again",
        (run, come_back, run, come_back, run),
        "INIT LAUNCHING HEALTHY RECOVERING LAUNCHING HEALTHY FAILED",
        "the pool's scheduler died after step 7; the ranks ended with it; no restart left of 1",
        RESTART,
    ),
    Story(
        "pool lost and back before ranks ran",
        (settle, come_back, run),
        "INIT LAUNCHING HEALTHY RECOVERING LAUNCHING HEALTHY",
        "2 of 2 ranks running, restart 1 of 1",
        RESTART,
    ),
    Story(
        "pool lost and back while the old generation is on its way out",
        (run, stubborn, fail(0), settle, come_back, run),
        "INIT LAUNCHING HEALTHY RECOVERING LAUNCHING HEALTHY",
        "2 of 2 ranks running, restart 1 of 1",
        RESTART,
    ),
    Story(
        "pool lost and back while a cancelled job is on its way out",
        (run, stubborn, cancel, settle, come_back, run),
        "INIT LAUNCHING HEALTHY STOPPING STOPPED",
        "cancelled by %dtrain cancel",
    ),
    Story(
        "pool lost while a failed job is on its way out",
        (run, stubborn, fail(0), settle, lose_pool),
        "INIT LAUNCHING HEALTHY STOPPING FAILED",
        "rank 0 raised ValueError: bad batch",
    ),
    Story(
        "pool lost while a cancelled job is on its way out",
        (run, stubborn, cancel, settle, lose_pool),
        "INIT LAUNCHING HEALTHY STOPPING STOPPED",
        "cancelled by %dtrain cancel",
    ),
]


def tell(story: Story) -> FakePool:
    pool = FakePool(dict(story.workers), start=1000.0)
    for step in story.before:
        step(pool)
    pool.launch(spec(**(story.options or {})), JOB)
    for step in story.steps:
        step(pool)
    return pool


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_story(story: Story) -> None:
    pool = tell(story)
    state = pool.states[JOB]
    told = [event for event in pool.record[JOB] if isinstance(event, PhaseChanged)]
    assert " ".join(event.phase.value for event in told) == story.phases
    assert state.reason == story.reason
    assert told[-1].phase is state.phase
    assert all(event.reason for event in told)
    if state.phase.is_terminal:
        pool.settle()
        assert not any(agent.stores for agent in pool.agents.values())
        assert (pool.alive(JOB), pool.held, pool.queue) == ([], {}, [])
        assert state.ended_at == told[-1].time
        assert state.deadline is None
    if state.phase is JobPhase.FAILED:
        assert state.failure is not None
        assert [e.failure for e in pool.record[JOB] if isinstance(e, FailureDetected)][-1] == state.failure


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_replay_gives_the_state_again(story: Story) -> None:
    pool = tell(story)
    pool.record[JOB] = [decode_event(encode_event(event)) for event in pool.record[JOB]]
    assert pool.replay(JOB) == pool.states[JOB]


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("starts", "RequestSlots StartStore StartRanks"),
        ("succeeds", "RequestSlots StartStore StartRanks StopRanks(0) ReleaseSlots"),
        ("refused", "RequestSlots FailureDetected ReleaseSlots"),
        ("exit code", "RequestSlots StartStore StartRanks StopRanks(10) FailureDetected StopRanks(0) ReleaseSlots"),
        ("cancel while queued", "RequestSlots ReleaseSlots"),
        ("cancel while the store starts", "RequestSlots StartStore StopRanks(0) ReleaseSlots"),
        ("cancel", "RequestSlots StartStore StartRanks StopRanks(10) StopRanks(0) ReleaseSlots"),
        ("force cancel", "RequestSlots StartStore StartRanks StopRanks(0) StopRanks(0) ReleaseSlots"),
        ("port in use", "RequestSlots StartStore StopRanks(10) FailureDetected StopRanks(0) ReleaseSlots"),
        (
            "restarts",
            "RequestSlots StartStore StartRanks StopRanks(10) FailureDetected StopRanks(0) RecoveryStarted "
            "RequestSlots StartStore StartRanks RecoveryFinished",
        ),
        (
            "goes back before NaN",  # copies in the ranks' memory are newer, and have it
            "RequestSlots StartStore StartRanks StopRanks(10) FailureDetected StopRanks(0) ForgetCopies "
            "RecoveryStarted RequestSlots StartStore StartRanks RecoveryFinished",
        ),
    ],
)
def test_commands(name: str, commands: str) -> None:
    pool = tell(next(story for story in STORIES if story.name == name))
    assert " ".join(map(_brief, pool.commands)) == commands


def _brief(command: object) -> str:
    match command:
        case Announce():
            return type(command.event).__name__
        case StopRanks():
            return f"StopRanks({command.grace:g})"
    return type(command).__name__


# --- what the story of an end says ------------------------------------------------------------------------------------


def test_consequences_are_told_beneath_the_cause() -> None:
    pool = tell(next(story for story in STORIES if story.name.startswith("collective error beneath the signal")))
    (told,) = [event for event in pool.record[JOB] if isinstance(event, FailureDetected)]
    assert (told.failure.kind, told.failure.rank) == (FailureKind.SIGNAL, 0)
    assert [(f.kind, f.rank) for f in told.consequences] == [(FailureKind.COLLECTIVE, 1)]


def test_a_cause_is_told_when_it_can_no_longer_be_outranked_though_ranks_still_run() -> None:
    pool = tell(Story("", (run, stubborn, fail(1), settle), "", ""))
    assert not [event for event in pool.record[JOB] if isinstance(event, FailureDetected)]
    pool.advance(SETTLE)
    assert [e.failure.rank for e in pool.record[JOB] if isinstance(e, FailureDetected)] == [1]
    assert len(pool.alive(JOB)) == 2


def test_a_told_cause_is_corrected_by_a_worker_loss_that_is_noticed_late() -> None:
    pool = tell(next(story for story in STORIES if story.name.endswith("noticed late")))
    told = [event.failure.kind for event in pool.record[JOB] if isinstance(event, FailureDetected)]
    assert told == [FailureKind.COLLECTIVE, FailureKind.WORKER_LOST]


def test_recovery_is_announced_with_its_reason() -> None:
    pool = tell(next(story for story in STORIES if story.name == "restarts"))
    started = [event for event in pool.record[JOB] if isinstance(event, RecoveryStarted)]
    finished = [event for event in pool.record[JOB] if isinstance(event, RecoveryFinished)]
    assert [(e.restart_count, e.reason) for e in started] == [(1, "restart 1 of 1: rank 1 killed by SIGKILL")]
    assert [e.restart_count for e in finished] == [1]


@pytest.mark.parametrize(
    ("exited", "reason"),
    [
        ({"exit_code": 1, "step": 12}, "rank 1 exited with code 1 at step 12"),
        ({"signal": 9, "detail": "out of memory"}, "rank 1 killed by SIGKILL: out of memory"),
        (
            {"signal": 11, "step": 4, "doing": "in all_reduce", "detail": "core dumped"},
            "rank 1 killed by SIGSEGV at step 4 while in all_reduce: core dumped",
        ),
        ({"detail": "lost with its zygote"}, "rank 1 ended: lost with its zygote"),
        ({"signal": 9, "stop_signal": 9}, "rank 1 killed by SIGKILL"),
    ],
)
def test_words_of_an_exit_that_nobody_ordered(exited: dict[str, object], reason: str) -> None:
    state = healthy()
    state, _ = transition(state, RankExited(time=3.0, restart_count=0, rank=1, log_path="/logs/1", **exited))
    assert state.reason == reason
    assert state.ranks[1].phase is RankPhase.FAILED
    assert state.failures[0].log_path == "/logs/1"


def test_an_exception_keeps_its_traceback_step_and_log() -> None:
    raised = RankRaised(time=3.0, restart_count=0, rank=0, error="KeyError: 'x'", traceback="Traceback …", step=5)
    state, _ = transition(healthy(), raised)
    (failure,) = state.failures
    assert failure.reason == "rank 0 raised KeyError: 'x' at step 5"
    assert (failure.traceback, failure.step, failure.log_path) == ("Traceback …", 5, "/logs/0")


@pytest.mark.parametrize(
    ("exited", "phase"),
    [
        ({"exit_code": 0}, RankPhase.SUCCEEDED),
        ({"exit_code": 0, "stop_signal": 15}, RankPhase.STOPPED),
        ({"exit_code": 143, "stop_signal": 15}, RankPhase.STOPPED),
        ({"signal": 15, "stop_signal": 15}, RankPhase.STOPPED),
        ({"signal": 15, "stop_signal": 9}, RankPhase.STOPPED),
        ({"signal": 9, "stop_signal": 9}, RankPhase.STOPPED),
        ({"stop_signal": 9}, RankPhase.STOPPED),
        ({"signal": 9, "stop_signal": 15}, RankPhase.FAILED),
        ({"signal": 11}, RankPhase.FAILED),
        ({"exit_code": 1}, RankPhase.FAILED),
    ],
)
def test_rank_phase_of_an_exit_while_the_job_stops(exited: dict[str, object], phase: RankPhase) -> None:
    state, _ = transition(healthy(), CancelRequested(time=3.0))
    state, _ = transition(state, RankExited(time=3.1, restart_count=0, rank=0, **exited))
    assert state.ranks[0].phase is phase
    assert state.phase is JobPhase.STOPPING


# --- what changes nothing ---------------------------------------------------------------------------------------------

PLACES = tuple(Placement(rank=k, local_rank=k, node_rank=0, worker="a", slot=k) for k in range(2))
GRANTED = SlotsGranted(time=1.0, placements=PLACES)
LISTENS = StoreStarted(time=1.1, restart_count=0, host="127.0.0.1", port=29500)
STARTED = tuple(RankStarted(time=1.2, restart_count=0, rank=k, pid=100 + k, log_path=f"/logs/{k}") for k in range(2))


def fold(*events: object, **options: object) -> JobState:
    state, _ = transition(None, LaunchRequested(time=0.5, job_id=JOB, spec=spec(**options)))
    for event in events:
        state, _ = transition(state, event)
    return state


def healthy(**options: object) -> JobState:
    return fold(GRANTED, LISTENS, *STARTED, **options)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (fold(GRANTED), GRANTED),
        (fold(GRANTED), SlotsAwaited(time=2.0, reason="waiting")),
        (fold(GRANTED), LaunchRefused(time=2.0, reason="no")),
        (fold(GRANTED, LISTENS), LISTENS),
        (healthy(), GRANTED),
        (healthy(), LISTENS),
        (healthy(), STARTED[0]),
        (healthy(), LaunchRefused(time=2.0, reason="no")),
        (healthy(), WorkerLost(time=2.0, worker="b")),
        (healthy(), Ticked(time=2.0)),
        (healthy(), RankStarted(time=2.0, restart_count=1, rank=0, pid=1)),
        (healthy(), RankExited(time=2.0, restart_count=1, rank=0, exit_code=1)),
        (fold(GRANTED), Ticked(time=2.0)),
        (fold(), LaunchFailed(time=2.0, restart_count=0, worker="a", reason="no")),
    ],
)
def test_out_of_turn(state: JobState, event: object) -> None:
    assert transition(state, event) == (state, ())


def test_no_slots_are_taken_while_the_old_generation_dies() -> None:
    failing, _ = transition(healthy(max_restarts=1), RankExited(time=2.0, restart_count=0, rank=0, exit_code=1))
    assert failing.phase is JobPhase.RECOVERING
    for event in (GRANTED, SlotsAwaited(time=2.1, reason="waiting"), LaunchRefused(time=2.1, reason="no")):
        assert transition(failing, event) == (failing, ())


def test_an_exception_told_twice_is_one_failure() -> None:
    raised = RankRaised(time=2.0, restart_count=0, rank=0, error="ValueError: x", traceback="")
    assert len(fold(GRANTED, LISTENS, *STARTED, raised, raised).failures) == 1


def test_an_exited_rank_never_changes() -> None:
    gone = fold(GRANTED, LISTENS, *STARTED, RankExited(time=2.0, restart_count=0, rank=0, exit_code=0))
    for event in (STARTED[0], RankExited(time=2.5, restart_count=0, rank=0, signal=9)):
        assert transition(gone, event)[0].ranks == gone.ranks


def test_a_rank_that_ends_before_it_is_told_to_run_does_not_hold_up_the_others() -> None:
    done = RankExited(time=2.0, restart_count=0, rank=1, exit_code=0)
    state = fold(GRANTED, LISTENS, STARTED[0], done)
    assert (state.phase, state.reason) == (JobPhase.HEALTHY, "1 of 2 ranks running, 1 finished")


@pytest.mark.parametrize("phase", [JobPhase.STOPPED, JobPhase.SUCCEEDED, JobPhase.FAILED])
def test_a_terminal_job_never_changes(phase: JobPhase) -> None:
    name = {"STOPPED": "cancel", "SUCCEEDED": "succeeds", "FAILED": "exit code"}[phase.value]
    state = tell(next(story for story in STORIES if story.name == name)).states[JOB]
    assert state.phase is phase
    late = (GRANTED, LISTENS, *STARTED, CancelRequested(time=9e9, force=True), Ticked(time=9e9))
    for event in (*late, WorkerLost(time=9e9, worker="a"), RankExited(time=9e9, restart_count=0, rank=0, signal=9)):
        assert transition(state, event) == (state, ())


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (None, GRANTED),
        (None, CancelRequested(time=1.0)),
        (healthy(), LaunchRequested(time=1.0, job_id=JOB, spec=spec())),
        (healthy(), RankExited(time=1.0, restart_count=0, rank=2, exit_code=0)),
        (healthy(), RankStarted(time=1.0, restart_count=0, rank=-1, pid=1)),
        (fold(), RankRaised(time=1.0, restart_count=0, rank=0, error="", traceback="")),
    ],
)
def test_what_cannot_be_is_an_internal_error_with_its_story(state: JobState | None, event: object) -> None:
    with pytest.raises(InvalidTransitionError) as caught:
        transition(state, event)
    assert caught.value.story


# --- what agents are told ---------------------------------------------------------------------------------------------


def test_each_worker_gets_its_own_ranks_and_all_the_same_world() -> None:
    places = tuple(
        Placement(rank=k, local_rank=k % 2, node_rank=k // 2, worker=f"w{k // 2}", slot=k % 2, host=f"10.0.0.{k // 2}")
        for k in range(4)
    )
    asked = spec(nnodes=2, nproc_per_node=0, master_port=4000)
    state, _ = transition(None, LaunchRequested(time=0.0, job_id=JOB, spec=asked))
    state, (store,) = transition(state, SlotsGranted(time=1.0, placements=places))
    assert isinstance(store, StartStore)
    assert (store.worker, store.host, store.port) == ("w0", "10.0.0.0", 4000)
    state, commands = transition(state, StoreStarted(time=1.1, restart_count=0, host="10.0.0.0", port=4000))
    assert state.master == ("10.0.0.0", 4000)
    for command, worker, ranks in zip(commands, ("w0", "w1"), ((0, 1), (2, 3)), strict=True):
        assert isinstance(command, StartRanks)
        assert (command.worker, tuple(p.rank for p in command.placements)) == (worker, ranks)
        assert (command.world_size, command.nnodes, command.spec.nproc_per_node) == (4, 2, 2)
        assert command.master == ("10.0.0.0", 4000)
    _, stops = transition(state, CancelRequested(time=2.0, force=True))
    assert [(c.worker, c.grace) for c in stops if isinstance(c, StopRanks)] == [("w0", 0.0), ("w1", 0.0)]


def test_deadlines_are_asked_for_while_launching_and_settling_only() -> None:
    assert fold(GRANTED, startup_timeout=7.0).deadline == 8.0
    assert healthy().deadline is None
    failing, _ = transition(healthy(), RankExited(time=2.0, restart_count=0, rank=0, exit_code=1))
    assert failing.deadline == 2.0 + SETTLE
    told, _ = transition(failing, Ticked(time=2.0 + SETTLE))
    assert told.deadline is None


def test_a_job_that_waited_waits_on_in_a_pool_that_is_back_without_a_worker_yet() -> None:
    """It is not refused for want of slots that will soon be there, and has restarted no more than it had started."""
    pool = FakePool({"a": 2}, start=1000.0)
    pool.launch(spec(), "first")
    pool.launch(spec(), JOB)
    pool.run()
    pool.lose_pool("the pool's scheduler died", comes_back=True)
    pool.run()
    assert pool.states["first"].phase is JobPhase.FAILED
    assert pool.states[JOB].phase is JobPhase.INIT
    pool.join("b", 2)
    pool.run()
    assert (pool.states[JOB].phase, pool.states[JOB].restart_count) == (JobPhase.HEALTHY, 0)
    assert pool.replay(JOB) == pool.states[JOB]
    assert not any(isinstance(event, WorkerLost) for event in pool.record["first"])


def test_a_port_in_use_is_waited_for_when_a_job_restarts_and_not_at_first() -> None:
    pool = FakePool({"a": 2}, start=1000.0)
    pool.launch(spec(master_port=29500, startup_timeout=30.0, **RESTART), JOB)
    pool.run()
    pool.kill(JOB, 1)
    pool.agents["a"].refuse_store = "port 29500 is in use"
    while pool.states[JOB].reason != "starting 2 ranks: port 29500 is in use":
        assert pool.carry("a") or pool.deliver("a")
    first, again = (command for command in pool.commands if isinstance(command, StartStore))
    assert (first.patience, again.patience) == (0.0, 15.0)
    pool.run()
    healthy = pool.states[JOB]
    assert healthy.phase is JobPhase.HEALTHY
    pool.feed(JOB, StoreAwaited(time=1001.0, restart_count=1, reason="said late"))
    assert pool.states[JOB] == healthy

"""Generations of ranks over their agents: each rank a thread, real lines and slots, a store of torch's in memory."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from workbench.agent.snapshots import Kept
from workbench.agent.wire import Connection, close_all
from workbench.training import buddies, memory, slot, snapshots
from workbench.training.control import Control
from workbench.training.council import Council
from workbench.training.line import Line
from workbench.training.recall import Restored
from workbench.training.slots import Who
from workbench.training.snapshots import Snapshots


class Agent:
    """A host's: the real keeper, and a thread at the end of each rank's line."""

    def __init__(self) -> None:
        self.kept = Kept()
        self._lock = threading.Lock()
        self._ends: list[Connection] = []
        self._threads: list[threading.Thread] = []

    def line(self, rank: int) -> Line:
        ours, theirs = (Connection(end) for end in socket.socketpair())
        process = _Process(rank, ours)
        thread = threading.Thread(target=self._serve, args=(ours, process), daemon=True)
        self._ends += [ours, theirs]
        self._threads.append(thread)
        thread.start()

        def receive() -> Any:
            if (frame := theirs.receive()) is None:
                raise EOFError
            return frame

        control = Control(receive, theirs.send, {})
        control.start()
        return Line(control)

    def _serve(self, connection: Connection, process: _Process) -> None:
        while (frame := connection.receive()) is not None:
            with self._lock:
                self.kept.on_frame(process, frame)  # type: ignore[arg-type]

    def hang_up(self) -> None:
        """Its ranks are gone; all that they said has been heard."""
        for end in self._ends[1::2]:
            end.sock.shutdown(socket.SHUT_WR)
        for thread in self._threads:
            thread.join(10)
        for end in self._ends:
            end.sock.close()
        self._ends, self._threads = [], []


class _Process:
    """A rank as the agent holds it."""

    job_id = "job"

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self._connection = rank, connection

    def tell(self, header: dict[str, Any], payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        self._connection.send(header, payload, fds)
        close_all(fds)


class Job:
    """`hosts[rank]` is the agent on which the rank runs, by number."""

    def __init__(self, agents: int = 1) -> None:
        self.agents = [Agent() for _ in range(agents)]
        self._store = HashStore()
        self._generation = -1

    def generation(self, hosts: tuple[int, ...], work: Callable[[Snapshots, Who], Any], every: int = 1) -> list[Any]:
        """Let the next generation's ranks do their work, and be gone; what each returned."""
        self._generation += 1
        store = PrefixStore(str(self._generation), self._store)

        def run(rank: int) -> Any:
            who = Who(self._generation, rank, len(hosts))
            peers = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
            council = Council(store, rank, len(hosts))
            return work(Snapshots(who, self.agents[hosts[rank]].line(rank), council, peers, every), who)

        with ThreadPoolExecutor(len(hosts)) as pool:
            results = list(pool.map(run, range(len(hosts)), timeout=15))
        for agent in self.agents:
            agent.hang_up()
        return results

    def close(self) -> None:
        for agent in self.agents:
            agent.kept.close()


@pytest.fixture
def make_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []
    monkeypatch.setattr(snapshots, "replica_checksum", lambda _: "the same on all ranks")

    def make(agents: int = 1) -> Job:
        made.append(Job(agents))
        return made[-1]

    yield make
    for job in made:
        job.close()


def state(step: int, rank: int = 0) -> dict[str, Any]:
    return {"weight": torch.full((64, 8), step + rank / 10), "lr": step}


def train(first: int, last: int, torn: tuple[int, ...] = ()) -> Callable[[Snapshots, Who], None]:
    """Copies of these steps; the ranks `torn` die in the midst of the last one."""

    def work(memory: Snapshots, who: Who) -> None:
        for step in range(first, last + 1):
            assert memory.is_due(step)
            memory.take(step, state(step), {"rank": who.rank, "rng": torch.full((3,), step)})
            assert memory.off == ""
            if step == last and who.rank in torn:
                newest = memory._slots.newest()
                assert newest is not None
                slot.begin(newest.bytes)

    return work


def restore(memory: Snapshots, who: Who) -> Restored | None:
    return memory.restore()


def steps(found: list[Restored | None]) -> list[int]:
    assert all(found)
    return [one.step for one in found if one]


@pytest.mark.parametrize("torn", [(), (0,), (1,), (0, 1)])
def test_all_go_on_from_the_newest_step_that_all_have(make_job: Callable[..., Job], torn: tuple[int, ...]) -> None:
    job = make_job()
    job.generation((0, 0), train(1, 5, torn))
    found = job.generation((0, 0), restore)
    step = 4 if torn else 5
    assert steps(found) == [step, step]
    for rank, one in enumerate(found):
        assert torch.equal(one.state["weight"], state(step)["weight"])
        assert one.state["lr"] == step
        assert list(one.extras) == [rank]
        assert one.extras[rank]["rank"] == rank


def test_only_one_rank_of_a_host_copies_the_state(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.generation((0, 0, 0), train(1, 2))
    sizes = {name: os.fstat(fd).st_size for name, fd in job.agents[0].kept.of("job").items()}
    assert sorted(sizes) == [(rank, number) for rank in range(3) for number in range(2)]
    own = {size for (rank, _), size in sizes.items() if rank}
    assert max(own) <= 2**17
    assert min(size for (rank, _), size in sizes.items() if rank == 0) >= max(own) + 2000


def train_shares(first: int, last: int, torn: tuple[int, ...] = ()) -> Callable[[Snapshots, Who], None]:
    """Each rank copies one of three tensors of a state that is the same on all; `mine` is no rank's share."""

    def work(memory: Snapshots, who: Who) -> None:
        for step in range(first, last + 1):
            assert memory.is_due(step)
            value = {
                "layers": [torch.full((500, n + 1), float(step)) for n in range(3)],
                "mine": torch.tensor(who.rank),
            }
            shares = [value["layers"][n :: len(memory.peers)] for n in range(len(memory.peers))]
            memory.take(step, value, {"rank": who.rank}, shares=shares)
            assert memory.off == ""
            newest = memory._slots.newest()
            assert newest is not None
            if step == last and who.rank in torn:
                slot.begin(newest.bytes)

    return work


@pytest.mark.parametrize("torn", [(), (0,), (1,), (2,)])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_ranks_of_a_host_copy_a_share_each(make_job: Callable[..., Job], ranks: int, torn: tuple[int, ...]) -> None:
    job = make_job()
    job.generation((0, 0, 0), train_shares(1, 5, torn))
    copies = job.agents[0].kept.of("job")
    sizes = [os.fstat(copies[rank, 0]).st_size for rank in range(3)]
    assert sizes[1] - sizes[0] == pytest.approx(2000, abs=1000)  # its tensor is 2000 bytes more
    found = job.generation((0,) * ranks, restore)
    step = 4 if torn else 5
    assert steps(found) == [step] * ranks
    for one in found:
        assert [tuple(layer.shape) for layer in one.state["layers"]] == [(500, 1), (500, 2), (500, 3)]
        assert all(torch.equal(layer, torch.full_like(layer, step)) for layer in one.state["layers"])
        assert int(one.state["mine"]) == 0


def test_shares_that_do_not_fit_together_are_not_gone_on_from(
    make_job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job()

    def work(memory: Snapshots, who: Who) -> None:
        assert memory.is_due(1)
        layers = [torch.ones(3), torch.ones(4)]
        memory.take(1, layers, {}, shares=[layers[:1], layers[1:]] if who.rank == 0 else [layers[1:], layers[:1]])

    job.generation((0, 0), work)
    assert job.generation((0, 0), restore) == [None, None]
    assert (
        "the ranks' parts do not fit together: tensor 0 is not what the first rank has seen" in capsys.readouterr().err
    )


def test_each_host_has_all_shares(make_job: Callable[..., Job]) -> None:
    job = make_job(agents=2)
    job.generation((0, 0, 1, 1), train_shares(1, 3))
    found = job.generation((0, 1, 0, 1), restore)
    assert steps(found) == [3] * 4
    assert [int(one.state["mine"]) for one in found] == [0, 2, 0, 2]
    assert [one.extras[rank]["rank"] for rank, one in enumerate(found)] == [0, 1, 2, 3]


def test_what_is_restored_is_the_ranks_own(make_job: Callable[..., Job]) -> None:
    """An optimizer keeps the tensors that it is given, and changes them."""
    job = make_job()
    job.generation((0, 0), train(1, 2))

    def work(memory: Snapshots, who: Who) -> None:
        found = memory.restore()
        assert found is not None
        found.state["weight"].zero_()
        found.extras[who.rank]["rng"].zero_()

    job.generation((0, 0), work)
    found = job.generation((0, 0), restore)
    assert [float(one.state["weight"].max()) for one in found] == [2.0, 2.0]
    assert [int(one.extras[rank]["rng"][0]) for rank, one in enumerate(found)] == [2, 2]


def test_a_crash_before_the_first_new_copy_loses_nothing_more(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.generation((0, 0), train(1, 5, (1,)))
    for _ in range(3):
        assert steps(job.generation((0, 0), restore)) == [4, 4]

    def work(memory: Snapshots, who: Who) -> None:
        assert memory.restore() is not None
        if who.rank == 0:  # which has a whole copy of step 5 then, of another generation than ever another rank's
            memory.is_due(5)
            memory._plan = snapshots.Plan(slot.Kind.WHOLE)
            memory.take(5, state(50), {})

    job.generation((0, 0), work)
    found = job.generation((0, 0), restore)
    assert steps(found) == [4, 4]
    assert float(found[0].state["weight"].max()) == 4.0


def test_generations_use_the_same_memory(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.generation((0, 0), train(1, 5))

    def inodes() -> dict[tuple[int, int], int]:
        return {name: os.fstat(fd).st_ino for name, fd in job.agents[0].kept.of("job").items()}

    before = inodes()
    for generation in range(3):

        def work(memory: Snapshots, who: Who) -> None:
            found = memory.restore()
            assert found is not None
            train(found.step + 1, found.step + 4)(memory, who)

        job.generation((0, 0), work)
        assert inodes() == before, generation
    assert steps(job.generation((0, 0), restore)) == [17, 17]


def test_a_newer_checkpoint_on_disk_comes_first_and_the_copies_are_forgotten(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.generation((0, 0), train(1, 5))

    def work(memory: Snapshots, who: Who) -> tuple[Restored | None, str]:
        return memory.restore(7 if who.rank == 0 else -1), memory.reason

    reason = "step 5, in memory, is older than step 7 on disk"
    assert job.generation((0, 0), work) == [(None, reason)] * 2
    assert job.generation((0, 0), restore) == [None, None]


def test_another_world_gets_everybodys_own_things(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.generation((0, 0, 0, 0), train(1, 3))
    found = job.generation((0, 0), restore)
    assert steps(found) == [3, 3]
    assert [(sorted(one.extras), one.world_size) for one in found] == [([0, 1, 2, 3], 4)] * 2
    found = job.generation((0, 0, 0), restore)  # the two took no copy: those of the four are still there
    assert [(sorted(one.extras), one.world_size) for one in found] == [([0, 1, 2, 3], 4)] * 3


def test_ranks_that_are_no_more_are_let_go_once_there_are_new_copies(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.generation((0, 0, 0, 0), train(1, 3))

    def work(memory: Snapshots, who: Who) -> None:
        assert memory.restore() is not None
        train(4, 6)(memory, who)

    job.generation((0, 0), work)
    assert {rank for rank, _ in job.agents[0].kept.of("job")} == {0, 1}
    found = job.generation((0, 0), restore)
    assert [(one.step, one.world_size) for one in found] == [(6, 2)] * 2


def test_each_host_has_a_copy_and_own_things_move_with_their_rank(make_job: Callable[..., Job]) -> None:
    job = make_job(agents=2)
    job.generation((0, 0, 1, 1), train(1, 3))
    found = job.generation((0, 1, 0, 1), restore)
    assert steps(found) == [3] * 4
    assert [one.extras[rank]["rank"] for rank, one in enumerate(found)] == [0, 1, 2, 3]


def with_buddies(first: int, last: int, ranks: int) -> Callable[[Snapshots, Who], None]:
    """As `train_shares`, and what is the ranks' own has come to the other host."""
    together = threading.Barrier(ranks)

    def work(memory: Snapshots, who: Who) -> None:
        for step in range(first, last + 1):
            train_shares(step, step)(memory, who)
            assert memory.buddies is not None
            deadline = time.monotonic() + 10
            while memory.buddies.steps() != dict.fromkeys(memory.buddies.wards, step):
                assert not memory.buddies.fault
                assert time.monotonic() < deadline
                time.sleep(0.001)
            together.wait(10)
        assert memory.buddies is not None
        memory.buddies.end()

    return work


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 1)])
def test_a_host_that_is_lost_costs_no_more_than_its_ranks(
    make_job: Callable[..., Job], hosts: tuple[int, ...], lost: int
) -> None:
    job = make_job(agents=2)
    job.generation(hosts, with_buddies(1, 3, len(hosts)))
    job.agents[lost].kept.close()
    found = job.generation((1 - lost,) * len(hosts), restore)
    assert steps(found) == [3] * len(hosts)
    assert [one.extras[rank]["rank"] for rank, one in enumerate(found)] == list(range(len(hosts)))
    assert all(torch.equal(layer, torch.full_like(layer, 3)) for one in found for layer in one.state["layers"])
    found = job.generation((1 - lost,) * len(hosts), restore)  # a crash before the first new copy
    assert steps(found) == [3] * len(hosts)


def test_hosts_are_lost_one_after_another(make_job: Callable[..., Job]) -> None:
    job = make_job(agents=3)
    job.generation((0, 1), with_buddies(1, 3, 2))
    job.agents[0].kept.close()

    def go_on(memory: Snapshots, who: Who) -> None:
        restored = memory.restore()
        assert restored is not None
        train_shares(restored.step + 1, 5)(memory, who)

    job.generation((1, 1), go_on)
    assert steps(job.generation((1, 1), restore)) == [5, 5]


def test_one_host_sends_nothing(make_job: Callable[..., Job]) -> None:
    def work(memory: Snapshots, who: Who) -> bool:
        train_shares(1, 2)(memory, who)
        return memory.buddies is None

    assert make_job().generation((0, 0), work) == [True, True]


def test_a_buddy_that_is_gone_stops_nobody(make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buddies, "PATIENCE", 0.01)
    job = make_job(agents=2)

    def work(memory: Snapshots, who: Who) -> None:
        train_shares(1, 1 if who.rank else 20)(memory, who)
        assert memory.buddies is not None
        memory.buddies.end()

    job.generation((0, 1), work)


def test_a_host_without_the_state_goes_to_disk_where_it_cannot_be_sent(make_job: Callable[..., Job]) -> None:
    job = make_job(agents=2)
    job.generation((0, 0), train(1, 3))

    def work(memory: Snapshots, who: Who) -> str:
        assert memory.restore() is None
        return memory.reason

    fault = "the host of rank 1 has none, and there is no process group to send it over"
    reason = f"steps 3 and 2 cannot be taken from memory: {fault}"
    assert job.generation((0, 1), work) == [reason] * 2


def test_ranks_that_differ_keep_their_own_parts(make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "replica_checksum", lambda _: "")
    job = make_job()

    def work(memory: Snapshots, who: Who) -> None:
        memory.is_due(1)
        memory.take(1, state(1, who.rank), {})

    job.generation((0, 0), work)
    found = job.generation((0, 0), restore)
    assert [round(float(one.state["weight"][0, 0]), 3) for one in found] == [1.0, 1.1]

    def smaller(memory: Snapshots, who: Who) -> str:
        assert memory.restore() is None
        return memory.reason

    (reason,) = job.generation((0,), smaller)
    assert reason == "step 1 cannot be taken from memory: it is in 2 parts, one a rank, and there are 1 ranks now"


def test_a_job_without_room_says_so_once_and_trains_on(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 3 * 2**10)
    job = make_job()

    def work(memory: Snapshots, who: Who) -> str:
        for step in (1, 2, 3):
            if memory.is_due(step):
                memory.take(step, state(step), {})
        return memory.off

    off = set(job.generation((0, 0), work))
    assert len(off) == 1
    assert "at most 50% of that is used" in off.pop()
    assert job.agents[0].kept.of("job") == {}
    words = capsys.readouterr().err.splitlines()
    assert len(words) == 1
    assert words[0].startswith("dtrain: no copies of the training state are kept in memory any more: they would take")


def test_what_cannot_be_copied_switches_it_off(
    make_job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    def work(memory: Snapshots, who: Who) -> bool:
        assert memory.is_due(1)
        memory.take(1, {"hook": lambda: 3}, {})
        return memory.is_due(2)

    assert make_job().generation((0,), work) == [False]
    assert "pickle" in capsys.readouterr().err


def test_a_held_copy_stays_while_others_are_taken(make_job: Callable[..., Job]) -> None:
    def work(memory: Snapshots, who: Who) -> None:
        train(1, 2)(memory, who)
        with memory.held(2) as copy:
            train(3, 6)(memory, who)
            assert copy["extras"]["rank"] == who.rank
            if who.rank == 0:
                assert float(copy["state"]["weight"].max()) == 2.0
            else:
                assert copy["state"] is None
        with memory.held(1) as copy:
            assert copy is None

    make_job().generation((0, 0), work)


def test_rank_0_sets_the_pace_for_all(make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    def work(memory: Snapshots, who: Who) -> list[int]:
        monkeypatch.setattr(memory._pace, "every", lambda: 4 if who.rank == 0 else 7)
        return [step for step in range(1, 20) if memory.is_due(step)]

    assert make_job().generation((0, 0), work, every=0) == [[1, 2, 3, 4, 8, 12, 16]] * 2


def test_a_rank_that_hears_nothing_keeps_its_pace(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SHORT_PATIENCE", 0.01)

    def work(memory: Snapshots, who: Who) -> int:
        if who.rank == 0:
            return 0
        return sum(memory.is_due(step) for step in range(1, 200))

    assert make_job().generation((0, 0), work, every=0) == [0, 199]

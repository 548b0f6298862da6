"""Gang placement: never a slot twice, all ranks or none, nobody overtaken, true reasons."""

from __future__ import annotations

import itertools
import re

import msgspec
import pytest
from msgspec.structs import replace

from workbench.commands import RequestSlots
from workbench.policy.placement import Granted, Refused, Waiting, WorkerSlots, place
from workbench.spec import JobSpec

Layout = tuple[tuple[str, int, tuple[int, ...]], ...]  # (host, total, free slots) a worker


def workers(layout: Layout) -> tuple[WorkerSlots, ...]:
    return tuple(
        WorkerSlots(worker=f"w{index}", host=host, total=total, free=free)
        for index, (host, total, free) in enumerate(layout)
    )


def spec(ranks: int, nnodes: int = 1) -> JobSpec:
    return JobSpec(entrypoint="train.py", nproc_per_node=ranks, nnodes=nnodes)


ONE = (("h", 4, (0, 1, 2, 3)),)
BUSY = (("h", 4, (1, 3)),)
TWO = (("h", 2, (0, 1)), ("g", 2, (0, 1)))
PAIR = (("h", 2, (0, 1)), ("h", 2, (0, 1)))  # two workers on one host


@pytest.mark.parametrize(
    ("layout", "asked", "slots"),
    [
        (ONE, spec(1), "w0:0"),
        (ONE, spec(4), "w0:0 w0:1 w0:2 w0:3"),
        (ONE, spec(0), "w0:0 w0:1 w0:2 w0:3"),
        (BUSY, spec(2), "w0:1 w0:3"),
        (PAIR, spec(3), "w0:0 w0:1 w1:0"),
        (PAIR, spec(0), "w0:0 w0:1 w1:0 w1:1"),
        (TWO, spec(2, 2), "w0:0 w0:1 w1:0 w1:1"),
        (TWO, spec(0, 2), "w0:0 w0:1 w1:0 w1:1"),
        (TWO, spec(1, 2), "w0:0 w1:0"),
        ((("h", 2, (1,)), ("g", 4, (0, 1, 2))), spec(2), "w1:0 w1:1"),
        ((("h", 1, (0,)), ("g", 4, (0, 1, 2, 3))), spec(0, 2), "w0:0 w1:0"),
        ((("h", 0, ()), ("g", 1, (0,))), spec(0), "w1:0"),
    ],
)
def test_granted(layout: Layout, asked: JobSpec, slots: str) -> None:
    decision = place(asked, workers(layout))
    assert isinstance(decision, Granted)
    assert " ".join(f"{p.worker}:{p.slot}" for p in decision.placements) == slots


@pytest.mark.parametrize(
    ("layout", "asked", "slots"),
    [
        (ONE, spec(3), "w0:1 w0:2 w0:0"),
        (ONE, spec(1), "w0:0"),
        (TWO, spec(2, 2), "w1:1 w1:0 w0:1 w0:0"),
    ],
)
def test_turned_each_rank_is_where_the_next_one_would_be(layout: Layout, asked: JobSpec, slots: str) -> None:
    decision = place(replace(asked, rotate_slots=True), workers(layout))
    assert isinstance(decision, Granted)
    assert [p.rank for p in decision.placements] == list(range(len(decision.placements)))
    assert " ".join(f"{p.worker}:{p.slot}" for p in decision.placements) == slots


@pytest.mark.parametrize(
    ("layout", "asked", "reason"),
    [
        ((), spec(2), "waiting: the pool has no worker with a slot now"),
        ((), spec(0), "waiting: the pool has no worker with a slot now"),
        ((("h", 0, ()),), spec(0), "waiting: the pool has no worker with a slot now"),
        (BUSY, spec(4), "waiting: needs 4 slots, 2 free"),
        (BUSY, spec(0), "waiting: needs 4 slots, 2 free"),
        ((("h", 1, ()),), spec(1), "waiting: needs 1 slot, 0 free"),
        ((("h", 2, (0,)), ("g", 2, (0,))), spec(2), "waiting: needs 2 slots on one host, 2 free"),
        ((("h", 2, (0, 1)), ("g", 2, (0,))), spec(2, 2), "waiting: needs 4 slots, 2 on each of 2 hosts, 3 free"),
    ],
)
def test_waiting(layout: Layout, asked: JobSpec, reason: str) -> None:
    assert place(asked, workers(layout)) == Waiting(reason)


@pytest.mark.parametrize(
    ("layout", "asked", "reason"),
    [
        (
            ONE,
            spec(5),
            "needs 5 slots, the pool has 4 on 1 host; ask for fewer ranks or start a larger pool (up -n 5)",
        ),
        (
            TWO,
            spec(3),
            "needs 3 slots on one host, and no host has more than 2; spread it with --nnodes and --nproc-per-node",
        ),
        (
            TWO,
            spec(5),
            "needs 5 slots, the pool has 4 on 2 hosts; ask for fewer ranks or start a larger pool (up -n 5)",
        ),
        (ONE, spec(2, 2), "needs 2 slots on each of 2 hosts, the pool has 4 on 1 host; ask for fewer ranks or nodes"),
        (ONE, spec(0, 2), "needs 4 slots on each of 2 hosts, the pool has 4 on 1 host; ask for fewer ranks or nodes"),
        (TWO, spec(1, 3), "needs 1 slot on each of 3 hosts, the pool has 4 on 2 hosts; ask for fewer ranks or nodes"),
    ],
)
def test_refused(layout: Layout, asked: JobSpec, reason: str) -> None:
    assert place(asked, workers(layout)) == Refused(reason)
    assert place(asked, workers(layout), ahead="digits-1a2b") == Refused(reason)


def test_warm_workers_come_first_but_to_avoid_a_slot_counts_more() -> None:
    def where(*avoid: tuple[str, int], ranks: int = 1) -> list[tuple[str, int]]:
        wish = RequestSlots(job_id="job", avoid=avoid)
        decision = place(spec(ranks), (msgspec.structs.replace(cold, is_warm=False), warm), wish=wish)
        assert isinstance(decision, Granted)
        return [(place.worker, place.slot) for place in decision.placements]

    cold, warm = workers(TWO)
    assert where() == [("w1", 0)]
    assert where(("w1", 0)) == [("w1", 1)]
    assert where(("w1", 0), ("w1", 1)) == [("w0", 0)]
    cold, warm = workers(PAIR)
    assert where() == [("w1", 0)]
    assert where(ranks=3) == [("w1", 0), ("w1", 1), ("w0", 0)]


@pytest.mark.parametrize("layout", [ONE, BUSY, TWO, PAIR])
def test_nobody_overtakes(layout: Layout) -> None:
    assert place(spec(1), workers(layout), ahead="digits-1a2b") == Waiting(
        "waiting: needs 1 slot, behind digits-1a2b in the queue"
    )


HOSTS = [(1, ()), (1, (0,)), (2, (1,)), (3, (0, 2)), (4, (0, 1, 2, 3))]
POOLS = [
    tuple((host, *slots) for host, slots in zip(names, chosen, strict=True))
    for names in (("h",), ("h", "h"), ("h", "g"), ("h", "g", "h"))
    for chosen in itertools.product(HOSTS, repeat=len(names))
]
ASKED = [spec(ranks, nnodes) for ranks in range(6) for nnodes in (1, 2, 3)]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: f"{asked.nnodes}x{asked.nproc_per_node}")
def test_every_small_pool(asked: JobSpec) -> None:
    for layout in POOLS:
        check(asked, workers(layout), place(asked, workers(layout)))


def check(asked: JobSpec, pool: tuple[WorkerSlots, ...], decision: Granted | Waiting | Refused) -> None:
    """Compare one decision with what the pool could do, counted in another way."""
    totals, free = by_host(pool, "total"), by_host(pool, "free")
    per_node = asked.nproc_per_node or sorted(totals.values())[-min(asked.nnodes, len(totals))]
    fits_ever = sum(total >= per_node for total in totals.values()) >= asked.nnodes
    fits_now = sum(count >= per_node for count in free.values()) >= asked.nnodes
    match decision:
        case Granted():
            assert fits_now
            check_gang(asked, pool, decision, per_node)
        case Waiting(reason):
            assert fits_ever and not fits_now
            assert f"needs {asked.nnodes * per_node} slot" in reason
            assert re.search(rf", {sum(free.values())} free\Z", reason)
        case Refused(reason):
            assert not fits_ever
            assert str(per_node) in reason or str(asked.nnodes * per_node) in reason


def by_host(pool: tuple[WorkerSlots, ...], what: str) -> dict[str, int]:
    counts = {worker.host: 0 for worker in pool}
    for worker in pool:
        counts[worker.host] += worker.total if what == "total" else len(worker.free)
    return counts


def check_gang(asked: JobSpec, pool: tuple[WorkerSlots, ...], granted: Granted, per_node: int) -> None:
    places = granted.placements
    free = {(worker.worker, slot): worker.host for worker in pool for slot in worker.free}
    assert len({(p.worker, p.slot) for p in places}) == len(places) == asked.nnodes * per_node
    assert all(free.get((p.worker, p.slot)) == p.host for p in places)
    assert [p.rank for p in places] == list(range(len(places)))
    assert [(p.node_rank, p.local_rank) for p in places] == [divmod(p.rank, per_node) for p in places]
    hosts = [host for host, _ in itertools.groupby(p.host for p in places)]
    assert len(hosts) == len(set(hosts)) == asked.nnodes

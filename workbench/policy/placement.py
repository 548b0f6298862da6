"""Which slots a job gets: gang placement, all ranks or none, first come, first served.

A node is a host. A job of `nnodes` × `nproc_per_node` gets that many slots on that many different hosts; ranks are
numbered host by host, so that neighbours in rank share a host. An elastic job that has waited is content with fewer:
fewer nodes first, then fewer ranks a node. Pure: the pool's slots are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from workbench.commands import RequestSlots
from workbench.spec import JobSpec
from workbench.state import Placement

T = TypeVar("T")


class WorkerSlots(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's slots: `total` of them, `free` the numbers not in use now, in ascending order."""

    worker: str
    host: str
    total: int
    free: tuple[int, ...]
    is_warm: bool = True  # ranks start there at once


class Granted(msgspec.Struct, frozen=True):
    placements: tuple[Placement, ...]


class Waiting(msgspec.Struct, frozen=True):
    reason: str


class Refused(msgspec.Struct, frozen=True):
    reason: str


Decision = Granted | Waiting | Refused


class Shape(NamedTuple):
    """Ranks as they are to lie."""

    nnodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nnodes * self.per_node


def place(
    spec: JobSpec, workers: Sequence[WorkerSlots], *, ahead: str = "", wish: RequestSlots | None = None
) -> Decision:
    """Decide for one job. `ahead` names a job that came first and still waits: nobody overtakes it.

    `wish` says what differs from the spec: another number of ranks, fewer than all of them, slots to avoid.
    """
    wish = wish or RequestSlots(job_id="")
    hosts = _by_host(workers)
    if not hosts:
        return Waiting("waiting: the pool has no worker with a slot now")
    shapes = _shapes(spec, hosts, wish, wish.at_least)
    wanted, least = shapes[0], shapes[-1]
    if complaint := _never(hosts, _shapes(spec, hosts, wish, spec.least_ranks)[-1]):
        return Waiting(f"waiting: {complaint}") if wish.is_patient else Refused(complaint)
    if ahead:
        return Waiting(f"waiting: needs {_slots(least.ranks)}, behind {ahead} in the queue")
    for shape in shapes:
        if placements := _fit(hosts, shape, wish.avoid, turn=int(spec.rotate_slots)):
            return Granted(placements)
    free = sum(len(w.free) for w in workers)
    least_text = f" (at least {least.ranks})" if least != wanted else ""
    return Waiting(f"waiting: needs {_slots(wanted.ranks)}{least_text}{_spread(wanted, hosts)}, {free} free")


def _shapes(spec: JobSpec, hosts: dict[str, list[WorkerSlots]], wish: RequestSlots, at_least: int) -> list[Shape]:
    """What would do, the best first; `at_least` 0: nothing less than all."""
    per_node = spec.nproc_per_node or _default_ranks(hosts, spec.nnodes)
    if wish.ranks:
        return [_spread_out(wish.ranks, spec.nnodes, per_node)]
    shapes = [Shape(spec.nnodes, per_node)]
    if at_least:
        shapes += [Shape(nodes, per_node) for nodes in range(spec.nnodes - 1, 0, -1)]
        shapes += [Shape(1, ranks) for ranks in range(per_node - 1, 0, -1)]
    return [shape for shape in shapes if shape.ranks >= at_least] or shapes[:1]


def _spread_out(ranks: int, nnodes: int, per_node: int) -> Shape:
    """So many ranks on as few nodes as the spec's number a node allows, the same number on each."""
    fewest = max(1, min(nnodes, -(-ranks // per_node)))
    nodes = next((n for n in range(fewest, nnodes + 1) if ranks % n == 0), 1)
    return Shape(nodes, ranks // nodes)


def _fit(
    hosts: dict[str, list[WorkerSlots]], shape: Shape, avoid: Sequence[tuple[str, int]], *, turn: int = 0
) -> tuple[Placement, ...] | None:
    """The slots for it, if they are free: rather warm ones, and to be avoided ones only where there are no others.

    `turn`: by how many places hosts, and the slots of each, are then turned against ranks.
    """
    slots = {host: _take(members, shape.per_node, avoid) for host, members in hosts.items()}
    fitting = [host for host in hosts if len(slots[host]) == shape.per_node]
    if len(fitting) < shape.nnodes:
        return None
    fitting.sort(key=lambda host: _cost(slots[host], avoid))
    return tuple(
        _placement(node, local, shape.per_node, worker, slot)
        for node, host in enumerate(_turned(fitting[: shape.nnodes], turn))
        for local, (worker, slot) in enumerate(_turned(slots[host], turn))
    )


def _turned(items: list[T], turn: int) -> list[T]:
    return items[turn:] + items[:turn]


def _spread(shape: Shape, hosts: dict[str, list[WorkerSlots]]) -> str:
    """How the slots have to lie, where that is a question."""
    if len(hosts) == 1:
        return ""
    return " on one host" if shape.nnodes == 1 else f", {shape.per_node} on each of {shape.nnodes} hosts"


def _placement(node: int, local: int, per_node: int, worker: WorkerSlots, slot: int) -> Placement:
    return Placement(
        rank=node * per_node + local,
        local_rank=local,
        node_rank=node,
        worker=worker.worker,
        slot=slot,
        host=worker.host,
    )


def _by_host(workers: Sequence[WorkerSlots]) -> dict[str, list[WorkerSlots]]:
    hosts: dict[str, list[WorkerSlots]] = {}
    for worker in (w for w in workers if w.total):
        hosts.setdefault(worker.host, []).append(worker)
    return hosts


def _default_ranks(hosts: dict[str, list[WorkerSlots]], nnodes: int) -> int:
    """One rank a slot: as many as the least of the `nnodes` largest hosts has."""
    sizes = sorted((_total(members) for members in hosts.values()), reverse=True)
    return sizes[min(nnodes, len(sizes)) - 1]


def _never(hosts: dict[str, list[WorkerSlots]], shape: Shape) -> str:
    """Why the job could not run here even with every slot free; empty when it could."""
    nnodes, per_node = shape
    large = sum(_total(members) >= per_node for members in hosts.values())
    if large >= nnodes:
        return ""
    total = sum(map(_total, hosts.values()))
    if nnodes == 1 and total >= per_node:
        return (
            f"needs {_slots(per_node)} on one host, and no host has more than {max(map(_total, hosts.values()))}; "
            "spread it with --nnodes and --nproc-per-node"
        )
    has = f"the pool has {total} on {_hosts(len(hosts))}"
    if nnodes == 1:
        return f"needs {_slots(per_node)}, {has}; ask for fewer ranks or start a larger pool (up -n {per_node})"
    return f"needs {_slots(per_node)} on each of {_hosts(nnodes)}, {has}; ask for fewer ranks or nodes"


def _take(
    members: Sequence[WorkerSlots], count: int, avoid: Sequence[tuple[str, int]]
) -> list[tuple[WorkerSlots, int]]:
    free = [(worker, slot) for worker in members for slot in worker.free]
    return sorted(free, key=lambda at: _cost([at], avoid))[:count]


def _cost(slots: Sequence[tuple[WorkerSlots, int]], avoid: Sequence[tuple[str, int]]) -> tuple[int, int]:
    """How many are to be avoided, and how many would start late."""
    return (
        sum((worker.worker, slot) in avoid for worker, slot in slots),
        sum(not worker.is_warm for worker, _ in slots),
    )


def _total(members: Sequence[WorkerSlots]) -> int:
    return sum(worker.total for worker in members)


def _slots(count: int) -> str:
    return f"{count} {'slot' if count == 1 else 'slots'}"


def _hosts(count: int) -> str:
    return f"{count} {'host' if count == 1 else 'hosts'}"

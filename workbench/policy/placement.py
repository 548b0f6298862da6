"""Which slots a job gets: gang placement, all ranks or none, first come, first served.

A node is a host. A job of `nnodes` × `nproc_per_node` gets that many slots on that many different hosts; ranks are
numbered host by host, so that neighbours in rank share a host. Pure: the pool's slots are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from workbench.spec import JobSpec
from workbench.state import Placement


class WorkerSlots(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's slots: `total` of them, `free` the numbers not in use now, in ascending order."""

    worker: str
    host: str
    total: int
    free: tuple[int, ...]


class Granted(msgspec.Struct, frozen=True):
    placements: tuple[Placement, ...]


class Waiting(msgspec.Struct, frozen=True):
    reason: str


class Refused(msgspec.Struct, frozen=True):
    reason: str


Decision = Granted | Waiting | Refused


def place(spec: JobSpec, workers: Sequence[WorkerSlots], *, ahead: str = "") -> Decision:
    """Decide for one job. `ahead` names a job that came first and still waits: nobody overtakes it."""
    hosts = _by_host(workers)
    if not hosts:
        return Waiting("waiting: the pool has no worker with a slot now")
    per_node = spec.nproc_per_node or _default_ranks(hosts, spec.nnodes)
    if complaint := _never(spec, hosts, per_node):
        return Refused(complaint)
    need, free = spec.nnodes * per_node, sum(len(w.free) for w in workers)
    if ahead:
        return Waiting(f"waiting: needs {_slots(need)}, behind {ahead} in the queue")
    fitting = [host for host, members in hosts.items() if _free(members) >= per_node][: spec.nnodes]
    if len(fitting) < spec.nnodes:
        return Waiting(f"waiting: needs {_slots(need)}{_spread(spec.nnodes, per_node, hosts)}, {free} free")
    return Granted(
        tuple(
            _placement(node, local, per_node, worker, slot)
            for node, host in enumerate(fitting)
            for local, (worker, slot) in enumerate(_take(hosts[host], per_node))
        )
    )


def _spread(nnodes: int, per_node: int, hosts: dict[str, list[WorkerSlots]]) -> str:
    """How the slots have to lie, where that is a question."""
    if len(hosts) == 1:
        return ""
    return " on one host" if nnodes == 1 else f", {per_node} on each of {nnodes} hosts"


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


def _never(spec: JobSpec, hosts: dict[str, list[WorkerSlots]], per_node: int) -> str:
    """Why the job could not run here even with every slot free; empty when it could."""
    large = sum(_total(members) >= per_node for members in hosts.values())
    if large >= spec.nnodes:
        return ""
    total = sum(map(_total, hosts.values()))
    if spec.nnodes == 1 and total >= per_node:
        return (
            f"needs {_slots(per_node)} on one host, and no host has more than {max(map(_total, hosts.values()))}; "
            "spread it with --nnodes and --nproc-per-node"
        )
    need, has = spec.nnodes * per_node, f"the pool has {total} on {_hosts(len(hosts))}"
    if spec.nnodes == 1:
        return f"needs {_slots(need)}, {has}; ask for fewer ranks or start a larger pool (up -n {need})"
    return f"needs {_slots(per_node)} on each of {_hosts(spec.nnodes)}, {has}; ask for fewer ranks or nodes"


def _take(members: Sequence[WorkerSlots], count: int) -> list[tuple[WorkerSlots, int]]:
    return [(worker, slot) for worker in members for slot in worker.free][:count]


def _total(members: Sequence[WorkerSlots]) -> int:
    return sum(worker.total for worker in members)


def _free(members: Sequence[WorkerSlots]) -> int:
    return sum(len(worker.free) for worker in members)


def _slots(count: int) -> str:
    return f"{count} {'slot' if count == 1 else 'slots'}"


def _hosts(count: int) -> str:
    return f"{count} {'host' if count == 1 else 'hosts'}"

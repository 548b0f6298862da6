"""Small models that `fully_shard` keeps in parts, and what goes wrong with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

STEPS = 5
AT = 2


class Told(NamedTuple):
    facts: list[tuple[str, dict[str, Any]]]
    error: str
    off: str
    result: bytes
    scatters: tuple[int, int, int]  # checked, found, healed
    tensors: int  # that a unit compares
    agreements: int


def run(
    rank: int, *, fault: str = "", replicas: int = 1, policy: str = "warn", checks: bool = True, watched: bool = True
) -> Told:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from workbench.training import guard
    from workbench.training.consistency import sharding, watch
    from workbench.training.consistency.check import Checker, ReplicasDifferError
    from workbench.training.consistency.reports import Reports

    torch.set_num_threads(1)
    facts: list[tuple[str, dict[str, Any]]] = []
    guard.install()
    checker = Checker(
        Reports(lambda event, **f: facts.append((event, f)), lambda **f: None), lambda: 0, policy=policy, every=1
    )
    watching = watch.Watch(checker)
    found: Any = None
    if watched:
        watch.install(watching)
        found = sharding.install(watching, checks_reduces=checks)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    names = ("replicate", "shard") if replicas > 1 else ("shard",)
    shape = (replicas, size // replicas) if replicas > 1 else (size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(rank if fault == "seeds" else 0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    error, units, optimizer = "", [], None
    try:
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = train(model, rank, fault, found)
        units = [unit for unit in watching.units.values() if unit is not None]
    except ReplicasDifferError as raised:
        error = str(raised)
    parts = [p._local_tensor if hasattr(p, "_local_tensor") else p for p in model.parameters()]
    result = b"".join(p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in parts)
    scatter = getattr(found, "scatter", None)
    counts = (scatter.checked, scatter.found, scatter.healed) if scatter is not None else (0, 0, 0)
    tensors, agreements = sum(len(unit.members) for unit in units), sum(unit.agreements for unit in units)
    del optimizer
    dist.destroy_process_group()
    told = [fact for fact in facts if fact[0] != "ConsistencyPaced"]
    return Told(told, error, checker.off, result, counts, tensors, agreements)


def train(model: Any, rank: int, fault: str, found: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if step == AT and fault:
            FAULTS.get(fault, lambda *_: None)(model, optimizer, rank)
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def flip(tensor: torch.Tensor, bit: int = 20) -> None:
    with torch.no_grad():
        tensor.view(-1).view(torch.int32)[3] ^= 1 << bit


def gathered(model: Any, optimizer: Any, rank: int) -> None:
    """A bit of what the all-gather gave flips on rank 1, once."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

    plain, left = module.foreach_all_gather_copy_out, [1]

    def copy_out(result: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        given = plain(result, params, *args, **kwargs)
        if rank == 1 and left[0]:
            left[0] -= 1
            flip(params[0].all_gather_outputs[0])
        return given

    module.foreach_all_gather_copy_out = copy_out  # type: ignore[assignment]


def scattered(model: Any, optimizer: Any, rank: int, times: int = 1) -> None:
    """A bit of what the next reduce-scatter gives flips on rank 1."""
    plain, left = dist.reduce_scatter_single, [times]

    def reduce_scatter_single(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = plain(output, *args, **kwargs)
        if left[0]:
            left[0] -= 1
            if rank == 1:
                flip(output, 29)
        return given

    dist.reduce_scatter_single = reduce_scatter_single


def lasting(model: Any, optimizer: Any, rank: int) -> None:
    scattered(model, optimizer, rank, 99)


def state(model: Any, optimizer: Any, rank: int) -> None:
    """A bit of this rank's part of the momentum."""
    if rank == 1:
        flip(optimizer.state[next(iter(model.parameters()))]["momentum_buffer"]._local_tensor)


FAULTS: dict[str, Any] = {"gathered": gathered, "scattered": scattered, "lasting": lasting, "state": state}

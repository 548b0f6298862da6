"""A small DDP training whose all-reduces are hit where a test wants it, and what was told of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 5
AT = 3  # the backward that is hit
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Hit(NamedTuple):
    """`stage`: before, after or in the reduce; `rank` where, "in": everywhere. `times`: reduces that are hit."""

    stage: str
    rank: int = 1
    element: int = 5
    bit: int = 27
    times: int = 1


class Told(NamedTuple):
    facts: list[tuple[str, dict[str, Any]]]
    error: str
    checked: int
    found: int
    healed: int
    result: bytes
    hooks: list[str]


def run(
    rank: int, *, mode: str | None = "checked", width: int = 64, hit: Hit | None = None, policy: str = "warn",
    every: int = 1, seat: list[int] | None = None, program: str = "plain", dtype: str = "float32", **ddp: Any,
) -> Told:  # fmt: skip
    """`seat`: whose data each rank takes, to permute ranks."""
    from workbench.training import guard
    from workbench.training.consistency import reducing, watch
    from workbench.training.consistency.check import Checker, ReplicasDifferError
    from workbench.training.consistency.reports import Reports

    torch.set_num_threads(1)
    facts: list[tuple[str, dict[str, Any]]] = []
    guard.install()
    checker = Checker(Reports(lambda event, **f: facts.append((event, f)), lambda **f: None), lambda: 0, policy=policy)
    watching = watch.Watch(checker)
    watch.install(watching)
    found = reducing.install(watching, reducing.Wish(mode, width, every)) if mode else None
    dist.init_process_group("gloo")
    who = rank if seat is None else seat[rank]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 4)).to(getattr(torch, dtype))
    wrapped = DDP(model, bucket_cap_mb=ddp.pop("bucket_cap_mb", 0.005), **ddp)
    error, hooks = "", []
    try:
        PROGRAMS[program](wrapped, model, who, found, hit, rank)
    except ReplicasDifferError as raised:
        error = str(raised)
    settlers = [*found.settlers.values()] if found is not None else []
    counts = [sum(getattr(one, name) for one in settlers) for name in ("checked", "found", "healed")]
    hooks = [hook.__qualname__ for hook, _ in wrapped._comm_hooks]
    result = b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters())
    dist.destroy_process_group()
    return Told([fact for fact in facts if fact[0] != "ConsistencyPaced"], error, *counts, result, hooks)


def batch(step: int, who: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + who)
    return torch.randn(8, 40, generator=generator).to(dtype), torch.randint(0, 4, (8,), generator=generator)


def train(wrapped: Any, model: Any, who: int, found: Any, hit: Hit | None, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, who, next(model.parameters()).dtype)
        loss = F.cross_entropy(wrapped(x).float(), y)
        if step == AT and hit is not None:
            inject(next(iter(found.settlers.values())).reducer, hit, rank)
        loss.backward()
        optimizer.step()


def inject(reducer: Any, hit: Hit, rank: int) -> None:
    """The first reduce of the next backward, and those that repeat it."""
    plain, left = reducer.send, [hit.times]

    def send(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        if op != dist.ReduceOp.SUM or left[0] == 0:
            return plain(tensor, op)
        left[0] -= 1
        is_here = hit.stage == "in" or rank == hit.rank
        if hit.stage == "before" and is_here:
            flip(tensor, hit)
        future = plain(tensor, op)
        if hit.stage == "before" or not is_here:
            return future

        def change(done: Any) -> Any:
            flip(tensor, hit)
            return done.value()

        return future.then(change)

    reducer.send = send


def flip(tensor: torch.Tensor, hit: Hit) -> None:
    words = tensor.view(WORDS[tensor.element_size()])
    words[hit.element] ^= 1 << hit.bit


def with_fp16(wrapped: Any, *rest: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped.register_comm_hook(None, fp16_compress_hook)
    train(wrapped, *rest)


def with_power_sgd(wrapped: Any, *rest: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    wrapped.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    train(wrapped, *rest)


def with_a_late_hook(wrapped: Any, model: Any, who: int, found: Any, hit: Hit | None, rank: int) -> None:
    train(wrapped, model, who, found, None, rank)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped.register_comm_hook(None, fp16_compress_hook)
    train(wrapped, model, who, found, None, rank)


def accumulating(wrapped: Any, model: Any, who: int, found: Any, hit: Hit | None, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        with wrapped.no_sync():
            F.cross_entropy(wrapped(batch(step, who, torch.float32)[0]), batch(step, who, torch.float32)[1]).backward()
        x, y = batch(step + 100, who, torch.float32)
        loss = F.cross_entropy(wrapped(x), y)
        if step == AT and hit is not None:
            inject(next(iter(found.settlers.values())).reducer, hit, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def uneven(wrapped: Any, model: Any, who: int, found: Any, hit: Hit | None, rank: int) -> None:
    from torch.distributed.algorithms.join import Join

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([wrapped]):
        for step in range(STEPS + who):
            optimizer.zero_grad()
            x, y = batch(step, who, torch.float32)
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()


PROGRAMS: dict[str, Callable[..., None]] = {
    "plain": train, "fp16": with_fp16, "power_sgd": with_power_sgd, "late": with_a_late_hook,
    "accumulating": accumulating, "uneven": uneven,
}  # fmt: skip

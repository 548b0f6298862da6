"""The order of one pass, told again from what a position keeps of it, for a run that has another number of ranks.

A `DistributedSampler`'s is computed once for all ranks. Of any other sampler each old rank's order is drawn again, by a
copy of the sampler that believes to be that rank, from the random states with which that rank's pass began.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from workbench.training.order import DEPTH, Drawn, index_sampler, set_generator_states
from workbench.training.rng import generator_state, host_rng_state, set_generator_state, set_rng_state

KINDS: Final = {DistributedSampler: "distributed", RandomSampler: "random", SequentialSampler: "sequential"}
WORLD_SIZES: Final = ("num_replicas", "world_size")  # what samplers call it; their rank is `rank`


def batches_of(loader: Any) -> BatchSampler | None:
    """What only puts samples together, in a loader whose order is one of samples."""
    batches = loader.batch_sampler
    return batches if type(batches) is BatchSampler else None


def sample_sampler(loader: Any) -> Any:
    """The sampler that gives samples; None where only the loader's own batch sampler knows them."""
    batches = batches_of(loader)
    if batches is not None:
        return batches.sampler
    return loader.sampler if loader.batch_sampler is None else None


def description(loader: Any) -> dict[str, Any]:
    """What the order of the pass that is about to begin is, beside its random states."""
    sampler = sample_sampler(loader)
    kind = KINDS.get(type(sampler), "custom")
    told: dict[str, Any] = {"kind": kind, "length": len_of(loader.dataset), "batch_size": batch_size(loader)}
    told["name"] = name_of(loader)
    if kind == "distributed":
        told |= {name: getattr(sampler, name) for name in ("seed", "epoch", "shuffle", "drop_last", "num_replicas")}
    elif kind == "random":
        told |= {"replacement": sampler.replacement, "num_samples": sampler.num_samples}
        told |= {"own": sampler.generator is not None, "shared": sampler.generator is loader.generator}
    return told


def name_of(loader: Any) -> str:
    """Of what makes the order."""
    return type(_unit_sampler(loader)).__qualname__


def batch_size(loader: Any) -> int:
    """Samples a batch; 0 where the loader's own batch sampler says it."""
    batches = batches_of(loader)
    if batches is not None:
        return batches.batch_size
    return 1 if loader.batch_sampler is None else 0


def len_of(value: Any) -> int:
    """-1 where it is not known."""
    try:
        return len(value)
    except TypeError:
        return -1


def distributed(told: Mapping[str, Any]) -> list[int]:
    """The epoch's order, of all ranks together, without padding."""
    if not told["shuffle"]:
        return list(range(told["length"]))
    generator = torch.Generator()
    generator.manual_seed(told["seed"] + told["epoch"])
    return torch.randperm(told["length"], generator=generator).tolist()


def rank_order(loader: Any, told: Mapping[str, Any], where: Mapping[str, Any], rank: int, size: int) -> list[Any]:
    """What one rank of `size` would have drawn in a whole pass; draws nothing from the process' generators."""
    with rng_kept():
        seeding, sampler = (_torchs_own if told["kind"] in KINDS.values() else _copied)(loader, told, where, rank, size)
        set_rng_state(where["rng"])
        if where["draws_seed"]:
            torch.empty((), dtype=torch.int64).random_(generator=seeding)
        return list(sampler)


def drawn_digest(units: Sequence[Any], batch_size: int) -> int:
    """What `Drawn.digest` is once these were drawn."""
    batches = units if not batch_size else [units[i : i + batch_size] for i in range(0, len(units), batch_size)]
    drawn = Drawn(iter(batches), len(batches))
    drawn.pass_over()
    return drawn.digest


def is_sharded(loader: Any) -> bool:
    """The loader's sampler knows ranks."""
    return bool(_believing(_clone(_unit_sampler(loader), {}, DEPTH), 0, 1))


@contextlib.contextmanager
def rng_kept() -> Iterator[None]:
    before = host_rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


def _unit_sampler(loader: Any) -> Any:
    sampler = sample_sampler(loader)
    return index_sampler(loader) if sampler is None else sampler


def _torchs_own(_loader: Any, told: Mapping[str, Any], where: Mapping[str, Any], _rank: int, _size: int) -> Any:
    """The generator that the workers' seed is drawn from, and torch's own sampler, wherever the old loader had it."""
    drawing = [torch.Generator() for _ in where["generators"]]
    for one, state in zip(drawing, where["generators"].values(), strict=True):
        set_generator_state(one, state)
    if told["kind"] == "sequential":
        return (drawing[0] if drawing else None), range(told["length"])
    own = drawing[-1] if told["own"] else None
    sampler = RandomSampler(range(told["length"]), told["replacement"], told["num_samples"], own)
    is_alone = told["own"] and not told["shared"] and len(drawing) == 1
    return (None if is_alone or not drawing else drawing[0]), sampler


def _copied(loader: Any, _told: Mapping[str, Any], where: Mapping[str, Any], rank: int, size: int) -> Any:
    known: dict[int, Any] = {}
    parts = {name: _clone(getattr(loader, name), known, DEPTH) for name in ("generator", "batch_sampler", "sampler")}
    bones = SimpleNamespace(**parts)
    set_generator_states(bones, where["generators"])
    sampler = _unit_sampler(bones)
    _believing(sampler, rank, size)
    return bones.generator, sampler


def _clone(value: Any, known: dict[int, Any], depth: int) -> Any:
    """A sampler with samplers and generators of its own; what it reads its indices from is shared."""
    if id(value) in known:
        return known[id(value)]
    state = generator_state(value)
    if isinstance(value, torch.Generator):
        known[id(value)] = torch.Generator()
    elif state is not None:
        known[id(value)] = copy.deepcopy(value)
    elif isinstance(value, Sampler) or (depth == DEPTH and hasattr(value, "__dict__")):
        known[id(value)] = twin = copy.copy(value)
        for name, part in list(vars(twin).items()) if depth else ():
            vars(twin)[name] = _clone(part, known, depth - 1)
    return known.get(id(value), value)


def _believing(sampler: Any, rank: int, size: int, depth: int = DEPTH) -> int:
    """Have it, and those within it, believe to be `rank` of `size`; how many knew of ranks."""
    own = getattr(sampler, "__dict__", {})
    names = [name for name in WORLD_SIZES if name in own] if "rank" in own else []
    if names:
        own.update({"rank": rank, **dict.fromkeys(names, size)})
    if isinstance(sampler, DistributedSampler):
        _resized(sampler)
    parts = [part for part in own.values() if isinstance(part, Sampler)] if depth else []
    return len(names) + sum(_believing(part, rank, size, depth - 1) for part in parts)


def _resized(sampler: Any) -> None:
    """What a `DistributedSampler` computes from the world size when it is made."""
    length, size = len(sampler.dataset), sampler.num_replicas
    drops = sampler.drop_last and length % size
    sampler.num_samples = math.ceil((length - size) / size) if drops else math.ceil(length / size)
    sampler.total_size = sampler.num_samples * size

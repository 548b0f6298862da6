"""What a checkpoint holds of a program's objects, under names that do not depend on how they are wrapped or placed.

A model's tensors have their names without what DistributedDataParallel, torch.compile and activation checkpointing put
in front; an optimizer's state goes by those names instead of by number, as `torch.distributed.checkpoint.state_dict`
has it. So the state of a DDP job loads into a plain model or one that `fully_shard` has split. What is neither a model
nor an optimizer is kept as its `state_dict` is, keys of any type included.

Nothing here steps an optimizer or allocates its state, as torch's own functions do to learn its layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

Path: TypeAlias = tuple[str | int, ...]
Tree: TypeAlias = dict[str, Any]  # nested dicts and lists; leaves are tensors and plain values
WRAPPED: Final = ("module", "_orig_mod", "_checkpoint_wrapped_module")
WRAPPERS: Final = ("DistributedDataParallel", "DataParallel", "OptimizedModule", "CheckpointWrapper")
REFUSED: Final = {
    "FullyShardedDataParallel": "use torch.distributed.fsdp.fully_shard, which takes its place",
    "ZeroRedundancyOptimizer": "its state lies in parts that only it can gather",
}


class UnfitError(RuntimeError):
    """A checkpoint does not fit the program, or the program's state fits no checkpoint; the text says where."""


@dataclass
class Taken:
    """A program's state taken apart, its tensors those of the program itself.

    `shared`: paths of tensors that are the same on every rank, so that any rank may write them. Of other plain tensors
    it is rank 0's that count; a DTensor is in parts by itself.
    """

    tree: Tree = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    shared: set[Path] = field(default_factory=set)


def take(state: Mapping[str, Any]) -> Taken:
    """Raises `UnfitError` for what cannot be kept."""
    taken = Taken()
    names = Names(state)
    for key, thing in state.items():
        _refuse(key, thing)
        if isinstance(thing, torch.nn.Module):
            taken.tree[key] = _model_state(thing)
            if _is_replicated(thing):
                own = {plain_name(thing, name) for name, _ in thing.named_parameters()}
                taken.shared |= {(key, name) for name in taken.tree[key] if name in own}
        elif isinstance(thing, torch.optim.Optimizer) and names.of(thing) is not None:
            taken.tree[key] = _optimizer_state(thing, names)
            taken.shared |= {
                (key, "state", name, part)
                for name, parts in taken.tree[key]["state"].items()
                if name in names.replicated
                for part in parts
            }
        else:
            taken.objects[key] = thing.state_dict()
    return taken


def _refuse(key: str, thing: Any) -> None:
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise UnfitError(f"state[{key!r}] is a {type(thing).__name__}, which has no state_dict and load_state_dict")
    kinds = [thing, *thing.modules()] if isinstance(thing, torch.nn.Module) else [thing]
    for kind in {type(part).__name__ for part in kinds} & REFUSED.keys():
        raise UnfitError(f"state[{key!r}] is a {kind}: {REFUSED[kind]}")


def _is_replicated(model: torch.nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel)


def plain_name(model: torch.nn.Module, name: str) -> str:
    """A parameter's or buffer's name without its wrappers'."""
    kept: list[str] = []
    module: Any = model
    for part in name.split("."):
        if not (part in WRAPPED and type(module).__name__ in WRAPPERS):
            kept.append(part)
        module = getattr(module, "_modules", {}).get(part)
    return ".".join(kept)


def _model_state(model: torch.nn.Module) -> dict[str, Any]:
    return {plain_name(model, name): value for name, value in model.state_dict().items()}


class Names:
    """What the parameters of a state's models are called, for its optimizers.

    Where one model has all parameters of an optimizer they have their names in it; else the model's key comes first.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.replicated: set[str] = set()
        self._known: dict[int, list[tuple[str, str]]] = {}  # by id: (model's key, name)
        for key, thing in state.items():
            if isinstance(thing, torch.nn.Module):
                for name, parameter in thing.named_parameters():
                    plain = plain_name(thing, name)
                    self._known.setdefault(id(parameter), []).append((key, plain))
                    if _is_replicated(thing):
                        self.replicated |= {plain, f"{key}.{plain}"}

    def of(self, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
        """By group; None where some parameter is in no model of the state."""
        groups = [[self._known.get(id(p), []) for p in group["params"]] for group in optimizer.param_groups]
        flat = [places for group in groups for places in group]
        if not all(flat):
            return None
        common = set.intersection(*({key for key, _ in places} for places in flat)) if flat else set()
        if common:
            key = min(common)
            return [[next(name for model, name in places if model == key) for places in group] for group in groups]
        return [[".".join(places[0]) for places in group] for group in groups]


def _optimizer_state(optimizer: torch.optim.Optimizer, names: Names) -> Tree:
    by_group = names.of(optimizer)
    assert by_group is not None
    known = optimizer.state_dict()
    flat = [name for group in by_group for name in group]
    numbers = [number for group in known["param_groups"] for number in group["params"]]
    state = {name: dict(known["state"][n]) for name, n in zip(flat, numbers, strict=True) if n in known["state"]}
    groups = [{**group, "params": own} for group, own in zip(known["param_groups"], by_group, strict=True)]
    return {"state": state, "param_groups": groups}


# --- going back -------------------------------------------------------------------------------------------------------


def put_back(state: Mapping[str, Any], tree: Tree, objects: Mapping[str, Any]) -> None:
    """Give the program's objects the state that was read: models first, then optimizers, then the rest."""
    names = Names(state)
    for key, thing in state.items():
        if key in tree and isinstance(thing, torch.nn.Module):
            _load_model(key, thing, tree[key])
    for key, thing in state.items():
        if key in tree and isinstance(thing, torch.optim.Optimizer):
            _load_optimizer(key, thing, tree[key], names)
    for key, thing in state.items():
        if key in objects:
            thing.load_state_dict(objects[key])


def _load_model(key: str, model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    live = model.state_dict()
    by_plain = {plain_name(model, name): name for name in live}
    _compare(key, set(by_plain), set(saved))
    model.load_state_dict({name: _placed(saved[plain], live[name]) for plain, name in by_plain.items()})


def _placed(value: Any, live: Any) -> Any:
    """A distributed tensor is to lie where the program's does before it is copied; a plain one need not."""
    is_distributed = isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")
    return value.to(live.device) if is_distributed and value.device != live.device else value


def _load_optimizer(key: str, optimizer: torch.optim.Optimizer, saved: Tree, names: Names) -> None:
    by_group = names.of(optimizer)
    if by_group is None:
        raise UnfitError(f"state[{key!r}]: some of its parameters are in no model of the state")
    groups = saved.get("param_groups", [])
    if [sorted(group) for group in by_group] != [sorted(group["params"]) for group in groups]:
        raise UnfitError(f"state[{key!r}]: its parameters, or their groups, are not those of the checkpoint")
    numbers: dict[str, int] = {}
    loaded = []
    for live, own, group in zip(optimizer.param_groups, by_group, groups, strict=True):
        mine = list(range(len(numbers), len(numbers) + len(own)))
        numbers.update(zip(own, mine, strict=True))
        loaded.append(
            {**group, "params": mine, **({"param_names": live["param_names"]} if "param_names" in live else {})}
        )
    known = {numbers[name]: parts for name, parts in saved.get("state", {}).items()}
    optimizer.load_state_dict({"state": known, "param_groups": loaded})


def _compare(key: str, live: set[str], saved: set[str]) -> None:
    for missing, where in ((live - saved, "the checkpoint has no"), (saved - live, "the program has no")):
        if missing:
            named = ", ".join(sorted(missing)[:3]) + (", …" if len(missing) > 3 else "")
            raise UnfitError(f"the checkpoint does not fit state[{key!r}]: {where} {named}")


def layouts(state: Mapping[str, Any]) -> dict[Path, torch.Tensor]:
    """The program's tensors by path, of which those read must have the shape and the parts."""
    return {
        (key, plain_name(thing, name)): value
        for key, thing in state.items()
        if isinstance(thing, torch.nn.Module)
        for name, value in thing.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def parameter_of(state: Mapping[str, Any]) -> dict[Path, torch.Tensor]:
    """By (optimizer's key, "state", name): the parameter whose state it is."""
    names = Names(state)
    found: dict[Path, torch.Tensor] = {}
    for key, thing in state.items():
        if isinstance(thing, torch.optim.Optimizer) and (by_group := names.of(thing)) is not None:
            for group, own in zip(thing.param_groups, by_group, strict=True):
                found.update({(key, "state", name): p for name, p in zip(own, group["params"], strict=True)})
    return found


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every tensor and value with its path."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list) and any(isinstance(part, Mapping) for part in tree):
        for number, value in enumerate(tree):
            yield from leaves(value, (*path, number))
    else:
        yield path, tree


def set_leaf(tree: Tree, path: Path, value: Any) -> None:
    """Put a value at its path, with the dicts and lists on the way."""
    here: Any = tree
    for part, after in itertools.pairwise(path):
        made: Any = [] if isinstance(after, int) else {}
        if isinstance(here, list):
            here.extend([None] * (int(part) + 1 - len(here)))
            if here[int(part)] is None:
                here[int(part)] = made
            here = here[int(part)]
        else:
            here = here.setdefault(part, made)
    if isinstance(here, list):
        here.extend([None] * (int(path[-1]) + 1 - len(here)))
    here[path[-1]] = value


def name_of(path: Sequence[str | int]) -> str:
    """As torch.distributed.checkpoint calls what lies there."""
    return ".".join(map(str, path))

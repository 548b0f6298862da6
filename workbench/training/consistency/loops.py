"""Loops that reduce by themselves: known by the gradients, or one flat copy of all of them, that they all_reduce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from workbench.training.consistency.replicas import Member, Unit, is_plain

MOST: Final = 8192  # tensors noted between two steps


class Replicated(NamedTuple):
    group: Any
    members: list[Member]


class Loops:
    """Notes what is all-reduced, until every optimizer is decided on; then only counts."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int, Any]] = []  # address, elements, group
        self._looked: dict[int, int] = {}  # optimizers that are not decided on: steps
        self._units: list[Unit] = []
        self.is_noting = True

    def forget(self) -> None:
        self._seen.clear()
        self._looked.clear()
        self._units.clear()
        self.is_noting = True

    def saw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """An all_reduce is about to begin."""
        for unit in self._units:
            unit.reduces += 1
        if not self.is_noting or len(self._seen) >= MOST:
            return
        tensors = args[0] if args else kwargs.get("tensor", kwargs.get("tensors"))
        group = kwargs.get("group", args[2] if len(args) > 2 else None)
        for tensor in tensors if isinstance(tensors, list | tuple) else (tensors,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and is_plain(tensor):
                self._seen.append((tensor.data_ptr(), tensor.numel(), group))

    def is_undecided(self, key: int, looks: int) -> bool:
        """Whether an optimizer is to be looked at again at its next step."""
        self._looked[key] = self._looked.get(key, 0) + 1
        return self._looked[key] < looks

    def decided(self, key: int) -> None:
        self._looked.pop(key, None)
        if not self._looked:
            self.is_noting = False
            self._seen.clear()

    def watch(self, unit: Unit) -> None:
        if not unit.is_wrapped:
            self._units.append(unit)

    def replicated(self, optimizer: Any, parameters: list[Any]) -> Replicated | None:
        """What was reduced since the last look, and all that the optimizer steps where that is most of it."""
        seen, self._seen = self._seen, []
        there = [p for p in parameters if is_plain(p) and p.grad is not None]
        size = sum(p.numel() for p in there)
        if not seen or not size:
            return None
        groups = {id(group): group for _, _, group in seen}
        if len(groups) > 1:
            return None
        group = next(iter(groups.values()))
        addresses = {address for address, _, _ in seen}
        hits = [p for p in there if p.grad.data_ptr() in addresses]
        is_flat = any(count == size for _, count, _ in seen)
        if is_flat or 2 * sum(p.numel() for p in hits) >= size:
            hits = [p for p in parameters if is_plain(p)]
        return Replicated(group, named(optimizer, hits)) if hits else None


def named(optimizer: Any, parameters: list[Any]) -> list[Member]:
    """Under their names where the optimizer was given any, else by their place in its groups."""
    names = {}
    for number, group in enumerate(optimizer.param_groups):
        known = group.get("param_names") or [f"group {number}, parameter {n}" for n in range(len(group["params"]))]
        names.update({id(p): name for p, name in zip(group["params"], known, strict=True)})
    return [Member(names[id(p)], p) for p in parameters]

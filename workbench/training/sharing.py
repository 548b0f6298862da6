"""Which rank copies which of the tensors that are the same on all of them, so that each has as little as can be.

The largest first, to who has least: the same on all ranks, without a word between them.
"""

from __future__ import annotations

import heapq
from typing import Any

import torch

from workbench.training.states import Path, Taken, leaves


class Sharing:
    """Among `size` ranks, by number from 0; the first also has what is not known to be the same on all.

    Remembers the last division, since a state's layout hardly ever changes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._sizes: dict[Path, int] = {}
        self._owners: dict[Path, int] = {}

    def owners(self, taken: Taken) -> dict[Path, int]:
        """Of each shared tensor, and value beside them."""
        return self._owned(shared_leaves(taken))

    def parts(self, taken: Taken) -> list[dict[Path, torch.Tensor]]:
        """The shared tensors, by rank."""
        found: list[dict[Path, torch.Tensor]] = [{} for _ in range(self.size)]
        shared = shared_leaves(taken)
        owners = self._owned(shared)
        for path, value in shared.items():
            if isinstance(value, torch.Tensor):
                found[owners[path]][path] = value
        return found

    def _owned(self, shared: dict[Path, Any]) -> dict[Path, int]:
        sizes = {path: value.nbytes if isinstance(value, torch.Tensor) else 0 for path, value in shared.items()}
        if sizes != self._sizes:
            self._sizes, self._owners = sizes, divide(sizes, self.size)
        return self._owners


def shared_leaves(taken: Taken) -> dict[Path, Any]:
    return {path: value for path, value in leaves(taken.tree) if path in taken.shared}


def divide(sizes: dict[Path, int], parts: int) -> dict[Path, int]:
    """Who has what of so many bytes each."""
    loads = [(0, part) for part in range(parts)]
    owners: dict[Path, int] = {}
    for path in sorted(sizes, key=lambda path: (-sizes[path], str(path))):
        load, owners[path] = loads[0]
        heapq.heapreplace(loads, (load + sizes[path], owners[path]))
    return owners

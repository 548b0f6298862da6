"""A copy of a state in this process' CPU memory, taken while training waits and written while it goes on.

The memory is kept from one copy to the next: to get it anew would cost more than the copying. Of what is the same on
all ranks each copies its share only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Set
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from workbench.training.sharing import Sharing
from workbench.training.states import Path, Taken, Tree, leaves, set_leaf


class Held(NamedTuple):
    """A copy that is there already, of some tensors; it stays as it is until it is released, once, in any thread."""

    tensors: Mapping[Path, torch.Tensor]
    release: Callable[[], object]


class Staging:
    """One copy at a time: the next `copy` overwrites what the last one gave."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._sharing = rank, Sharing(world_size)
        self._buffers: dict[Path, torch.Tensor] = {}

    def copy(
        self, taken: Taken, held: Mapping[Path, torch.Tensor] = MappingProxyType({}), *, is_shared: bool = True
    ) -> tuple[Tree, dict[str, Any]]:
        """This rank's part of the tree, on the CPU, and a copy of the objects' states. Returns when all is copied.

        What is in `held` is not copied again. Not `is_shared`: rank 0 copies all that it has.
        """
        shared = taken.shared if is_shared else set()
        mine = {path: value for path, value in leaves(taken.tree) if self._is_mine(path, value, shared)}
        owners = self._sharing.owners(taken) if is_shared else {}
        mine = {path: value for path, value in mine.items() if owners.get(path, self._rank) == self._rank}
        tensors = {path: value.detach() for path, value in mine.items() if isinstance(value, torch.Tensor)}
        there = {path: held[path] for path, tensor in tensors.items() if _is_copy(held.get(path), tensor)}
        copies = {**there, **self._copy_tensors({path: t for path, t in tensors.items() if path not in there})}
        tree: Tree = {}
        for path, value in mine.items():
            set_leaf(tree, path, copies[path] if path in copies else copy.deepcopy(value))
        return tree, {key: freeze(value) for key, value in taken.objects.items()}

    def _is_mine(self, path: Path, value: Any, shared: Set[Path]) -> bool:
        """Parts of a distributed tensor are each rank's own; of what is not known to be the same, rank 0's count."""
        return self._rank == 0 or path in shared or hasattr(value, "device_mesh")

    def _copy_tensors(self, tensors: Mapping[Path, torch.Tensor]) -> dict[Path, torch.Tensor]:
        kept, self._buffers = self._buffers, {}
        for path, tensor in tensors.items():
            buffer = kept.get(path)
            if buffer is None or not _is_alike(buffer, tensor):
                buffer = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
                if tensor.is_cuda and not hasattr(tensor, "device_mesh"):
                    buffer = buffer.pin_memory()
            self._buffers[path] = buffer
        with torch.no_grad():
            for path, tensor in tensors.items():
                _local(self._buffers[path]).copy_(_local(tensor), non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return dict(self._buffers)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "device_mesh") else tensor


def _is_copy(held: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return held is not None and not hasattr(tensor, "device_mesh") and _is_alike(held, tensor)


def _is_alike(buffer: Any, tensor: Any) -> bool:
    def layout(value: Any) -> tuple[Any, ...]:
        return (value.shape, value.dtype, getattr(value, "device_mesh", None), getattr(value, "placements", None))

    return layout(buffer) == layout(tensor)


def freeze(value: Any) -> Any:
    """A copy that the program cannot change any more, its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (dict, list, tuple):
        made = {key: freeze(part) for key, part in value.items()} if type(value) is dict else map(freeze, value)
        return type(value)(made)
    return copy.deepcopy(value)

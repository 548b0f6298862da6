"""Which copy in memory is known to be of ranks that held the same parameters: that one is kept until a newer one is.

A rank that leaves out a collective goes on: its next one meets the one that the others still wait in, and from then on
all compute with each other's gradients of another step. Nothing stops them for a while, and copies of that time would
be gone on from as if nothing had happened. So each rank tells the store a checksum of some of its parameters with each
copy; all that told the same make a copy one to be kept.

Costs two questions to the store a copy, and no wait: what others have not told yet is looked up with the next copy.
Without a store, copies are taken as they come.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import torch

from workbench.training import memory
from workbench.training.slots import Slot

ROOM: Final = "dtrain/copies"
PATIENCE: Final = 120.0  # s that ranks may differ until copies are taken as they come: they drift, and it goes on
TENSORS: Final = 16  # of each model, spread over those that are trained
ELEMENTS: Final = 256  # of each
RECENT: Final = 8  # copies


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


class Confirming:
    """One rank's side; `mark` gives the checksum, 0 where there is nothing that all ranks hold."""

    def __init__(self, store: Store, rank: int, world_size: int, mark: Callable[[], int]) -> None:
        self._store, self._rank, self._world_size, self._mark = store, rank, world_size, mark
        self._last: tuple[Slot, str] | None = None
        self._told: list[str] = []  # keys that the store has
        self._is_off = world_size == 1
        self._since = 0.0  # when the ranks were last known to be the same, monotonic
        self.sure: Slot | None = None  # the copy to be kept; None: the newest

    def look(self) -> int:
        """Before a copy is written: whether the last one has become the one to be kept. The mark of the next."""
        mark = 0 if self._is_off else self._mark()
        try:
            if mark and self._last is not None:
                self._look_at(*self._last)
        except Exception:
            self._is_off = True
        if self._is_off or not mark:
            self.sure = self._last = None
            return 0
        return mark

    def _look_at(self, slot: Slot, key: str) -> None:
        if self._store.add(key, 0) >= self._world_size:
            self.sure, self._since = slot, time.monotonic()
        else:
            self._is_off = time.monotonic() - self._since > PATIENCE

    def took(self, slot: Slot, step: int, mark: int) -> None:
        """A copy is whole."""
        if not mark:
            return
        self._since = self._since or time.monotonic()
        key = f"{ROOM}/{step}/{mark}"
        self._last = slot, key
        try:
            self._store.add(key, 1)
            self._forget(key)
        except Exception:
            self._is_off = True

    def _forget(self, key: str) -> None:
        """What every rank has looked up by now, so that the store does not grow with the run."""
        self._told.append(key)
        if len(self._told) > RECENT:
            old = self._told.pop(0)
            if self._rank == 0:
                self._store.delete_key(old)


def mark_of(models: Sequence[Any], world_size: int) -> int:
    """A checksum of 32 bits of some elements of what DDP keeps the same on `world_size` ranks; 0: nothing.

    Every optimizer step changes all elements that are trained, so that few of them tell one step from the next.
    """
    trained = (
        [p for p in model.parameters() if p.requires_grad and p.numel()] for model in replicated(models, world_size)
    )
    return checksum_of((some[:: max(1, len(some) // TENSORS)] for some in trained), ELEMENTS)


def replicated(models: Iterable[Any], world_size: int) -> list[Any]:
    """Those that DDP keeps the same on all ranks."""
    return [model for model in models if model.process_group.size() == world_size]


def checksum_of(models: Iterable[Sequence[torch.Tensor]], elements: int) -> int:
    """32 bits, of the first elements of each of a model's parameters; models come in no order."""
    checksum = 0
    for parameters in models:
        by_type: dict[Any, list[torch.Tensor]] = {}
        for parameter in parameters:
            sample = parameter.detach().reshape(-1)[:elements]
            by_type.setdefault((sample.dtype, sample.device), []).append(sample)
        of_model = 1
        for samples in by_type.values():
            joined = torch.cat(samples).cpu().view(torch.uint8)
            of_model = zlib.crc32(memory.as_view(joined), of_model)
        checksum += of_model
    return checksum & 0xFFFFFFFF

"""The ranks that save and load together, over a process group of their own: what they send each other does not come
between the collectives of training, and may be sent by another thread.

Rank 0 decides, the others follow. What is decided while training goes on is told through the store, which waits for
nobody but rank 0; what belongs to a save or a load goes through the group, one thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist

from workbench.training.council import Council

T = TypeVar("T")
PATIENCE = timedelta(minutes=20)  # for the slowest rank's writing


class Team:
    """`group` and `council` None: this process is alone."""

    _current: ClassVar[Team | None] = None

    def __init__(
        self, rank: int = 0, world_size: int = 1, group: Any = None, council: Council | None = None, whole: Any = None
    ) -> None:
        self.rank, self.world_size, self.group, self.council = rank, world_size, group, council
        self._whole = whole
        self._told = 0

    @classmethod
    def current(cls) -> Team | None:
        """Of the default process group, made at the first call, by all ranks at once; None: there are ranks and no
        group.
        """
        is_there = dist.is_available() and dist.is_initialized()
        if not is_there:
            return cls() if int(os.environ.get("WORLD_SIZE", "1")) == 1 else None
        whole = dist.group.WORLD
        if cls._current is None or cls._current._whole is not whole:
            cls._current = cls._form(whole)
        return cls._current

    @classmethod
    def _form(cls, whole: Any) -> Team:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        if dist.get_world_size() == 1:
            return cls(whole=whole)
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        store = PrefixStore("dtrain/checkpoint", _get_default_store())
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return cls(rank, world_size, group, Council(store, rank, world_size), whole)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """What each rank has given, on all of them."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def tell(self, value: T) -> T:
        """Rank 0's value, on all ranks."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    # --- through the store ---

    def decide(self, choose: Callable[[], str]) -> str:
        """What rank 0 chooses; the others wait until it has come to the same call. All ranks call it equally often."""
        if self.council is None:
            return choose()
        number, self._told = self._told, self._told + 1
        word: str = self.council.hear(f"decision/{number}", choose, PATIENCE.total_seconds())
        return word

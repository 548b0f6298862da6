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

T = TypeVar("T")
PATIENCE = timedelta(minutes=20)  # for the slowest rank's writing


class Team:
    """`group` None: this process is alone."""

    _current: ClassVar[Team | None] = None

    def __init__(self, rank: int, world_size: int, group: Any, store: Any, whole: Any = None) -> None:
        self.rank, self.world_size, self.group = rank, world_size, group
        self._store, self._whole = store, whole
        self._told = 0

    @classmethod
    def current(cls) -> Team | None:
        """Of the default process group, made at the first call, by all ranks at once; None: there are ranks and no
        group.
        """
        is_there = dist.is_available() and dist.is_initialized()
        if not is_there:
            return cls(0, 1, None, None) if int(os.environ.get("WORLD_SIZE", "1")) == 1 else None
        whole = dist.group.WORLD
        if cls._current is None or cls._current._whole is not whole:
            cls._current = cls._form(whole)
        return cls._current

    @classmethod
    def _form(cls, whole: Any) -> Team:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        if dist.get_world_size() == 1:
            return cls(0, 1, None, None, whole)
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        store = PrefixStore("dtrain/checkpoint", _get_default_store())
        return cls(dist.get_rank(), dist.get_world_size(), group, store, whole)

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
        number, self._told = self._told, self._told + 1
        if self.leads:
            word = choose()
            self.announce(f"decision/{number}", word)
            return word
        return self.heard(f"decision/{number}")

    def announce(self, key: str, word: str) -> None:
        if self._store is not None:
            self._store.set(key, word)

    def heard(self, key: str) -> str:
        """What rank 0 has announced, or will."""
        word: bytes = self._store.get(key)
        return word.decode()

    def forget(self, key: str) -> None:
        """Take back what all have heard."""
        if self._store is not None:
            self._store.delete_key(key)

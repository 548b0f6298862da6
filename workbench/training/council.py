"""The ranks of a generation agree on something through their store, which is outside every rank.

Nothing here is a collective: it works before there is a process group and beside any, and no rank waits without end.
Each question has a name that is asked once. Values are what JSON keeps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

FIRST_PAUSE, LAST_PAUSE = 0.0002, 0.02  # s between two looks
ROOM: Final = "dtrain/council"


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...


class Council:
    """One rank's side."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size

    def decide(self, name: str, mine: Any, decide: Callable[[list[Any]], Any], timeout: float) -> Any:
        """Every rank brings its own, rank 0 decides from all of them in order, and all get its decision.

        `TimeoutError` names a rank that did not come.
        """
        if self.rank:
            self.post(f"{name}/{self.rank}", mine)
            return self.fetch(name, timeout)
        end = time.monotonic() + timeout
        rest = [self.fetch(f"{name}/{rank}", end - time.monotonic()) for rank in range(1, self.world_size)]
        decision = decide([json.loads(json.dumps(mine)), *rest])
        self.post(name, decision)
        return decision

    def hear(self, name: str, tell: Callable[[], Any], timeout: float) -> Any:
        """What rank 0 tells; it waits for nobody."""
        if self.rank:
            return self.fetch(name, timeout)
        told = tell()
        self.post(name, told)
        return told

    def post(self, name: str, value: Any) -> None:
        self.store.set(f"{ROOM}/{name}", json.dumps(value))

    def forget(self, name: str) -> None:
        """Take back what everybody has had time to fetch, so that the store does not grow with the run."""
        self.store.delete_key(f"{ROOM}/{name}")

    def has(self, name: str) -> bool:
        """Whether it has been posted."""
        return self.store.check([f"{ROOM}/{name}"])

    def fetch(self, name: str, timeout: float) -> Any:
        """What was or will be posted; waits in Python, where an interrupt ends it."""
        key, end, pause = f"{ROOM}/{name}", time.monotonic() + timeout, FIRST_PAUSE
        while not self.store.check([key]):
            if time.monotonic() > end:
                raise TimeoutError(f"nobody answered {name!r} within {timeout:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)
        return json.loads(self.store.get(key))

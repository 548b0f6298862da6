"""Lets the ranks of a job meet for a process group again and again over one store that outlives them.

torch writes the same keys for every default group of a job; where the store is an agent's, a second group would read
the first one's addresses. So each group gets a prefix of its own. A count of groups would do as long as no rank ever
failed or was interrupted on the way; instead the ranks agree: each says that it is there with a word never used
before, rank 0 waits for all, makes up the prefix and tells it to exactly those. A rank that gives up withdraws its
word. All waiting is done in Python, where an interrupt ends it.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any, Final, Protocol

ROOM: Final = "dtrain/meeting"
FIRST_PAUSE, LAST_PAUSE = 0.0005, 0.02  # s between two looks


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Meeting:
    """One rank's side; `used` are words that led to a group before."""

    def __init__(self, store: Store, rank: int, world_size: int, *, room: str = ROOM) -> None:
        self._store, self._rank, self._world_size, self._room = store, rank, world_size, room

    def agree(self, used: set[bytes], timeout: float) -> str:
        """The prefix of the new group; `TimeoutError` names the ranks that did not come."""
        word = uuid.uuid4().hex
        deadline = time.monotonic() + timeout
        self._store.set(self._seat(self._rank), word)
        try:
            if self._rank == 0:
                return self._lead(word, used, deadline)
            return self._follow(word, deadline)
        finally:
            self._store.set(self._seat(self._rank), "")

    def _seat(self, rank: int) -> str:
        return f"{self._room}/seat/{rank}"

    def _go(self, word: str) -> str:
        return f"{self._room}/go/{word}"

    def _lead(self, prefix: str, used: set[bytes], deadline: float) -> str:
        words: dict[int, bytes] = {}
        pause = FIRST_PAUSE
        while missing := [rank for rank in range(self._world_size) if not self._came(rank, used, words)]:
            self._wait(pause, deadline, f"ranks {', '.join(map(str, missing))} have not called init_process_group")
            pause = min(2 * pause, LAST_PAUSE)
        for word in words.values():
            used.add(word)
            self._store.set(self._go(word.decode()), prefix)
        return prefix

    def _came(self, rank: int, used: set[bytes], words: dict[int, bytes]) -> bool:
        """Looked at anew each time: a rank may have given up and come again."""
        seat = self._seat(rank)
        word = self._store.get(seat) if self._store.check([seat]) else b""
        words[rank] = word
        return bool(word) and word not in used

    def _follow(self, word: str, deadline: float) -> str:
        pause = FIRST_PAUSE
        while not self._store.check([self._go(word)]):
            self._wait(pause, deadline, "not every rank has called init_process_group; rank 0 knows which")
            pause = min(2 * pause, LAST_PAUSE)
        return self._store.get(self._go(word)).decode()

    @staticmethod
    def _wait(pause: float, deadline: float, reason: str) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no process group: {reason}")
        time.sleep(pause)


def seconds(timeout: Any, default: float) -> float:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else default

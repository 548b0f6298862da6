"""Ranks that agree on a new group's prefix over a store that outlives them; what a batch's size is."""

from __future__ import annotations

import threading
from collections import UserDict, namedtuple
from typing import Any

import pytest

from workbench.training.batches import BatchSizes
from workbench.training.meeting import Meeting


class Memory:
    """A store in this process."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self._kept[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self._kept[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._kept for key in keys)


class Party:
    """Ranks with what each remembers."""

    def __init__(self, size: int) -> None:
        self.store = Memory()
        self.used: list[set[bytes]] = [set() for _ in range(size)]

    def meet(self, ranks: list[int], timeout: float = 2.0, more: float = 0.0) -> list[Any]:
        """The prefix or the error of each; every rank waits `more` than the one before."""
        results: list[Any] = [None] * len(self.used)

        def one(rank: int) -> None:
            try:
                results[rank] = Meeting(self.store, rank, len(self.used)).agree(self.used[rank], timeout + rank * more)
            except TimeoutError as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in ranks]


def test_all_get_the_same_prefix_and_a_new_one_each_time() -> None:
    party = Party(3)
    seen = set()
    for _ in range(3):
        prefixes = party.meet([0, 1, 2])
        assert len(set(prefixes)) == 1
        seen.add(prefixes[0])
    assert len(seen) == 3


def test_who_did_not_come_is_named() -> None:
    error, follower = Party(3).meet([0, 2], timeout=0.02, more=0.05)
    assert "ranks 1 have not called" in str(error)
    assert isinstance(follower, TimeoutError)


def test_a_rank_that_gave_up_is_not_waited_for_and_can_come_again() -> None:
    party = Party(2)
    assert isinstance(party.meet([1], timeout=0.01)[0], TimeoutError)
    assert isinstance(party.meet([0], timeout=0.01)[0], TimeoutError), "rank 1 has withdrawn"
    first, second = party.meet([0, 1])
    assert first == second and isinstance(first, str)


def test_a_single_rank_meets_itself() -> None:
    assert isinstance(Party(1).meet([0])[0], str)


# --- batches ---


class Sized:
    """A tensor as far as its shape goes."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


Pair = namedtuple("Pair", "x y")
BATCHES = [
    (Sized(4, 3), 4),
    ([Sized(4, 3), Sized(5)], 4),
    ((Sized(2), 1), 2),
    ({"id": ["a", "b"], "x": Sized(2, 8)}, 2),
    ({"deep": [{"x": (None, Sized(7))}]}, 7),
    (Pair(None, Sized(3)), 3),
    (UserDict(x=Sized(6)), 6),
    (["text", 1, None], 0),
    (Sized(), 0),
    ([], 0),
    (None, 0),
    ("text", 0),
]


@pytest.mark.parametrize(("batch", "size"), BATCHES)
def test_size_of_a_batch(batch: object, size: int) -> None:
    sizes = BatchSizes()
    assert [sizes.size(batch), sizes.size(batch)] == [size, size]


def test_batches_of_changing_shape_are_looked_at_anew() -> None:
    sizes = BatchSizes()
    for batch, size in BATCHES + BATCHES[::-1]:
        assert sizes.size(batch) == size


def test_a_batch_that_holds_itself_ends() -> None:
    batch: list[object] = []
    batch.append(batch)
    assert BatchSizes().size(batch) == 0

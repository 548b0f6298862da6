"""Ranks agree on a prefix for each group, also after one of them has given up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from workbench.training.meeting import Meeting


class Store:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)


def together(*acts: Callable[[], str]) -> list[str]:
    found: dict[int, str] = {}
    threads = [threading.Thread(target=lambda n=n, act=act: found.update({n: act()})) for n, act in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    return [found[n] for n in range(len(acts))]


def test_all_get_the_same_prefix_and_each_time_another() -> None:
    store, used = Store(), [set[bytes]() for _ in range(3)]
    prefixes = []
    for _ in range(5):
        got = together(*(lambda r=r: Meeting(store, r, 3).agree(used[r], 5.0) for r in range(3)))
        assert len(set(got)) == 1
        prefixes.append(got[0])
    assert len(set(prefixes)) == 5


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_gave_up_and_came_again_meets_the_others(early: int) -> None:
    store, used = Store(), [set[bytes](), set[bytes]()]
    for _ in range(3):
        with pytest.raises(TimeoutError, match="no process group"):
            Meeting(store, early, 2).agree(used[early], 0.005)
    got = together(*(lambda r=r: Meeting(store, r, 2).agree(used[r], 5.0) for r in range(2)))
    assert got[0] == got[1]


def test_rank_0_names_who_did_not_come() -> None:
    with pytest.raises(TimeoutError, match=r"ranks 1, 2 have not called init_process_group"):
        Meeting(Store(), 0, 3).agree(set(), 0.005)


def test_a_seat_is_empty_again_when_its_rank_is_interrupted() -> None:
    class Interrupting(Store):
        def check(self, keys: list[str], /) -> bool:
            if "/go/" in keys[0]:
                raise KeyboardInterrupt
            return super().check(keys)

    store = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        Meeting(store, 1, 2).agree(set(), 5.0)
    assert set(store.values.values()) == {b""}

"""Ranks that step at any pace, one ahead of another, all save after the same steps, and soon after it is wanted."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.training.asking import INTERVAL, Asking
from workbench.training.council import Council


class Board:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class World:
    """`lead`: how many steps a rank may be ahead of rank 0, which is first when none may be."""

    def __init__(self, ranks: int) -> None:
        self.now, self.wanted = 0.0, False
        board = Board()
        self.asking = [Asking(Council(board, rank, ranks), self._wants, lambda: self.now) for rank in range(ranks)]
        self.steps = [0] * ranks
        self.saves: list[list[int]] = [[] for _ in range(ranks)]

    def _wants(self) -> bool:
        wanted, self.wanted = self.wanted, False
        return wanted

    def step(self, rank: int) -> None:
        self.steps[rank] += 1
        if self.asking[rank].step():
            self.saves[rank].append(self.steps[rank])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_save_after_the_same_steps(data: Any) -> None:
    ranks = data.draw(st.integers(2, 4))
    world = World(ranks)
    paces = data.draw(st.lists(st.sampled_from([0.0001, 0.003, 0.1, 2.0]), min_size=1, max_size=3))
    wishes = 0
    for number in range(data.draw(st.integers(1, 150))):
        if data.draw(st.integers(0, 9)) == 0:
            world.wanted = True
            wishes += 1
        for rank in data.draw(st.permutations(range(ranks))) if number > 2 else range(ranks):
            # A rank that is a step ahead of rank 0, as a collective in each step allows, must never have to wait.
            world.step(rank)
        world.now += paces[number % len(paces)]
    assert all(saves == world.saves[0] for saves in world.saves)
    assert len(world.saves[0]) <= wishes


def test_a_wish_is_granted_soon_whatever_a_step_takes() -> None:
    for pace in (0.0001, 0.002, 0.05, 1.0):
        world = World(2)
        for number in range(20_000):
            if world.now > 10 * INTERVAL and number > 20 and not world.saves[0]:
                break
            world.step(0)
            world.step(1)
            world.now += pace
        world.wanted, begun, first = True, world.now, number
        while not world.saves[1]:
            world.step(0)
            world.step(1)
            world.now += pace
            number += 1
            assert world.now - begun < 6 * INTERVAL or number - first <= 4, pace


def test_a_single_process_need_not_ask_anybody() -> None:
    wishes = iter([False, True, False])
    asking = Asking(None, lambda: next(wishes))
    assert [asking.step() for _ in range(3)] == [False, True, False]


def test_ranks_that_do_not_step_together_are_left_alone(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("workbench.training.asking.PATIENCE", 0.01)
    asking = Asking(Council(Board(), 1, 2), lambda: True)
    assert not any(asking.step() for _ in range(10))
    assert capsys.readouterr().err.count("do not step together") == 1

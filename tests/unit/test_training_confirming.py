"""The copy that is kept is the last one of ranks that held the same; here each rank is an object, over one store."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from workbench.training import confirming
from workbench.training.confirming import RECENT, Confirming, mark_of


class Rank:
    """One that holds `mark`, and takes copies that are called by their step."""

    def __init__(self, store: Any, rank: int, ranks: int = 2) -> None:
        self.mark = 1
        self.confirming = Confirming(store, rank, ranks, lambda: self.mark)

    def take(self, step: int) -> Any:
        """The step of the copy that is kept meanwhile."""
        mark = self.confirming.look()
        kept = self.confirming.sure
        self.confirming.took(step, step, mark)  # type: ignore[arg-type]
        return kept


def take(ranks: list[Rank], step: int, *marks: int) -> list[Any]:
    for one, mark in zip(ranks, marks or (step,) * len(ranks), strict=True):
        one.mark = mark
    return [one.take(step) for one in ranks]


@pytest.fixture
def ranks() -> list[Rank]:
    store = HashStore()
    return [Rank(store, rank) for rank in range(2)]


def test_the_last_copy_of_all_is_kept_until_a_newer_one_is_of_all(ranks: list[Rank]) -> None:
    assert take(ranks, 1) == [None, None], "nothing is known yet"
    assert take(ranks, 2) == [1, 1] and take(ranks, 3) == [2, 2]
    assert take(ranks, 4, 4, 40) == [3, 3], "from here on they differ"
    for step in (5, 6, 7):
        assert take(ranks, step, step, 10 * step) == [3, 3]
    assert take(ranks, 8) == [3, 3] and take(ranks, 9) == [8, 8], "repaired"


def test_a_rank_that_is_behind_is_waited_for(ranks: list[Rank]) -> None:
    first, second = ranks
    take(ranks, 1), take(ranks, 2)
    first.mark = 3
    assert first.take(3) == 2
    first.mark = 4
    assert first.take(4) == 2, "the other has not said what it holds at 3"
    second.mark = 3
    assert second.take(3) == 2


def test_ranks_that_drift_for_long_keep_what_is_newest(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    take(ranks, 1), take(ranks, 2)
    monkeypatch.setattr(confirming, "PATIENCE", -1.0)
    take(ranks, 3, 3, 30)
    assert take(ranks, 4, 4, 40) == [None, None] and take(ranks, 5) == [None, None]
    assert ranks[0].confirming.look() == 0, "and copies say nothing of it any more"


@pytest.mark.parametrize("mark", [0, 5])
def test_nothing_is_asked_where_nothing_is_the_same_on_all_or_there_is_one_rank(mark: int) -> None:
    alone = Rank(None, 0, ranks=1)
    apart = Rank(None, 0)
    alone.mark, apart.mark = mark, 0
    assert [alone.take(1), alone.take(2), apart.take(1), apart.take(2)] == [None] * 4


def test_a_store_that_is_gone_stops_nothing() -> None:
    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection reset")

    rank = Rank(Gone(), 0)
    assert [rank.take(1), rank.take(2)] == [None, None] and rank.confirming.look() == 0


def test_the_store_does_not_grow(ranks: list[Rank]) -> None:
    store = ranks[0].confirming._store
    for step in range(1, 200):
        take(ranks, step)
    assert store.num_keys() <= RECENT + 2  # type: ignore[attr-defined]


class Replicas:
    """What is asked of a DDP model."""

    def __init__(self, *tensors: torch.Tensor, size: int = 2) -> None:
        self._parameters = [torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()) for tensor in tensors]
        self.process_group = self
        self.size = lambda: size

    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters


def test_a_mark_is_of_what_is_trained_in_any_order_of_the_models() -> None:
    first, second = Replicas(torch.ones(300, 4), torch.ones(5).half()), Replicas(torch.zeros(2))
    both = mark_of([first, second], 2)
    assert both == mark_of([second, first], 2) != mark_of([first], 2) != 0
    with torch.no_grad():
        first.parameters()[1][4] += 1
    assert mark_of([first, second], 2) != both
    assert mark_of([], 2) == 0 == mark_of([Replicas(torch.ones(2), size=4)], 2), "of another group than all"
    assert mark_of([Replicas(torch.tensor(1.0))], 2) != mark_of([Replicas(torch.tensor(2.0))], 2)

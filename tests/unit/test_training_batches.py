"""The size of a batch: whatever its structure, and none where it cannot be told."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from workbench.training.batches import BatchSizes, usual


class Tensor:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


Pair = namedtuple("Pair", "x y")


class Own:
    """A user's class: indexing it may cost or do anything."""

    def __getitem__(self, key: object) -> object:
        raise AssertionError("indexed")


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (Tensor(7, 3), 7),
        ([Tensor(5, 2), Tensor(5)], 5),
        ((("id", [Tensor(4)]), Tensor(9)), 4),
        (Pair(Tensor(6), Tensor(6)), 6),
        ({"name": "a", "x": Tensor(3, 1)}, 3),
        (OrderedDict(x=Tensor(2)), 2),
        (UserDict(x=Tensor(8)), 8),
        ([Tensor(), Tensor(3)], 3),
        (Tensor(), 0),
        (["a", "b"], 0),
        ([], 0),
        (None, 0),
        (Own(), 0),
        ([Own(), Tensor(2)], 2),
        ([[[[[[Tensor(2)]]]]]], 0),
    ],
)
def test_the_first_dimension_of_the_first_tensor(batch: Any, size: int) -> None:
    sizes = BatchSizes()
    assert sizes.size(batch) == size
    assert sizes.size(batch) == size  # with what it has remembered


def test_another_structure_is_searched_anew() -> None:
    sizes = BatchSizes()
    assert [sizes.size(batch) for batch in ([Tensor(2)], {"x": Tensor(3)}, Tensor(4), None, (Tensor(5),))] == [
        2,
        3,
        4,
        0,
        5,
    ]


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def __len__(self) -> int:
        raise RuntimeError("there is no end")


def first_of(loader: DataLoader[Any]) -> Any:
    iterator = iter(loader)
    next(iterator)
    return iterator


DATA = TensorDataset(torch.ones(10, 3))


@pytest.mark.parametrize(
    ("loader", "count", "left"),
    [
        (DataLoader(DATA, batch_size=4), 4, 1),  # two are full, one of them has been given
        (DataLoader(DATA, batch_size=4), 3, 0),  # it is not what the loader says
        (DataLoader(DATA, batch_size=4, collate_fn=list), 4, 0),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), 2, 0),
        (DataLoader(DATA, batch_size=2, sampler=Endless()), 2, 0),
        (DataLoader(DATA, batch_size=None), 1, 0),
    ],
)
def test_how_many_batches_are_full_for_sure(loader: DataLoader[Any], count: int, left: int) -> None:
    assert usual(first_of(loader), count) == left
    assert usual(object(), count) == 0

"""The size of a batch: whatever its structure, and none where it cannot be told."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest

from workbench.training.batches import BatchSizes


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

"""Digests of tensors, and the row of numbers that ranks exchange."""

from __future__ import annotations

import pytest
import torch

from workbench.training.consistency import digest, lanes
from workbench.training.consistency.digest import Digests

LARGE = 3 * 2**15  # elements: summed by itself, with rows, columns and a rest
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.complex64]


def of(*tensors: torch.Tensor) -> int:
    return int(Digests().of(tensors))


def some(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    values = torch.randint(-(2**31), 2**31, (size * 4,), generator=generator, dtype=torch.int64)
    return values.view(torch.uint8)[: size * dtype.itemsize].clone().view(dtype)


def flipped(tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    copy = tensor.clone()
    data = copy.view(torch.uint8)
    data[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 7, 1021, LARGE + 3])
def test_equal_bits_have_equal_digests_and_others_other_ones(size: int, dtype: torch.dtype) -> None:
    tensor = some(size, dtype)
    assert of(tensor) == of(tensor.clone())
    for element in {0, size // 2, size - 1}:
        for bit in (0, 7, 8 * dtype.itemsize - 1):
            assert of(flipped(tensor, element, bit)) != of(tensor), (element, bit)


def test_a_nan_and_a_negative_zero_are_bits_like_others() -> None:
    nan = torch.full((8,), float("nan"))
    assert of(nan) == of(nan.clone())
    assert of(torch.zeros(8)) != of(-torch.zeros(8))


def test_the_same_whatever_else_is_computed_at_once() -> None:
    tensor, before = some(LARGE), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = of(tensor)
        torch.set_num_threads(4)
        assert of(tensor) == alone
    finally:
        torch.set_num_threads(before)


def test_without_numpy_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with_numpy = of(some(LARGE))
    monkeypatch.setattr(digest, "_numpy", lambda: None)
    assert of(some(LARGE)) == with_numpy


def test_where_a_tensor_lies_in_its_storage_does_not_matter() -> None:
    base = some(LARGE + 1)
    assert of(base[1:]) == of(base[1:].clone())


def test_memory_order_counts_where_there_are_no_gaps() -> None:
    image = some(2 * 3 * 64 * 64).view(2, 3, 64, 64)
    last = image.contiguous(memory_format=torch.channels_last)
    assert of(last) == of(last.clone())
    assert of(image[:, :, ::2]) == of(image[:, :, ::2].contiguous())


def test_two_tensors_in_another_order_differ() -> None:
    one, two = some(64), some(65)[:64]
    assert of(one, two) != of(two, one)


@pytest.mark.parametrize("distance", [1, 2, 16, 32, 511, 512, 1024, 30_000])
def test_two_words_that_change_places_are_seen(distance: int) -> None:
    """torch.hash_tensor, which is an exclusive or, does not see it, nor does a sum."""
    words = some(LARGE, torch.int64)
    swapped = words.clone()
    swapped[100], swapped[100 + distance] = words[100 + distance], words[100]
    assert torch.hash_tensor(words) == torch.hash_tensor(swapped)
    assert of(swapped) != of(words)


@pytest.mark.parametrize("stride", [1, 2, 16, 32, 64, 512])
@pytest.mark.parametrize("bit", [0, 31, 62, 63])
def test_a_bit_that_is_stuck_at_every_so_many_words_is_seen(stride: int, bit: int) -> None:
    words = some(LARGE, torch.int64)
    stuck = words.clone()
    stuck[::stride] ^= -(2**63) if bit == 63 else 1 << bit
    assert of(stuck) != of(words)


def test_nothing_has_a_digest_too() -> None:
    assert of() == 0
    assert of(torch.empty(0)) == 0


def test_ranks_that_agree_differ_in_nothing() -> None:
    values = {name: number - 3 for number, name in enumerate(lanes.COMPARED)} | {"every": 7, "share": 3}
    reading = lanes.read(lanes.row(values))
    assert reading.differing == ()
    assert set(reading.largest) == set(lanes.LARGEST)
    assert {name: value for name, value in reading.largest.items() if value} == {"share": 3, "every": 7}


@pytest.mark.parametrize("lane", lanes.COMPARED)
@pytest.mark.parametrize("other", [1, -1, 2**63 - 1, -(2**63)])
def test_one_rank_with_another_number_is_seen_whatever_it_is(lane: str, other: int) -> None:
    rows = [lanes.row({}), lanes.row({lane: other, "parts": 4}), lanes.row({})]
    reading = lanes.read(torch.stack(rows).amax(0))
    assert reading.differing == (lane,)
    assert reading.largest["parts"] == 4


def test_the_row_is_as_long_for_any_model_and_small() -> None:
    assert len(lanes.row({})) == lanes.SIZE == len(lanes.row({"gradients": 1}))
    assert 8 * lanes.SIZE <= 256


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_summed_in_pieces_has_the_digest_that_torch_gives_it_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of a length, and of an address, that fit no word, row, column or piece as well."""
    words = 9 * digest.PIECE * digest.COLUMN + 5 * digest.COLUMN + 3
    base = some(words * 8 // dtype.itemsize + 3, dtype)
    tensors = [base, base[1:], base[: 4 * digest.PIECE * digest.COLUMN], base[3:-2]]
    in_pieces = [of(tensor) for tensor in tensors]
    assert of(flipped(base, base.numel() - 1, 0)) != in_pieces[0] != of(flipped(base, base.numel() // 2, 7))
    monkeypatch.setattr(digest, "_numpy", lambda: None)
    assert [of(tensor) for tensor in tensors] == in_pieces

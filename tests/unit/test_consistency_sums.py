"""Checksums of what is reduced, integers in place of gradients, and whose bit explains a wrong sum."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.training.consistency import fixed, sums
from workbench.training.consistency.blame import suspects

RANKS = pytest.mark.parametrize("ranks", [2, 3, 4, 16])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def gradients(ranks: int, rows: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(ranks)
    values = torch.randn(ranks, rows, sums.ROW, generator=generator, dtype=torch.float64)
    if kind == "one sign":
        values = values.abs()
    if kind == "wide":
        values *= torch.exp(3 * torch.randn(ranks, rows, sums.ROW, generator=generator, dtype=torch.float64))
    if kind == "sparse":
        values *= torch.rand(ranks, rows, sums.ROW, generator=generator) < 0.01
    return (values / ranks).to(dtype)


def reduced(sent: torch.Tensor) -> torch.Tensor:
    """One rank after the other, rounded each time, as a ring does it."""
    total = sent[0].clone()
    for values in sent[1:]:
        total += values
    return total


def judged(sent: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
    own = [sums.row_sums(values) for values in sent]
    scales = [sums.scales(values, row) for values, row in zip(sent, own, strict=True)]
    allowed = sums.tolerance(len(sent), sent.dtype)
    return sums.broken(sums.row_sums(came), reduced(torch.stack(own)), reduced(torch.stack(scales)), allowed)


@RANKS
@DTYPES
@pytest.mark.parametrize("kind", ["normal", "one sign", "wide", "sparse", "zero"])
def test_no_row_that_is_right_is_flagged(ranks: int, dtype: torch.dtype, kind: str) -> None:
    sent = gradients(ranks, 64, kind, dtype) * (kind != "zero")
    assert not judged(sent, reduced(sent)).any()


@pytest.mark.parametrize("factor", [1e-30, 1e-20, 1e-10, 1e10, 1e18])
def test_nor_one_whose_squares_are_too_small_or_large_to_be_seen(factor: float) -> None:
    sent = gradients(4, 16, "normal", torch.float32) * factor
    assert not judged(sent, reduced(sent)).any()


@RANKS
@DTYPES
def test_a_change_beyond_the_tolerance_is_flagged_in_its_row_only(ranks: int, dtype: torch.dtype) -> None:
    sent = gradients(ranks, 8, "normal", dtype)
    came = reduced(sent)
    scale = sum(float(sums.scales(values, sums.row_sums(values))[3]) for values in sent)
    came[3, 17] += 4 * sums.tolerance(ranks, dtype) * scale
    assert judged(sent, came).nonzero().tolist() == [[3]]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_is_flagged_where_it_comes_out_of_numbers(value: float) -> None:
    sent = gradients(2, 4, "normal", torch.float32)
    came = reduced(sent)
    came[2, 5] = value
    assert judged(sent, came).nonzero().tolist() == [[2]]
    sent[0, 2, 5] = value  # an overflow, say: GradScaler's business
    assert not judged(sent, reduced(sent)).any()


def test_the_tolerance_is_far_from_what_moves_a_gradient() -> None:
    """A change of 0.2 % of the root mean square is seen: a row's scale is some 16 times as large."""
    for ranks in (2, 4):
        sent = gradients(ranks, 64, "normal", torch.float32)
        came = reduced(sent)
        came[:, 7] += 0.002 * came.square().mean().sqrt()
        assert judged(sent, came).all()


# --- integers ---------------------------------------------------------------------------------------------------------


def exact_mean(values: torch.Tensor, width: int, order: list[int] | None = None) -> torch.Tensor:
    ranks = len(values)
    maxima = torch.stack([fixed.largest([one], width) for one in values]).amax(0)
    exponents = fixed.exponents(maxima, ranks, width)
    total = torch.zeros(values.shape[1], dtype=fixed.WIDTHS[width])
    for place in order or range(ranks):
        words = torch.empty_like(total)
        fixed.encode(values[place], exponents[0], maxima[0], words)
        total += words
    out = torch.empty_like(values[0])
    fixed.decode(total, exponents[0], maxima[0], ranks, out)
    return out


@RANKS
@pytest.mark.parametrize(("width", "error"), [(32, 4e-6), (64, 1e-7)])
def test_integers_give_the_mean_in_any_order(ranks: int, width: int, error: float) -> None:
    values = gradients(ranks, 4, "wide", torch.float32).view(ranks, -1)
    mean = values.double().mean(0)
    found = exact_mean(values, width)
    assert float((found - mean).norm() / mean.norm()) < error
    assert torch.equal(found, exact_mean(values, width, [*reversed(range(ranks))]))


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-30, 1.0, 3e38])
def test_integers_never_overflow(width: int, size: float) -> None:
    values = torch.full((4, 3), size)
    found = exact_mean(values, width)
    assert torch.allclose(found, values[0], rtol=1e-6, atol=1e-44 if width == 64 else 1e-38)


def test_what_is_not_finite_comes_out_as_nan() -> None:
    values = torch.ones(2, 3)
    values[1, 2] = math.inf
    assert exact_mean(values, 64).isnan().all()


# --- whose bit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_who_sent_a_flipped_bit_is_among_the_suspects(dtype: torch.dtype) -> None:
    values = torch.tensor([0.013, -0.2, 0.5, 0.031], dtype=torch.float64)
    sent = (values * 2**20).to(dtype) if not dtype.is_floating_point else values.to(dtype)
    for place in range(4):
        wrong = sent.clone()
        wrong.view(WORDS[wrong.element_size()])[place] ^= 1 << 19
        assert place in suspects(sent, wrong.sum(dtype=dtype))


def test_a_value_that_none_could_have_sent_has_no_suspects() -> None:
    sent = torch.tensor([0.25, 0.5])
    assert suspects(sent, torch.tensor(0.123)) == []


def test_a_large_exponent_betrays_its_rank() -> None:
    sent = torch.tensor([0.3, 0.0071, -0.02, 0.11])
    wrong = sent.clone()
    wrong.view(torch.int32)[2] ^= 1 << 29
    assert suspects(sent, wrong.sum()) == [2]

"""Of any gradients: a right sum is never flagged, one that is off by more than the bound is; integers never care who is
first.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.training.consistency import fixed, sums

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


def made(ranks: int, size: int, spread: float, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(ranks, sums.rows_of(size), sums.ROW, generator=generator, dtype=torch.float64)
    values *= torch.exp(spread * torch.randn(values.shape, generator=generator, dtype=torch.float64))
    values.view(ranks, -1)[:, size:] = 0
    return (values.clamp(-1e3, 1e3) / ranks).to(dtype)


def summed(values: torch.Tensor) -> torch.Tensor:
    total = values[0].clone()
    for one in values[1:]:
        total += one
    return total


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 9), st.integers(1, 3000), st.floats(0, 4), st.integers(0, 99), DTYPES)
def test_only_what_is_wrong_is_flagged(ranks: int, size: int, spread: float, seed: int, dtype: torch.dtype) -> None:
    sent = made(ranks, size, spread, seed, dtype)
    own = torch.stack([sums.row_sums(one) for one in sent])
    scales = torch.stack([sums.scales(one, row) for one, row in zip(sent, own, strict=True)])
    came, allowed = summed(sent), sums.tolerance(ranks, dtype)
    assert not sums.broken(sums.row_sums(came), summed(own), summed(scales), allowed).any()
    came[0, 0] += 4 * allowed * summed(scales)[0] + 8 * torch.finfo(dtype).eps * came[0, 0].abs() + 1e-6
    assert sums.broken(sums.row_sums(came), summed(own), summed(scales), allowed)[0]


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 9), st.integers(1, 500), st.floats(0, 8), st.integers(0, 99), st.sampled_from([32, 64]))
def test_any_order_gives_the_same_bits(ranks: int, size: int, spread: float, seed: int, width: int) -> None:
    values = made(ranks, size, spread, seed, torch.float32).view(ranks, -1)[:, :size]
    maxima = torch.stack([fixed.largest([one], width) for one in values]).amax(0)
    exponents = fixed.exponents(maxima, ranks, width)
    words = torch.zeros(ranks, size, dtype=fixed.WIDTHS[width])
    for one, out in zip(values, words, strict=True):
        fixed.encode(one, exponents[0], maxima[0], out)
    forth, back = summed(words), summed(words.flip(0))
    assert torch.equal(forth, back)
    assert int(forth.abs().max()) < 2 ** (width - 1) - 1, "room for all ranks"
    result = torch.empty(size)
    fixed.decode(forth, exponents[0], maxima[0], ranks, result)
    error = (result.double() - values.double().mean(0)).abs().max()
    assert error <= float(maxima[0]) * (2.0 ** (3 + ranks.bit_length() - (24 if width == 64 else 30)) + 2.0**-23)

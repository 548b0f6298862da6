"""Gradients as integers, whose sum does not depend on the order in which it is taken.

Each parameter has a power of two for its scale, from the largest absolute value that any rank has in it: neither the
ranks' order nor how parameters are put into buckets changes a bit of the result. The scale leaves room for the sum of
all ranks, so that nothing overflows. With 32 bits what is sent is as large as single precision, and values far smaller
than their parameter's largest lose digits: each rank's value is off by at most 2^(ceil(log2 N) - 30) of the largest.
With 64 bits what is sent is twice as large, and the result better than a sum in single precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

WIDTHS: Final = {32: torch.int32, 64: torch.int64}
WIDE: Final = {32: torch.float32, 64: torch.float64}  # what is computed with


def largest(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Of each part the largest absolute value; infinite where one is not finite."""
    found = torch.stack(torch._foreach_norm(list(parts), float("inf"))).to(WIDE[width])
    return torch.where(found.isfinite(), found, torch.inf)


def exponents(maxima: torch.Tensor, ranks: int, width: int) -> torch.Tensor:
    """By part; from the largest values over all ranks."""
    _, exponent = torch.frexp(torch.where(maxima.isfinite(), maxima, 0.0))
    room = width - 2 - (ranks - 1).bit_length()
    most = 126 if width == 32 else 1000  # so that the scale itself is a number
    return (room - exponent).clamp(max=most)


def encode(part: torch.Tensor, exponent: torch.Tensor, maximum: torch.Tensor, out: torch.Tensor) -> None:
    """`out`: integers, as many. What is not finite becomes 0 and is decoded as NaN."""
    scaled = part.to(WIDE[8 * out.element_size()]) * scale(exponent, out)
    if scaled.is_cuda or not bool(maximum.isfinite()):
        scaled = torch.where(maximum.isfinite(), scaled, 0.0)
    out.copy_(scaled.round_())


def decode(
    words: torch.Tensor, exponent: torch.Tensor, maximum: torch.Tensor, ranks: int, out: torch.Tensor
) -> None:  # fmt: skip
    """The mean over ranks."""
    factor = torch.where(maximum.isfinite(), scale(-exponent, words) / ranks, torch.nan)
    out.copy_(words.to(factor.dtype).mul_(factor))


def scale(exponent: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """2 to that power; exact."""
    wide = WIDE[8 * words.element_size()]
    return torch.ldexp(torch.ones((), dtype=wide, device=exponent.device), exponent)

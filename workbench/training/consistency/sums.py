"""Linear checksums of what is all-reduced: sums of rows go through the same sum over ranks as the values, and must
come out as the sums of the rows that come out.

With exact numbers they would be equal. With floating-point ones both sides round; `tolerance` says by how much they
may differ, in parts of a row's scale, its Euclidean norm and the absolute value of its sum, added up over ranks.

**The bound.** Let `x[i, j]` be what rank i of N sends of a row of C values, `y[j]` what comes out, `u` and `v` the unit
roundoffs of values and of sums (half an eps). Every addition is wrong by at most its unit roundoff times its result,
and the errors have no common sign, so that variances add up, each at most (roundoff x result)^2 / 3:

- N - 1 additions for each `y[j]`. The results are partial sums over ranks; summed over j their squares are at most
  Q^2, where Q adds up the norms of ranks' rows (triangle inequality):   (N - 1) u^2 Q^2 / 3
- the sums of a row, before (N of them, each over its own scale) and after. In torch's order, chains of 16, then 2, 4
  and 8 of them, additions on the way to the sum see at most `DEPTH` times the square of the norm, plus twice the square
  of the whole sum where all values have one sign, which is why the scale has the sum in it:   2 DEPTH v^2 Q^2 / 3
- N - 1 additions of ranks' sums, each at most Q:   (N - 1) v^2 Q^2 / 3

`SIGMAS` deviations of that are allowed. C is in the bound through Q and `DEPTH` only; the size of a bucket only through
the number of rows in which luck is tried: at 6 deviations once in 5e8, were the estimates tight, which they are not.
"""

from __future__ import annotations

import math
from typing import Final

import torch

ROW: Final = 256  # values; the sums and scales are 2 / ROW of what is sent, and what is missed grows with its root
DEPTH: Final = 16
SIGMAS: Final = 6.0


def rows_of(size: int) -> int:
    return -(-size // ROW)


def carried(dtype: torch.dtype) -> torch.dtype:
    """In what sums of such values are kept: half precision would see nothing."""
    return torch.float32 if torch.finfo(dtype).bits < 32 else dtype


def tolerance(ranks: int, dtype: torch.dtype) -> float:
    """Of a row's scale; see above."""
    values, sums = torch.finfo(dtype).eps / 2, torch.finfo(carried(dtype)).eps / 2
    variance = (ranks - 1) * values**2 + (2 * DEPTH + ranks - 1) * sums**2
    return SIGMAS * math.sqrt(variance / 3)


def row_sums(table: torch.Tensor) -> torch.Tensor:
    return table.sum(1, dtype=carried(table.dtype))


def scales(table: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Norm and sum of each row; a little more than nothing where squares are too small to be seen."""
    norms: torch.Tensor = torch.linalg.vector_norm(table, dim=1, dtype=sums.dtype)
    return norms.add_(sums.abs()).add_(math.sqrt(table.shape[1] * torch.finfo(sums.dtype).tiny))


def broken(found: torch.Tensor, sent: torch.Tensor, scale: torch.Tensor, allowed: float) -> torch.Tensor:
    """Rows whose sum is not what was sent. A row that was not finite when it was sent cannot be judged."""
    is_off = (found - sent).abs_() > scale * allowed
    return is_off | (~found.isfinite() & sent.isfinite() & scale.isfinite())


# --- integers, which do not round -------------------------------------------------------------------------------------


def exact_sums(table: torch.Tensor) -> torch.Tensor:
    """Modulo the width of the integers, as their sums over ranks are."""
    return table.sum(1, dtype=table.dtype)

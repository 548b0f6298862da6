"""Whose value explains a wrong sum, if one of its bits had been another on the way into the reduce. Pure."""

from __future__ import annotations

import torch


def suspects(sent: torch.Tensor, came: torch.Tensor) -> list[int]:
    """`sent`: one value of each rank, in the type that was reduced; `came`: the wrong sum, of shape ()."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[sent.element_size()]
    width = 8 * sent.element_size()
    ones = [1 << bit for bit in range(width - 1)] + [-(1 << (width - 1))]
    masks = torch.tensor(ones, dtype=torch.int64).to(bits)
    flipped = (sent.contiguous().view(bits).unsqueeze(1) ^ masks).view(sent.dtype)
    if not sent.is_floating_point():
        sums = sent.sum(dtype=sent.dtype) - sent.unsqueeze(1) + flipped
        return _rows(sums == came)
    values, changed, result = sent.double(), flipped.double(), came.double()
    if not bool(result.isfinite()):
        return _rows(~changed.isfinite())
    sums = values.sum() - values.unsqueeze(1) + changed
    rounding = torch.finfo(sent.dtype).eps * len(sent) * (values.abs().sum() + changed.abs())
    return _rows((sums - result).abs() <= rounding.clamp(max=float((result - values.sum()).abs()) / 4))


def _rows(fits: torch.Tensor) -> list[int]:
    return [int(place) for place in fits.any(1).nonzero().reshape(-1)]

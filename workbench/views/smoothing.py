"""Curves made smooth, so that a trend is seen in noise."""

from __future__ import annotations

import math
from collections.abc import Sequence


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Each value as a mean of those up to it, of which each counts `weight` times what the next one does.

    The first ones are not drawn towards 0 (debiased, as Adam's means are). NaN stays where it is and is not counted.
    """
    mean, norm, made = 0.0, 0.0, []
    for value in values:
        if math.isnan(value):
            made.append(value)
            continue
        mean = weight * mean + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        made.append(mean / norm)
    return made

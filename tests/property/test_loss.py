"""Clean loss curves of many kinds, with noise, schedules and odd batches: nothing is found in them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.views.curve import LossPoint
from workbench.views.loss import Ranks, diagnose


def falling(x: float) -> float:
    return 2.3 * math.exp(-4 * x) + 0.2


KINDS: dict[str, Callable[[float], float]] = {  # of the share of the run that is behind
    "exponential": falling,
    "power law": lambda x: 2.3 / (1 + 20 * x) ** 0.5,
    "flat": lambda x: 1.0,
    "plateau, then a fall": lambda x: 2.3 if x < 0.6 else 2.3 - 3.75 * (x - 0.6),
    "learning rate decays in a step": lambda x: falling(x) * (1.0 if x < 0.5 else 0.5),
    "warm restarts": lambda x: falling(x) * (1 + 0.25 * math.exp(-20 * (x % 0.25))),
    "cyclic": lambda x: falling(x) * (1 + 0.15 * math.sin(60 * x)),
    "epochs": lambda x: falling(x) * (1 + 0.2 * (x * 8 % 1)),
    "negative": lambda x: -falling(1 - x),
    "a bump in the warm-up": lambda x: falling(x) + 0.4 * math.exp(-((30 * x - 1.5) ** 2)),
    "linear": lambda x: 5 - 4 * x,
    "a slow rise": lambda x: 1 + 0.05 * x,
    "large": lambda x: 1e4 * falling(x),
}


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    count=st.integers(1, 300),
    noise=st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.2]),
    odd=st.floats(0, 0.01),
    ranks=st.sampled_from([1, 2, 4, 16]),
    seed=st.integers(0, 2**32),
)
def test_nothing_is_found_in_clean_curves(
    kind: str, count: int, noise: float, odd: float, ranks: int, seed: int
) -> None:
    chance, level = random.Random(seed), KINDS[kind]
    points = []
    for at in range(count):
        clean = level(at / count)
        losses = {rank: clean + chance.gauss(0, noise * abs(clean)) for rank in range(ranks)}
        if chance.random() < odd:
            losses = {rank: loss + 10 * abs(clean) for rank, loss in losses.items()}
        points.append(LossPoint(at + 1, sum(losses.values()) / ranks, losses))
    same = Ranks(samples=dict.fromkeys(range(ranks), 8.0), steps=dict.fromkeys(range(ranks), count), recent=5)
    assert diagnose(points, (), same) == ()

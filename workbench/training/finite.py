"""A loss that is NaN or infinite: told once, with the first tensor of the model that is so too.

Nothing is looked at while losses are finite. Standard library and torch only.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

from workbench.training.control import Control


class FiniteWatch:
    """Of one rank's losses. Told again only when they have been finite in between."""

    def __init__(self) -> None:
        self._is_told = False

    def look(self, loss: float, step: int) -> None:
        """`step`: the one that the loss belongs to."""
        if math.isfinite(loss):
            self._is_told = False
        elif not self._is_told and Control.current is not None:
            self._is_told = True
            place = first_non_finite()
            what = f"loss, with the {place}," if place else "loss"
            Control.current.fact("NonFiniteFound", step=step, what=what)


def first_non_finite() -> str:
    """`gradient of layer2.weight` or `parameter layer2.weight`, the first in the model's order; empty: none is."""
    models = list(roots())
    for kind in ("gradient of", "parameter"):
        for model in models:
            for name, parameter in model.named_parameters():
                tensor = parameter.grad if kind == "gradient of" else parameter.detach()
                if tensor is not None and not bool(tensor.isfinite().all()):
                    return f"{kind} {name.removeprefix('module.')}"
    return ""


def roots() -> Iterator[Any]:
    """Models that are part of no other, the largest first."""
    from torch import nn

    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    parts = {id(child) for module in modules for child in module.children()}
    whole = [module for module in modules if id(module) not in parts]
    return iter(sorted(whole, key=lambda module: -sum(1 for _ in module.parameters())))

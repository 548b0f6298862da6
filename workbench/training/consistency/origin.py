"""The first rank whose loss is not finite, before a reduce makes it everybody's: its loss is looked at when a backward
begins, where that costs nothing: one number on the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.training.control import Control


class Origin:
    """Tells once, and again only when losses have been finite in between."""

    def __init__(self, step_of: Callable[[], int], models: Callable[[], Sequence[Any]]) -> None:
        self._step_of, self._models = step_of, models
        self._inputs: list[weakref.ref[torch.Tensor]] = []
        self._is_broken = False
        self.tell: Callable[..., None] = tell

    def saw(self, inputs: tuple[Any, ...]) -> None:
        """A model's forward begins with these."""
        self._inputs = [weakref.ref(value) for value in inputs if isinstance(value, torch.Tensor)]

    def look(self, args: tuple[Any, ...]) -> None:
        """At the roots of a backward that is about to run."""
        roots = args[0]
        root = roots[0] if isinstance(roots, tuple | list) and len(roots) == 1 else roots
        if not isinstance(root, torch.Tensor) or root.numel() != 1 or root.device.type != "cpu":
            return
        value = root.item()
        if value - value == 0:  # neither NaN nor infinite
            self._is_broken = False
        elif not self._is_broken:
            self._is_broken = True
            if self._is_origin():
                self.tell(step=self._step_of(), what=self._what())

    def _is_origin(self) -> bool:
        """Whether this rank's parameters were still finite: else it is a consequence."""
        return all(
            bool(p.isfinite().all()) for model in self._models() if model is not None for p in model.parameters()
        )

    def _what(self) -> str:
        inputs = [value for ref in self._inputs if (value := ref()) is not None and value.is_floating_point()]
        is_data = any(not bool(value.isfinite().all()) for value in inputs)
        return "loss, before the all-reduce (its batch is not finite)," if is_data else "loss, before the all-reduce,"


def tell(**fields: Any) -> None:
    if Control.current is not None:
        Control.current.fact("NonFiniteFound", **fields)

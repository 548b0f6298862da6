"""A loss that is not finite is told once, with the first tensor that is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workbench.training.control import Control
from workbench.training.finite import FiniteWatch, first_non_finite


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the rank's line was given."""
    found: list[dict[str, Any]] = []
    line = Control(lambda: ({}, b"", ()), lambda header: found.append(header["fields"]), {})
    monkeypatch.setattr(Control, "current", line)
    return found


def test_it_is_told_once_until_losses_were_finite_again(facts: list[dict[str, Any]]) -> None:
    watch = FiniteWatch()
    for step, loss in enumerate([1.0, float("nan"), float("inf"), 2.0, float("-inf")]):
        watch.look(loss, step)
    assert [fact["step"] for fact in facts] == [1, 4]
    assert all(fact["what"].startswith("loss") for fact in facts)


def test_the_first_tensor_that_is_not_finite_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    wrapped = torch.nn.ModuleDict({"module": model})  # as DDP wraps it
    model(torch.ones(1, 2)).sum().backward()
    assert first_non_finite() == ""
    with torch.no_grad():
        model[1].weight.fill_(float("inf"))
    assert first_non_finite() == "parameter 1.weight"
    assert model[1].bias.grad is not None
    model[1].bias.grad.fill_(float("nan"))
    assert first_non_finite() == "gradient of 1.bias"
    del wrapped, model


def test_outside_a_job_nothing_happens() -> None:
    FiniteWatch().look(float("nan"), 1)

"""Which module a number that is none comes from, by what operations have kept; what a rank feels in its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from workbench.training.consistency.origin import Origin, first_broken
from workbench.training.consistency.replicas import Member, Model


class Spoil(nn.Module):
    """Gives `value` in one place."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([self.value, *[0.0] * (x.shape[-1] - 1)])


def found(model: nn.Module, x: torch.Tensor | None = None) -> tuple[str, str]:
    names = {id(p): name for name, p in model.named_parameters()}
    loss = model(torch.randn(4, 8) if x is None else x).square().mean()
    seen = first_broken(loss, names)
    loss.backward()  # all that was kept for it is still there
    return seen


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
@pytest.mark.parametrize(("place", "module"), [(1, "0"), (3, "2"), (5, "4")])
def test_the_module_before_the_first_bad_value_is_named(place: int, module: str, value: float, kind: str) -> None:
    layers: list[nn.Module] = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)]
    layers.insert(place, Spoil(value))
    assert found(nn.Sequential(*layers)) == (kind, module)


def test_minus_infinity_is_told_where_there_is_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Spoil(float("-inf")), nn.Linear(8, 8))
    with torch.no_grad():
        model[2].weight.abs_()
    assert found(model) == ("infinity", "0")


def test_of_two_branches_the_one_is_named_in_which_it_began() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
            self.spoil = Spoil(float("nan"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.left(x).tanh() * self.spoil(self.right(x)).tanh())
            return found

    assert found(Branches()) == ("NaN", "right")


def test_an_attention_mask_that_is_infinite_on_purpose_is_no_origin() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 8)
            self.spoil = Spoil(float("inf"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            mask = torch.zeros(x.shape[0], x.shape[0]).masked_fill(torch.ones(x.shape[0], x.shape[0]).triu(1) > 0, -1e9)
            mask = mask.masked_fill(mask < 0, float("-inf"))
            seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.spoil(self.head(seen))  # type: ignore[no-any-return]

    told, module = found(Attention())
    assert module == "head", told


def test_what_a_checkpoint_would_compute_again_is_left_alone() -> None:
    calls = 0

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.spoil = nn.Linear(8, 8), Spoil(float("nan"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return self.spoil(self.layer(x)).tanh()  # type: ignore[no-any-return]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.head = nn.Linear(8, 8), Inner(), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(checkpoint(self.inner, self.first(x), use_reentrant=False))
            return found

    assert found(Outer()) == ("NaN", "inner.layer")
    assert calls == 2, "once forward, once for backward"


def test_nothing_is_said_where_nothing_is_known() -> None:
    leaf = torch.tensor(float("nan"), requires_grad=True)
    assert first_broken(leaf, {}) == ("", "")
    assert first_broken(leaf * 1, {}) == ("", "")


# --- gradients --------------------------------------------------------------------------------------------------------


class Felt:
    def __init__(self, *, is_scaled: bool = False) -> None:
        self.told: list[dict[str, Any]] = []
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        model = Model.__new__(Model)
        model.members = [Member(name, p) for name, p in self.layers.named_parameters()]
        self.model = model
        self.origin = Origin(lambda: 7, lambda: [model], lambda: is_scaled)
        self.origin.tell = lambda **fields: self.told.append(fields)
        self.end = self.origin.feel(model)

    def step(self, *, is_bad: bool) -> None:
        self.layers.zero_grad()
        hidden = self.layers[:3](torch.randn(4, 8))
        found = hidden + (hidden * 0).abs().sqrt() if is_bad else hidden
        self.layers[3:](found).square().mean().backward()


@pytest.fixture
def feel() -> Iterator[Callable[..., Felt]]:
    """What is felt is no longer watched afterwards: a hook on a parameter keeps what it refers to."""
    made: list[Felt] = []

    def make(**options: bool) -> Felt:
        made.append(Felt(**options))
        return made[-1]

    yield make
    for felt in made:
        felt.end()


def test_a_gradient_that_is_none_is_told_with_the_parameter_nearest_to_the_loss_and_once(
    feel: Callable[..., Felt],
) -> None:
    felt = feel()
    for is_bad in (False, True, True, False, True):
        felt.step(is_bad=is_bad)
    told = {"step": 7, "what": "gradient of 2.bias, before the all-reduce,", "module": "2"}
    assert felt.told == [told, told]


def test_who_scales_is_told_nothing_and_what_is_no_longer_wanted_neither(feel: Callable[..., Felt]) -> None:
    scaled, ended = feel(is_scaled=True), feel()
    ended.end()
    for felt in (scaled, ended):
        felt.step(is_bad=True)
        assert felt.told == []


def test_a_scaled_loss_that_overflows_is_the_scalers_business_and_nan_is_not(feel: Callable[..., Felt]) -> None:
    felt = feel(is_scaled=True)
    for factor in (float("inf"), float("nan")):
        felt.origin.look((felt.layers(torch.randn(4, 8)).square().mean() * factor,))
    assert len(felt.told) == 1


def test_a_loss_that_was_told_explains_its_gradients(feel: Callable[..., Felt]) -> None:
    felt = feel()
    loss = felt.layers(torch.randn(4, 8)).square().mean() * float("nan")
    felt.origin.look((loss,))
    loss.backward()
    assert [one["what"][:4] for one in felt.told] == ["loss"]

"""What a look counts and measures, what becomes of many ranks' numbers, and how layers are named."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from workbench.training.consistency import looks
from workbench.training.consistency.looks import BINS, LENGTH, MEASURED, SHARDED, UNSEEN, Look, Numbers, histogram
from workbench.training.consistency.replicas import Member
from workbench.training.consistency.summary import SINGLY, Summary


@pytest.fixture(scope="module", autouse=True)
def nothing_stays() -> Iterator[None]:
    """Models with gradients that are none are not to be found by who looks for such."""
    yield
    gc.collect()


class FakeModel:
    """A DDP model that reduces, or is under no_sync."""

    was_synced = True


class FakeUnit:
    def __init__(self, model: nn.Module, *, is_wrapped: bool = True) -> None:
        self.members = [Member(name, p) for name, p in model.named_parameters()]
        self.models = [FakeModel()] if is_wrapped else []
        self.is_wrapped, self.reduces = is_wrapped, 0


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (factor * model(torch.randn(32, 8)).square().mean()).backward()


def looked(unit: Any, *backwards: Any, scale: Any = 1.0) -> Look:
    look = Look(unit, 3, has_layers=True)
    for one in backwards:
        one()
    look.gather(scale)
    return look


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def test_a_look_sees_a_ranks_own_gradient_and_what_it_became(model: nn.Sequential) -> None:
    unit: Any = FakeUnit(model)
    look = Look(unit, 0, has_layers=True)
    backward(model)
    own = flat(model).clone()
    torch.manual_seed(5)
    for p in model.parameters():
        assert p.grad is not None
        p.grad += 0.1 * torch.randn_like(p.grad) * p.grad.norm()
    mean = flat(model)
    look.gather(1.0)
    numbers = look.numbers()
    assert numbers.state == MEASURED
    assert math.sqrt(numbers.square) == pytest.approx(float(own.norm()), rel=1e-5)
    assert math.sqrt(numbers.mean_square) == pytest.approx(float(mean.norm()), rel=1e-5)
    assert numbers.cosine == pytest.approx(float(nn.functional.cosine_similarity(own, mean, 0)), abs=1e-5)
    assert sum(numbers.counts) == int((own != 0).sum())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters()), "nothing is left"


def test_of_several_backwards_the_last_has_them_all_and_no_sync_is_passed_over(model: nn.Sequential) -> None:
    unit: Any = FakeUnit(model)
    seen: list[torch.Tensor] = []

    def silent() -> None:
        unit.models[0].was_synced = False
        backward(model, 3.0)
        unit.models[0].was_synced = True

    def loud() -> None:
        backward(model)
        seen.append(flat(model).clone())

    numbers = looked(unit, silent, loud).numbers()
    assert math.sqrt(numbers.square) == pytest.approx(float(seen[0].norm()), rel=1e-5)
    assert looked(unit, silent).numbers().state == UNSEEN


def test_what_a_loop_has_reduced_already_is_not_called_its_own(model: nn.Sequential) -> None:
    unit: Any = FakeUnit(model, is_wrapped=False)
    assert looked(unit, lambda: backward(model)).numbers().state == MEASURED
    unit.reduces = 1
    assert looked(unit, lambda: backward(model)).numbers().state == looks.REDUCED


def test_what_is_in_parts_is_not_measured(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "is_plain", lambda _: False)
    look = looked(FakeUnit(model), lambda: backward(model))
    assert look.numbers().state == SHARDED
    assert math.sqrt(look.numbers().mean_square) == pytest.approx(float(flat(model).norm()), rel=1e-5)


def test_a_scale_is_taken_off(model: nn.Sequential) -> None:
    plain, seed = looked(FakeUnit(model), lambda: (torch.manual_seed(1), backward(model))), 1
    model.zero_grad()
    scale = torch.tensor(1024.0, dtype=torch.float64)
    scaled = looked(FakeUnit(model), lambda: (torch.manual_seed(seed), backward(model, 1024.0)), scale=scale)
    assert scaled.numbers().square == pytest.approx(plain.numbers().square)
    assert scaled.numbers().counts == plain.numbers().counts


def test_what_is_not_finite_is_counted_and_named(model: nn.Sequential) -> None:
    def spoil() -> None:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            broken = gradient.clone()
            broken[0, :2], broken[1, 0] = float("nan"), float("inf")
            return broken

        handle = model[2].weight.register_hook(hook)
        backward(model)
        handle.remove()

    look = looked(FakeUnit(model), spoil)
    assert look.broken == ["2.weight"]
    assert (look.numbers().nans, look.numbers().infinite) == (2, 1)
    assert not math.isfinite(look.numbers().square)


def test_an_update_is_measured_by_module(model: nn.Sequential) -> None:
    before = [p.detach().clone() for p in model.parameters()]
    look = looked(FakeUnit(model), lambda: backward(model))
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    look.stepped()
    moved = [(p.detach() - old).square().sum() for p, old in zip(model.parameters(), before, strict=True)]
    weights = [old.square().sum() for old in before]
    for at, (name, gradient, _, update) in enumerate(look.layers()):
        assert name == ("0", "2")[at]
        part = slice(2 * at, 2 * at + 2)
        assert update == pytest.approx(math.sqrt(float(sum(moved[part])) / float(sum(weights[part]))), rel=1e-4)
        assert gradient > 0
    assert not look.has_weights


def test_of_a_large_model_a_part_is_copied_another_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "SAMPLE", 1000)
    model = nn.Linear(200, 50)
    counts, places = [], set()
    for number in range(8):
        model.zero_grad()
        look = Look(FakeUnit(model), number, has_layers=False)  # type: ignore[arg-type]
        places.add(look._start)
        model(torch.randn(4, 200)).square().mean().backward()
        look.gather(1.0)
        numbers = look.numbers()
        counts.append(sum(numbers.counts))
        assert math.sqrt(numbers.square) == pytest.approx(float(flat(model).norm()), rel=1e-5), "of all elements"
    assert max(counts) < 1100
    assert len(places) > 4


def test_a_histogram_has_a_bin_for_each_factor_of_four() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, 3.9, 4.0, 1e-30, 1e30, 0.25, math.inf, math.nan, -math.inf, 1e-45])
    counts = histogram(values).tolist()
    assert (counts[BINS], counts[BINS + 1]) == (2, 3)
    assert {k: counts[k] for k in range(BINS) if counts[k]} == {0: 2, 23: 1, 24: 3, 25: 1, BINS - 1: 1}
    assert sum(counts) == len(values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_precision(dtype: torch.dtype) -> None:
    model = nn.Linear(8, 4).to(dtype)
    look = looked(FakeUnit(model), lambda: model(torch.randn(16, 8, dtype=dtype)).square().mean().backward())
    assert math.sqrt(look.numbers().square) == pytest.approx(float(flat(model).double().norm()), rel=1e-2)


def test_numbers_go_as_bits() -> None:
    numbers = Numbers.of([1.0, math.nan, -0.25, *range(LENGTH - 3)])
    again = looks.unpacked(looks.packed(numbers))
    assert math.isnan(again.square)
    assert again[2:] == numbers[2:]


def test_layers_are_modules_and_of_many_what_holds_them() -> None:
    assert looks.layer_names(["0.weight", "0.bias", "head.weight", "scale"]) == ["0", "0", "head", "scale"]
    deep = [f"blocks.{n}.{part}.weight" for n in range(40) for part in ("attn", "mlp")]
    assert set(looks.layer_names(deep)) == {f"blocks.{n}" for n in range(40)}
    wide = looks.layer_names([f"m{n}.weight" for n in range(100)])
    assert len(set(wide)) == looks.MOST_LAYERS
    assert wide[-1] == "others"


# --- of all ranks -----------------------------------------------------------------------------------------------------


def numbers(square: float, **fields: float) -> Numbers:
    values = {"state": MEASURED, "square": square, "cosine": 0.8, "zeros": 0.1, "nans": 0, "infinite": 0}
    return Numbers(**{**values, "mean_square": 1.0, **fields}, counts=(2.0,) * BINS)  # type: ignore[arg-type]


def test_one_odd_batch_does_not_stand_for_a_rank() -> None:
    summary = Summary(1.0, 5)
    for step, square in enumerate((4.0, 4.0, 1e6, 4.0, math.nan), start=5):
        summary.add([numbers(1.0), numbers(square)], step)
    found = summary.fields([0, 1], [("0", 0.1, 0.2, 0.003)])
    assert found["norms"] == [1.0, 2.0]
    assert (found["first_step"], found["last_step"], found["samples"]) == (5, 9, 5)
    assert found["layers"] == [["0", 0.1, 0.2, 0.003]]
    assert found["histograms"] == [[[0], [10] * BINS], [[1], [10] * BINS]]


def test_what_no_rank_could_measure_says_why_and_tells_of_the_mean() -> None:
    summary = Summary(1.0, 5)
    summary.add([numbers(1.0, state=SHARDED), numbers(1.0, state=SHARDED)], 5)
    found = summary.fields([0, 1])
    assert "fully_shard" in found["missing"]
    assert (found["norms"], found["cosines"], found["mean_norm"]) == ([], [], 1.0)
    assert found["histograms"] == [[[0, 1], [2] * BINS]]


def test_of_many_ranks_all_together_and_those_far_off_have_histograms() -> None:
    ranks = list(range(1024))
    summary = Summary(1.0, 5)
    summary.add([numbers(900.0 if rank == 77 else 1.0, nans=float(rank == 5)) for rank in ranks], 5)
    found = summary.fields(ranks)
    assert found["histograms"][0] == [ranks, [2048] * BINS]
    assert found["histograms"][1][0] == [77]
    assert len(found["histograms"]) <= SINGLY
    assert found["broken"] == [[5, 1, 0]]

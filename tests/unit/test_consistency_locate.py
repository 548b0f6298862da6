"""Who deviates, in which tensor, element and bit: from what all ranks have gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workbench.training.consistency.cadence import Costs, Pace, choose, is_worth, share
from workbench.training.consistency.locate import compare, decide, divide


def account(changed: bool = False, **items: Any) -> dict[str, Any]:
    return {"items": {"steps": 5, **items}, "changed": dict.fromkeys(items, changed)}


def weights(*digests: int) -> list[tuple[str, int]]:
    return [(f"{number}.weight", digest) for number, digest in enumerate(digests)]


@pytest.mark.parametrize(
    ("values", "deviating", "told_by"),
    [
        ([1, 1, 2, 1], (2,), "majority"),
        ([2, 1, 1], (0,), "majority"),
        ([1, 2, 1, 3, 1], (1, 3), "majority"),
        ([1, 2], (), ""),
        ([1, 1, 2, 2], (), ""),
        ([1, 2, 3, 4], (), ""),
        ([1, 1, 2, 3], (), ""),  # two of four are no majority
    ],
)
def test_only_more_than_half_are_right(values: list[int], deviating: tuple[int, ...], told_by: str) -> None:
    sides = divide(values)
    assert (sides.deviating, sides.told_by) == (deviating, told_by)


@pytest.mark.parametrize(
    ("changed", "deviating"),
    [([False, True], (1,)), ([True, False], (0,)), ([True, True], ()), ([False, False], ())],
)
def test_of_two_the_one_that_is_not_as_it_was_itself(changed: list[bool], deviating: tuple[int, ...]) -> None:
    sides = divide([1, 2], changed)
    assert sides.deviating == deviating
    assert sides.told_by == ("own digest" if deviating else "")


def test_what_explains_the_others_is_told_first() -> None:
    accounts = [
        account(parameters=weights(1, 2, 3), gradients=weights(4, 5, 6)),
        account(parameters=weights(1, 9, 3), gradients=weights(7, 8, 9)),
        account(parameters=weights(1, 2, 3), gradients=weights(0, 0, 0)),
    ]
    verdict = decide(accounts, ["gradients", "parameters"])
    assert verdict is not None
    assert (verdict.lane, verdict.sides.deviating, verdict.names, verdict.of) == ("parameters", (1,), ["1.weight"], 3)
    assert verdict.reference == 0


def test_of_two_the_first_may_be_the_one_that_is_wrong() -> None:
    accounts = [
        {"items": {"state": [("a", digest)]}, "changed": {"state": has_changed}}
        for digest, has_changed in [(1, True), (2, False)]
    ]
    verdict = decide(accounts, ["state"])
    assert verdict is not None
    assert (verdict.sides.deviating, verdict.reference, verdict.names) == ((0,), 1, ["a"])


def test_what_only_one_side_has_differs() -> None:
    accounts = [account(state=weights(1, 2)), account(state=[]), account(state=[])]
    verdict = decide(accounts, ["state"])
    assert verdict is not None
    assert (verdict.sides.deviating, verdict.names) == ((0,), ["0.weight", "1.weight"])


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_the_other_one_is_what_is_held_against(rank: int) -> None:
    accounts = [account(changed=place == rank, parameters=weights(place)) for place in range(2)]
    verdict = decide(accounts, ["parameters"])
    assert verdict is not None
    assert (verdict.sides.deviating, verdict.reference) == ((rank,), 1 - rank)


def test_what_has_passed_is_no_verdict() -> None:
    assert decide([account(gradients=weights(1)), account(gradients=weights(1))], ["gradients"]) is None


def test_a_flipped_bit_is_found_with_its_element_and_size() -> None:
    reference = torch.linspace(-1, 1, 64).view(8, 8)
    own = reference.clone()
    own.view(-1)[5:6].view(torch.int32).bitwise_xor_(1 << 20)
    found = compare(own, reference)
    assert (found.elements, found.element, found.bits, found.size) == (1, 5, (20,), 64)
    assert found.deviation == pytest.approx(float((own - reference).abs().max()))
    assert found.relative == pytest.approx(found.deviation / float(reference.square().mean().sqrt()))
    assert found.ratio == 0.0


def test_the_sign_bit_of_every_type() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8):
        reference = torch.arange(1, 9).to(dtype)
        own = reference.clone()
        own[3] = -own[3]
        found = compare(own, reference)
        assert found.element == 3, dtype
        assert 8 * dtype.itemsize - 1 in found.bits, dtype


def test_all_of_it_scaled_is_told_with_its_factor() -> None:
    reference = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert compare(reference * 0.25, reference).ratio == pytest.approx(0.25)
    assert compare(reference * -1, reference).ratio == pytest.approx(-1)
    assert compare(reference.flip(0), reference).ratio == 0.0


def test_what_is_not_finite_has_a_size_that_json_can_keep() -> None:
    reference = torch.ones(4)
    own = reference.clone()
    own[1], own[2] = float("nan"), float("inf")
    found = compare(own, reference)
    assert found.elements == 2
    assert 0 < found.deviation < float("inf")


# --- how often --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "pace"),
    [
        (Costs(step=0.5, light=0.005, dear=0.004), Pace(1, 1)),
        (Costs(step=0.5, light=0.005, dear=0.030), Pace(1, 6)),
        (Costs(step=0.01, light=0.0005, dear=0.0005), Pace(4, 2)),
        (Costs(step=0.0005, light=0.0004, dear=0.0), Pace(40, 1)),
        (Costs(step=0.0, light=0.1, dear=0.1), Pace(1, 1)),  # not measured yet
    ],
)
def test_what_is_chosen_costs_no_more_than_the_budget(costs: Costs, pace: Pace) -> None:
    assert choose(costs, 0.02) == pace
    assert share(costs, pace) <= 0.02 + 1e-9


def test_a_small_change_is_not_followed() -> None:
    assert not is_worth(Pace(10, 4), Pace(12, 5))
    assert is_worth(Pace(10, 4), Pace(25, 4))
    assert is_worth(Pace(10, 4), Pace(10, 1))

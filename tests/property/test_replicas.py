"""Of any tensors: one changed bit and any swap change the digest. Of any verdict: nobody is blamed without a reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.telemetry import ConsistencyReport
from workbench.training.consistency.cadence import Costs, choose, share
from workbench.training.consistency.digest import Digests
from workbench.training.consistency.locate import divide
from workbench.views.checks import NEWEST, thinned

DIGESTS = Digests()
SIZES = st.integers(2, 64) | st.integers(8_000, 60_000)


def words(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (size,), generator=generator)


@settings(max_examples=300, deadline=None)
@given(size=SIZES, seed=st.integers(0, 99), place=st.floats(0, 0.9999), bit=st.integers(0, 63))
def test_any_changed_bit_changes_the_digest(size: int, seed: int, place: float, bit: int) -> None:
    tensor = words(size, seed)
    before = int(DIGESTS.of([tensor]))
    tensor[int(place * size)] ^= -(2**63) if bit == 63 else 1 << bit
    assert int(DIGESTS.of([tensor])) != before


@settings(max_examples=300, deadline=None)
@given(size=SIZES, seed=st.integers(0, 99), one=st.floats(0, 0.9999), other=st.floats(0, 0.9999))
def test_any_swap_changes_the_digest(size: int, seed: int, one: float, other: float) -> None:
    tensor = words(size, seed)
    before = int(DIGESTS.of([tensor]))
    here, there = int(one * size), int(other * size)
    tensor[[here, there]] = tensor[[there, here]]
    assert (int(DIGESTS.of([tensor])) == before) == (here == there)


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.integers(0, 700), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_tensors_are_told_apart_from_what_they_are_in_one(parts: list[int], seed: int) -> None:
    """The same bytes cut in the same places give the same; a bit anywhere in them another."""
    made = [words(size, seed + number) for number, size in enumerate(parts)]
    assert int(DIGESTS.of(made)) == int(DIGESTS.of([tensor.clone() for tensor in made]))
    if any(parts):
        which = max(range(len(parts)), key=parts.__getitem__)
        before = int(DIGESTS.of(made))
        made[which][parts[which] // 2] ^= 4
        assert int(DIGESTS.of(made)) != before


@given(
    values=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    changed=st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_nobody_is_blamed_without_a_majority_or_an_own_digest(values: list[int], changed: list[bool]) -> None:
    sides = divide(values, changed[: len(values)])
    assert sorted(place for group in sides.groups for place in group) == list(range(len(values)))
    right = [place for place in range(len(values)) if place not in sides.deviating]
    match sides.told_by:
        case "majority":
            assert len({values[place] for place in right}) == 1
            assert len(right) > len(values) / 2
            assert all(values[place] != values[right[0]] for place in sides.deviating)
        case "own digest":
            assert len(values) == 2
            assert [changed[place] for place in sides.deviating] == [True]
            assert not changed[right[0]]
        case _:
            assert sides.deviating == ()
            assert max(map(len, sides.groups)) <= len(values) / 2


@given(
    step=st.floats(1e-4, 10), light=st.floats(1e-6, 1), dear=st.floats(0, 5), budget=st.floats(0.001, 1),
    most=st.integers(1, 64),
)  # fmt: skip
def test_no_pace_costs_more_than_the_budget(step: float, light: float, dear: float, budget: float, most: int) -> None:
    pace = choose(Costs(step, light, dear), budget, most)
    assert pace.every >= 1
    assert 1 <= pace.parts <= most
    assert share(Costs(step, light, dear), pace) <= budget * 1.01 or pace.every == 10_000


MADE = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 2), st.booleans(), st.sets(st.integers(0, 3), max_size=2)),
    min_size=1, max_size=300,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(told=MADE, limit=st.integers(1, 300))
def test_told_with_fewer_nobody_who_deviated_is_lost(told: list[tuple[int, int, bool, set[int]]], limit: int) -> None:
    """Checks stay as many, in their order, and the newest as they were."""
    reports = [
        ConsistencyReport(
            job_id="a", restart_count=generation, rank=0, start=float(at), end=at + 1.0, first_step=at, last_step=at,
            ranks=(0, 1, 2, 3), optimizer=optimizer, checked=2, agreed=2 - bool(who),
            deviating=tuple((rank, 1) for rank in sorted(who)), unclear=int(is_unclear),
        )
        for at, (optimizer, generation, is_unclear, who) in enumerate(told)
    ]  # fmt: skip
    kept = thinned(reports, limit, lambda _: 1)

    def sums(some: list[Any]) -> tuple[Any, ...]:
        who = Counter(rank for one in some for rank, times in one.deviating for _ in range(times))
        return who, *(sum(getattr(one, name) for one in some) for name in ("checked", "agreed", "unclear"))

    assert sums(kept) == sums(reports)
    assert len(kept) <= max(limit, NEWEST + 6)
    assert [one.start for one in kept] == sorted(one.start for one in kept)
    assert kept[-NEWEST:] == reports[-NEWEST:]

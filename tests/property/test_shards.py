"""The rest of an epoch dealt to other ranks: every sample exactly once, whatever the world sizes and positions.

First the pure arithmetic of `shards`, then real DataLoaders that are resumed by other ranks through `DataPosition`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

from workbench.training.position import DataPosition
from workbench.training.shards import Segment, dealt, evened, left, padded, together

WORLDS = st.integers(1, 5)
LENGTHS = st.integers(1, 60)


@st.composite
def decks(draw: st.DrawFn) -> tuple[list[int], Segment]:
    """An epoch, and how far each rank has come in it."""
    deck, size = draw(st.permutations(range(draw(LENGTHS)))), draw(WORLDS)
    most = -(-len(deck) // size)
    return list(deck), Segment(tuple(draw(st.lists(st.integers(0, most), min_size=size, max_size=size))))


def consumed(deck: Sequence[int], segment: Segment) -> list[int]:
    size = segment.world_size
    return [unit for rank in range(size) for unit in dealt(deck, size, rank)[: segment.taken[rank]]]


@given(decks())
def test_consumed_and_left_are_the_whole_once(case: tuple[list[int], Segment]) -> None:
    deck, segment = case
    assert sorted(consumed(deck, segment) + left(deck, segment)) == sorted(deck)


@given(LENGTHS, WORLDS, st.integers(0, 60), st.booleans())
def test_dealt_again_to_as_many_ranks_each_goes_on_with_its_own(
    length: int, size: int, steps: int, drop_last: bool
) -> None:
    deck = list(range(length))
    whole = padded(deck, size, order=deck, drop_last=drop_last)
    done = min(steps, len(whole) // size)
    rest = padded(left(deck, Segment((done,) * size)), size, order=deck, drop_last=drop_last)
    for rank in range(size):
        assert dealt(rest, size, rank) == dealt(whole, size, rank)[done:]


@given(decks(), WORLDS)
def test_padding_is_less_than_a_sample_a_rank_and_from_the_epochs_start(
    case: tuple[list[int], Segment], size: int
) -> None:
    deck, segment = case
    rest = left(deck, segment)
    whole = padded(rest, size, order=deck, drop_last=False)
    assert whole[: len(rest)] == rest and len(whole) % size == 0 and len(whole) - len(rest) < size
    cut = padded(rest, size, order=deck, drop_last=True)
    assert cut == rest[: len(cut)] and len(rest) - len(cut) < size


@given(st.lists(st.integers(1, 6), max_size=20), WORLDS)
def test_batches_are_evened_without_a_sample_lost_or_a_step_that_one_rank_has_alone(
    sizes: list[int], ranks: int
) -> None:
    numbers = iter(range(sum(sizes)))
    batches = [[next(numbers) for _ in range(size)] for size in sizes]
    even = evened(batches, ranks)
    samples = list(chain.from_iterable(even))
    assert len(even) % ranks == 0 and all(even)
    assert set(samples) == set(range(sum(sizes)))
    assert len(samples) == sum(sizes) or sum(sizes) < ranks
    assert len(even) - len(batches) < ranks


@given(st.lists(st.lists(st.integers(), max_size=5), max_size=5))
def test_together_goes_step_by_step(lists: list[list[int]]) -> None:
    steps = max(map(len, lists), default=0)
    assert together(lists) == [one[step] for step in range(steps) for one in lists if step < len(one)]


class Lengths(Sampler[list[int]]):
    """A batch sampler of a user's own: neighbours together, shuffled by its own generator, padded by batches."""

    def __init__(self, length: int, size: int, rank: int, num_replicas: int) -> None:
        self.length, self.size, self.rank, self.num_replicas = length, size, rank, num_replicas
        self.generator = torch.Generator().manual_seed(4)

    def __iter__(self) -> Iterator[list[int]]:
        starts = range(0, self.length, self.size)
        order = [starts[number] for number in torch.randperm(len(starts), generator=self.generator)]
        order = padded(order, self.num_replicas, order=order, drop_last=False)
        for start in order[self.rank :: self.num_replicas]:
            yield list(range(start, min(start + self.size, self.length)))

    def __len__(self) -> int:
        return len(range(0, len(range(0, self.length, self.size)), self.num_replicas))


def distributed(length: int, size: int, rank: int, world: int) -> DataLoader[Any]:
    return DataLoader(range(length), size, sampler=DistributedSampler(range(length), world, rank, seed=7))  # type: ignore[arg-type]


def explicit(length: int, size: int, rank: int, world: int) -> DataLoader[Any]:
    sampler = BatchSampler(DistributedSampler(range(length), world, rank, shuffle=False), size, False)  # type: ignore[arg-type]
    return DataLoader(range(length), batch_sampler=sampler)  # type: ignore[arg-type]


def alone(length: int, size: int, rank: int, world: int) -> DataLoader[Any]:
    """Shuffled by torch's own sampler while there is one rank."""
    if world > 1:
        return distributed(length, size, rank, world)
    return DataLoader(range(length), size, shuffle=True)  # type: ignore[arg-type]


def own_generator(length: int, size: int, rank: int, world: int) -> DataLoader[Any]:
    if world > 1:
        return distributed(length, size, rank, world)
    generator = torch.Generator().manual_seed(9)
    sampler = RandomSampler(range(length), generator=generator)
    return DataLoader(range(length), size, sampler=sampler, generator=generator)  # type: ignore[arg-type]


def buckets(length: int, size: int, rank: int, world: int) -> DataLoader[Any]:
    return DataLoader(range(length), batch_sampler=Lengths(length, size, rank, world))  # type: ignore[arg-type]


MAKERS = [distributed, explicit, alone, own_generator, buckets]
EPOCHS = 2


class Ranks:
    """All ranks of a run, one after the other, and what they saw."""

    def __init__(self, make: Any, length: int, size: int, world: int, states: list[Any]) -> None:
        torch.manual_seed(1)
        self.positions = [DataPosition(make(length, size, r, world), rank=r, world_size=world) for r in range(world)]
        if states:
            for position in self.positions:
                position.restore(states)
        self.streams = [position.epochs(EPOCHS) for position in self.positions]
        self.steps: list[list[tuple[int, list[int]]]] = [[] for _ in self.positions]

    def run(self, steps: int) -> None:
        for stream, seen in zip(self.streams, self.steps, strict=True):
            for _, (epoch, batch) in zip(range(steps), stream, strict=False):
                seen.append((epoch, batch.tolist()))

    def states(self) -> list[Any]:
        return [position.state_dict() for position in self.positions]

    def seen(self) -> list[tuple[int, int]]:
        return [(epoch, sample) for seen in self.steps for epoch, batch in seen for sample in batch]


@settings(max_examples=60, deadline=None)
@given(
    make=st.sampled_from(MAKERS),
    length=LENGTHS,
    size=st.integers(1, 7),
    worlds=st.lists(WORLDS, min_size=2, max_size=4),
    steps=st.integers(1, 6),
)
def test_no_sample_of_an_epoch_is_lost_or_seen_twice(
    make: Any, length: int, size: int, worlds: list[int], steps: int
) -> None:
    worlds = [1, *worlds] if make in (alone, own_generator) else worlds
    states: list[Any] = []
    seen: Counter[tuple[int, int]] = Counter()
    for number, world in enumerate(worlds):
        ranks = Ranks(make, length, size, world, states)
        ranks.run(steps if number + 1 < len(worlds) else 10**6)
        seen.update(ranks.seen())
        states = ranks.states()
        assert len({len(steps_of) for steps_of in ranks.steps}) == 1
    for epoch in range(EPOCHS):
        counts = [seen[epoch, sample] for sample in range(length)]
        padding = max(worlds) * (size if make is buckets else 1)
        assert min(counts) >= 1 and sum(counts) - length < padding

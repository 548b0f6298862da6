"""Positions in what is no plain DataLoader, on other ranks, and what is said where a place cannot be gone back to."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from workbench.training import passes
from workbench.training.position import DataPosition
from workbench.training.rng import generator_state, rng_state, set_generator_state, set_rng_state


def batches(number: int) -> Iterator[int]:
    yield from range(number)


def loader_of(length: int, size: int, **how: Any) -> DataLoader[Any]:
    return DataLoader(range(length), size, **how)  # type: ignore[arg-type]


def numbers(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def taken(source: Any, count: int, epochs: int | None = None) -> Any:
    """The state after so many batches."""
    position = DataPosition(source, rank=0, world_size=1)
    stream = position.epochs(epochs)
    for _ in range(count):
        next(stream)
    return position.state_dict()


def rest(source: Any, states: list[Any], epochs: int | None = None, *, rank: int = 0, world: int = 1) -> list[Any]:
    position = DataPosition(source, rank=rank, world_size=world)
    position.restore(states)
    return [numbers(batch) for _, batch in position.epochs(epochs)]


def test_a_generator_given_anew_goes_on() -> None:
    assert rest(batches(5), [taken(batches(5), 2)]) == [2, 3, 4]


def test_a_generator_that_has_begun_is_refused() -> None:
    begun = batches(5)
    next(begun)
    with pytest.raises(ValueError, match="rank 0 cannot go back in a generator that has begun: give a new one"):
        rest(begun, [taken(batches(5), 2)])


def test_a_generator_has_no_second_epoch() -> None:
    with pytest.raises(ValueError, match="cannot go back to epoch 1: a generator gives its batches once"):
        rest(batches(5), [taken([1, 2], 3, epochs=2)], epochs=2)


@pytest.mark.parametrize("source", [[1, 2, 3], loader_of(12, 4), loader_of(12, 4, num_workers=1)])
def test_a_source_that_has_become_shorter_is_refused_with_both_lengths(source: Any) -> None:
    saved = taken([0] * 9, 5) if isinstance(source, list) else taken(loader_of(40, 4), 5)
    with pytest.raises(ValueError, match=r"5 batches of this epoch were consumed, and now there are only 3"):
        rest(source, [saved])


def test_the_lengths_that_a_changed_dataset_had_are_named() -> None:
    with pytest.raises(ValueError, match=r"only 3 \(of 12 samples, where it was 40\)"):
        rest(loader_of(12, 4), [taken(loader_of(40, 4), 5)])


class Stateful:
    """Behaves as torchdata's StatefulDataLoader says it does: a state from amid a pass is gone on with once."""

    def __init__(self, length: int) -> None:
        self.length, self.given, self._goes_on = length, 0, False

    def __iter__(self) -> Iterator[int]:
        if not self._goes_on:
            self.given = 0
        self._goes_on = False
        while self.given < self.length:
            self.given += 1
            yield self.given - 1
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given, self._goes_on = state["given"], state["given"] > 0


@pytest.mark.parametrize("done", range(1, 10))
def test_a_loader_that_keeps_its_position_is_used_as_it_is(done: int) -> None:
    whole = [*range(5), *range(5)]
    assert rest(Stateful(5), [taken(Stateful(5), done, epochs=2)], epochs=2) == whole[done:]


def test_between_its_passes_too() -> None:
    position = DataPosition(Stateful(3), rank=0, world_size=1)
    assert len(list(position.epochs(None))) == 3
    again = DataPosition(Stateful(3), rank=0, world_size=1)
    again.restore([position.state_dict()])
    assert [list(again.epochs(None)), list(again.epochs(None))] == [[], [(0, 0), (0, 1), (0, 2)]]


def test_on_other_ranks_it_is_told_that_it_cannot_be_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert rest(Stateful(4), [taken(Stateful(4), 2)], rank=0, world=2) == [2, 3]
    assert "Stateful keeps its own position, which is one of 1 ranks" in capsys.readouterr().err


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def test_a_stream_on_other_ranks_passes_over_its_share(capsys: pytest.CaptureFixture[str]) -> None:
    saved = taken(DataLoader(Stream(), 2), 6)
    assert rest(DataLoader(Stream(), 2), [saved], world=2) == [[k, k + 1] for k in range(6, 20, 2)]
    assert "cannot be told to 2: each passes over 3 batches" in capsys.readouterr().err


def test_drawing_again_is_told_once_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(passes, "monotonic", lambda: float(next(clock)))
    passes.draw(iter(range(9)), 3, 7)
    assert "rank 7 gets past what was consumed by drawing it again: 1 of 3 batches" in capsys.readouterr().err


class Forgetful(Sampler[int]):
    """Another order each time, from nowhere."""

    orders: Iterator[list[int]] = iter([[3, 1, 0, 2], [0, 1, 2, 3], [1, 0, 3, 2]])

    def __iter__(self) -> Iterator[int]:
        return iter(next(self.orders))

    def __len__(self) -> int:
        return 4


def test_a_sampler_that_gives_another_order_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    saved = taken(loader_of(4, 1, sampler=Forgetful()), 2)
    assert len(rest(loader_of(4, 1, sampler=Forgetful()), [saved])) == 2
    assert "Forgetful does not give the order again that it gave before the save" in capsys.readouterr().err


def test_on_other_ranks_too(capsys: pytest.CaptureFixture[str]) -> None:
    Forgetful.orders = iter([[3, 1, 0, 2], [0, 1, 2, 3], [1, 0, 3, 2]])
    saved = taken(loader_of(4, 1, sampler=Forgetful()), 2)
    assert rest(loader_of(4, 1, sampler=Forgetful()), [saved], world=2) == [[0], [3], [2]]
    assert "does not give the order again that rank 0 had" in capsys.readouterr().err


def sharded(size: int, rank: int, world: int) -> DataLoader[Any]:
    sampler: DistributedSampler[int] = DistributedSampler(range(24), world, rank)  # type: ignore[arg-type]
    return loader_of(24, size, sampler=sampler)


def test_batches_of_another_size_leave_the_samples_that_were_left() -> None:
    states = []
    for rank in range(2):
        position = DataPosition(sharded(4, rank, 2), rank=rank, world_size=2)
        stream = position.epochs(None)
        next(stream)
        states.append(position.state_dict())
    seen = [sample for batch in sharded(4, 0, 2) for sample in batch.tolist()][:4]
    seen += [sample for batch in sharded(4, 1, 2) for sample in batch.tolist()][:4]
    for rank in range(2):
        seen += [sample for batch in rest(sharded(3, rank, 2), states, rank=rank, world=2) for sample in batch]
    assert sorted(seen) == list(range(24))


def test_every_sampler_that_wants_to_know_is_told_the_epoch() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(range(8), 2, 0)  # type: ignore[arg-type]
    loader = DataLoader(range(8), batch_sampler=BatchSampler(sampler, 2, False))  # type: ignore[arg-type]
    list(DataPosition(loader, rank=0, world_size=1).epochs(3))
    assert sampler.epoch == 2


def test_a_pass_that_was_left_early_is_over() -> None:
    position = DataPosition([1, 2, 3], rank=0, world_size=1)
    for _ in position.epochs(None):
        break
    state = position.state_dict()
    assert (state["call"], state["batches"]) == (1, 0)
    again = DataPosition([1, 2, 3], rank=0, world_size=1)
    again.restore([state])
    assert [len(list(again.epochs(None))) for _ in range(2)] == [0, 3]


@pytest.mark.parametrize("world", [1, 2])
def test_until_the_call_comes_that_goes_on_the_position_is_the_old_one(world: int) -> None:
    first = DataPosition([1, 2, 3], rank=0, world_size=1)
    list(first.epochs(None))
    stream = first.epochs(None)
    next(stream)
    again = DataPosition([1, 2, 3], rank=0, world_size=world)
    again.restore([first.state_dict()])
    assert again.is_waiting and list(again.epochs(None)) == [] and again.is_waiting
    third = DataPosition([1, 2, 3], rank=0, world_size=world)
    third.restore([again.state_dict()] * world)
    assert list(third.epochs(None)) == []
    assert next(third.epochs(None)) == (0, 2 if world == 1 else 1)
    assert not third.is_waiting


def test_a_loader_that_is_set_again_keeps_its_workers_account() -> None:
    loader = loader_of(8, 4)
    position = DataPosition(loader, rank=0, world_size=1)
    stream = position.epochs(None)
    next(stream)
    position.loader = loader
    assert position.state_dict()["units"] == 4


def test_fewer_epochs_than_were_done_end_at_once_with_the_states_back() -> None:
    called: list[int] = []
    position = DataPosition([1, 2], rank=0, world_size=1)
    position.restore([taken([1, 2], 5, epochs=3)], then=lambda: called.append(1))
    assert list(position.epochs(2)) == [] and called == [1]


def test_a_position_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"version \[99\] cannot be read"):
        DataPosition([], rank=0, world_size=1).restore([{"version": 99}])


def size_of(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    parts: Iterable[Any] = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return 16 + sum(map(size_of, parts))


def test_a_position_in_a_million_samples_is_small() -> None:
    assert size_of(taken(loader_of(1_000_000, 4, shuffle=True), 3)) < 60_000


def test_random_states_of_every_kind_go_back() -> None:
    state = rng_state()
    first = (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist())
    set_rng_state(state)
    again = (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist())
    assert first == again


@pytest.mark.parametrize(
    "generator",
    [
        torch.Generator(),
        random.Random(1),
        np.random.RandomState(2),
        np.random.default_rng(3),
        np.random.Generator(np.random.MT19937(4)),
        np.random.Generator(np.random.Philox(5)),
        np.random.Generator(np.random.SFC64(6)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_generator_objects_too(generator: Any) -> None:
    def draw() -> Any:
        if isinstance(generator, torch.Generator):
            return torch.rand(3, generator=generator).tolist()
        return [generator.random() for _ in range(3)]

    state = generator_state(generator)
    assert state is not None
    first = draw()
    set_generator_state(generator, state)
    assert draw() == first


def test_no_generator_no_state() -> None:
    assert generator_state("noise") is None

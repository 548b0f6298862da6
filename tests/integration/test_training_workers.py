"""Positions in loaders whose datasets draw random numbers, in the rank and in worker processes, and in streams."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from workbench.training.position import DataPosition
from workbench.training.rng import rng_state, set_rng_state

LENGTH = 23
EPOCHS = 2
Seen = tuple[int, Any, tuple[float, float, float]]


def me() -> tuple[int, int, int]:
    """Which worker, of how many, and its seed."""
    info = get_worker_info()
    return (info.id, info.num_workers, info.seed % 1000) if info else (0, 1, 0)


class Noisy(Dataset[Any]):
    """Draws from every global generator, and from two of its own."""

    def __init__(self) -> None:
        self.python, self.torch = random.Random(7), torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        own = [self.python.random(), float(torch.rand((), generator=self.torch))]
        noise = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return torch.tensor([index, *own, *noise, *me()], dtype=torch.float64)


class Stream(IterableDataset[Any]):
    """Each worker has its own part, in an order drawn when it begins."""

    def __init__(self) -> None:
        self.python = random.Random(7)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker, workers, _ = me()
        order = list(range(worker, LENGTH, workers))
        self.python.shuffle(order)
        for sample in order:
            yield torch.tensor([sample, random.random(), self.python.random()], dtype=torch.float64)


class Keeping(Stream):
    """Knows where it is, and goes on there; drawing it again would be told."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.epoch, self.is_loaded, self.drawn = 0, 0, False, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.is_loaded:
            self.at, self.epoch = 0, self.epoch + 1
        self.is_loaded = False
        worker, workers, _ = me()
        order = list(range(worker, LENGTH, workers))
        random.Random(self.epoch).shuffle(order)
        while self.at < len(order):
            self.at += 1
            yield torch.tensor([order[self.at - 1], random.random(), float(torch.rand(()))], dtype=torch.float64)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch, self.is_loaded = state["at"], state["epoch"], True


def own_generator(**how: Any) -> Any:
    return DataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(5), **how)


def sharded(**how: Any) -> Any:
    sampler: DistributedSampler[Any] = DistributedSampler(range(LENGTH), 2, 1, seed=3)  # type: ignore[arg-type]
    return DataLoader(Noisy(), 2, sampler=sampler, drop_last=True, **how)


class Wrapping(DataLoader[Any]):
    """A user's own way of giving batches: torch's iterator is made once the first is asked for."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch + 100


LOADERS: dict[str, Callable[..., Any]] = {
    "shuffled": lambda **how: DataLoader(Noisy(), 4, shuffle=True, **how),
    "own generator": own_generator,
    "distributed": sharded,
    "class of a user's": lambda **how: Wrapping(Noisy(), 4, shuffle=True, **how),
    "no batches": lambda **how: DataLoader(Noisy(), None, shuffle=True, **how),
    "stream": lambda **how: DataLoader(Stream(), 4, **how),
    "stream that keeps its place": lambda **how: DataLoader(Keeping(), 4, **how),
    "its samples": lambda **how: DataLoader(Keeping(), None, **how),
}
HOW: dict[str, dict[str, Any]] = {
    "in the rank": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def carried(state: Any) -> Any:
    """Through a file, as a checkpoint is read."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def straight(loader: Any) -> list[Seen]:
    seen: list[Seen] = []
    for epoch in range(EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        seen += [(epoch, batch.tolist(), draws()) for batch in loader]
    return seen


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", LOADERS)
def test_the_same_with_a_position_and_after_going_back_to_one(kind: str, how: str) -> None:
    def position() -> DataPosition:
        return DataPosition(LOADERS[kind](**HOW[how]), rank=0, world_size=1)

    seed(1)
    expected = straight(LOADERS[kind](**HOW[how]))
    seed(1)
    first, saves, seen = position(), [], []
    for epoch, batch in first.epochs(EPOCHS):
        seen.append((epoch, batch.tolist(), draws()))
        saves.append(carried([first.state_dict(), rng_state()]))
    assert seen == expected
    epoch_end = sum(epoch == 0 for epoch, *_ in expected)
    for done in sorted({1, 3, epoch_end - 1, epoch_end, epoch_end + 1, epoch_end + 3, len(expected)}):
        state, rng = saves[done - 1]
        seed(99)
        again = position()
        again.restore([state], then=lambda rng=rng: set_rng_state(rng))  # type: ignore[misc]
        assert [(epoch, batch.tolist(), draws()) for epoch, batch in again.epochs(EPOCHS)] == expected[done:], done


@pytest.mark.parametrize("kind", ["own generator", "stream", "stream that keeps its place"])
def test_between_two_epochs_persistent_workers_are_as_they_were(kind: str) -> None:
    how = HOW["persistent workers"]
    seed(1)
    expected = straight(LOADERS[kind](**how))
    seed(1)
    first = DataPosition(LOADERS[kind](**how), rank=0, world_size=1)
    done = sum(1 for _ in first.epochs(None) if draws())
    state, rng = carried([first.state_dict(), rng_state()])
    seed(99)
    again = DataPosition(LOADERS[kind](**how), rank=0, world_size=1)
    again.restore([state], then=lambda: set_rng_state(rng))
    assert list(again.epochs(None)) == []
    assert [(1, batch.tolist(), draws()) for _, batch in again.epochs(None)] == expected[done:]


def test_what_is_fetched_ahead_is_not_consumed() -> None:
    loader = DataLoader(torch.arange(40), 4, num_workers=2, prefetch_factor=4)  # type: ignore[arg-type]
    position = DataPosition(loader, rank=0, world_size=1)
    stream = position.epochs(None)
    assert next(stream)[1].tolist() == [0, 1, 2, 3]
    state = position.state_dict()
    again = DataPosition(loader, rank=0, world_size=1)
    again.restore([state])
    assert next(again.epochs(None))[1].tolist() == [4, 5, 6, 7]


def test_what_a_dataset_holds_stays_as_the_user_made_it() -> None:
    loader = LOADERS["shuffled"](num_workers=2, persistent_workers=True)
    parts = {name: value for name, value in vars(loader).items() if name != "_iterator"}
    position = DataPosition(loader, rank=0, world_size=1)
    for _ in position.epochs(1):
        state = position.state_dict()
    position.restore([state])
    assert len(list(position.epochs(2))) == 6
    assert all(vars(loader)[name] is value for name, value in parts.items() if name != "_IterableDataset_len_called")
    assert loader._iterator._index_sampler is loader.batch_sampler

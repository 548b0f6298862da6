"""`DataPosition`: the loader's own batches without a restore, and the same ones after it."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from workbench.training.position import DataPosition
from workbench.training.rng import rng_state, set_rng_state

DATA = torch.arange(23)
EPOCHS = 3


def carried(state: Any) -> Any:
    """Through a file, as a checkpoint is read."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def draws() -> tuple[float, float, float]:
    """One of each generator, as a training step draws."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class Wrapping(DataLoader[Any]):
    """A user's own way of giving batches: torch's iterator is made once the first is asked for."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch + 100


class Endless(DataLoader[Any]):
    """Keeps one iterator for ever, made before anybody looks, of a sampler that goes round."""

    def __init__(self, length: int) -> None:
        super().__init__(DATA, batch_sampler=itertools.cycle([[i, i + 1] for i in range(0, length, 2)]))  # type: ignore[arg-type]
        self.kept = super().__iter__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(5):
            yield next(self.kept)


Make = Callable[[], Any]
LOADERS: dict[str, Make] = {
    "in order": lambda: DataLoader(DATA, 4),
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "own generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "drop_last": lambda: DataLoader(DATA, 4, shuffle=True, drop_last=True),
    "no batches": lambda: DataLoader(DATA, None, shuffle=True),
    "replacement": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True, num_samples=70)),
    "distributed": lambda: DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 1, seed=3)),
    "class of a user's": lambda: Wrapping(DATA, 4, shuffle=True),
    "endless": lambda: Endless(10),
    "list": lambda: [torch.tensor([i]) for i in range(5)],
}


def straight(loader: Any) -> list[Any]:
    seed(1)
    seen: list[Any] = []
    for epoch in range(EPOCHS):
        if hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(epoch)
        seen += [(epoch, batch.tolist(), draws()) for batch in loader]
    return seen


@pytest.mark.parametrize("kind", LOADERS)
def test_without_a_restore_nothing_differs(kind: str) -> None:
    expected = straight(LOADERS[kind]())
    position = DataPosition(LOADERS[kind](), rank=0, world_size=1)
    seed(1)
    assert [(epoch, batch.tolist(), draws()) for epoch, batch in position.epochs(EPOCHS)] == expected


@pytest.mark.parametrize("kind", LOADERS)
def test_resumed_after_any_batch_the_rest_is_the_same(kind: str) -> None:
    expected = straight(LOADERS[kind]())
    position = DataPosition(LOADERS[kind](), rank=0, world_size=1)
    seed(1)
    saves = []
    for _ in position.epochs(EPOCHS):
        draws()
        saves.append(carried([position.state_dict(), rng_state()]))
    for done, (state, rng) in enumerate(saves, 1):
        seed(99)
        again = DataPosition(LOADERS[kind](), rank=0, world_size=1)
        again.restore([state], then=lambda rng=rng: set_rng_state(rng))  # type: ignore[misc]
        rest = [(epoch, batch.tolist(), draws()) for epoch, batch in again.epochs(EPOCHS)]
        assert rest == expected[done:]


@pytest.mark.parametrize("kind", ["shuffled", "own generator"])
def test_a_script_that_calls_for_each_epoch_is_resumed_as_it_stands(kind: str) -> None:
    def run(position: DataPosition, saves: list[Any]) -> list[Any]:
        seen = []
        for call in range(EPOCHS):
            for _, batch in position.epochs(None):
                seen.append((call, batch.tolist(), draws()))
                saves.append(carried([position.state_dict(), rng_state()]))
            saves.append(carried([position.state_dict(), rng_state()]))
        return seen

    seed(1)
    saves: list[Any] = []
    expected = run(DataPosition(LOADERS[kind](), rank=0, world_size=1), saves)
    assert len(saves) == len(expected) + EPOCHS
    for state, rng in saves:
        done = state["call"] * 6 + state["batches"]
        again = DataPosition(LOADERS[kind](), rank=0, world_size=1)
        again.restore([state], then=lambda rng=rng: set_rng_state(rng))  # type: ignore[misc]
        assert run(again, []) == expected[done:]

"""The order in which a DataLoader takes its indices: watched, skipped and replaced where the loader asks its sampler.

torch offers no door for this, so an iterator is made while a stand-in lies where the loader looks its sampler up; the
loader itself is as before once its iterator is there. Nothing is drawn that the loader would not draw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import Sampler

from workbench.training.rng import State, generator_state, set_generator_state

DEPTH = 4  # samplers within samplers


class Order:
    """Stands in for `inner`, an index sampler, and passes over the first `skip` of what that gives."""

    def __init__(self, inner: Iterable[Any], skip: int = 0) -> None:
        self.inner, self.skip = inner, skip
        self.live: Drawn | None = None

    def __iter__(self) -> Drawn:
        self.live = Drawn(iter(self.inner), self.skip)
        return self.live

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]


class Drawn:
    """One pass over the order. What a sampler draws at its first element is drawn at the first here too."""

    def __init__(self, indices: Iterator[Any], skip: int) -> None:
        self._indices, self._skip = indices, skip
        self.skipped = 0

    def __iter__(self) -> Drawn:
        return self

    def __next__(self) -> Any:
        self.pass_over()
        return next(self._indices)

    def pass_over(self) -> None:
        """Pass over what is to be skipped now, or as much as there is of it."""
        while self.skipped < self._skip:
            try:
                next(self._indices)
            except StopIteration:
                self._skip = self.skipped
                return
            self.skipped += 1


@contextlib.contextmanager
def standing_in(loader: Any, order: Order | None) -> Iterator[None]:
    """While this lasts the loader takes its indices from `order`."""
    if order is None:
        yield
        return
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    with replaced(loader, **{name: order}):
        running = loader._iterator if loader.persistent_workers else None
        if running is None:
            yield
        else:  # it has looked its sampler up when it was made
            with replaced(running, _index_sampler=order):
                yield


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of an object, changed for a while, past `__setattr__`."""
    own = vars(owner)
    before = {name: own[name] for name in values}
    own.update(values)
    try:
        yield
    finally:
        own.update(before)


def generators(loader: Any) -> dict[str, Any]:
    """The generator objects that the order may come from, by where they are found."""
    found: dict[str, Any] = {}
    _search(loader.generator, "generator", found, 0)
    _search(loader.sampler, "sampler", found, DEPTH)
    _search(loader.batch_sampler, "batch_sampler", found, DEPTH)
    return found


def _search(value: Any, path: str, found: dict[str, Any], depth: int) -> None:
    if generator_state(value) is not None:
        found[path] = value
    elif depth and isinstance(value, Sampler):
        for name, part in vars(value).items():
            _search(part, f"{path}.{name}", found, depth - 1)


def generator_states(loader: Any) -> dict[str, State]:
    return {path: state for path, one in generators(loader).items() if (state := generator_state(one)) is not None}


def set_generator_states(loader: Any, states: dict[str, State]) -> None:
    for path, one in generators(loader).items():
        if path in states:
            set_generator_state(one, states[path])

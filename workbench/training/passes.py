"""Going over a source of batches again and again, and going back into one such pass: a way for each kind of source.

Here is what any source can do; `loaders.py` has torch's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from inspect import GEN_CREATED, getgeneratorstate, isgenerator
from time import monotonic
from typing import Any, Final, Protocol

States = Sequence[Mapping[str, Any]]
PATIENCE: Final = 2.0  # s of passing over batches before it is told
AGAIN: Final = 10.0  # s until it is told again


class Passes(Protocol):
    """One kind of source. A pass is begun or resumed; of each batch that is given out `took` is told."""

    def begin(self) -> Iterator[Any]: ...

    def prepare(self, states: States) -> None:
        """Nothing of the next pass was consumed: put what must be as it was before that is begun."""

    def resume(self, states: States) -> tuple[Iterator[Any], int]:
        """Go back into a pass: its iterator, and how many of its batches lie behind."""

    def took(self) -> None: ...

    def state(self, is_within: bool) -> dict[str, Any]:
        """`is_within`: a pass of which something was consumed."""


class CountedPasses:
    """Any iterable: batches are counted, and drawn again to get past them."""

    def __init__(self, source: Any, rank: int, world_size: int) -> None:
        self.source, self.rank, self.world_size = source, rank, world_size

    def begin(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self.source)
        return iterator

    def prepare(self, states: States) -> None:
        self._check(states[self.rank % len(states)])

    def resume(self, states: States) -> tuple[Iterator[Any], int]:
        self._check(states[self.rank % len(states)])
        batches = share(states, self.rank, self.world_size, type(self.source).__name__)
        iterator = self.begin()
        draw(iterator, batches, self.rank)
        return iterator, batches

    def took(self) -> None:
        pass

    def state(self, is_within: bool) -> dict[str, Any]:
        return {}

    def _check(self, saved: Mapping[str, Any]) -> None:
        name = type(self.source).__name__
        if isgenerator(self.source) and getgeneratorstate(self.source) != GEN_CREATED:
            raise ValueError(
                f"rank {self.rank} cannot go back in a {name} that has begun: give a new one, a list, a DataLoader or "
                "an object whose __iter__ starts anew"
            )
        if saved["epoch"] and iter(self.source) is self.source:
            raise ValueError(
                f"rank {self.rank} cannot go back to epoch {saved['epoch']}: a {name} gives its batches once; give a "
                "list, a DataLoader or an object whose __iter__ starts anew"
            )


class StatefulPasses:
    """A loader that keeps its position itself, such as torchdata's StatefulDataLoader."""

    def __init__(self, loader: Any, rank: int, world_size: int) -> None:
        self.loader, self.rank, self.world_size = loader, rank, world_size

    def begin(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self.loader)
        return iterator

    def prepare(self, states: States) -> None:
        if len(states) == self.world_size:
            self.loader.load_state_dict(states[self.rank]["loader"])

    def resume(self, states: States) -> tuple[Iterator[Any], int]:
        if len(states) != self.world_size:
            told = f"keeps its own position, which is one of {len(states)} ranks: with {self.world_size} ranks some"
            say(self.rank, f"{type(self.loader).__name__} {told} samples of this epoch are seen twice or not at all")
        saved = states[self.rank % len(states)]
        self.loader.load_state_dict(saved["loader"])
        return self.begin(), saved["batches"]

    def took(self) -> None:
        pass

    def state(self, is_within: bool) -> dict[str, Any]:
        return {"loader": self.loader.state_dict()}


def share(states: States, rank: int, world_size: int, name: str) -> int:
    """How many batches to pass over; with another number of ranks, of whose order nothing is known, an equal share."""
    if len(states) == world_size:
        return int(states[rank]["batches"])
    told = f"which samples {len(states)} ranks have seen of a {name} cannot be told to {world_size}: each passes over"
    batches = sum(int(state["batches"]) for state in states) // world_size
    say(rank, f"{told} {batches} batches, and some samples of this epoch are seen twice or not at all")
    return batches


def draw(iterator: Iterator[Any], batches: int, rank: int) -> None:
    """Get past so many batches by drawing them. Raises `ValueError` where there are fewer."""
    tell_at = monotonic() + PATIENCE
    for done in range(batches):
        try:
            next(iterator)
        except StopIteration:
            raise too_short(rank, batches, done) from None
        if monotonic() > tell_at:
            say(0, f"rank {rank} gets past what was consumed by drawing it again: {done + 1} of {batches} batches")
            tell_at = monotonic() + AGAIN


def too_short(rank: int, batches: int, there: int, more: str = "") -> ValueError:
    return ValueError(
        f"rank {rank} cannot go back to its place in the data: {batches} batches of this epoch were consumed, and now "
        f"there are only {there}{more}. Has the dataset changed since? Resume with the old one, or from an epoch's end"
    )


def say(rank: int, text: str) -> None:
    """On stderr, by one rank for all."""
    if rank == 0:
        sys.stderr.write(f"dtrain: {text}\n")

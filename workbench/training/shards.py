"""What is left of an epoch, and which rank of another number of ranks takes what of it. Pure; knows no torch.

An epoch is a list of units (samples, or whole batches where a batch sampler makes them), dealt like cards: unit `j` is
for rank `j % world_size`, as `DistributedSampler` does. When the number of ranks changes the rest is dealt anew, as
often as that happens within the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice, zip_longest
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")
ABSENT: Final = object()


class Segment(NamedTuple):
    """A part of an epoch that was run with one number of ranks: how many units each of them consumed."""

    taken: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.taken)


def left(units: Sequence[T], segment: Segment) -> list[T]:
    """What the ranks of `segment`, dealt `units`, had not consumed; padding that they consumed counts for nothing."""
    taken, size = segment.taken, segment.world_size
    if len(set(taken)) == 1:
        return list(units[taken[0] * size :])
    return [unit for place, unit in enumerate(units) if place // size >= taken[place % size]]


def padded(units: Sequence[T], world_size: int, *, order: Sequence[T], drop_last: bool) -> list[T]:
    """`units` in a number that all ranks can take the same number of, as `DistributedSampler` makes an epoch's.

    Either what is over at the end is dropped, or the first of `order`, the whole epoch's, are taken again.
    """
    over = len(units) % world_size
    if drop_last or not over:
        return list(units[: len(units) - over])
    return [*units, *islice(cycle(order), world_size - over)]


def evened(batches: Sequence[Sequence[T]], world_size: int) -> list[Sequence[T]]:
    """The same samples in a number of batches that all ranks can take the same number of: the last are cut smaller.

    So no rank waits for one that has had its last batch. Some are repeated only where there are fewer than ranks.
    """
    over = len(batches) % world_size
    if not over:
        return list(batches)
    for end in (over, over + world_size):
        samples = list(chain.from_iterable(batches[len(batches) - end :]))
        if len(samples) >= world_size or end >= len(batches):
            break
    if len(samples) < world_size:
        samples = list(islice(cycle(samples), world_size))
    return [*batches[: max(0, len(batches) - end)], *_cut(samples, world_size)]


def dealt(units: Sequence[T], world_size: int, rank: int) -> list[T]:
    """What that rank gets."""
    return list(units[rank::world_size])


def together(lists: Iterable[Sequence[T]]) -> list[T]:
    """What several ranks have, in the order of their steps."""
    return [unit for row in zip_longest(*lists, fillvalue=ABSENT) for unit in row if unit is not ABSENT]  # type: ignore[misc]


def _cut(samples: Sequence[T], parts: int) -> Iterator[Sequence[T]]:
    """Into so many parts, whose sizes differ by one at most."""
    size, more = divmod(len(samples), parts)
    start = 0
    for part in range(parts):
        end = start + size + (part < more)
        yield samples[start:end]
        start = end

"""What a rank has left of an epoch that was begun by another number of ranks, or in batches of another size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch.utils.data import BatchSampler

from workbench.training import decks
from workbench.training.shards import Segment, dealt, evened, left, padded, together

States = Sequence[Mapping[str, Any]]
ALL: Final = 2**62  # units of an epoch that a rank has finished


class Rest(NamedTuple):
    """`indices`: what stands in for the index sampler. The others say where they came from, for the next time."""

    indices: Any
    told: Mapping[str, Any]
    segments: list[list[int]]
    origins: dict[int, Any]


class Unknown(Exception):
    """Which samples were consumed cannot be found out; says why."""


def rest_of(loader: Any, states: States, rank: int, world_size: int, *, anew: bool) -> Rest:
    """`anew`: with what `states` say was consumed since the rest was dealt last; else as it was dealt then."""
    place = min((state["call"], state["epoch"]) for state in states)
    those = [state for state in states if (state["call"], state["epoch"]) == place and state["batches"]]
    told, segments = those[0]["order"], [list(segment) for segment in those[0]["segments"]]
    origins = {old: where for state in those for old, where in state["origins"].items()}
    current = [_taken(state, place) for state in states]
    if anew:
        segments.append(current)
    taken = [Segment(tuple(segment)) for segment in segments]
    digests = None if those[0]["segments"] else [state.get("digest") for state in states]
    if told["kind"] == "distributed":
        units = _of_distributed(told, taken, world_size)
    else:
        units = _of_any(loader, told, taken, origins, digests, world_size)
    mine = {old: where for old, where in origins.items() if old % world_size == rank}
    return Rest(_batched(loader, told, dealt(units, world_size, rank)), told, segments, mine)


def _taken(state: Mapping[str, Any], place: tuple[int, int]) -> int:
    at = (state["call"], state["epoch"])
    if at != place:
        return ALL
    return int(state["units"]) if state["batches"] else 0


def _of_distributed(told: Mapping[str, Any], taken: list[Segment], world_size: int) -> list[Any]:
    order = units = decks.distributed(told)
    for segment in taken:
        units = left(units, segment)
    return padded(units, world_size, order=order, drop_last=told["drop_last"])


def _of_any(
    loader: Any,
    told: Mapping[str, Any],
    taken: list[Segment],
    origins: Mapping[int, Any],
    digests: Sequence[int | None] | None,
    world_size: int,
) -> list[Any]:
    first, size = taken[0].taken, taken[0].world_size
    if set(origins) != set(range(size)):
        raise Unknown("some ranks had left the epoch")
    if told["kind"] == "custom" and told["name"] != decks.name_of(loader):
        raise Unknown(f"the order was made by {told['name']}, which the loader does not have now")
    lists = [decks.rank_order(loader, told, origins[old], old, size) for old in range(size)]
    for old, order in enumerate(lists) if digests else ():
        if decks.drawn_digest(order[: first[old]], told["batch_size"]) != digests[old]:  # type: ignore[index]
            raise Unknown(f"{told['name']} does not give the order again that rank {old} had")
    units = together([order[count:] for order, count in zip(lists, first, strict=True)])
    for segment in taken[1:]:
        units = left(units if told["batch_size"] else evened(units, segment.world_size), segment)
    if not told["batch_size"]:
        return list(evened(units, world_size))
    return padded(units, world_size, order=together(lists), drop_last=False)


def _batched(loader: Any, told: Mapping[str, Any], units: list[Any]) -> Any:
    """In the shape that the loader's own index sampler gives."""
    batches = decks.batches_of(loader)
    if not told["batch_size"] and loader.batch_sampler is not None:
        return units
    if not told["batch_size"]:
        raise Unknown("the order was one of batches, and the loader takes single samples now")
    if loader.batch_sampler is None:
        return units
    size, drop_last = (told["batch_size"], False) if batches is None else (batches.batch_size, batches.drop_last)
    return BatchSampler(units, size, drop_last)

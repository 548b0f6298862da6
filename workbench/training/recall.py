"""At a restart: what the generations before have left in memory, agreeing on one copy, and getting it.

Every rank of the new generation goes through the same calls, since they agree through the store and may send each other
what a host lacks. Needs torch.
"""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from workbench.training import agreement, packing
from workbench.training.agreement import Choice, Copy
from workbench.training.council import Council
from workbench.training.line import Line, close_all
from workbench.training.slot import Kind
from workbench.training.slots import Slot, Who

PATIENCE: Final = 600.0  # s for all ranks to come: one may be preparing its data
PIECE: Final = 2**28  # bytes sent at a time


class Restored(NamedTuple):
    """What to go on from. `extras` by the rank that had them: this rank's own, or all when the world's size differs."""

    step: int
    number: int  # as checkpoints on disk are called
    state: Any
    extras: Mapping[int, Any]
    world_size: int  # of the ranks that took it
    reason: str
    seconds: float


class Found(NamedTuple):
    """A slot on this host, of this rank or another one, of any generation."""

    rank: int
    number: int
    slot: Slot


class Agreed(NamedTuple):
    """`hosts`: where each rank runs now, by rank; a host is named by the lowest rank there."""

    choice: Choice | None
    reason: str
    hosts: tuple[int, ...]


class Recall:
    """One rank's side of one restart."""

    def __init__(self, who: Who, host: int, council: Council, line: Line) -> None:
        self._who, self._host, self._council = who, host, council
        self.found = list(find(line))

    def copies(self) -> list[Copy]:
        """The whole copies on this host."""
        headers = (one.slot.header for one in self.found)
        return [agreement.describe(header, self._host) for header in headers if header is not None]

    def agree(self, disk_step: int) -> Agreed:
        """Raises `TimeoutError` when not every rank comes."""

        def decide(told: list[Any]) -> Any:
            place = agreement.Place(tuple(host for host, _, _, _ in told), all(can for _, can, _, _ in told))
            copies = [Copy(*copy)._replace(kind=Kind(copy[5])) for _, _, found, _ in told for copy in found]
            return (*agreement.choose(copies, place, told[0][3]), place.hosts)

        mine = self.copies() if self._who.rank == self._host else []
        can_send = torch.distributed.is_available() and torch.distributed.is_initialized()
        chosen, reason, hosts = self._council.decide("agree", (self._host, can_send, mine, disk_step), decide, PATIENCE)
        if chosen is None:
            return Agreed(None, reason, tuple(hosts))
        choice = Choice(*chosen)
        choice = choice._replace(kind=Kind(choice.kind), hosts=tuple(choice.hosts))
        return Agreed(choice, reason, tuple(hosts))

    def load(self, agreed: Agreed, like: Any) -> Restored | None:
        """The agreed copy, this rank's own to keep; None, on every rank, when one of them could not get it."""
        assert agreed.choice is not None
        start, fault, restored = time.monotonic(), "", None
        try:
            meshes = {} if like is None else packing.find_meshes(like)
            state = self._state(agreed.choice, agreed.hosts, meshes)
            extras = self._extras(agreed.choice, agreed.hosts)
            seconds = time.monotonic() - start
            choice = agreed.choice
            restored = Restored(choice.step, choice.number, state, extras, choice.world_size, agreed.reason, seconds)
        except Exception as error:
            fault = f"rank {self._who.rank} cannot load it: {type(error).__name__}: {error}"
        faults = self._council.decide("loaded", fault, lambda told: [one for one in told if one], PATIENCE)
        if faults:
            raise RuntimeError(faults[0])
        return restored

    def _of(self, choice: Choice) -> Iterator[Slot]:
        for one in self.found:
            header = one.slot.header
            if header is not None and (header.generation, header.step) == (choice.generation, choice.step):
                yield one.slot

    def _state(self, choice: Choice, hosts: Sequence[int], meshes: packing.Meshes) -> Any:
        if choice.kind is Kind.OWN:
            own = next(one for one in self._of(choice) if one.header and one.header.rank == self._who.rank)
            return copied(own.value(meshes)["state"])
        lacking = set(hosts) - set(choice.hosts)
        parts = [one for one in self._of(choice) if one.header and one.header.kind is Kind.WHOLE]
        if lacking:
            source = choice.hosts[0]
            members = [source, *(rank for rank, host in enumerate(hosts) if host in lacking)]
            received = send(parts, source, members)
            if received:
                return joined(received, meshes)
        return copied(joined(parts, meshes))

    def _extras(self, choice: Choice, hosts: Sequence[int]) -> dict[int, Any]:
        here = {one.header.rank: one for one in self._of(choice) if one.header is not None}
        is_spread = len(set(hosts)) > 1
        if is_spread and self._who.rank == self._host:
            for rank, one in here.items():
                text = base64.b64encode(pickle.dumps(extras_of(one))).decode()
                self._council.post(f"extras/{rank}", text)
        is_same = choice.world_size == self._who.world_size
        wanted = [self._who.rank] if is_same else range(choice.world_size)
        return {rank: self._one_extra(rank, here.get(rank)) for rank in wanted}

    def _one_extra(self, rank: int, here: Slot | None) -> Any:
        if here is not None:
            return extras_of(here)
        return pickle.loads(base64.b64decode(self._council.fetch(f"extras/{rank}", PATIENCE)))


def find(line: Line) -> Iterator[Found]:
    """All that the agent holds for this job."""
    held = line.kept()
    try:
        for one in held:
            yield Found(one.rank, one.number, Slot.of(one.fd))
    finally:
        close_all(held)


def extras_of(one: Slot) -> Any:
    """What its rank kept for itself, from its own slot or its buddy's."""
    value = one.value({})
    return pickle.loads(value["pickled"]) if "pickled" in value else copied(value["extras"])


def joined(parts: Sequence[Slot], meshes: packing.Meshes) -> Any:
    """The state from all its parts: the first has all but the tensors that the others have, which go by numbers."""
    by_part = {one.header.part: one for one in parts if one.header is not None}
    away: dict[int, torch.Tensor] = {}
    for part, one in by_part.items():
        if part:
            away |= one.value({})["state"]
    return by_part[0].value(meshes, away)["state"]


def copied(value: Any) -> Any:
    """With tensors of its own: `load_state_dict` of an optimizer keeps those it is given."""
    return packing.map_tensors(value, torch.Tensor.clone)


def send(slots: Sequence[Slot], source: int, members: list[int]) -> list[Slot]:
    """Send slots from rank `source` to the other `members`; every rank of the job calls it. What was received."""
    import torch.distributed as dist

    group = dist.new_group(members, backend="gloo")
    if dist.get_rank() not in members:
        return []
    is_source = dist.get_rank() == source
    sizes = [[len(one.bytes) for one in slots]]
    dist.broadcast_object_list(sizes, source, group=group)
    data = [one.memory for one in slots] if is_source else [torch.empty(n, dtype=torch.uint8) for n in sizes[0]]
    for one in data:
        for at in range(0, len(one), PIECE):
            dist.broadcast(one[at : at + PIECE], source, group=group)
    dist.destroy_process_group(group)
    return [] if is_source else [Slot(one) for one in data]

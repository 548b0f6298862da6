"""One rank's slots, in this process: which is written next, writing it in place, reading it.

Two keep the copy before while a newer one is written. A third is made only when one is held, by whoever writes it to
disk. Needs torch.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from workbench.training import memory, packing, slot
from workbench.training.packing import Packed
from workbench.training.slot import Header, Kind

ENOUGH: Final = 2
MOST: Final = 3
ROOM: Final = 2**16  # bytes by which a text may grow before its slot has to


class Who(NamedTuple):
    """Whose copies these are; `generation` is the job's restart count."""

    generation: int
    rank: int
    world_size: int


class Share(NamedTuple):
    """Which part of a state this is; `away`: of its tensors, by `id`, the numbers of those that other parts hold."""

    part: int = 0
    parts: int = 1
    away: Mapping[int, int] = MappingProxyType({})


class Slot:
    """The memory of one slot, this process' view of it; made, or taken over from the generation before."""

    def __init__(self, data: torch.Tensor) -> None:
        self.memory = data
        self.bytes = memory.as_view(data)
        self.header = slot.read(self.bytes)
        self.holders = 0
        self._places: list[packing.Place] = []
        self._views: list[torch.Tensor] = []
        self._meshes: packing.Meshes = {}

    @classmethod
    def of(cls, fd: int) -> Slot:
        """The slot in this memory; the descriptor stays the caller's."""
        return cls(memory.map_bytes(fd))

    def clear(self) -> None:
        """There is no copy in it any more."""
        slot.begin(self.bytes)
        self.header = None

    def fits(self, packed: Packed) -> bool:
        return slot.align(packed.end) + len(packed.text) <= len(self.bytes)

    def write(self, packed: Packed, header: Header) -> None:
        """Replace what is there. Allocates nothing when the tensors are those of the last time."""
        self.clear()
        if packed.places != self._places:
            self._places = packed.places
            self._views = [packing.view(self.memory, place) for place in packed.places]
        if packed.tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._views, packed.tensors)
        at = slot.align(packed.end)
        self.bytes[at : at + len(packed.text)] = packed.text
        header = header._replace(
            text_at=at,
            text_size=len(packed.text),
            data_size=packed.end - slot.SIZE,
            text_crc=zlib.crc32(packed.text),
            taken_at=time.time(),
        )
        header.commit(self.bytes)
        self.header, self._meshes = header, packed.meshes

    def value(self, meshes: packing.Meshes | None = None, away: packing.Away | None = None) -> Any:
        """What was written; its tensors are views, valid until the slot is written again. `away`: see `packing`."""
        if self.header is None:
            raise LookupError("there is no whole copy in this slot")
        text = self.bytes[self.header.text_at : self.header.text_at + self.header.text_size]
        return packing.put_together(text, self.memory, self._meshes if meshes is None else meshes, away)


class Slots:
    """`keep(number, fd)` hands a new slot to whoever outlives this process, and closes nothing.

    `free()`: bytes that may be taken.
    """

    def __init__(self, who: Who, keep: Callable[[int, int], object], free: Callable[[], int]) -> None:
        self._who, self._keep, self._free = who, keep, free
        self.slots: dict[int, Slot] = {}
        self._sequence = 0

    def adopt(self, number: int, old: Slot) -> None:
        """Go on with a slot of this rank's predecessor: what is in it stays until a newer copy is whole."""
        self.slots[number] = old
        if old.header is not None:
            self._sequence = max(self._sequence, old.header.sequence)

    def write(
        self,
        step: int,
        value: Any,
        kind: Kind,
        number: int | None = None,
        share: Share | None = None,
        sure: Slot | None = None,
        mark: int = 0,
    ) -> Slot | None:
        """Copy; None when every slot is held or needed. `sure`: the copy that stays in place of the newest.

        Raises `MemoryError` when there is no room for a first two.
        """
        share = share or Share()
        packed, who = packing.take_apart(value, share.away), self._who
        place = self._choose(sure)
        if place is None:
            return None
        chosen = self.slots.get(place)
        if chosen is None or not chosen.fits(packed):
            size = slot.align(packed.end) + len(packed.text) + len(packed.text) // 4 + ROOM
            if size > (free := self._free()):
                if chosen is None and len(self.slots) >= ENOUGH:
                    return None
                raise MemoryError(f"{size / 2**20:.0f} MiB more are needed and {free / 2**20:.0f} MiB may be used")
            chosen = self._make(place, size)
        self._sequence += 1
        number = step if number is None else number
        header = Header(kind, self._sequence, who.generation, step, number, who.rank, who.world_size)
        chosen.write(packed, header._replace(part=share.part, parts=share.parts, mark=mark))
        return chosen

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return sum(len(one.bytes) for one in self.slots.values())

    def newest(self) -> Slot | None:
        """The last whole copy."""
        whole = [one for one in self.slots.values() if one.header is not None]
        return max(whole, key=_sequence, default=None)

    def find(self, step: int) -> Slot | None:
        """This generation's copy of that step."""
        for one in self.slots.values():
            if one.header is not None and (one.header.generation, one.header.step) == (self._who.generation, step):
                return one
        return None

    def _choose(self, sure: Slot | None) -> int | None:
        """Never the newest copy, or in its place the one that is sure, never one that is held; else the oldest, or a
        new one.
        """
        is_there = sure is not None and sure.header is not None and sure in self.slots.values()
        kept = sure if is_there else self.newest()
        free = {number: one for number, one in self.slots.items() if one is not kept and not one.holders}
        if free:
            return min(free, key=lambda number: _sequence(free[number]))
        return next((number for number in range(MOST) if number not in self.slots), None)

    def _make(self, number: int, size: int) -> Slot:
        fd = memory.create(size)
        try:
            made = self.slots[number] = Slot.of(fd)
            self._keep(number, fd)
        finally:
            os.close(fd)
        return made


def _sequence(one: Slot) -> int:
    return one.header.sequence if one.header is not None else 0

"""The header of a slot: the memory that one rank's copy of the training state lies in, outside the rank.

    0    header, 128 bytes       who took it, at which step, where the rest lies
    128  the tensors' bytes      each at a multiple of 64
    ...  the text                a pickle of everything else, in which tensors are named by their offsets

A copy is one to pass over until `Header.commit` has written the word `complete`, last of all; `begin` clears it first
of all. A process that is killed has either done a store or not, and what it has done is there for the next reader, so
that a torn copy is always seen. The header and the text have checksums, since what they say is followed. The tensors'
bytes have none: they lie in the memory that the model itself is trusted to, for at most a few steps, and a checksum
would take six times as long as the copy. What may lie for months, on disk, has one.

Standard library only. Nothing here allocates, maps or reads a clock.
"""

from __future__ import annotations

import enum
import struct
import zlib
from typing import Final, NamedTuple

MAGIC: Final = b"dtrainsn"
VERSION: Final = 3
SIZE: Final = 128
ALIGNMENT: Final = 64
_COMPLETE_AT: Final = 8
_COMPLETE: Final = struct.Struct("<Q")
_HEADER: Final = struct.Struct("<8sQIIQqqqqqQQQIdIIQ")  # magic, complete, version, then `Header`
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = SIZE - _CRC.size


class Kind(enum.IntEnum):
    """What a copy holds beside its rank's own things."""

    EXTRAS = 0  # nothing: another rank of the host has the state, which is the same on every rank
    WHOLE = 1  # the state, the same on every rank, or one of the parts in which a host's ranks copy it
    OWN = 2  # this rank's part of the state


class Header(NamedTuple):
    """`sequence` counts a rank's copies from 1. `generation` is the restart count of the ranks that took it.

    `step` tells copies of a generation apart; `number` is the step by which a checkpoint on disk would be called. Of a
    state in `parts`, those of one host together are the state. `mark`: this rank's checksum of what is the same on
    all, see `confirming`; 0: none.
    """

    kind: Kind
    sequence: int
    generation: int
    step: int
    number: int
    rank: int
    world_size: int
    text_at: int = 0
    text_size: int = 0
    data_size: int = 0
    text_crc: int = 0
    taken_at: float = 0.0  # epoch s
    part: int = 0
    parts: int = 1
    mark: int = 0

    def commit(self, buffer: memoryview) -> None:
        """Make the copy one to be read; everything else has been written."""
        buffer[_COMPLETE_AT + _COMPLETE.size : SIZE] = self.pack()[_COMPLETE_AT + _COMPLETE.size :]
        buffer[:_COMPLETE_AT] = MAGIC
        _COMPLETE.pack_into(buffer, _COMPLETE_AT, self.sequence)

    def pack(self) -> bytes:
        """The header as it lies there once it is complete."""
        fields = _HEADER.pack(MAGIC, self.sequence, VERSION, *self).ljust(_CRC_AT, b"\0")
        return fields + _CRC.pack(zlib.crc32(fields))


def begin(buffer: memoryview) -> None:
    """From here on, until a `commit`, there is no copy in the slot."""
    _COMPLETE.pack_into(buffer, _COMPLETE_AT, 0)


def read(buffer: memoryview) -> Header | None:
    """Whose copy is there; None when there is none, or one that is torn or not what was written."""
    if len(buffer) < SIZE:
        return None
    raw = bytes(buffer[:SIZE])
    magic, complete, version, *fields = _HEADER.unpack_from(raw)
    if (magic, version) != (MAGIC, VERSION) or not complete:
        return None
    if _CRC.unpack_from(raw, _CRC_AT)[0] != zlib.crc32(raw[:_CRC_AT]):
        return None
    header = Header(Kind(fields[0]), *fields[1:])
    end = header.text_at + header.text_size
    if complete != header.sequence or end > len(buffer):
        return None
    return header if zlib.crc32(buffer[header.text_at : end]) == header.text_crc else None


def align(offset: int) -> int:
    """The next offset at which a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT

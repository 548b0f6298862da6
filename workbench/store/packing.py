"""Samples as bytes: a row holds all ranks of one bucket by columns, compressed; times as 4-byte floats.

Counts, samples, tokens and losses are exact; durations are kept to 7 digits.
"""

from __future__ import annotations

import math
import sys
import zlib
from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import msgspec

from workbench.blackbox import STEP
from workbench.feed import Bucket

LEVEL: Final = 1  # zlib's; higher ones cost five times the CPU for a tenth of the bytes
_COLUMNS: Final = (
    ("rank", "I"),
    ("steps", "Q"),
    ("last_step", "q"),
    ("samples", "d"),
    ("tokens", "d"),
    ("loss", "d"),
    ("duration", "f"),
    ("slowest", "f"),
    ("data", "f"),
    ("forward", "f"),
    ("backward", "f"),
    ("comm", "f"),
    ("optimizer", "f"),
    ("checkpoint", "f"),
    ("learning_rate", "d"),
)
_FIRST: Final = 14  # columns of records that knew no learning rate
_Blocks = list[tuple[int, bytes]]
_blocks = msgspec.msgpack.Decoder(_Blocks)


def pack_buckets(buckets: Sequence[Bucket]) -> bytes:
    """Buckets of one start and width, which are not kept."""
    columns = [_column(code, [_number(bucket, name) for bucket in buckets]) for name, code in _COLUMNS]
    return len(buckets).to_bytes(4, "little") + zlib.compress(b"".join(columns), LEVEL)


def unpack_buckets(data: bytes, start: float, width: float, ranks: Collection[int] | None = None) -> list[Bucket]:
    """The inverse; of these ranks only, when `ranks` is given. Raises `ValueError` or `zlib.error` on other bytes."""
    count, body, offset = int.from_bytes(data[:4], "little"), zlib.decompress(data[4:]), 0
    columns: list[array[Any]] = []
    for _, code in _COLUMNS:
        if offset == len(body) and len(columns) >= _FIRST:
            columns.append(array(code, [math.nan]) * count)
            continue
        column = array(code)
        size = count * column.itemsize
        column.frombytes(body[offset : offset + size])
        columns.append(_little_endian(column))
        offset += size
    if offset != len(body):
        raise ValueError(f"{len(body)} bytes for {count} ranks")
    rows = zip(*columns, strict=True)
    return [_bucket(start, width, row) for row in rows if ranks is None or row[0] in ranks]


def _bucket(start: float, width: float, row: tuple[float, ...]) -> Bucket:
    rank, steps, last_step, samples, tokens, loss, duration, slowest, *phases, rate = row
    data, forward, backward, comm, optimizer, checkpoint = phases
    return Bucket(
        rank=int(rank),
        start=start,
        width=width,
        steps=int(steps),
        last_step=int(last_step),
        duration=duration,
        slowest=slowest,
        data=data,
        forward=forward,
        backward=backward,
        comm=comm,
        optimizer=optimizer,
        checkpoint=checkpoint,
        samples=samples,
        tokens=tokens,
        loss=loss,
        learning_rate=None if math.isnan(rate) else rate,
    )


def _number(bucket: Bucket, name: str) -> float:
    value = getattr(bucket, name)
    return math.nan if value is None else value


def _column(code: str, values: list[float]) -> bytes:
    return _little_endian(array(code, values)).tobytes()


def _little_endian(column: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        column.byteswap()
    return column


def pack_steps(blocks: Iterable[tuple[int, bytes]]) -> bytes:
    """Step records as they came, by rank."""
    return zlib.compress(msgspec.msgpack.encode(list(blocks)), LEVEL)


def unpack_blocks(data: bytes) -> list[tuple[int, bytes]]:
    """What `pack_steps` packed."""
    return _blocks.decode(zlib.decompress(data))


def unpack_steps(data: bytes, rank: int) -> bytes:
    """One rank's records of it."""
    return b"".join(block for owner, block in unpack_blocks(data) if owner == rank)


def time_span(blocks: Iterable[tuple[int, bytes]]) -> tuple[float, float]:
    """When the first and the last step of these blocks ended."""
    ends = [STEP.unpack_from(block, at)[1] for _, block in blocks if block for at in (0, len(block) - STEP.size)]
    return min(ends), max(ends)

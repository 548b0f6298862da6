"""The layout of a rank's black box: shared memory that the rank writes and its agent reads, also once the rank is dead.

Only the layout lives here: a buffer is handed in, no file is opened and no clock is read. Standard library only, since
ranks under another interpreter import it. One writer, one reader, no lock: a record is whole before `head` counts it,
and the header's words are aligned 8-byte stores. Times are in seconds; points in time are epoch seconds of a clock that
does not jump (the rank adds CLOCK_MONOTONIC to an offset it took once).

Two rings, of which each step takes the same slot. One holds whole records. The other holds brief ones, for steps so
short that to write a whole one would be felt: when the step ended (CLOCK_MONOTONIC; 0: the record is a whole one), its
wait for data and its samples. The reader makes whole ones of them: a step began where the one before ended, and the
rest of it is divided as in the last whole record.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable, Iterator
from functools import partial
from mmap import mmap
from typing import Final, NamedTuple, TypeAlias

Buffer: TypeAlias = bytearray | memoryview | mmap

MAGIC: Final = b"dtrainbb"
VERSION: Final = 4
HEADER_SIZE: Final = 512
CAPACITY: Final = 4096  # steps kept: 4 s of 1 ms steps against a reader that comes ten times a second


class Activity(enum.IntEnum):
    """What the rank is doing."""

    STARTING = 0
    RUNNING = 1  # in the user's code, nothing more precise is known
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    COLLECTIVE = 5
    OPTIMIZER = 6
    CHECKPOINT = 7
    IDLE = 8  # an interactive rank waits for a cell
    CELL = 9
    EXITING = 10


class StepRecord(NamedTuple):
    """One finished optimizer step, this rank's. Durations in s; `loss` is NaN when it was not reported."""

    step: int
    end: float
    duration: float
    data: float
    forward: float
    backward: float
    comm: float
    optimizer: float
    checkpoint: float
    samples: float
    tokens: float
    loss: float


STEP: Final = struct.Struct("<q11d")
BRIEF: Final = struct.Struct("<3d")  # end, data, samples
_FIELD: Final = struct.Struct("<d")
_IDENTITY: Final = struct.Struct("<8sII")  # magic, version, capacity
_HEAD: Final = struct.Struct("<d")  # a float, so that a brief record takes stores of one kind only
_NOW: Final = struct.Struct("<qqd")  # step, activity, since
_COLLECTIVE: Final = struct.Struct("<q64s")  # sequence number, name
_PROGRESS: Final = struct.Struct("<qq")  # done, total
_PATIENCE: Final = struct.Struct("<qd")  # whether the model is being evaluated, s that the next step may take
_GAUGES: Final = struct.Struct("<dd")  # learning rate, share of communication that is hidden; NaN: not known
_TRAFFIC: Final = struct.Struct("<24sqq")  # name, calls, bytes
_ORIGIN: Final = struct.Struct("<dq")  # seconds since the epoch minus CLOCK_MONOTONIC, a step minus its `head`
KINDS: Final = 8  # of calls that are counted, each under its name
_HEAD_AT, _NOW_AT, _COLLECTIVE_AT, _PROGRESS_AT, _PATIENCE_AT, _GAUGES_AT, _TRAFFIC_AT = 16, 24, 48, 120, 136, 152, 168
_END: Final = _TRAFFIC_AT + KINDS * _TRAFFIC.size
_ORIGIN_AT: Final = _END
_BRIEFS_AT: Final = HEADER_SIZE + CAPACITY * STEP.size
SIZE: Final = _BRIEFS_AT + CAPACITY * BRIEF.size
HEAD_WORD, BRIEF_WORDS = _HEAD_AT // 8, BRIEF.size // 8


class Traffic(NamedTuple):
    """What one rank has communicated by one kind of call. `bytes`: of the largest buffer of each call (nccl-tests'
    "size"), not what went over a wire.
    """

    name: str
    calls: int
    bytes: int


class Snapshot(NamedTuple):
    """The header as last written."""

    head: int  # steps ever recorded
    step: int
    activity: Activity
    since: float
    collective: str
    collective_seq: int
    progress: tuple[int, int] | None
    is_evaluating: bool = False
    expected: float = 0.0  # s that the rank has said its next step may take; 0: nothing
    learning_rate: float | None = None  # of the first parameter group, as last looked at
    hidden: float | None = None  # share of DDP's communication that backward hides
    traffic: tuple[Traffic, ...] = ()


def shifted(block: bytes, seconds: float) -> bytes:
    """Consecutive `STEP` records with their ends moved by so much, for one whose clock was wrong."""
    moved = bytearray(block)
    for at in range(8, len(moved) - STEP.size + 9, STEP.size):
        _FIELD.pack_into(moved, at, _FIELD.unpack_from(moved, at)[0] + seconds)
    return bytes(moved)


def format_box(buffer: Buffer) -> None:
    """Make `buffer` (at least `SIZE` bytes) an empty black box."""
    buffer[:HEADER_SIZE] = bytes(HEADER_SIZE)
    _IDENTITY.pack_into(buffer, 0, MAGIC, VERSION, CAPACITY)
    _GAUGES.pack_into(buffer, _GAUGES_AT, math.nan, math.nan)


class Writer:
    """The rank's side. Every method is one or two stores; none raises, allocates much or waits.

    `now(step, activity, since)` says what the rank is doing, from `since` on; `step` = steps finished so far.
    `record(*step, activity)` appends the fields of a `StepRecord`; from its end on the rank is in `activity`. Who ends
    a step in a µs writes a brief record by itself, see `brief_slots`, in `times`, the whole box as floats.
    `offset(seconds)` says what makes epoch seconds of CLOCK_MONOTONIC, which brief records are in.
    """

    def __init__(self, buffer: Buffer) -> None:
        check_box(buffer)
        self._buffer = buffer
        # Several times a step: one call into C costs a fraction of a Python function.
        self.now: Callable[[int, int, float], None] = partial(_NOW.pack_into, buffer, _NOW_AT)
        self.times = memoryview(buffer).cast("d")
        self.record = _recorder(memoryview(buffer).cast("q"), self.times)
        self.offset: Callable[[float], None] = partial(_FIELD.pack_into, buffer, _ORIGIN_AT)
        self.learning_rate: Callable[[float], None] = partial(_FIELD.pack_into, buffer, _GAUGES_AT)
        self.hidden: Callable[[float], None] = partial(_FIELD.pack_into, buffer, _GAUGES_AT + _FIELD.size)

    def brief_slots(self, most: int) -> tuple[int, int, int]:
        """Where the next brief records go: `head`, and the words from which and up to which, at most for `most` steps.

        A brief record is end (CLOCK_MONOTONIC), data and samples, then the new `head` in `times[HEAD_WORD]`. The
        activity stays what the last whole record said.
        """
        head = int(self.times[HEAD_WORD])
        slot = head % CAPACITY
        first = _BRIEFS_AT // 8 + slot * BRIEF_WORDS
        return head, first, first + min(most, CAPACITY - slot) * BRIEF_WORDS

    def counter(self, name: str) -> Callable[[int, int], None]:
        """`count(calls, bytes)` adds to what was communicated by calls of this name; names without room share one."""
        raw = name.encode()[:24]
        for at in range(_TRAFFIC_AT, _END, _TRAFFIC.size):
            known = bytes(self._buffer[at : at + 24]).rstrip(b"\0")
            if not known:
                is_last = at + _TRAFFIC.size == _END
                self._buffer[at : at + 24] = (b"others" if is_last else raw).ljust(24, b"\0")
            if not known or known == raw:
                break
        return _counter(self._buffer, at + 24)

    def collective(self, seq: int, name: str) -> None:
        """Say which collective is being entered; `seq` counts them from 1."""
        _COLLECTIVE.pack_into(self._buffer, _COLLECTIVE_AT, seq, name.encode()[:64])

    def progress(self, done: int, total: int) -> None:
        """Say how far the run is; `total` 0 means unknown."""
        _PROGRESS.pack_into(self._buffer, _PROGRESS_AT, done, total)

    def patience(self, is_evaluating: int, expected: float) -> None:
        """Say why the next step may take longer than others."""
        _PATIENCE.pack_into(self._buffer, _PATIENCE_AT, is_evaluating, expected)

    def amend(self, field: str, value: float) -> None:
        """Replace a field, any but `step`, of the newest record; a reader that has it already keeps the old value."""
        head = int(self.times[HEAD_WORD])
        if not head:
            return
        at = (head - 1) % CAPACITY
        if self.times[_BRIEFS_AT // 8 + at * BRIEF_WORDS] and (block := read_steps(self._buffer, head - 1)[0]):
            self._buffer[HEADER_SIZE + at * STEP.size : HEADER_SIZE + (at + 1) * STEP.size] = block
            self.times[_BRIEFS_AT // 8 + at * BRIEF_WORDS] = 0.0
        place = HEADER_SIZE + at * STEP.size + StepRecord._fields.index(field) * _FIELD.size
        _FIELD.pack_into(self._buffer, place, value)


def _recorder(words: memoryview[int], times: memoryview[float]) -> Callable[..., None]:
    """Stores through views and a closure: out of the caches, as it always is, a third of what `pack_into` costs."""
    now, origin, first, first_brief = _NOW_AT // 8, _ORIGIN_AT // 8, HEADER_SIZE // 8, _BRIEFS_AT // 8
    row = STEP.size // 8

    def record(
        step: int, end: float, duration: float, data: float, forward: float, backward: float, comm: float,
        optimizer: float, checkpoint: float, samples: float, tokens: float, loss: float,
        activity: int = Activity.RUNNING,
    ) -> None:  # fmt: skip
        head = int(times[HEAD_WORD])
        at = first + head % CAPACITY * row
        words[at] = step
        times[at + 1] = end
        times[at + 2] = duration
        times[at + 3] = data
        times[at + 4] = forward
        times[at + 5] = backward
        times[at + 6] = comm
        times[at + 7] = optimizer
        times[at + 8] = checkpoint
        times[at + 9] = samples
        times[at + 10] = tokens
        times[at + 11] = loss
        times[first_brief + head % CAPACITY * BRIEF_WORDS] = 0.0
        words[origin + 1] = step - head - 1
        times[HEAD_WORD] = head + 1
        words[now] = step
        words[now + 1] = activity
        times[now + 2] = end

    return record


def _counter(buffer: Buffer, at: int) -> Callable[[int, int], None]:
    words, calls_at = memoryview(buffer).cast("q"), at // 8

    def count(calls: int, size: int) -> None:
        words[calls_at] += calls
        words[calls_at + 1] += size

    return count


def check_box(buffer: Buffer) -> None:
    """Raise `ValueError` unless `buffer` is a black box of this version."""
    magic, version, capacity = _IDENTITY.unpack_from(buffer, 0)
    if (magic, version, capacity) != (MAGIC, VERSION, CAPACITY):
        raise ValueError(f"not a black box of version {VERSION}: {magic!r} {version} {capacity}")


def read_header(buffer: Buffer) -> Snapshot:
    """The rank's newest word on itself."""
    head = _head(buffer)
    step, activity, since = _NOW.unpack_from(buffer, _NOW_AT)
    offset, ahead = _ORIGIN.unpack_from(buffer, _ORIGIN_AT)
    end = _brief_at(buffer, head - 1)[0]
    if head and end and end + offset >= since:
        step, since = head + ahead, end + offset
    seq, name = _COLLECTIVE.unpack_from(buffer, _COLLECTIVE_AT)
    done, total = _PROGRESS.unpack_from(buffer, _PROGRESS_AT)
    is_evaluating, expected = _PATIENCE.unpack_from(buffer, _PATIENCE_AT)
    _, hidden = _GAUGES.unpack_from(buffer, _GAUGES_AT)
    return Snapshot(
        head=head,
        step=step,
        activity=Activity(activity),
        since=since,
        collective=name.rstrip(b"\0").decode(errors="replace"),
        collective_seq=seq,
        progress=(done, total) if total else None,
        is_evaluating=bool(is_evaluating),
        expected=expected,
        learning_rate=read_learning_rate(buffer),
        hidden=None if math.isnan(hidden) else hidden,
        traffic=tuple(
            Traffic(name.rstrip(b"\0").decode(errors="replace"), calls, size)
            for name, calls, size in _TRAFFIC.iter_unpack(buffer[_TRAFFIC_AT:_END])
            if calls
        ),
    )


def read_learning_rate(buffer: Buffer) -> float | None:
    """Of all that the header holds only this."""
    rate, _ = _GAUGES.unpack_from(buffer, _GAUGES_AT)
    return None if math.isnan(rate) else float(rate)


def fingerprint(buffer: Buffer) -> bytes:
    """All that the header says: another one means that the rank has got on."""
    return bytes(buffer[_HEAD_AT:_END])


def read_steps(buffer: Buffer, cursor: int) -> tuple[bytes, int, int]:
    """Records from `cursor` (a `head` value) on: `(block, new cursor, steps overwritten before they were read)`."""
    head = _head(buffer)
    # The slot after the newest may be half written at this moment, so one less than the capacity is readable.
    first = max(cursor, head - CAPACITY + 1)
    block, briefs = _copied(buffer, HEADER_SIZE, STEP, first, head), _copied(buffer, _BRIEFS_AT, BRIEF, first, head)
    before = whole = first
    if any(memoryview(briefs).cast("d")[::BRIEF_WORDS]):
        before, whole, block = _made_whole(buffer, first, block, briefs)
    oldest = _head(buffer) - CAPACITY + 1
    if before < oldest:  # what the first brief ones follow has been overwritten meanwhile
        whole = max(whole, oldest, _first_whole(first, briefs))
    left = min(max(whole, oldest), head)
    return block[(left - head) * STEP.size :] if left < head else b"", head, max(0, left - cursor)


def _head(buffer: Buffer) -> int:
    return int(_HEAD.unpack_from(buffer, _HEAD_AT)[0])


def _copied(buffer: Buffer, at: int, layout: struct.Struct, first: int, head: int) -> bytes:
    """Records `first` up to `head` of one of the rings."""
    size = layout.size
    return b"".join(
        bytes(buffer[at + start * size : at + stop * size]) for start, stop in _spans(first, head)
    )  # fmt: skip


def _spans(first: int, head: int) -> list[tuple[int, int]]:
    """Slot ranges of the ring that hold records `first` up to `head`."""
    if first >= head:
        return []
    start, count = first % CAPACITY, head - first
    wrapped = start + count - CAPACITY
    return [(start, start + count)] if wrapped <= 0 else [(start, CAPACITY), (0, wrapped)]


# --- brief records ---


def _brief_at(buffer: Buffer, number: int) -> tuple[float, float, float]:
    end, data, samples = BRIEF.unpack_from(buffer, _BRIEFS_AT + number % CAPACITY * BRIEF.size)
    return end, data, samples


def _first_whole(first: int, briefs: bytes) -> int:
    ends = [end for end, _, _ in BRIEF.iter_unpack(briefs)]
    return first + (ends.index(0.0) if 0.0 in ends else len(ends))


def _made_whole(buffer: Buffer, first: int, block: bytes, briefs: bytes) -> tuple[int, int, bytes]:
    """`(oldest record looked at, first that could be made whole, the block with all from `first` on whole)`."""
    before, like, step, end = _leading_up_to(buffer, first)
    offset = _FIELD.unpack_from(buffer, _ORIGIN_AT)[0]
    made, whole = bytearray(block), first
    for index, (at, data, samples) in enumerate(BRIEF.iter_unpack(briefs)):
        if not at:
            like = StepRecord._make(STEP.unpack_from(block, index * STEP.size))
            step, end = like.step, like.end
        elif like is None:
            whole = first + index + 1
        else:
            step, began, end = step + 1, end, at + offset
            STEP.pack_into(made, index * STEP.size, *_divided(like, step, end, end - began, data, samples))
    return before, whole, bytes(made)


def _leading_up_to(buffer: Buffer, first: int) -> tuple[int, StepRecord | None, int, float]:
    """`(its number, the last whole record before `first`, step and end of the record just before `first`)`."""
    oldest = max(0, _head(buffer) - CAPACITY + 1)
    number = first - 1
    while number >= oldest and _brief_at(buffer, number)[0]:
        number -= 1
    if number < oldest:
        return first, None, 0, 0.0
    like = StepRecord._make(STEP.unpack_from(buffer, HEADER_SIZE + number % CAPACITY * STEP.size))
    if number == first - 1:
        return number, like, like.step, like.end
    end = _brief_at(buffer, first - 1)[0] + _FIELD.unpack_from(buffer, _ORIGIN_AT)[0]
    return number, like, like.step + first - 1 - number, end


def _divided(
    like: StepRecord, step: int, end: float, duration: float, data: float, samples: float
) -> StepRecord:  # fmt: skip
    """A step whose time besides the wait for data is divided as in `like`."""
    left = like.duration - like.data - like.checkpoint
    scale = (duration - data) / left if left > 0.0 else 0.0
    forward, backward, comm, optimizer = like[4:8]
    return StepRecord(
        step, end, duration, data, forward * scale, backward * scale, comm * scale, optimizer * scale,
        0.0, samples, 0.0, NO_LOSS,
    )  # fmt: skip


def iter_steps(block: bytes) -> Iterator[StepRecord]:
    """The records in a block."""
    return map(StepRecord._make, STEP.iter_unpack(block))


def pack_step(record: StepRecord) -> bytes:
    """One record as a block of its own."""
    return STEP.pack(*record)


NO_LOSS: Final = math.nan

"""What of a rank's output is shown: the newest, soon, in few pieces. The log has all of it. No clock is read here."""

from __future__ import annotations

import codecs
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

PACE: Final = 0.2  # s between two flushes of one rank, and how long an unfinished line is held back
GATHER: Final = 0.004  # s that the first output after a silence waits for what comes with it
MOST: Final = 64 * 1024  # bytes shown in one flush; of more, the newest
PIECES: Final = 4  # in one flush; of more, each stream's are put together


class Piece(NamedTuple):
    """Text for display. `dropped` bytes before it are not shown; `offset` is where it begins in all of the output."""

    stream: str
    text: str
    offset: int
    dropped: int


@dataclass
class _Segment:
    stream: str
    offset: int
    time: float
    data: bytearray


@dataclass
class Output:
    """One rank's output on its way to display; `offset` is the position of what comes next."""

    offset: int = 0
    _pending: deque[_Segment] = field(default_factory=deque)
    _size: int = 0
    _dropped: int = 0
    _last: float = float("-inf")
    _decoders: dict[str, codecs.IncrementalDecoder] = field(default_factory=dict)

    def add(self, stream: str, data: bytes, now: float) -> None:
        """Take what the rank wrote just now."""
        start = self.offset
        self.offset += len(data)
        if len(data) > MOST:
            self._clear()
            self._cut(len(data) - MOST, stream)
            start, data = self.offset - MOST, data[-MOST:]
        last = self._pending[-1] if self._pending else None
        # An unfinished line keeps its own time, so that it is not held back anew by what follows it.
        if last is not None and last.stream == stream and not _has_line(last.data):
            last.data += data
        else:
            self._pending.append(_Segment(stream, start, now, bytearray(data)))
        self._size += len(data)
        self._trim()

    def _clear(self) -> None:
        self._dropped += self._size
        self._pending.clear()
        self._size = 0

    def _cut(self, count: int, stream: str) -> None:
        self._dropped += count
        self._decoders.pop(stream, None)

    def _trim(self) -> None:
        while self._size > MOST:
            first = self._pending[0]
            count = min(self._size - MOST, len(first.data))
            del first.data[:count]
            first.offset += count
            self._size -= count
            self._cut(count, first.stream)
            if not first.data:
                self._pending.popleft()

    def due(self) -> float | None:
        """When the next flush is; None while there is nothing to show."""
        if not self._pending:
            return None
        first = self._pending[0]
        wait = GATHER if any(_has_line(segment.data) for segment in self._pending) else PACE
        return max(self._last + PACE, first.time + wait)

    def take(self, now: float, *, everything: bool = False) -> list[Piece]:
        """What is to be shown now; an unfinished line at the end only when it has waited long enough."""
        held = [] if everything else self._hold(now)
        segments = _gather(list(self._pending))
        self._pending = deque(held)
        self._size = sum(len(segment.data) for segment in held)
        self._last = now
        pieces = [piece for segment in segments if (piece := self._decode(segment))]
        if everything:
            self._decoders.clear()
        return pieces

    def _hold(self, now: float) -> list[_Segment]:
        held: list[_Segment] = []
        while self._pending and self._pending[-1].time + PACE > now:
            last = self._pending[-1]
            cut = max(last.data.rfind(b"\n"), last.data.rfind(b"\r")) + 1
            if cut:
                if rest := last.data[cut:]:
                    held.insert(0, _Segment(last.stream, last.offset + cut, last.time, rest))
                    del last.data[cut:]
                break
            held.insert(0, self._pending.pop())
        return held

    def _decode(self, segment: _Segment) -> Piece | None:
        decoder = self._decoders.get(segment.stream)
        data, offset = bytes(segment.data), segment.offset
        if decoder is None:
            decoder = self._decoders[segment.stream] = codecs.getincrementaldecoder("utf-8")("replace")
            if self._dropped:  # the cut may have gone through a character
                whole = data.lstrip(bytes(range(0x80, 0xC0))) if data[:1] < b"\xc0" else data
                skipped = len(data) - len(whole)
                data, offset, self._dropped = whole, offset + skipped, self._dropped + skipped
        text = decoder.decode(data)
        if not text:
            return None
        dropped, self._dropped = self._dropped, 0
        return Piece(segment.stream, text, offset, dropped)


def _has_line(data: bytes | bytearray) -> bool:
    return b"\n" in data or b"\r" in data


def _gather(segments: list[_Segment]) -> list[_Segment]:
    """Neighbours of one stream as one; when there are still many, each stream as one."""
    joined = _join(segments)
    if len(joined) <= PIECES:
        return joined
    return _join(sorted(joined, key=lambda segment: segment.stream))


def _join(segments: list[_Segment]) -> list[_Segment]:
    joined: list[_Segment] = []
    for segment in segments:
        if joined and joined[-1].stream == segment.stream:
            joined[-1].data += segment.data
        else:
            joined.append(segment)
    return joined

"""The last lines that the ranks printed, fit for display: labelled, folded over ranks, bounded. Pure.

Not a copy of the logs: these lie on disk, whole. Here escapes are taken out, a progress bar that redraws itself with
carriage returns is its last state, a line that several ranks print within `TOGETHER` seconds is shown once, and so is
one that is printed again and again.
"""

from __future__ import annotations

import enum
import re
from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from workbench.telemetry import OutputWritten
from workbench.views.wording import plural, ranks_text, size

LIMIT_LINES: Final = 2000
LINE_CHARACTERS: Final = 2000
TOGETHER: Final = 2.0  # s
LOOKED_AT: Final = 200  # newest lines among which the same one is looked for
_ESCAPES: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|\x1b[@-Z\\^_a-z]"
)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class Level(enum.IntEnum):
    """What a line looks like; by its words, since ranks print text."""

    INFO = 0
    WARNING = 1
    ERROR = 2


_ERROR: Final = re.compile(r"\b(error|exception|fatal|critical|traceback|segmentation fault|killed)\b|Error\b", re.I)
_WARNING: Final = re.compile(r"\bwarn(ing)?s?\b|Warning\b", re.I)


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line, of one rank or of several that printed the same."""

    ranks: tuple[int, ...]
    text: str
    time: float
    stream: str
    level: Level
    times: int = 1  # in all, of all ranks

    @property
    def label(self) -> str:
        """Who printed it, and how often: "ranks 0–7 ×8"."""
        return ranks_text(self.ranks) + (f" ×{self.times}" if self.times > 1 else "")


class LogRing:
    """The newest `limit_lines` lines of all ranks."""

    def __init__(self, limit_lines: int = LIMIT_LINES) -> None:
        self._lines: dict[int, LogLine] = {}  # by number, in order; a folded line keeps its place
        self._newest: deque[tuple[int, str]] = deque()
        self._by_text: dict[str, deque[int]] = {}  # the numbers of `_newest`
        self._open: dict[tuple[int, str], str] = {}  # an unfinished line by rank and stream
        self._limit, self._next = limit_lines, 0
        self.dropped_lines = 0
        self.dropped_bytes = 0  # left out before they came here

    def add(self, chunks: Iterable[OutputWritten]) -> None:
        """Take in output in the order in which it came."""
        for chunk in chunks:
            self.dropped_bytes += chunk.dropped
            self._add(chunk)

    def lines(
        self,
        *,
        ranks: Collection[int] | None = None,
        level: Level = Level.INFO,
        text: str = "",
        most: int | None = None,
        until: float | None = None,
    ) -> list[LogLine]:
        """Lines, oldest first, of these ranks, at least of this level, that contain `text` (in any case).

        `until` (epoch s): only those that had been printed by then.
        """
        wanted = text.casefold()
        found = [
            line
            for line in self._lines.values()
            if (ranks is None or not set(ranks).isdisjoint(line.ranks))
            and line.level >= level
            and (until is None or line.time <= until)
            and (not wanted or wanted in line.text.casefold())
        ]
        return found if most is None else found[max(0, len(found) - most) :]

    def unfinished(self) -> list[LogLine]:
        """What ranks have begun to print and not ended: a prompt, a progress bar's last state."""
        return [
            LogLine(ranks=(rank,), text=shown, time=0.0, stream=stream, level=Level.INFO)
            for (rank, stream), raw in sorted(self._open.items())
            if (shown := clean(raw))
        ]

    def note(self, output_dropped: int = 0) -> str:
        """What is not shown, in words; empty when all is. `output_dropped`: bytes that the job's view counts."""
        parts = [plural(self.dropped_lines, "earlier line")] if self.dropped_lines else []
        missing = max(self.dropped_bytes, output_dropped)
        parts += [f"{size(missing)} of output"] if missing else []
        return f"{' and '.join(parts)} not shown here; the log files have all of it" if parts else ""

    def _add(self, chunk: OutputWritten) -> None:
        key = (chunk.rank, chunk.stream)
        *whole, rest = (("" if chunk.dropped else self._open.pop(key, "")) + chunk.text).split("\n")
        for raw in whole:
            self._put(chunk, clean(raw))
        # A bar redraws itself for hours without a newline: only its last state has to be kept.
        rest = rest if len(rest) <= LINE_CHARACTERS else rest[rest.rfind("\r", 0, -1) + 1 :][-LINE_CHARACTERS:]
        self._open.pop(key, None)
        if rest:
            self._open[key] = rest

    def _put(self, chunk: OutputWritten, text: str) -> None:
        number = self._place_of(chunk, text)
        if number is None:
            level = level_of(text)
            self._append(LogLine(ranks=(chunk.rank,), text=text, time=chunk.time, stream=chunk.stream, level=level))
            return
        line = self._lines[number]
        ranks = line.ranks if chunk.rank in line.ranks else tuple(sorted((*line.ranks, chunk.rank)))
        self._lines[number] = msgspec.structs.replace(line, ranks=ranks, times=line.times + 1)

    def _place_of(self, chunk: OutputWritten, text: str) -> int | None:
        """The line that already says this: the newest of all, else the first recent one that lacks this rank."""
        if not text.strip():
            return None
        for number in self._by_text.get(text, ()):
            line = self._lines.get(number)
            if line is None or not 0 <= chunk.time - line.time <= TOGETHER:
                continue
            if number == self._next - 1 or chunk.rank not in line.ranks:
                return number
        return None

    def _append(self, line: LogLine) -> None:
        self._newest.append((self._next, line.text))
        self._by_text.setdefault(line.text, deque()).append(self._next)
        self._lines[self._next] = line
        self._next += 1
        if len(self._newest) > LOOKED_AT:
            _, text = self._newest.popleft()
            self._by_text[text].popleft()
            if not self._by_text[text]:
                del self._by_text[text]
        while len(self._lines) > self._limit:
            gone = self._lines.pop(next(iter(self._lines)))
            self.dropped_lines += gone.times


def clean(raw: str) -> str:
    """A line as a terminal would show it in the end: no escapes, the last state of what a carriage return redrew."""
    text = _ESCAPES.sub("", raw)
    if "\r" in text:
        text = next((part for part in reversed(text.split("\r")) if part.strip()), "")
    text = _CONTROL.sub("", text)
    return text if len(text) <= LINE_CHARACTERS else text[: LINE_CHARACTERS - 1] + "…"


def level_of(text: str) -> Level:
    """By the words in it."""
    if _ERROR.search(text):
        return Level.ERROR
    return Level.WARNING if _WARNING.search(text) else Level.INFO

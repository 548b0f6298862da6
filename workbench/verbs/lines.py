"""Chunks of output by rank into labelled lines, and a bound on how much of them is shown.

Pure: time is handed in. A line is labelled once, `[rank 1] …`; a line that is not finished yet is held back for
`PATIENCE` seconds, so that two ranks' words never run together in one line.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from workbench.views.wording import rank_spans

PATIENCE: Final = 1.0  # s that an unfinished line is held back
HEAD: Final = 100_000  # characters shown as they come
LINE: Final = 4096  # characters of one line that are never cut
TAIL: Final = 100_000  # characters of the end that are shown when more came


@dataclass(slots=True)
class _Open:
    """A line that has no end yet."""

    text: str
    since: float


@dataclass(slots=True)
class Labeller:
    """Cuts chunks into whole lines; `\\r` begins a line anew, as progress bars want it."""

    open: dict[tuple[int, bool], _Open] = field(default_factory=dict)

    def add(self, rank: int, text: str, now: float, *, is_error: bool = False) -> list[tuple[bool, str]]:
        """`(is_error, labelled line)` for each line that this chunk finishes."""
        key = (rank, is_error)
        before = self.open.pop(key, None)
        *whole, rest = ((before.text if before else "") + text).replace("\r\n", "\n").split("\n")
        if rest:
            # What a progress bar has overwritten is not kept.
            self.open[key] = _Open(visible(rest, keeps_end=True), before.since if before and not whole else now)
        return [(is_error, _label(rank, line)) for line in whole]

    def overdue(self, now: float, patience: float = PATIENCE) -> list[tuple[bool, str]]:
        """Unfinished lines that have been held back long enough; with patience 0 all of them."""
        late = [key for key, line in self.open.items() if now - line.since >= patience]
        return [(is_error, _label(rank, self.open.pop((rank, is_error)).text)) for rank, is_error in late]


def _label(rank: int, line: str) -> str:
    return f"[rank {rank}] {visible(line)}\n"


def visible(line: str, *, keeps_end: bool = False) -> str:
    """What a terminal would show of a line with `\\r` in it."""
    body = line.rstrip("\r")
    shown = body.rpartition("\r")[2]
    return shown + line[len(body) :] if keeps_end else shown


@dataclass(slots=True)
class Bound:
    """The first `head` characters pass; of what follows the last `tail` are kept until the end."""

    head: int = HEAD
    tail: int = TAIL
    passed: int = 0
    left_out: int = 0
    kept: deque[tuple[bool, str]] = field(default_factory=deque)
    kept_size: int = 0

    @property
    def is_full(self) -> bool:
        return self.passed >= self.head

    def let(self, lines: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
        """The lines that may be shown now."""
        through = []
        for is_error, line in lines:
            room = 0 if self.is_full else max(self.head - self.passed, LINE)
            if room:
                through.append((is_error, line if len(line) <= room else f"{line[:room]}…\n"))
                self.passed += len(line[:room])
            if line[room:]:
                self._keep(is_error, line[room:])
        return through

    def _keep(self, is_error: bool, line: str) -> None:
        self.left_out += max(len(line) - self.tail, 0)
        line = line[-self.tail :]
        self.kept.append((is_error, line))
        self.kept_size += len(line)
        while self.kept_size > self.tail:
            gone = len(self.kept.popleft()[1])
            self.kept_size -= gone
            self.left_out += gone

    def rest(self) -> list[tuple[bool, str]]:
        """The end, to be shown now that nothing follows."""
        lines = list(self.kept)
        self.kept.clear()
        self.kept_size = 0
        return lines


def joined(lines: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
    """Neighbours for the same stream as one text, so that they are written at once."""
    texts: list[tuple[bool, list[str]]] = []
    for is_error, line in lines:
        if not texts or texts[-1][0] is not is_error:
            texts.append((is_error, []))
        texts[-1][1].append(line)
    return [(is_error, "".join(parts)) for is_error, parts in texts]


def name_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """`rank 1`, `ranks 0–7`, `ranks 0, 2, 5–7`."""
    spans = rank_spans(ranks)
    words = [str(a) if a == b else f"{a}–{b}" if b > a + 1 or len(spans) == 1 else f"{a}, {b}" for a, b in spans]
    return ("rank " if len(set(ranks)) == 1 else "ranks ") + ", ".join(words)

"""What a rank that died of a signal left in its log: faulthandler's stack, and what the C++ runtime said. Pure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

HERE: Final = str(Path(__file__).parents[1])
MOST: Final = 32 * 1024  # bytes of the log's end that are looked at
LONGEST: Final = 300  # characters of the runtime's words
FATAL: Final = "Fatal Python error: "
FRAME: Final = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
STACK: Final = re.compile(r"^((?:Current thread|Thread) 0x[0-9a-f]+)[^\n]*:\n((?:  [^\n]*\n?)+)", re.MULTILINE)
THROWN: Final = re.compile(r"terminate called after throwing an instance of '([^']+)'\s+what\(\):\s+([^\n]*)")
PLACE_IN_C: Final = re.compile(r"\[enforce fail at [^\]]*\] ?")
NOT_THE_USERS: Final = (f"{HERE}/", "/site-packages/", "/dist-packages/", "<frozen ", "/lib/python3")


class LastWords(NamedTuple):
    """`where`: `train.py:41 in load`, the innermost line that is neither torch's nor the interpreter's nor ours.

    `said`: what C++ said of the exception that nobody caught. `stack`: faulthandler's, most recent call first.
    """

    where: str = ""
    said: str = ""
    stack: str = ""

    @property
    def text(self) -> str:
        return "; ".join(filter(None, (self.said, f"in {self.where}" if self.where else "")))


def last_words(log: str) -> LastWords:
    """From the end of a rank's log."""
    head, fatal, dump = log.rpartition(FATAL)
    said = _said(head if fatal else log)
    if not fatal:
        return LastWords(said=said)
    stack = _stack(dump)
    return LastWords(_where(stack), said, f"{FATAL}{dump.splitlines()[0]}\n{stack}" if stack else "")


def _said(text: str) -> str:
    thrown = THROWN.findall(text)
    if not thrown:
        return ""
    kind, what = thrown[-1]
    return f"{kind}: {PLACE_IN_C.sub('', what)}"[:LONGEST]


def _stack(dump: str) -> str:
    """The stack of the thread that crashed; where that is not one of Python's, of the main thread."""
    stacks: list[tuple[str, str]] = STACK.findall(dump)
    crashed = [lines for name, lines in stacks if name.startswith("Current") and FRAME.search(lines)]
    main = [lines for _, lines in stacks if f'"{HERE}/agent/bootstrap.py"' in lines]
    lines = next(iter([*crashed, *main]), "")
    kept = [line for line in lines.splitlines() if f'"{HERE}/agent/' not in line]
    return "\n".join(kept)


def _where(stack: str) -> str:
    for frame in FRAME.finditer(stack):
        if not any(part in frame["file"] for part in NOT_THE_USERS):
            return f"{Path(frame['file']).name}:{frame['line']} in {frame['name']}"
    return ""


def read_end(path: str, since: int) -> str:
    """The end of a log file, of what comes after byte `since`; empty where it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(since, file.tell() - MOST))
            return file.read().decode(errors="replace")
    except OSError:
        return ""

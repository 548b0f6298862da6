"""A stack's text in py-spy's form: which line is the program's own, and names that people know. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

FRAME: Final = re.compile(r"^ {4}(?P<name>.*) \((?P<file>.*):(?P<line>[^:()]+)\)$")
LIBRARY: Final = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.\d+/|^<frozen|(?:^|/)workbench/(?:agent|training)/"
)
PREFIX: Final = re.compile(r"^.*/(?:site-packages|dist-packages|lib(?:64)?/python3\.\d+)/")
OWN: Final = re.compile(r"(?:^|/)(workbench/(?:agent|training)/)")


class Place(NamedTuple):
    """`where`: the innermost line of the program, `train.py:41 in load`; `call`: what that has called, innermost."""

    where: str = ""
    call: str = ""


def main_frames(text: str) -> list[tuple[str, str, str]]:
    """`(function, file, line)` of the main thread, innermost first; of the first thread where none is called so."""
    _, *threads = re.split(r"^(?=Thread )", text, flags=re.MULTILINE)
    main = next(
        (thread for thread in threads if '"MainThread"' in thread.partition("\n")[0]), threads[0] if threads else ""
    )
    return [match.groups() for line in main.splitlines() if (match := FRAME.match(line))]  # type: ignore[misc]


def find_place(text: str, root: str = "") -> Place:
    """Where the program is; its files are named relative to `root` where they lie below it."""
    frames = main_frames(text)
    if not frames:
        return Place()
    own = next((frame for frame in frames if not LIBRARY.search(frame[1])), None)
    name, file, line = own or frames[0]
    inner = next((frame for frame in frames if not OWN.search(frame[1])), frames[0])
    call = f"{inner[0]} ({shorten(inner[1], root)})" if own is not None and inner is not own else ""
    return Place(f"{shorten(file, root)}:{line} in {name}", call)


def shorten(path: str, root: str = "") -> str:
    """`torch/nn/modules/module.py`, `train.py`: what lies in a library by its package, else below `root`, else bare."""
    if PREFIX.match(path):
        return PREFIX.sub("", path)
    if match := OWN.search(path):
        return path[match.start(1) :]
    if root and path.startswith(f"{root.rstrip('/')}/"):
        return path[len(root.rstrip("/")) + 1 :]
    return path.rpartition("/")[2] or path


def shorten_all(text: str, root: str = "") -> str:
    """The text with every file's name shortened."""
    return "\n".join(
        f"    {match['name']} ({shorten(match['file'], root)}:{match['line']})"
        if (match := FRAME.match(line))
        else line
        for line in text.splitlines()
    )

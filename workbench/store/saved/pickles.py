"""A pickle looked at, and its texts changed, without loading it: nothing that it names is imported or called. Pure.

Its opcodes are read by `pickletools`. All functions raise `ValueError` for what is no pickle.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

from workbench.store.saved.scrub import REMOVED, Scrubber, is_secret_pair

_TEXTS: Final = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_OTHER_TEXTS: Final = ("UNICODE", "STRING", "BINSTRING", "SHORT_BINSTRING")
_BYTES: Final = ("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8")
_IMPORTS: Final = ("cloudpickle.cloudpickle", "subimport")  # what stands for a module that a function refers to
MOST: Final = 16 * 2**20  # bytes: a function and its arguments, no data set
_SILENT: Final = frozenset({"PROTO", "FRAME", "MARK"})  # push nothing that a name could be made of


def _ops(data: bytes) -> list[tuple[str, Any, int, int]]:
    """`(name, argument, begin, end)` of each opcode."""
    try:
        found = [(opcode.name, argument, at or 0) for opcode, argument, at in pickletools.genops(data)]
    except Exception as error:  # of a damaged one nearly any
        raise ValueError(f"no pickle: {error}") from error
    ends = [at for _, _, at in found[1:]] + [len(data)]
    return [(name, argument, at, end) for (name, argument, at), end in zip(found, ends, strict=True)]


def texts(data: bytes) -> Iterator[str]:
    """All strings, in order."""
    return (argument for name, argument, _, _ in _ops(data) if name in (*_TEXTS, *_OTHER_TEXTS))


def blobs(data: bytes) -> Iterator[bytes]:
    """All bytes, in order: of arrays, compiled code and the like."""
    return (bytes(argument) for name, argument, _, _ in _ops(data) if name in _BYTES)


def rewrite(data: bytes, change: Callable[[str], str]) -> bytes:
    """The same pickle with other strings; the same bytes where none is another. Frames, which tell sizes, go."""
    ops = _ops(data)
    changed = {k: change(op[1]) for k, op in enumerate(ops) if op[0] in _TEXTS}
    if all(changed[k] == ops[k][1] for k in changed):
        return data
    parts = []
    for k, (name, _, begin, end) in enumerate(ops):
        if name != "FRAME":
            parts.append(_text(changed[k]) if k in changed else data[begin:end])
    return b"".join(parts)


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) < 2**32:
        return b"X" + struct.pack("<I", len(raw)) + raw
    return b"\x8d" + struct.pack("<Q", len(raw)) + raw


def clean(data: bytes, scrub: Scrubber) -> tuple[bytes, str]:
    """The pickle with a mark for the home, or no bytes and why it must not be told: nothing can be cut out of it."""
    if len(data) > MOST:
        return b"", f"it is larger than {MOST // 2**20} MiB"
    try:
        new = rewrite(data, scrub.code)
    except ValueError as error:
        return b"", str(error)
    told = list(texts(new))
    opaque = (blob.decode("latin-1") for blob in blobs(new))
    if any(REMOVED in text for text in told) or any(map(is_secret_pair, told, told[1:])):
        return b"", "there is what looks like a secret in it; have the function read that from its environment"
    if any(scrub.text(blob) != blob for blob in opaque):
        return b"", "there is a secret, or the path of the home, in its data"
    return new, ""


def modules(data: bytes) -> set[str]:
    """Dotted names of the modules that loading it imports, as far as they can be told."""
    found: set[str] = set()
    memo: dict[int, Any] = {}
    pushed: list[Any] = []  # strings, `(module, name)` of what was named so, None for all else
    for name, argument, _, _ in _ops(data):
        if name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            memo[len(memo) if name == "MEMOIZE" else int(argument)] = pushed[-1] if pushed else None
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            pushed.append(memo.get(int(argument)))
        elif name == "GLOBAL":
            pushed.append(tuple(argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            pushed.append(tuple(pushed[-2:]))
        elif name not in _SILENT:
            pushed.append(argument if name in _TEXTS else None)
        if pushed and isinstance(pushed[-1], tuple) and isinstance(pushed[-1][0], str):
            found.add(pushed[-1][0])
        elif len(pushed) > 1 and pushed[-2] == _IMPORTS and isinstance(pushed[-1], str):
            found.add(pushed[-1])
    return found

"""What a job was launched from, as it was at that moment: its code, packages and commit. Values only; see `capture`."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_FILES: Final = 64
MAX_TEXT: Final = 2**19  # bytes of all sources of one job together that are kept as text


class Source(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file. `path` is relative to the origin's `root`; digests are hexadecimal, of the file's bytes.

    `blob`: git's own name for the content. `text` is empty where the file was too large, or no UTF-8.
    """

    path: str
    digest: str
    blob: str = ""
    text: str = ""


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`sources`: the program first, then what it imports from its own folder (`root`).

    `packages`: versions by distribution, of the client's interpreter. `left_out`: what could not be kept, in words.
    """

    root: str = ""
    sources: tuple[Source, ...] = ()
    packages: dict[str, str] = {}
    python: str = ""
    platform: str = ""
    cores: int = 0
    commit: str = ""
    branch: str = ""
    repository: str = ""  # the folder of the checkout
    left_out: tuple[str, ...] = ()

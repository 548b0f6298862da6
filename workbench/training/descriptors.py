"""Descriptors of ours have high numbers: a program's first file is to be number 3, as in a process without us."""

from __future__ import annotations

import fcntl
import os
from typing import Final

LOWEST: Final = 100


def raised(fd: int) -> int:
    """The same file under a number of ours, not inherited by other programs; `fd` is closed, whatever happens."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST)
    finally:
        os.close(fd)

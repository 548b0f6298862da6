"""Anonymous memory that this process shares by handing on its descriptor: it has no name, so nothing can be left.

Python's `mmap` would keep a descriptor open at a low number, which the program is to find free; so the mapping is made
by hand, and goes with the last tensor that is a view of it. Needs torch.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from pathlib import Path
from typing import Any, Final

import torch

from workbench.training.descriptors import raised

FAILED: Final = ctypes.c_void_p(-1).value
HUGE_PAGES: Final = 14  # MADV_HUGEPAGE
NO_LIMIT: Final = 2**62


def create(size: int) -> int:
    """A descriptor of `size` bytes, all 0, none of them taken yet. The caller closes it."""
    fd = os.memfd_create("dtrain-snapshot", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return raised(fd)


def map_bytes(fd: int) -> torch.Tensor:
    """The file's bytes as a tensor; `fd` stays open and is not needed for it any more."""
    size = os.fstat(fd).st_size
    libc = _libc()
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == FAILED:
        raise OSError(ctypes.get_errno(), "the memory of a snapshot cannot be mapped")
    libc.madvise(address, size, HUGE_PAGES)  # a wish: fewer faults at the first copy
    array = (ctypes.c_char * size).from_address(address)
    weakref.finalize(array, libc.munmap, address, size).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def as_view(memory: torch.Tensor) -> memoryview:
    """The same bytes for `struct` and `zlib`; valid while `memory` is."""
    return memoryview((ctypes.c_char * len(memory)).from_address(memory.data_ptr())).cast("B")


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def free_bytes() -> int:
    """What this process could still take: of the machine, and of the container where that is limited."""
    return min(_machine(Path("/proc/meminfo")), _container(Path("/sys/fs/cgroup")))


def _machine(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return NO_LIMIT
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), NO_LIMIT)


def _container(folder: Path) -> int:
    try:
        limit, used = (folder / "memory.max").read_text(), (folder / "memory.current").read_text()
    except OSError:
        return NO_LIMIT
    return NO_LIMIT if limit.strip() == "max" else int(limit) - int(used)

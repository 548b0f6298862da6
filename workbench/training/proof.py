"""Digests that a checkpoint carries: what was loaded is what was saved, and whether the ranks that saved it agreed.

Files have checksums of their own (`manifest`), which say that the disk gave back what it got. This one goes over the
program's own tensors, before the copy and after the load, so it covers all that lies between. Needs torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch

from workbench.training.consistency.digest import Digests, Seen
from workbench.training.states import Path, Taken, leaves, name_of


class Proof(NamedTuple):
    """`whole`: of every plain tensor, with a checksum of names, types and shapes in front. `shared`: of what all ranks
    hold alike; empty: there is no such thing.
    """

    whole: str
    shared: str


NO_PROOF: Final = Proof("", "")


def prove(taken: Taken) -> Proof:
    """Of a program's state. Parts of distributed tensors are left out: each rank has others."""
    found = sorted((name_of(path), path, value.contiguous()) for path, value in leaves(taken.tree) if _is_plain(value))
    layout = "\n".join(f"{name} {value.dtype} {tuple(value.shape)}" for name, _, value in found)
    shared = [(path, value) for _, path, value in found if path in taken.shared]
    seen: Seen = {}  # memory is read once for both
    whole = _digest(((path, value) for _, path, value in found), seen)
    return Proof(f"{zlib.crc32(layout.encode()):08x}-{whole}", _digest(shared, seen) if shared else "")


def difference(saved: str, loaded: str) -> str:
    """Why what was loaded is not what was saved, in words; empty: it is, or they cannot be compared."""
    layout, _, digest = saved.partition("-")
    other_layout, _, other = loaded.partition("-")
    if not digest or layout != other_layout or digest == other:
        return ""
    return f"what was loaded is not what was saved: its digest is {other}, it was {digest}"


def is_proof(saved: str, loaded: str) -> bool:
    return bool(saved) and saved == loaded


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not hasattr(value, "device_mesh") and value.layout is torch.strided


def _digest(tensors: Iterable[tuple[Path, torch.Tensor]], seen: Seen) -> str:
    """16 hexadecimal digits; in the order of names, whatever the devices."""
    digests, by_device = Digests(), dict[torch.device, list[torch.Tensor]]()
    for _, tensor in tensors:
        by_device.setdefault(torch.device(tensor.device.type), []).append(tensor)
    total = sum(int(digests.of(some, seen)) for some in by_device.values())
    return f"{total & (2**64 - 1):016x}"

"""When DDP is made: whether all ranks give it the same parameters, which it does not ask in full.

DDP compares counts, shapes and strides. Equal shapes under swapped names, or half precision of two kinds, it averages
unlike with unlike; of what it refuses it tells only the rank that it refuses.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from workbench.training.consistency import lanes, locate
from workbench.training.consistency.check import Checker, ReplicasDifferError
from workbench.training.consistency.inquiry import first_difference, in_words, sentence
from workbench.training.consistency.replicas import Member, describe, digest_of
from workbench.training.consistency.reports import say
from workbench.training.consistency.room import Room


def process_group_of(init: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What DDP's `init` will take, without `self` and `module`; None: the default group."""
    names = [*inspect.signature(inspect.unwrap(init)).parameters][2:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mesh = given.get("device_mesh")
    return given.get("process_group") or (mesh.get_group(mesh_dim=0) if mesh is not None else None)


def compare_structure(room: Room, module: torch.nn.Module, checker: Checker) -> bool:
    """Whether ranks are alike. Raises when they are not and the job is not to go on then."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    lines = describe(Member(name, p) for name, p in module.named_parameters() if name not in ignored)
    lines += [
        f"buffer {name} {tuple(buffer.shape)} {str(buffer.dtype)[6:]}"
        for name, buffer in module.named_buffers()
        if name not in ignored
    ]
    reduced = room.exchange(lanes.row({"structure": digest_of("\n".join(lines))}))
    if reduced is None or not lanes.read(reduced).differing:
        return True
    everybody = room.gather(lines)
    sides = locate.divide([tuple(one) for one in everybody])
    tell_structure(room, everybody, sides, checker)
    return False


def tell_structure(room: Room, everybody: list[list[str]], sides: locate.Sides, checker: Checker) -> None:
    lists = [everybody[group[0]] for group in sides.groups]
    values = first_difference(lists)
    ranks = [[room.ranks[place] for place in group] for group in sides.groups]
    names = [value.removeprefix("buffer ").partition(" ")[0] for value in values]
    length = max(map(len, lists))
    mismatch = {
        "compared": "structure",
        "ranks": [room.ranks[place] for place in sides.deviating],
        "told_by": sides.told_by,
        "sides": [[some, ""] for some in ranks[: locate.SIDES]],
        "tensors": names[-1:],
        "count": sum(len({tuple(one[n : n + 1]) for one in lists}) > 1 for n in range(length)),
        "of": length,
        "is_first": True,
        "values": values[: locate.SIDES],
        "detail": in_words(values, ranks),
    }
    response = "warn" if checker.policy == "warn" else "stop"
    checker.reports.structure(room.leads, checker.step_of(), mismatch, response)
    if room.leads:
        say(sentence(mismatch, checker.step_of()))
    if response != "warn":
        room.gather(None)
        raise ReplicasDifferError(sentence(mismatch, checker.step_of()))

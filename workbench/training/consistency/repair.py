"""Puts right what deviates: the ranks that do get, bit for bit, what a rank of the majority has. All ranks call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from workbench.training.consistency.replicas import Unit, local


class Repair(NamedTuple):
    tensors: int
    size: int  # bytes that were sent


@torch.no_grad()
def repair(unit: Unit, names: Mapping[str, Sequence[str]], source: int, *, is_deviating: bool) -> Repair:
    """`names` by lane: the tensors that somebody has otherwise. `source`: a place whose ranks are right."""
    done = [
        _parameters(unit, names.get("parameters", ()), source, is_deviating=is_deviating),
        _buffers(unit, names.get("buffers", ()), source, is_deviating=is_deviating),
        _gradients(unit, source, is_deviating=is_deviating) if "gradients" in names or "absent" in names else [],
        _state(unit, source, is_deviating=is_deviating) if "state" in names else [],
    ]
    sizes = [size for part in done for size in part]
    return Repair(len(sizes), sum(sizes))


def _parameters(unit: Unit, names: Sequence[str], source: int, *, is_deviating: bool) -> list[int]:
    wanted = set(names)
    found = [m.parameter for m in (*unit.members, *unit.frozen) if m.name in wanted]
    return [_put(unit, parameter, source, is_deviating=is_deviating) for parameter in found]


def _buffers(unit: Unit, names: Sequence[str], source: int, *, is_deviating: bool) -> list[int]:
    wanted = set(names)
    found = [
        buffer
        for model in unit.models
        for name, buffer in zip(model.buffer_names, model.buffers(), strict=True)
        if name in wanted
    ]
    return [_put(unit, buffer, source, is_deviating=is_deviating) for buffer in found]


def _gradients(unit: Unit, source: int, *, is_deviating: bool) -> list[int]:
    """All of them: what one lacks is made, what only it has is dropped."""
    there = unit.room.tell([not gone for gone in unit.absent()], source)
    sizes = []
    for (_, parameter), has_one in zip(unit.members, there, strict=True):
        if not has_one:
            parameter.grad = None if is_deviating else parameter.grad
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        sizes.append(_put(unit, parameter.grad, source, is_deviating=is_deviating))
    return sizes


def _state(unit: Unit, source: int, *, is_deviating: bool) -> list[int]:
    """The optimizer's, for each parameter as the source has it; other keys go."""
    state = unit.optimizer.state
    mine = [_outline(state.get(parameter, {})) for _, parameter in unit.members]
    sizes = []
    for (_, parameter), outline in zip(unit.members, unit.room.tell(mine, source), strict=True):
        if is_deviating:
            _take_shape(state, parameter, outline)
        tensors = [key for key, value in outline.items() if isinstance(value, Shape)]
        sizes += [_put(unit, state[parameter][key], source, is_deviating=is_deviating) for key in sorted(tensors)]
    return sizes


class Shape(NamedTuple):
    """A tensor of the optimizer's state; `is_like`: laid out as its parameter, and where that is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_like: bool


def _outline(known: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: Shape(tuple(value.shape), value.dtype, value.dim() > 0) if isinstance(value, torch.Tensor) else value
        for key, value in known.items()
    }


def _take_shape(state: Any, parameter: torch.Tensor, outline: Mapping[str, Any]) -> None:
    if not outline:
        state.pop(parameter, None)
        return
    known = state[parameter]
    for key in [key for key in known if key not in outline]:
        del known[key]
    for key, value in outline.items():
        if not isinstance(value, Shape):
            known[key] = value
            continue
        there = known.get(key)
        if not isinstance(there, torch.Tensor) or tuple(there.shape) != value.shape or there.dtype != value.dtype:
            like = value.is_like and tuple(parameter.shape) == value.shape
            device = parameter.device if value.is_like else "cpu"
            made = torch.zeros_like(parameter, dtype=value.dtype) if like else None
            known[key] = torch.zeros(value.shape, dtype=value.dtype, device=device) if made is None else made


def _put(unit: Unit, tensor: torch.Tensor, source: int, *, is_deviating: bool) -> int:
    tensor = local(tensor)
    right = unit.room.send(tensor, source)
    if is_deviating:
        tensor.detach().copy_(right)
    return right.nbytes

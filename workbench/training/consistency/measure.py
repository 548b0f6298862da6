"""Digests of what is compared: of all together while ranks agree, of each tensor by itself once they do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from workbench.training.consistency.digest import Digests
from workbench.training.consistency.replicas import Member, Model, Unit, digest_of, local


class Measure:
    """Keeps what digests need from one check to the next. All of its digests may still be on a device."""

    def __init__(self) -> None:
        self._digests = Digests()

    def gradients(self, unit: Unit) -> torch.Tensor:
        return self.together(unit.gradients())

    def held(
        self, unit: Unit, members: Sequence[Member], frozen: Sequence[Member]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of parameters and of optimizer state."""
        parameters = self.together([local(parameter) for _, parameter in (*members, *frozen)])
        tensors, plain = _apart(unit.state_of(members))
        state = self.together(tensors)
        return parameters, state + digest_of(plain) if plain else state

    def see_buffers(self, model: Model) -> None:
        """Keep what they are when a forward begins: afterwards they differ, and may."""
        model.wants_buffers = False
        model.buffer_copies = [buffer.detach().clone() for buffer in model.buffers()]
        model.buffer_digest = self.together(model.buffer_copies)

    def together(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One digest of tensors that may lie on several devices."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        found = [self._digests.of(some) for some in by_device.values()]
        if not found:
            return torch.zeros((), dtype=torch.int64)
        if len(found) == 1:
            return found[0]
        device = next((digest.device for digest in found if digest.is_cuda), found[0].device)
        return torch.stack([digest.to(device, non_blocking=True) for digest in found]).sum()

    def each(self, named: Mapping[str, Any]) -> list[tuple[str, int]]:
        """By name; plain values of an optimizer's state as well. Waits for the device."""
        return [
            (name, int(self._digests.of([value])) if isinstance(value, torch.Tensor) else digest_of(repr(value)))
            for name, value in named.items()
        ]


def _apart(state: Iterable[tuple[str, Any]]) -> tuple[list[torch.Tensor], str]:
    """Tensors, and what is none as text."""
    tensors, plain = [], []
    for name, value in state:
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach())
        else:
            plain.append(f"{name}={value!r}")
    return tensors, "\n".join(plain)

"""A run's state in the memory tier: what of it goes into a copy, and giving it back to the program's objects.

Models and optimizers are under names that fit however they are wrapped, as on disk (`states`). The states of other
objects may differ from rank to rank, so each rank keeps those as its own. Needs torch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch

from workbench.training import packing, states
from workbench.training.control import Control
from workbench.training.loading import Loaded
from workbench.training.sharing import Sharing
from workbench.training.snapshots import Snapshots
from workbench.training.staging import Held
from workbench.training.states import Path, leaves


class Memory:
    """One run's."""

    def __init__(self, control: Control, snapshots: Snapshots) -> None:
        self._control, self._snapshots = control, snapshots
        self._sharing = Sharing(len(snapshots.peers))
        self._away: list[Path] = []  # of tensors in other ranks' parts than the first's, by number

    @classmethod
    def open(cls, control: Control) -> Memory | None:
        """None where no copies are taken: see `Snapshots.open`."""
        snapshots = Snapshots.open()
        return None if snapshots is None else cls(control, snapshots)

    def is_due(self, step: int) -> bool:
        """After every step, on every rank."""
        return self._snapshots.is_due(step)

    def take(self, step: int, number: int, state: Mapping[str, Any], extras: Any) -> None:
        """`step` counts the run's own, `number` is that of a checkpoint on disk."""
        try:
            taken = states.take(state)
        except Exception as error:
            self._snapshots.switch_off(str(error) or type(error).__name__)
            return
        own = {"extras": extras, "objects": taken.objects}
        parts = self._sharing.parts(taken)
        self._away = [path for part in parts[1:] for path in part]
        self._snapshots.take(step, taken.tree, own, number, [list(part.values()) for part in parts])

    def hold(self, step: int) -> Held | None:
        """This rank's part of the copy of that step, which stays as it is until it is released; None: there is none."""
        value = self._snapshots.hold(step)
        if value is None:
            return None
        state = value["state"] or {}
        if all(isinstance(name, int) for name in state):
            found = [(self._away[number], tensor) for number, tensor in state.items()]
        else:
            found = list(leaves(state))
        tensors = {path: tensor for path, tensor in found if isinstance(tensor, torch.Tensor)}
        return Held(tensors, functools.partial(self._snapshots.release, step))

    def load(self, state: Mapping[str, Any], newest: int) -> Loaded | None:
        """Give the state what every rank has of it in memory; None where that is older than `newest`, on disk."""
        like = states.take(state).tree if packing.TENSOR in sys.modules else None
        restored = self._snapshots.restore(newest, like)
        if restored is None:
            return None
        rank, world_size = self._snapshots.who.rank, self._snapshots.who.world_size
        is_alike = restored.world_size == world_size
        own = restored.extras[rank if is_alike else 0]
        states.put_back(state, restored.state, own["objects"])
        if rank == 0:
            self._control.fact("RunResumed", step=restored.number, tier="memory", seconds=restored.seconds)
        parts = [own] * world_size if is_alike else [restored.extras[other] for other in range(restored.world_size)]
        return Loaded(step=restored.number, path="", extras=[part["extras"] for part in parts])

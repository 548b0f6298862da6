"""A rank that saves for ever, to be killed at it; in a module of its own, which is quick to import."""

from __future__ import annotations

import functools
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.integration.training_ranks import set_contract
from workbench.training.checkpoint import Checkpointer
from workbench.training.saving import Where
from workbench.training.team import Team


def program(step: float = -1.0, width: int = 64) -> dict[str, Any]:
    """A model whose every number is the step."""
    model = nn.Linear(width, width)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return {"model": model}


def save_for_ever(folder: Path, generation: int, rank: int, world_size: int, port: int, told: Connection) -> None:
    """Goes on from the newest, and is always at a save; says each step that has been published."""
    set_contract(rank, world_size, port)
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    team = Team.current()
    assert team is not None
    where = Where(folder=folder, restart_count=generation, keep=2)
    keeper = Checkpointer(where, team, functools.partial(say, told))
    state = program(width=256)
    loaded = keeper.load(state)
    step = loaded.step if loaded else 0
    while True:
        step += 1
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.fill_(float(step))
        keeper.save(state, step, {"rank": rank}, wait=True)


def say(told: Connection, event: str, **fields: Any) -> None:
    if event == "CheckpointSaved":
        told.send(fields["checkpoint"]["step"])
    elif event != "RunResumed":
        told.send(f"{event}: {fields}")

"""Where a fault may happen: the calls of torch that a program makes, met one by one while a fault is wanted."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from workbench.training.patching import Function, Patches

BATCH, BACKWARD, FORWARD, COLLECTIVE = "batch", "backward", "forward", "collective"
WRITE: Final = "write"  # of a checkpoint: in any thread, the others in the main one only
BETWEEN: Final = "between"  # two lines of the program, where it does none of these
ANYWHERE: Final = (FORWARD, BACKWARD, COLLECTIVE, BETWEEN)
COLLECTIVES: Final = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list",
)  # fmt: skip


class Call(NamedTuple):
    """A call that is about to be made."""

    point: str
    name: str
    plain: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return self.plain(*self.args, **self.kwargs)


Meet = Callable[[Call], Any]


def watch_points(patches: Patches, meet: Meet) -> None:
    """Have `meet` make these calls, each time, until the patches are undone.

    May be called while the program runs: each is put on by one assignment.
    """
    import torch
    from torch.utils.data import dataloader

    for iterator in (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter):
        patches.wrap((iterator,), "_next_data", partial(_met, meet, BATCH, "_next_data"))
    name = "_engine_run_backward" if hasattr(torch.autograd, "_engine_run_backward") else "backward"
    patches.wrap((torch.autograd,), name, partial(_met, meet, BACKWARD, "backward"))
    patches.wrap((torch, torch.serialization), "save", partial(_met, meet, WRITE, "save"))
    patches.wrap((os,), "fsync", partial(_met, meet, WRITE, "fsync"))
    if torch.distributed.is_available():
        _watch_collectives(patches, meet)


def _watch_collectives(patches: Patches, meet: Meet) -> None:
    import torch
    from torch.distributed import distributed_c10d as c10d
    from torch.nn.parallel import DistributedDataParallel

    patches.wrap((DistributedDataParallel,), "forward", partial(_met, meet, FORWARD, "forward"))
    for name in COLLECTIVES:
        if hasattr(c10d, name):
            patches.wrap((c10d, torch.distributed), name, partial(_met, meet, COLLECTIVE, name))


def _met(meet: Meet, point: str, name: str, plain: Function) -> Function:
    from torch.compiler import is_dynamo_compiling as tracing

    def call(*args: Any, **kwargs: Any) -> Any:
        if tracing():
            return plain(*args, **kwargs)
        return meet(Call(point, name, plain, args, kwargs))

    return call

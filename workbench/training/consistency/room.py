"""Replicas meet: a gloo group of their own, made once, so that what they compare never comes between the collectives
of training, nor is counted among them.

An exchange waits so long for the others and no longer: a rank that leaves out a step of the optimizer would otherwise
hang a job that went on before. What has not come by then is looked at again at the next check.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

PATIENCE: Final = 10.0  # s that a rank waits in a check for the others
LIFE: Final = timedelta(minutes=10)  # after which gloo itself gives up


class Room:
    """`ranks` are global, in the order of the group; `index` is this rank's place among them."""

    def __init__(self, group: Any, ranks: tuple[int, ...], wait: Callable[..., Any]) -> None:
        self.group, self.ranks, self._wait = group, ranks, wait
        self.rank = dist.get_rank()
        self.index = ranks.index(self.rank)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._options = options
        self._pending: tuple[Any, torch.Tensor] | None = None
        self.missed = 0  # checks in a row to which not all have come

    @classmethod
    def open(cls, whole: Any) -> Room:
        """Of all ranks of a process group, called by all of them at once."""
        wait = plain_wait()
        if whole is None or whole is dist.group.WORLD:
            ranks = tuple(range(dist.get_world_size()))
            return cls(dist.new_group(backend="gloo", timeout=LIFE), ranks, wait)
        ranks = tuple(dist.get_process_group_ranks(whole))
        group = dist.new_group(list(ranks), backend="gloo", timeout=LIFE, use_local_synchronization=True)
        return cls(group, ranks, wait)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def leads(self) -> bool:
        return self.index == 0

    def exchange(self, row: torch.Tensor) -> torch.Tensor | None:
        """The largest of each number over all ranks; None: somebody has not come.

        While an earlier exchange is under way it is that which is looked at, and nothing is sent: so that all ranks
        have made equally many when they meet again.
        """
        if self._pending is None:
            self._pending = self.group.allreduce([row], self._options), row
        work, sent = self._pending
        if not self._comes(work, 0.0 if self.missed else PATIENCE):
            self.missed += 1
            return None
        self._pending, self.missed = None, 0
        return sent

    def _comes(self, work: Any, patience: float) -> bool:
        if not patience:
            if not work.is_completed():
                return False
            self._wait(work)  # raises what has gone wrong
            return True
        try:
            self._wait(work, timedelta(seconds=patience))
        except RuntimeError:
            if work.is_completed():
                raise
            return False
        return True

    # --- after a difference: all ranks come ---

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def tell(self, value: Any, source: int) -> Any:
        """What the rank at place `source` has."""
        box = [value]
        dist.broadcast_object_list(box, src=self.ranks[source], group=self.group)
        return box[0]

    def send(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """A copy on the CPU of what the rank at place `source` has, bit for bit; of the shape of `tensor`."""
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        dist.broadcast(copy.view(-1).view(torch.uint8), src=self.ranks[source], group=self.group)
        return copy


def plain_wait() -> Callable[..., Any]:
    """`Work.wait` without what watches it: in a check a rank is not in a collective of its program."""
    wait: Any = dist.Work.wait
    while hasattr(wait, "__wrapped__"):
        wait = wait.__wrapped__
    found: Callable[..., Any] = wait
    return found

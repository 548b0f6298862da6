"""Replicas meet: a gloo group of their own, made once, so that what they compare never comes between the collectives
of training, nor is counted among them.

An exchange waits so long for the others and no longer: a rank that leaves out a step of the optimizer would otherwise
hang a job that went on before. What has not come by then is looked at again at the next check.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

PATIENCE: Final = 5.0  # s that a rank waits in a check for the others
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
        self._pending: Any = None  # the work of the first row that waits, once it is sent
        self._waiting: deque[tuple[Any, torch.Tensor]] = deque()
        self.missed = 0  # looks in a row at which somebody had not come

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

    def post(self, about: Any, row: torch.Tensor) -> None:
        """Bring a row to the others, in its turn."""
        self._waiting.append((about, row))

    def post_next(self, about: Any, numbers: list[int]) -> None:
        """Bring each rank's numbers to all before anything else; the answer has a line a rank.

        For what follows from an answer, so that it comes at the same turn on all ranks, also on one that is behind.
        """
        table = torch.full((self.size, len(numbers)), torch.iinfo(torch.int64).min)
        table[self.index] = torch.tensor(numbers, dtype=torch.int64)
        self._waiting.appendleft((about, table))

    def answer(self) -> tuple[Any, torch.Tensor] | None:
        """What the next row was about, and the largest of each number over all ranks; None: there is no more, or
        somebody has not come (`is_waiting`).

        One row is under way at a time, and the next is sent when it has been answered: so all ranks have made equally
        many exchanges when they meet, however late one of them is.
        """
        if self._pending is None:
            if not self._waiting:
                return None
            self._pending = self.group.allreduce([self._waiting[0][1]], self._options)
        if not self._comes(self._pending, PATIENCE):
            self.missed += 1
            return None
        self._pending, self.missed = None, 0
        return self._waiting.popleft()

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def drop(self) -> None:
        """Rows that have not been sent are no longer wanted."""
        self._waiting.clear()

    def exchange(self, row: torch.Tensor) -> torch.Tensor | None:
        """Post, and the answer at once; None: not all have come."""
        self.post(None, row)
        answer = self.answer()
        return answer[1] if answer is not None else None

    def assemble(self) -> None:
        """Wait for the others before anything that waits without end. Raises `TimeoutError`."""
        if self.exchange(torch.zeros(1, dtype=torch.int64)) is None:
            raise TimeoutError("ranks differ, and not all came to find out in what")

    def _comes(self, work: Any, patience: float) -> bool:
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

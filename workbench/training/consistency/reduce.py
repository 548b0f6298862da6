"""Integrity of each all-reduce of one DDP model: a communication hook that sends sums of rows along with the gradients,
or integers, and afterwards looks whether what came is the sum of what was sent.

    checked    sums and scales travel behind the values, in the same collective
    bitwise    in one of their own, so that values meet as in plain DDP and training is the same, bit for bit
    exact      values are integers: see `fixed`

The mean is not taken in place but on the way into a buffer of ours, so that what was reduced is still there for another
try, and nothing is copied for it. Only where gradients are views of DDP's buckets does the result overwrite it; a copy
is kept then. Memory: the gradients once more (exact: 4 or 8 bytes each).

A hook's future never starts a collective: buckets are done in an order of their own on each rank. What was found is
looked at after backward, by all ranks together (`settle`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from time import thread_time
from typing import Any, Final

import torch
import torch.distributed as dist

from workbench.training.consistency import fixed, sums
from workbench.training.consistency.room import plain_wait

MODES: Final = ("checked", "bitwise", "exact")


class Bucket:
    """One bucket of a model: what was reduced, what came, and which rows are not what was sent."""

    def __init__(self, size: int, like: torch.Tensor, mode: str, width: int) -> None:
        self.size, self.rows = size, sums.rows_of(size)
        self.dtype = dtype = fixed.WIDTHS[width] if mode == "exact" else like.dtype
        carried = dtype if mode == "exact" else sums.carried(like.dtype)
        self.is_apart = mode == "bitwise" or carried is not dtype
        count = self.rows * (1 if mode == "exact" else 2)
        values = self.rows * sums.ROW
        whole = like.new_zeros(values + (0 if self.is_apart else count), dtype=dtype)
        self.table = whole[:values].view(self.rows, sums.ROW)
        self.extra = like.new_zeros(count, dtype=carried) if self.is_apart else whole[values:]
        self.sent = whole[:size] if self.is_apart else whole  # what is reduced with the values
        self.values = whole[:size]
        self.result = like.new_empty(size) if mode == "exact" else self.values
        self.retained = like
        self.parameters: list[Any] = []
        self.parts: list[torch.Tensor] = []  # of what is retained, by parameter
        self.scale: Any = None  # exact: exponents and largest values, by parameter
        self.flagged: torch.Tensor | None = None  # by row

    @property
    def row_sums(self) -> torch.Tensor:
        return self.extra[: self.rows]

    @property
    def scales(self) -> torch.Tensor:
        return self.extra[self.rows :]

    def offsets(self) -> list[int]:
        found = [0]
        for part in self.parts:
            found.append(found[-1] + part.numel())
        return found

    def cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """By parameter, each as its gradient lies in the bucket."""
        return [
            whole.as_strided(part.shape, part.stride(), whole.storage_offset() + start)
            for part, start in zip(self.parts, self.offsets(), strict=False)
        ]


class Reducer:
    """Of one model. `every`: of so many backwards one is checked; an exact one is always exact, and checked."""

    def __init__(self, ddp: Any, mode: str, width: int = 32, every: int = 1) -> None:
        self.group, self.mode, self.width, self.every = ddp.process_group, mode, width, every
        self.ranks = dist.get_world_size(self.group)
        self.keeps_copy = bool(getattr(ddp, "gradient_as_bucket_view", False))
        self.inner: tuple[Any, Any] | None = None  # a hook that the program has registered since, and its state
        self.is_off = False
        self.is_joined: Callable[[], bool] = lambda: bool(getattr(getattr(ddp, "_join_config", None), "enable", False))
        self.backwards = 0
        self.fired: list[Bucket] = []  # in this backward
        self.is_checking = self.has_fired = False
        self.spent = 0.0  # s of CPU time
        self._buckets: dict[int, Bucket] = {}
        self._wait = plain_wait()

    # --- the hook -----------------------------------------------------------------------------------------------------

    def hook(self, _: Any, bucket: Any) -> Any:
        if self.inner is not None:
            state, inner = self.inner
            return inner(state, bucket)
        buffer = bucket.buffer()
        is_plain = buffer.layout is torch.strided and buffer.is_floating_point()
        self._begin()
        if self.is_off or not is_plain or (self.mode != "exact" and (not self.is_checking or self.is_joined())):
            buffer.mul_(1 / self.ranks)  # as DDP does
            future = self.send(buffer)
            return future.then(lambda done: done.value()[0])
        begun = thread_time()
        kept = self._bucket(bucket, buffer)
        if self.mode == "exact":
            self._agree_on_scale(kept)
        self.fill(kept)
        futures = [self.send(kept.sent), *([self.send(kept.extra)] if kept.is_apart else [])]
        if not self.is_joined():  # who has no more input takes part in all-reduces, and in nothing else
            self.fired.append(kept)
        self.spent += thread_time() - begun
        both: Any = torch.futures.collect_all(futures)
        return both.then(lambda _: self._receive(kept))

    def _begin(self) -> None:
        if not self.has_fired:
            self.has_fired = True
            self.is_checking = self.mode == "exact" or self.backwards % self.every == 0
            self.backwards += 1

    def send(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """The future of its sum over ranks, in place."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = op
        return self.group.allreduce([tensor], options).get_future()

    def _bucket(self, bucket: Any, buffer: torch.Tensor) -> Bucket:
        kept = self._buckets.get(bucket.index())
        if kept is None or kept.size != buffer.numel() or kept.retained.dtype is not buffer.dtype:
            kept = self._buckets[bucket.index()] = Bucket(buffer.numel(), buffer, self.mode, self.width_for(buffer))
        kept.parameters, kept.parts, kept.flagged = bucket.parameters(), bucket.gradients(), None
        kept.retained = buffer.clone() if self.keeps_copy else buffer
        return kept

    def width_for(self, buffer: torch.Tensor) -> int:
        """Double precision does not fit into 32 bits."""
        return 64 if buffer.dtype is torch.float64 else self.width

    def _agree_on_scale(self, kept: Bucket) -> None:
        width = 8 * kept.dtype.itemsize
        flat = _split(kept.retained, kept)
        maxima = fixed.largest(flat, width)
        self.send(maxima, dist.ReduceOp.MAX).wait()
        kept.scale = fixed.exponents(maxima, self.ranks, width), maxima

    def fill(self, kept: Bucket) -> None:
        """From what is retained: values and their sums, to be reduced. Any number of times."""
        kept.table.view(-1)[kept.size :].zero_()
        if self.mode != "exact":
            torch.mul(kept.retained, 1 / self.ranks, out=kept.values)
            kept.row_sums.copy_(sums.row_sums(kept.table))
            kept.scales.copy_(sums.scales(kept.table, kept.row_sums))
            return
        parts = zip(_split(kept.retained, kept), *kept.scale, _split(kept.values, kept), strict=True)
        for part, exponent, maximum, out in parts:
            fixed.encode(part, exponent, maximum, out)
        kept.row_sums.copy_(sums.exact_sums(kept.table))

    def _receive(self, kept: Bucket) -> torch.Tensor:
        begun = thread_time()
        self.judge(kept)
        self.spent += thread_time() - begun
        return kept.result

    def judge(self, kept: Bucket) -> None:
        """What has come: which rows are not what was sent, and the result."""
        if self.mode != "exact":
            allowed = sums.tolerance(self.ranks, kept.retained.dtype)
            kept.flagged = sums.broken(sums.row_sums(kept.table), kept.row_sums, kept.scales, allowed)
            return
        kept.flagged = sums.exact_sums(kept.table) != kept.row_sums
        parts = zip(_split(kept.values, kept), *kept.scale, _split(kept.result, kept), strict=True)
        for words, exponent, maximum, out in parts:
            fixed.decode(words, exponent, maximum, self.ranks, out)

    # --- after backward -----------------------------------------------------------------------------------------------

    def finish(self) -> list[Bucket]:
        """The buckets that were reduced, and checked, since the last call."""
        fired, self.fired, self.has_fired = self.fired, [], False
        return fired

    def again(self, kept: Bucket) -> None:
        """Reduce once more what is retained. All ranks call; nothing of this group is under way."""
        self.fill(kept)
        for tensor in [kept.sent, *([kept.extra] if kept.is_apart else [])]:
            self.send(tensor).wait()
        self.judge(kept)


def _split(whole: torch.Tensor, kept: Bucket) -> Sequence[torch.Tensor]:
    offsets = kept.offsets()
    return [whole[start:end] for start, end in pairwise(offsets)]

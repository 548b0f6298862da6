"""What a rank reads: remembered where a DataLoader asks its sampler and hands out a batch, told in a short row.

A batch that is not wanted costs a look into a dict. Nothing is held of it but its indices, of a pass the first
`MOST` of them. What the rows of all ranks mean together is `rows`'.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.compiler import is_dynamo_compiling as tracing

from workbench.training.consistency.digest import Digests
from workbench.training.consistency.replicas import Unit, digest_of
from workbench.training.consistency.rows import SKETCH, Row
from workbench.training.patching import Function, Patches

EVERY: Final = 50  # steps between two rows
EAGER: Final = 2  # checks that have a row at first: what never changes is known by the second
MOST: Final = 2048  # indices of a pass that are remembered: a sketch of them takes a quarter of a ms
LARGE: Final = 2**16  # elements of a tensor that are looked at
DEPTH: Final = 4
WIDTH: Final = 16
GOLDEN: Final = -7046029254386353131
MIX: Final = -4658895280553007687
NEVER: Final = 2**63 - 1  # no index hashes to this


def nothing() -> None:
    """As a weak reference to what cannot have one."""


class Pass:
    """One pass over a DataLoader. `number` counts those of its sampler."""

    def __init__(self, iterator: Any, sampler: Any, number: int, before: int) -> None:
        self.order, self.number, self.before = iterator._sampler_iter, number, before
        self.sampler: Callable[[], Any] = nothing if sampler is None else weakref.ref(sampler)
        self.indices: list[int] = []
        self.first = 0  # digest of the indices of its first batch
        self.wants = True  # the next batch is looked at
        self.content = self.earlier = self.size = 0
        self.seed = iterator._base_seed if iterator._num_workers else 0

    def drew(self, index: Any) -> None:
        batch = index if isinstance(index, list | tuple) else [index]
        if not batch or not isinstance(batch[0], int):
            return
        if not self.first:
            self.first = digest_of(repr(list(batch)))
        if len(self.indices) < MOST:
            self.indices += batch

    def look(self, batch: Any) -> None:
        self.wants, self.earlier = False, self.content
        self.content, self.size = content_of(batch)


class Past:
    """What is kept of a sampler between its passes."""

    def __init__(self) -> None:
        self.passes, self.first = 0, 0
        self.epoch: int | None = None
        self.drawn: list[int] = []  # indices of the pass before
        self.drawing: list[int] = []


class DataWatch:
    """One of a process."""

    def __init__(self) -> None:
        self.current: Pass | None = None
        self.loose = Loose()
        self._past: weakref.WeakKeyDictionary[Any, Past] = weakref.WeakKeyDictionary()
        self._told_of: Pass | None = None
        self._steps = -EVERY
        self._rows = 0
        self._wants = True
        self._is_on = True

    def install(self, patches: Patches) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        patches.wrap((_BaseDataLoaderIter,), "_next_index", self.around_index)
        patches.wrap((_BaseDataLoaderIter,), "__next__", self.around_batch)

    # --- as the program reads ---

    def around_index(self, plain: Function) -> Function:
        def _next_index(iterator: Any) -> Any:
            index = plain(iterator)
            if self._is_on and not tracing():
                try:
                    self._drew(iterator, index)
                except Exception as error:
                    self._fail(error)
            return index

        return _next_index

    def _drew(self, iterator: Any, index: Any) -> None:
        found: Pass | None = vars(iterator).get("_dtrain_pass")
        if found is None or found.order is not iterator._sampler_iter:
            found = self._begin(iterator)
        self.current = found
        if len(found.indices) < MOST:
            found.drew(index)

    def _fail(self, error: Exception) -> None:
        """Looking must never stop training: there is no more of it."""
        self._is_on = False
        self.current = None
        sys.stderr.write(f"dtrain: what ranks read is no longer compared: {type(error).__name__}: {error}\n")

    def _begin(self, iterator: Any) -> Pass:
        order = iterator._index_sampler
        order = getattr(order, "inner", order)  # of one that stands in for it
        sampler = getattr(order, "sampler", order)
        try:
            past = self._past.setdefault(sampler, Past())
        except TypeError:  # a list, as the rest of a pass may be: it is not read again
            past, sampler = Past(), None
        made = Pass(iterator, sampler, past.passes, past.first)
        past.passes += 1
        past.drawn, past.drawing = past.drawing, made.indices
        iterator._dtrain_pass = made
        return made

    def around_batch(self, plain: Function) -> Function:
        def __next__(iterator: Any) -> Any:
            batch = plain(iterator)
            if self._is_on and not tracing():
                found: Pass | None = vars(iterator).get("_dtrain_pass")
                if found is not None and found.wants:
                    try:
                        found.look(batch)
                    except Exception as error:
                        self._fail(error)
            return batch

        return __next__

    def saw(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A model's forward begins, with gradients."""
        if self._wants and self._is_on:
            self._wants = False
            try:
                self.loose.look((inputs, kwargs))
            except Exception as error:
                self._fail(error)

    # --- as it is checked ---

    def is_due(self, unit: Unit) -> bool:
        is_new = self.current is not None and self.current is not self._told_of
        return unit.checks < EAGER or is_new or unit.steps - self._steps >= EVERY

    def prepare(self, unit: Unit) -> None:
        """The next step is checked."""
        if unit.checks < EAGER or unit.steps + 1 - self._steps >= EVERY:
            self._wants = True
            if self.current is not None:
                self.current.wants = True

    def row(self, unit: Unit) -> Row:
        """What is known now; it counts as told."""
        self._steps, self._told_of = unit.steps, self.current
        now, found = random_state(), self.current
        loose = self.loose
        values: dict[str, Any] = {"drawn": int(loose.random not in (0, now)), "random": now}
        if found is None:
            return Row(content=loose.content, is_still=loose.content == loose.earlier != 0, size=loose.size, **values)
        sampler = found.sampler()
        is_dealt = hasattr(sampler, "set_epoch") and bool(getattr(sampler, "shuffle", True))
        past = self._past.get(sampler) if sampler is not None else None
        epoch = getattr(sampler, "epoch", -1)
        drawn = max(found.indices, past.drawn if past is not None else [], key=len)
        made = Row(
            content=found.content or loose.content, is_still=found.content == found.earlier != 0,
            size=found.size or loose.size, first=found.first, before=found.before, number=found.number,
            is_dealt=is_dealt, epoch=epoch if isinstance(epoch, int) else -1,
            is_same_epoch=past is not None and past.epoch == epoch and found.number > 0,
            place=_whole(sampler, "rank"), places=_whole(sampler, "num_replicas"), taken=len(drawn),
            seed=found.seed, kind=KINDS.get(type(sampler).__name__, 0), sketch=sketch(drawn), **values,
        )  # fmt: skip
        if past is not None:
            past.first, past.epoch = found.first, epoch
        return made


class Loose:
    """The last batch that a model was given, where no DataLoader tells of it, and torch's random state then."""

    def __init__(self) -> None:
        self.content = self.earlier = self.size = self.random = 0

    def look(self, batch: Any) -> None:
        self.earlier = self.content
        self.content, self.size = content_of(batch)
        self.random = random_state()


# 0 is any other.
KINDS: Final = {"SequentialSampler": 1, "RandomSampler": 2, "DistributedSampler": 3, "WeightedRandomSampler": 4}


def _whole(sampler: Any, name: str) -> int:
    value = getattr(sampler, name, -1)
    return value if isinstance(value, int) else -1


def content_of(batch: Any) -> tuple[int, int]:
    """A digest of its tensors, 0 where there are none or they say nothing; and its first dimension.

    Only what lies on the CPU: a device is not waited for.
    """
    tensors = [t for t in tensors_of(batch, DEPTH) if t.numel() > 1 and t.layout is torch.strided]
    size = next((int(t.shape[0]) for t in tensors if t.dim()), 0)
    here = [t.detach().reshape(-1)[:LARGE] for t in tensors if t.device.type == "cpu"]
    if not any(bool((t != t[0]).any()) for t in here):
        return 0, size
    return int(Digests().of(here)), size


def tensors_of(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for part in list(value.values())[:WIDTH]:
            yield from tensors_of(part, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for part in value[:WIDTH]:
            yield from tensors_of(part, depth - 1)


def random_state() -> int:
    """A number for the state of torch's generator."""
    return int(Digests().of([torch.get_rng_state()]))


def sketch(indices: list[int]) -> tuple[int, ...]:
    """The smallest few hashes of what was drawn: of two sets they tell how much they have in common."""
    if not indices:
        return (NEVER,) * SKETCH
    mixed = (torch.tensor(indices[:MOST], dtype=torch.int64) + 1) * GOLDEN
    mixed ^= mixed >> 31
    found: list[int] = (mixed * MIX).unique()[:SKETCH].tolist()  # type: ignore[no-untyped-call]  # sorted
    return (*found, *[NEVER] * (SKETCH - len(found)))

"""How many samples a batch holds: the first dimension of the first tensor in it. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

DEPTH: Final = 4  # containers looked into
WIDTH: Final = 16  # entries looked at in each
PLAIN: Final = frozenset({list, tuple, dict})  # what indexing a user's own class costs or does is not known
Path = tuple[Any, ...]


class BatchSizes:
    """Remembers where the last batch had its tensor: batches of one loader look alike."""

    def __init__(self) -> None:
        self._path: Path = ()

    def size(self, batch: Any) -> int:
        """0 where no tensor is found."""
        try:
            value = batch
            for key in self._path:
                if type(value) not in PLAIN:
                    raise TypeError
                value = value[key]
            size: int = value.shape[0]
            return size
        except (AttributeError, IndexError, KeyError, TypeError):
            return self._search(batch)

    def _search(self, batch: Any) -> int:
        found = _find(batch, DEPTH)
        if found is None:
            return 0
        self._path = found
        return int(_follow(batch, found).shape[0])


def _follow(batch: Any, path: Path) -> Any:
    for key in path:
        batch = batch[key]
    return batch


def _find(batch: Any, depth: int) -> Path | None:
    if isinstance(batch, (list, tuple)):
        entries: list[tuple[Any, Any]] = list(enumerate(batch[:WIDTH]))
    elif isinstance(batch, Mapping):
        entries = [(key, batch[key]) for key, _ in zip(batch, range(WIDTH), strict=False)]
    else:
        shape = getattr(batch, "shape", None)
        return () if isinstance(shape, tuple) and len(shape) else None
    for key, value in entries if depth else ():
        path = _find(value, depth - 1)
        if path is not None:
            return (key, *path)
    return None


def usual(iterator: Any, count: int) -> int:
    """How many batches to come of a DataLoader's iterator are sure to be of `count` samples, and need no look."""
    from torch.utils.data import BatchSampler, default_collate

    try:
        sampler = iterator._index_sampler
        is_sure = type(sampler) is BatchSampler and sampler.batch_size == count
        if not is_sure or iterator._collate_fn is not default_collate or iterator._dataset_kind != 0:
            return 0
        return len(sampler.sampler) // count - int(iterator._num_yielded)
    except Exception:  # what a sampler of the user's own raises is not known
        return 0

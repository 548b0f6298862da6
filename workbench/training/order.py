"""The order in which a DataLoader takes its indices: watched, skipped and replaced where the loader asks its sampler.

torch offers no door for this, so an iterator is made while a stand-in lies where the loader looks its sampler up; the
loader itself is as before once its iterator is there. Nothing is drawn that the loader would not draw.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from zlib import crc32

from torch.utils.data import Sampler

from workbench.training.rng import State, generator_state, host_rng_state, set_generator_state, set_rng_state

DEPTH: Final = 4  # samplers within samplers


class Order:
    """Stands in for `inner`, an index sampler, and passes over the first `skip` of what that gives.

    While it is held its pass gives nothing, and draws what making an iterator draws; released, it is as it was, or the
    next iterator has that same pass.
    """

    def __init__(self, inner: Iterable[Any], *, skip: int = 0) -> None:
        self.inner, self.skip = inner, skip
        self.live = Drawn(iter(()), 0)
        self._is_held = self._is_same = False

    def __iter__(self) -> Iterator[Any]:
        if self._is_same:
            self._is_same = False
            return self.live
        self.live = Drawn(iter(self.inner), self.skip)
        return iter(()) if self._is_held else self.live

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def hold(self) -> None:
        self._is_held = True

    def release(self, *, same_pass: bool) -> None:
        self._is_held, self._is_same = False, same_pass


class Drawn:
    """One pass over the order. What a sampler draws at its first element is drawn at the first here too.

    Of each element that was drawn it keeps how many indices it has and a digest of them, until it is `taken`.
    """

    def __init__(self, indices: Iterator[Any], skip: int) -> None:
        self._indices, self._skip = indices, skip
        self._ahead: deque[tuple[int, int]] = deque()
        self.skipped = self.batches = self.samples = self.digest = 0

    def __iter__(self) -> Drawn:
        return self

    def __next__(self) -> Any:
        self.pass_over()
        index = next(self._indices)
        self._ahead.append(sketch(index))
        return index

    def pass_over(self) -> None:
        """Pass over what is to be skipped, or as much as there is of it; once."""
        while self.skipped < self._skip:
            try:
                size, mark = sketch(next(self._indices))
            except StopIteration:
                self._skip = 0
                return
            self.skipped += 1
            self._count(size, mark)

    def taken(self) -> None:
        """The oldest that was drawn is consumed."""
        if self._ahead:
            self._count(*self._ahead.popleft())

    def _count(self, size: int, mark: int) -> None:
        self.batches += 1
        self.samples += size
        self.digest = crc32(mark.to_bytes(4, "little"), self.digest)


def sketch(index: Any) -> tuple[int, int]:
    """How many samples it asks for, and a digest of them: 0 where they are no numbers."""
    indices = index if isinstance(index, (list, tuple)) else (index,)
    try:
        return len(indices), crc32(array("q", indices))
    except (TypeError, OverflowError, RuntimeError):
        return len(indices), 0


def index_sampler(loader: Any) -> Any:
    """Where the loader takes its indices from."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


@contextlib.contextmanager
def standing_in(loader: Any, order: Order) -> Iterator[None]:
    """While this lasts the loader takes its indices from `order`."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    with replaced(loader, **{name: order}), contextlib.ExitStack() as stack:
        if loader._iterator is not None:  # of persistent workers: it has looked its sampler up when it was made
            stack.enter_context(replaced(loader._iterator, _index_sampler=order))
        yield
    if loader._iterator is not None:
        vars(loader._iterator)["_index_sampler"] = index_sampler(loader)


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of an object, changed for a while, past `__setattr__`."""
    own = vars(owner)
    before = {name: own[name] for name in values}
    own.update(values)
    try:
        yield
    finally:
        own.update(before)


def origin(loader: Any) -> State:
    """The random states that the order of a pass comes from, which is about to begin."""
    return {
        "rng": host_rng_state(),
        "generators": generator_states(loader),
        "draws_seed": not (loader.persistent_workers and loader._iterator is not None),  # for the workers
    }


def go_to(loader: Any, where: Mapping[str, Any]) -> None:
    """Put the random states of an `origin` back."""
    set_rng_state(where["rng"])
    set_generator_states(loader, where["generators"])


def generators(loader: Any) -> dict[str, Any]:
    """The generator objects that the order may come from, by where they are found."""
    found: dict[str, Any] = {}
    _search(loader.generator, "generator", found, 0)
    _search(loader.sampler, "sampler", found, DEPTH)
    _search(loader.batch_sampler, "batch_sampler", found, DEPTH)
    return found


def _search(value: Any, path: str, found: dict[str, Any], depth: int) -> None:
    if generator_state(value) is not None:
        if all(value is not one for one in found.values()):
            found[path] = value
    elif depth and (isinstance(value, Sampler) or (depth == DEPTH and hasattr(value, "__dict__"))):
        for name, part in vars(value).items():
            _search(part, f"{path}.{name}", found, depth - 1)


def generator_states(loader: Any) -> dict[str, State]:
    """Their states, by where they are found."""
    return {path: state for path, one in generators(loader).items() if (state := generator_state(one)) is not None}


def set_generator_states(loader: Any, states: Mapping[str, State]) -> None:
    for path, one in generators(loader).items():
        if path in states:
            set_generator_state(one, states[path])

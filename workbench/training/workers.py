"""What only a DataLoader's worker processes know, brought along with each batch: their random states, and a dataset's.

A worker's random state is what its dataset has made of it, and dies with it. So a batch carries that of its worker, if
it has changed since the last one: a dataset that draws nothing costs a comparison. What a resumed run starts its
workers with is that of the last batches that were consumed; what was fetched ahead is fetched again.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from workbench.training.order import replaced
from workbench.training.rng import Raw, generator_state, set_generator_state, set_rng_state

SLOT: Final = 2**15  # bytes; what does not fit travels with the batch
Glance: TypeAlias = tuple[Any, ...]
Note: TypeAlias = bytes | tuple[int, int] | None  # what a worker knew: itself, or its slot and length; None: as before


class Carried:
    """A batch on its way to the rank, and what its worker knew after it."""

    def __init__(self, batch: Any, worker: int, note: Note) -> None:
        self.batch, self.worker, self.note = batch, worker, note

    def pin_memory(self) -> Carried:
        from torch.utils.data._utils.pin_memory import pin_memory

        return Carried(pin_memory(self.batch), self.worker, self.note)  # type: ignore[no-untyped-call]


class Luggage:
    """Goes to the workers in place of `collate_fn` and `worker_init_fn`, calls both, and packs.

    Notes lie in shared memory: they would fill the pipe that batches come by, and a worker with something left to write
    there outlives a rank that was killed. A worker's slots are more than the batches it may be ahead.
    """

    def __init__(self, loader: Any, saved: Mapping[int, Any]) -> None:
        self._collate, self._init, self._saved = loader.collate_fn, loader.worker_init_fn, saved
        is_iterable = isinstance(loader.dataset, IterableDataset)  # the last worker that has data left gets all to do
        ahead = loader.prefetch_factor * (loader.num_workers if is_iterable else 1)
        slots = torch.empty((loader.num_workers, ahead + 2, SLOT), dtype=torch.uint8)
        self._slots = slots.share_memory_()  # type: ignore[no-untyped-call]
        self._last: Glance = ()
        self._notes = 0

    def init(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        if worker in self._saved:
            put(self._saved[worker], _dataset())
        self._last = _glance(_dataset())

    def collate(self, samples: Any) -> Carried:
        batch, dataset = self._collate(samples), _dataset()
        now = _glance(dataset)
        is_same, self._last = now == self._last, now
        return Carried(batch, _worker(), None if is_same else self._note(pickle.dumps(now)))

    def read(self, worker: int, note: bytes | tuple[int, int]) -> bytes | torch.Tensor:
        """A copy of its own; to be read before the worker is asked for another batch."""
        return note if isinstance(note, bytes) else self._slots[worker, note[0], : note[1]].clone()

    def _note(self, data: bytes) -> Note:
        if len(data) > SLOT:
            return data
        self._notes += 1
        slot = self._notes % self._slots.shape[1]
        self._slots[_worker(), slot, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return slot, len(data)


class Workers:
    """The rank's account of its loader's workers, as of the last batch consumed."""

    def __init__(self) -> None:
        self.last = -1  # the worker that the last batch came from
        self._luggage: Luggage | None = None
        self._known: dict[int, bytes | torch.Tensor | Mapping[str, Any]] = {}
        self._given: set[int] = set()  # workers that gave a batch in this pass

    def state(self, *, is_within: bool) -> dict[str, Any]:
        """`is_within` a pass; `ended` are those that have nothing to go on with in it."""
        known = {worker: _loaded(data) for worker, data in self._known.items()}
        for worker, told in known.items():
            told["ended"] = not is_within or worker not in self._given
        return {"last": self.last, "known": known}

    def begin_pass(self) -> None:
        self.last = -1
        self._given.clear()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.last = state["last"]
        self._known = dict(state["known"])
        self._given = {worker for worker, known in state["known"].items() if not known["ended"]}

    def open(self, batch: Any) -> Any:
        if not isinstance(batch, Carried) or self._luggage is None:
            return batch
        self.last = batch.worker
        self._given.add(batch.worker)
        if batch.note is not None:
            self._known[batch.worker] = self._luggage.read(batch.worker, batch.note)
        return batch.batch

    def iterator(self, loader: Any, saved: Mapping[int, Any]) -> Any:
        """torch's own iterator, whose batches, where workers fetch them, bring along what those know."""
        if not loader.num_workers or loader._iterator is not None:
            return DataLoader.__iter__(loader)
        self._luggage = luggage = Luggage(loader, saved)
        with replaced(loader, collate_fn=luggage.collate, worker_init_fn=luggage.init):
            iterator: Any = DataLoader.__iter__(loader)
        vars(iterator)["_next_data"] = partial(_opened, weakref.ref(iterator), type(iterator)._next_data, self)
        return iterator


def _loaded(data: bytes | torch.Tensor | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(data, Mapping):
        return dict(data)
    raw, own = pickle.loads(data if isinstance(data, bytes) else bytes(data.tolist()))
    return {"rng": raw.state()} | (pickle.loads(own) if own else {"generators": {}})


def _opened(iterator: weakref.ref[Any], plain: Callable[[Any], Any], workers: Workers) -> Any:
    """`_next_data` of the one iterator; refers to it weakly, as its workers end when nobody refers to it."""
    return workers.open(plain(iterator()))


def _glance(dataset: Any) -> Glance:
    """All that this process knows of a dataset's future, quickly: taken for each batch, and compared."""
    own = known_to(dataset)
    return Raw.now(), pickle.dumps(own) if own["generators"] or "dataset" in own else b""


def known_to(dataset: Any) -> dict[str, Any]:
    """What a dataset knows: generators of its own, its own state."""
    told: dict[str, Any] = {"generators": generators_of(dataset)}
    if hasattr(dataset, "state_dict"):
        told["dataset"] = dataset.state_dict()
    return told


def put(told: Mapping[str, Any], dataset: Any) -> None:
    """Have the dataset, in this process, go on from there."""
    put_to(told, dataset)
    set_rng_state(told["rng"])
    if told["ended"] and "dataset" in told and isinstance(dataset, IterableDataset):
        for _ in dataset:  # the end of a pass of which nothing is wanted any more; the next is about to begin
            pass


def put_to(told: Mapping[str, Any], dataset: Any) -> None:
    """The same for what `known_to` gave."""
    if "dataset" in told:
        dataset.load_state_dict(told["dataset"])
    put_generators(told["generators"], dataset)


def put_generators(states: Mapping[str, Any], dataset: Any) -> None:
    for name, state in states.items():
        one = getattr(dataset, "__dict__", {}).get(name)
        if generator_state(one) is not None:
            set_generator_state(one, state)


def generators_of(dataset: Any) -> dict[str, Any]:
    own = getattr(dataset, "__dict__", {})
    return {name: state for name, part in own.items() if (state := generator_state(part)) is not None}


def _dataset() -> Any:
    info = get_worker_info()
    return None if info is None else info.dataset


def _worker() -> int:
    info = get_worker_info()
    return -1 if info is None else info.id

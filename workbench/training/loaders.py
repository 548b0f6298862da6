"""Passes over torch's DataLoader, map-style and iterable; see `DataPosition` for what is exact and what is not."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset

from workbench.training import decks
from workbench.training.order import (
    Order,
    generator_states,
    go_to,
    index_sampler,
    origin,
    set_generator_states,
    standing_in,
)
from workbench.training.passes import CountedPasses, Passes, StatefulPasses, States, draw, say, share, too_short
from workbench.training.rest import Unknown, rest_of
from workbench.training.workers import Workers, generators_of, known_to, put_generators, put_to


def passes_over(source: Any, rank: int, world_size: int) -> Passes:
    """By what the source can do; one that keeps its position itself is asked for it."""
    if hasattr(source, "state_dict") and hasattr(source, "load_state_dict"):
        return StatefulPasses(source, rank, world_size)
    if not isinstance(source, DataLoader):
        return CountedPasses(source, rank, world_size)
    if isinstance(source.dataset, IterableDataset):
        return IterablePasses(source, rank, world_size)
    return MapPasses(source, rank, world_size)


NOTHING: Final[dict[str, Any]] = {"generators": {}}
NO_WORKERS: Final[dict[str, Any]] = {"last": -1, "known": {}}


class LoaderPasses:
    """What both kinds of DataLoader have: random states, and workers."""

    def __init__(self, loader: Any, rank: int, world_size: int) -> None:
        self.loader, self.rank, self.world_size = loader, rank, world_size
        self.workers = Workers()
        self.begun: dict[str, Any] = {}  # the random states with which the pass began
        self.born: dict[str, Any] | None = None  # and those with which its persistent workers were started
        self.order = Order(())
        self._hatched: Any = None  # persistent workers that wait for the pass to begin

    def begin(self) -> Iterator[Any]:
        return self._begin(Order(index_sampler(self.loader)))

    def prepare(self, states: States) -> None:
        saved = states[self.rank % len(states)]
        if len(states) == self.world_size and self.loader.persistent_workers and saved.get("born"):
            self.order = Order(index_sampler(self.loader))
            with standing_in(self.loader, self.order):
                self._hatched = self._hatch(saved["born"], saved["workers"])
        self._put_now(saved)

    def took(self) -> None:
        vars(self.loader).pop("_get_iterator", None)  # a class of the user's that never asked for one
        self.order.live.taken()

    def state(self, is_within: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"now": generator_states(self.loader), "num_workers": self.loader.num_workers}
        if self.loader.num_workers and (is_within or self.loader.persistent_workers):
            state["workers"] = self.workers.state(is_within=is_within)
        if self.loader.persistent_workers:
            state["born"] = self.born
        return state | {"begin": self.begun} if is_within else state

    def _begin(self, order: Order) -> Iterator[Any]:
        self.workers.begin_pass()
        self.begun, self.order = self._origin(), order
        if self.begun["draws_seed"]:
            self.workers, self.born = Workers(), self.begun
        hatched, self._hatched = self._hatched, None
        if hatched is None:
            return self._iterator()
        with standing_in(self.loader, order):
            hatched._reset(self.loader, first_iter=True)
        return self._given(hatched)

    def _origin(self) -> dict[str, Any]:
        return origin(self.loader)

    def _iterator(self) -> Iterator[Any]:
        """The loader's iterator; a class of the user's may make torch's own, within, only once it is asked for data."""
        loader, kind = self.loader, type(self.loader)
        if kind.__iter__ is not DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator:
            if loader._iterator is None:
                vars(loader)["_get_iterator"] = self._make
            else:
                vars(loader._iterator)["_index_sampler"] = self.order
            iterator: Iterator[Any] = iter(loader)
            return iterator
        return self._make() if kind._get_iterator is DataLoader._get_iterator else iter(loader)

    def _make(self) -> Iterator[Any]:
        vars(self.loader).pop("_get_iterator", None)
        with standing_in(self.loader, self.order):
            iterator: Iterator[Any] = self.workers.iterator(self.loader, {})
        return iterator

    def _given(self, iterator: Any) -> Iterator[Any]:
        """The loader's iterator, with this one as torch's own within it."""
        loader = self.loader
        if type(loader).__iter__ is DataLoader.__iter__:
            return iterator  # type: ignore[no-any-return]
        vars(loader).update({"_iterator": None, "_get_iterator": partial(_given_once, loader, iterator)})
        outer: Iterator[Any] = iter(loader)
        return outer

    def _hatch(self, born: dict[str, Any], workers: Mapping[str, Any]) -> Any:
        """Start workers as they were started then, knowing what they came to know; they get nothing to do yet."""
        vars(self.loader)["_iterator"] = None
        go_to(self.loader, born)
        self.born = born
        self.order.hold()
        iterator = self.workers.iterator(self.loader, workers["known"])
        self.workers.restore(workers)
        return iterator

    def _return(self, saved: Mapping[str, Any], order: Order, workers: Mapping[str, Any]) -> Iterator[Any]:
        """Make the iterator of a pass again, the first batch to come from the worker whose turn it was."""
        loader, self.begun, self.order = self.loader, saved["begin"], order
        if workers["known"] and saved.get("num_workers") != loader.num_workers:
            what = "the random numbers that the dataset draws in them are others than they would have been"
            say(self.rank, f"the loader has {loader.num_workers} workers, not {saved.get('num_workers')}: {what}")
        if not loader.num_workers:
            go_to(loader, self.begun)
            return self._given(self._make())
        born = self.begun if self.begun["draws_seed"] else saved.get("born") or self.begun
        with standing_in(loader, order):
            iterator = self._hatch(born, workers)
            if born is not self.begun:
                go_to(loader, self.begun)
            order.release(same_pass=born is self.begun)
            vars(iterator)["_try_put_index"] = partial(_from_turn, weakref.ref(iterator), workers["last"] + 1)
            iterator._reset(loader, first_iter=True)
        return self._given(iterator)

    def _redrawn(self, states: States) -> tuple[Iterator[Any], int]:
        """Of a loader whose indices nobody sees, the pass is begun as it was, and what was consumed drawn again."""
        saved = states[self.rank % len(states)]
        batches = share(states, self.rank, self.world_size, type(self.loader).__name__)
        self.begun, self.order = saved["begin"], Order(index_sampler(self.loader))
        go_to(self.loader, self.begun)
        iterator = self._iterator()
        draw(iterator, batches, self.rank)
        self._put_now(saved)
        return iterator, batches

    def _put_now(self, saved: Mapping[str, Any]) -> None:
        set_generator_states(self.loader, saved.get("now", {}))


class MapPasses(LoaderPasses):
    """Indices that were consumed are passed over; nothing is loaded for it."""

    def __init__(self, loader: Any, rank: int, world_size: int) -> None:
        super().__init__(loader, rank, world_size)
        self.told: Mapping[str, Any] = {}
        self.segments: list[list[int]] = []
        self.origins: dict[int, Any] = {}

    def _begin(self, order: Order) -> Iterator[Any]:
        self.told, self.segments = decks.description(self.loader), []
        iterator = super()._begin(order)
        self.origins = {} if self.told["kind"] == "distributed" else {self.rank: self.begun}
        return iterator

    def state(self, is_within: bool) -> dict[str, Any]:
        state = super().state(is_within)
        if not self.loader.num_workers:
            state["dataset"] = known_to(self.loader.dataset)
        if is_within:
            live = self.order.live
            state |= {"order": self.told, "segments": self.segments, "origins": self.origins}
            state |= {"units": live.samples if self.told["batch_size"] else live.batches, "digest": live.digest}
            state["length"] = decks.len_of(self.order)
        return state

    def resume(self, states: States) -> tuple[Iterator[Any], int]:
        place = min((state["call"], state["epoch"]) for state in states)
        those = [state for state in states if (state["call"], state["epoch"]) == place and state["batches"]]
        saved = states[self.rank] if len(states) == self.world_size else those[self.rank % len(those)]
        if not saved["units"]:
            self.told, self.segments, self.origins = saved["order"], saved["segments"], saved["origins"]
            return self._redrawn(states)
        if self._is_dealt_anew(saved, len(states)):
            return self._dealt(states)
        order = Order(self._indices(saved, states), skip=saved["batches"])
        iterator = self._return(saved, order, saved.get("workers") or NO_WORKERS)
        self.told, self.segments, self.origins = saved["order"], saved["segments"], saved["origins"]
        self._pass_over(saved["batches"], saved)
        self._put_now(saved)
        return iterator, saved["batches"]

    def _is_dealt_anew(self, saved: Mapping[str, Any], world_size: int) -> bool:
        """Other ranks than these, or batches of another size, had an order that all of them shared."""
        told, segments = saved["order"], saved["segments"]
        is_shared = len(segments[0] if segments else range(world_size)) == 1 or told["kind"] == "distributed"
        if not is_shared and not (told["kind"] == "custom" and decks.is_sharded(self.loader)):
            return False
        has_changed = told["kind"] == "distributed" and told["batch_size"] != decks.batch_size(self.loader)
        return world_size != self.world_size or has_changed

    def _indices(self, saved: Mapping[str, Any], states: States) -> Any:
        if not saved["segments"]:
            return index_sampler(self.loader)
        return rest_of(self.loader, states, self.rank, self.world_size, anew=False).indices

    def _dealt(self, states: States) -> tuple[Iterator[Any], int]:
        try:
            rest = rest_of(self.loader, states, self.rank, self.world_size, anew=True)
        except Unknown as why:
            batches = share(states, self.rank, self.world_size, f"{type(self.loader).__name__} ({why})")
            iterator = self._begin(Order(index_sampler(self.loader), skip=batches))
            self._pass_over(batches, {})
            return iterator, batches
        iterator = self._begin(Order(rest.indices))
        self.told, self.segments, self.origins = rest.told, rest.segments, rest.origins
        return iterator, 0

    def _pass_over(self, batches: int, saved: Mapping[str, Any]) -> None:
        live = self.order.live
        live.pass_over()
        if live.skipped < batches:
            was = saved["order"]["length"] if "order" in saved else self.told["length"]
            samples = f" (of {decks.len_of(self.loader.dataset)} samples, where it was {was})"
            raise too_short(self.rank, batches, live.skipped, samples)
        if self.loader.in_order and live.digest != saved.get("digest", live.digest):
            name = decks.name_of(self.loader)
            say(
                self.rank,
                f"{name} does not give the order again that it gave before the save: some samples of this epoch are "
                "seen twice or not at all. Give it state_dict and load_state_dict, or a generator of its own",
            )

    def _put_now(self, saved: Mapping[str, Any]) -> None:
        super()._put_now(saved)
        if not self.loader.num_workers and "dataset" in saved:
            put_to(saved["dataset"], self.loader.dataset)


class IterablePasses(LoaderPasses):
    """A dataset that keeps its state is asked for it; others are drawn from again."""

    def state(self, is_within: bool) -> dict[str, Any]:
        dataset = self.loader.dataset
        state = super().state(is_within) | {"stateful": hasattr(dataset, "load_state_dict")}
        state["is_seen"] = self.order.live.batches > 0
        return state if self.loader.num_workers else state | {"dataset": known_to(dataset)}

    def prepare(self, states: States) -> None:
        super().prepare(states)
        if not self.loader.num_workers and len(states) == self.world_size:
            put_to(states[self.rank].get("dataset", NOTHING), self.loader.dataset)

    def resume(self, states: States) -> tuple[Iterator[Any], int]:
        saved, dataset, order = states[self.rank % len(states)], self.loader.dataset, Order(index_sampler(self.loader))
        if not saved["is_seen"]:
            return self._redrawn(states)
        is_same = len(states) == self.world_size and saved["num_workers"] == self.loader.num_workers
        if saved["stateful"] and is_same:
            if "dataset" in saved:
                put_to(saved["dataset"], dataset)
            return self._return(saved, order, saved.get("workers") or NO_WORKERS), saved["batches"]
        batches = share(states, self.rank, self.world_size, type(dataset).__name__)
        put_generators(saved["begin"]["dataset"], dataset)
        iterator = self._return(saved, order, saved["begin"].get("workers") or NO_WORKERS)
        draw(iterator, batches, self.rank)
        self._put_now(saved)
        put_generators(saved.get("dataset", NOTHING)["generators"], dataset)
        return iterator, batches

    def _origin(self) -> dict[str, Any]:
        begun = super()._origin() | {"dataset": generators_of(self.loader.dataset)}
        return begun if begun["draws_seed"] else begun | {"workers": self.workers.state(is_within=False)}


def _from_turn(iterator: weakref.ref[Any], turn: int) -> None:
    """In place of `_try_put_index` the first time: the worker whose turn it is gets the first of the order."""
    one: Any = iterator()
    del vars(one)["_try_put_index"]
    for _ in range(turn % one._num_workers):
        next(one._worker_queue_idx_cycle)
    one._try_put_index()


def _given_once(loader: Any, iterator: Any) -> Any:
    """In place of `_get_iterator`, once."""
    vars(loader).pop("_get_iterator", None)
    return iterator

"""Where a run is in its data: what was consumed, kept in a few kilobytes, and gone back to exactly.

What is kept is where the order came from (random states at the start of the pass), never the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from workbench.training.loaders import passes_over

VERSION: Final = 1


class DataPosition:
    """The position of one rank in `loader`: a DataLoader, or anything that can be iterated over.

        position = DataPosition(loader, rank=rank, world_size=world_size)
        position.restore(states, then=lambda: set_rng_state(saved))   # only where a checkpoint is resumed
        for epoch, batch in position.epochs(3):
            ...
            torch.save({"data": position.state_dict(), "rng": rng_state()}, path)    # `states` has one of each rank

    Without `restore` this gives the batches that `for batch in loader` gives, and draws the same random numbers.

    **Passes.** Each call of `epochs` goes once over the loader (None) or so many times. A script that is run again to
    resume calls it again as often: calls that were finished when the state was saved give nothing, the one that was not
    goes on, so that `for epoch in range(9): sampler.set_epoch(epoch); for _, batch in position.epochs(None)` is
    resumed as it stands. `loader` may be set to another one between calls.

    **Exact**, with as many ranks as before: the order of a DataLoader of any sampler that draws from the process'
    generators when a pass begins, from generators it holds, or from an epoch and a seed; what a map-style dataset draws
    from the global generators, and from those it holds as attributes, in the rank and in workers, persistent ones too,
    as long as their number is the same; iterable datasets that have `state_dict` and `load_state_dict`. Indices that
    were consumed are passed over and nothing is loaded. Batches fetched ahead are not consumed. Other iterable
    datasets, other iterables, and DataLoaders whose class takes its indices in ways of its own are drawn from again,
    which is told when it takes long; that is exact unless they draw from a generator that training draws from between
    batches, as it is for a sampler. A loader with `state_dict` and `load_state_dict` is trusted with its place.
    An order that comes out other than it was is told on stderr. `in_order=False` has no order to go back to: as many
    batches are passed over as were consumed.

    **With another number of ranks** the rest of the epoch is dealt anew, each sample once: an order of
    `DistributedSampler`, or of any sampler of a single rank, or of a sampler that has `rank` and `num_replicas` (or
    `world_size`) as attributes. At the end samples are repeated from the epoch's start, or dropped with `drop_last`, as
    `DistributedSampler` does; of batches made by a batch sampler the last are cut smaller, so that no rank waits for
    another's. The next epoch is the loader's own again. Also so with as many ranks, where `DistributedSampler` is used
    and the batch size has changed. Of streams and loaders that keep their own place no such thing is known: they pass
    over an equal share, and it is told. Ranks that each went over the whole data go on in the place of rank
    `rank % len(states)`.

    **Random states.** To go back, the states with which the pass began are put into the process' generators, the
    iterator is made, what was consumed is passed over, and then `then` is called, once, just before the next batch is
    fetched: it must put back the random states of the save (`rng.set_rng_state`), as they are whatever by then. What
    must be as it was saved before the next batch may be restored there too.
    """

    def __init__(self, loader: Any, *, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._call = self._epoch = self._batches = 0
        self._states: Sequence[Mapping[str, Any]] | None = None
        self._then: Callable[[], object] | None = None
        self._loader, self._passes = loader, passes_over(loader, rank, world_size)

    @property
    def loader(self) -> Any:
        return self._loader

    @loader.setter
    def loader(self, loader: Any) -> None:
        if loader is not self._loader:  # what is known of persistent workers is known of these alone
            self._loader, self._passes = loader, passes_over(loader, self._rank, self._world_size)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch last given out, which counts as consumed; to be called between batches.

        Holds only what `torch.load(weights_only=True)` takes. While the call that goes on has not come, the position
        is the one to go back to.
        """
        if self._states is not None:
            same = len(self._states) == self._world_size
            return dict(self._states[self._rank]) if same else {"version": VERSION, "waiting": list(self._states)}
        place = {"version": VERSION, "call": self._call, "epoch": self._epoch, "batches": self._batches}
        return place | self._passes.state(self._batches > 0)

    @property
    def is_waiting(self) -> bool:
        """There is a place to go back to, and the call of `epochs` that goes on from it has not come yet.

        What the script does between its calls, such as `scheduler.step()`, it has done again by then: whoever restores
        has to give the objects their states once more in `then`.
        """
        return self._states is not None

    def restore(self, states: Sequence[Mapping[str, Any]], then: Callable[[], object] | None = None) -> None:
        """Go on where the run was that saved `states`: those of all its ranks, in their order.

        Takes effect at the next batch that `epochs` is asked for; `then` is called before it. Raises `ValueError`
        there, or here, where the place cannot be gone back to.
        """
        versions = {state["version"] for state in states}
        if versions != {VERSION}:
            raise ValueError(f"positions of version {sorted(versions)} cannot be read: this is version {VERSION}")
        self._states, self._then = states[0].get("waiting", states), then
        self._call = self._epoch = self._batches = 0

    def epochs(self, epochs: int | None) -> Iterator[tuple[int, Any]]:
        """`(epoch, batch)`; with a number, samplers that have `set_epoch` are told each epoch, 0 first."""
        saved = None if self._states is None else self._saved(self._states)
        if saved is not None and self._call < saved["call"]:
            self._call += 1
            return
        try:
            for epoch in range(saved["epoch"] if saved else 0, 1 if epochs is None else epochs):
                yield from self._pass(epoch, is_told=epochs is not None)
            self._states = None  # of an epoch that is not asked for any more
            self._settle()
        finally:
            self._call += 1
            self._epoch = self._batches = 0

    def _saved(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The state that says in which pass to go on: this rank's own, or that of those least far."""
        if len(states) == self._world_size:
            return states[self._rank]
        return min(states, key=lambda state: (state["call"], state["epoch"], -state["batches"]))

    def _pass(self, epoch: int, *, is_told: bool) -> Iterator[tuple[int, Any]]:
        if is_told:
            for sampler in samplers(self.loader):
                sampler.set_epoch(epoch)
        self._epoch, self._batches = epoch, 0
        iterator, took = self._iterator(), self._passes.took
        for batch in iterator:
            took()
            self._batches += 1
            yield epoch, batch

    def _iterator(self) -> Iterator[Any]:
        states, self._states = self._states, None
        if states is not None and self._saved(states)["batches"]:
            iterator, self._batches = self._passes.resume(states)
            self._settle()
            return iterator
        if states is not None:
            self._passes.prepare(states)
        self._settle()  # first: making an iterator draws random numbers
        return self._passes.begin()

    def _settle(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


def samplers(loader: Any) -> list[Any]:
    """Those of a loader that want to be told the epoch."""
    batches = getattr(loader, "batch_sampler", None)
    parts = [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    told = {id(part): part for part in parts if hasattr(part, "set_epoch")}
    return list(told.values())

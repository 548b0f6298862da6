"""Where a run is in its data: what was consumed, kept in a few kilobytes, and gone back to exactly.

What is kept is where the order came from (random states at the start of the pass), never the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch.utils.data import DataLoader

from workbench.training.order import Order, generator_states, set_generator_states, standing_in
from workbench.training.rng import host_rng_state, set_rng_state

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

    **Random states.** To go back, the states with which the pass began are put into the process' generators, the
    iterator is made, what was consumed is passed over, and then `then` is called, once, just before the next batch is
    fetched: it must put back the random states of the save (`rng.set_rng_state`), as they are whatever by then. What
    must be as it was saved before the next batch may be restored there too.
    """

    def __init__(self, loader: Any, *, rank: int, world_size: int) -> None:
        self.loader = loader
        self._rank, self._world_size = rank, world_size
        self._call = self._epoch = self._batches = 0
        self._begin: dict[str, Any] | None = None
        self._saved: Mapping[str, Any] | None = None
        self._then: Callable[[], object] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch last given out, which counts as consumed; to be called between batches.

        Holds only what `torch.load(weights_only=True)` takes.
        """
        state: dict[str, Any] = {"version": VERSION, "call": self._call, "epoch": self._epoch, "batches": self._batches}
        state |= {"rank": self._rank, "world_size": self._world_size}
        if isinstance(self.loader, DataLoader):
            state["now"] = generator_states(self.loader)
        if self._begin is not None:
            state["begin"] = self._begin
        return state

    def restore(self, states: Sequence[Mapping[str, Any]], then: Callable[[], object] | None = None) -> None:
        """Go on where the run was that saved `states`: those of all its ranks, in their order.

        Takes effect at the next batch that `epochs` is asked for; `then` is called before it.
        """
        if len(states) != self._world_size:
            raise NotImplementedError("another world size")
        self._saved, self._then = states[self._rank], then
        self._call = self._epoch = self._batches = 0

    def epochs(self, epochs: int | None) -> Iterator[tuple[int, Any]]:
        """`(epoch, batch)`; with a number, a sampler that has `set_epoch` is told each epoch, 0 first."""
        if self._saved is not None and self._call < self._saved["call"]:
            self._call += 1
            return
        try:
            for epoch in range(self._saved["epoch"] if self._saved else 0, 1 if epochs is None else epochs):
                set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
                if epochs is not None and set_epoch is not None:
                    set_epoch(epoch)
                self._epoch, self._batches = epoch, 0
                for batch in self._iterator():
                    self._batches += 1
                    yield epoch, batch
        finally:
            self._call += 1
            self._epoch = self._batches = 0
            self._begin = None

    def _iterator(self) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        is_loader = isinstance(self.loader, DataLoader)
        if saved is None or not saved["batches"]:
            self._settle(saved)  # first: making an iterator draws random numbers
            self._begin = self._origin() if is_loader else None
            iterator: Iterator[Any] = iter(self.loader)
            return iterator
        iterator = self._resumed(saved) if is_loader else self._counted(saved["batches"])
        self._settle(saved)
        return iterator

    def _settle(self, saved: Mapping[str, Any] | None) -> None:
        if saved is not None and "now" in saved:
            set_generator_states(self.loader, saved["now"])
        then, self._then = self._then, None
        if then is not None:
            then()

    def _origin(self) -> dict[str, Any]:
        return {"rng": host_rng_state(), "generators": generator_states(self.loader)}

    def _resumed(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        self._begin = saved["begin"]
        set_rng_state(saved["begin"]["rng"])
        set_generator_states(self.loader, saved["begin"]["generators"])
        sampler = self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler
        order = Order(sampler, saved["batches"])
        with standing_in(self.loader, order):
            iterator: Iterator[Any] = iter(self.loader)
        assert order.live is not None
        order.live.pass_over()
        self._batches = saved["batches"]
        return iterator

    def _counted(self, batches: int) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self.loader)
        for _ in range(batches):
            next(iterator)
        self._batches = batches
        return iterator

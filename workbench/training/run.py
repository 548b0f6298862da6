"""`Run`: what a training script may say of itself. Outside a job it does the same, and nobody listens."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Final

from workbench.training import limit
from workbench.training.finite import FiniteWatch

if TYPE_CHECKING:
    from workbench.training.keeping import Keeping
    from workbench.training.observe import Observer
    from workbench.training.position import DataPosition

READ_EVERY: Final = 0.5  # s between two readings of a loss that lies on a device


class Expectation:
    """What `Run.expect` gives: leaving its block ends it early."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer

    def begin(self, seconds: float) -> None:
        if self._observer is not None:
            self._observer.allow(expected=seconds)

    def __enter__(self) -> Expectation:
        return self

    def __exit__(self, *_: object) -> None:
        self.begin(0.0)


class Run:
    """The run of this process: `Run.current()`. Results are the same with it or without, in a job or outside."""

    _current: ClassVar[Run | None] = None

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer = observer
        self._steps = 0
        self._next_reading = 0.0
        self._finite = FiniteWatch()
        self._keeping: Keeping | None = None
        self._position: DataPosition | None = None
        self._is_restored = False
        self._done = 0  # steps of the pass that is gone on with, until its first batch

    @classmethod
    def current(cls) -> Run:
        """This process' run; one that nobody watches when the process is no rank of a job."""
        if cls._current is None:
            observe = sys.modules.get("workbench.training.observe")  # loaded, if this is a rank
            cls._current = cls(observe.Observer.current if observe else None)
        return cls._current

    @property
    def is_watched(self) -> bool:
        return self._observer is not None

    def steps(
        self, loader: Iterable[Any], state: Mapping[str, Any] | None = None, *, epochs: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        """`(step, batch)` for each batch of `loader`; steps are counted from 0, over all calls of this run.

        With `epochs` the loader is read so many times, and a sampler that has `set_epoch` (`DistributedSampler`) is
        told each epoch, 0 first; without, it is read once and its sampler's epoch is left alone. Progress shows in the
        live view where the loader's length is known.

        `state` is what a checkpoint holds: a dict of models, optimizers and anything else with `state_dict` and
        `load_state_dict`. In a job it is restored here from the newest checkpoint that is whole, with random states and
        the place in the data, and saved as the job's spec says, after the same step on every rank. With several ranks
        the process group must be there by then.
        """
        keeping = self._keep() if state is not None else None
        if keeping is None or state is None:
            yield from self._plain_steps(loader, epochs)
            return
        kept = {name: thing for name, thing in state.items() if thing is not loader}
        position = self._position_in(loader, keeping)
        self._restore(keeping, kept)
        total, done = _length(loader) * (epochs or 1), 0
        passes = position.epochs(epochs)  # held until the last save: at a limit it has not ended
        for _, batch in [] if limit.is_reached() else passes:
            done, self._done = self._done or done, 0
            yield self._steps, batch
            self._steps += 1
            done += 1
            self.progress(done, total)
            keeping.after_step(self._steps, kept, position, done)
            if limit.is_reached():
                break
        keeping.end(self._steps, kept, position, done)

    def _plain_steps(self, loader: Iterable[Any], epochs: int | None) -> Iterator[tuple[int, Any]]:
        total = _length(loader) * (epochs or 1)
        done = 0
        for epoch in range(1 if epochs is None else epochs):
            set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
            if epochs is not None and set_epoch is not None:
                set_epoch(epoch)
            for batch in [] if limit.is_reached() else loader:
                yield self._steps, batch
                self._steps += 1
                done += 1
                self.progress(done, total)
                if limit.is_reached():
                    return

    # --- checkpoints ---

    def save(self, state: Mapping[str, Any]) -> bool:
        """Make a checkpoint now, on all ranks at once, besides those that the spec asks for; outside a job nothing.

        Returns when the state has been copied; it is written in the background. Whether that went well is in the job's
        record, and nothing is raised for a disk's sake. False: there is no job.
        """
        keeping = self._keep()
        return keeping is not None and keeping.save(self._counted(), state, self._position, wait=True)

    def load(self, state: Mapping[str, Any]) -> int:
        """Give `state` back what the newest whole checkpoint has of it, on all ranks at once; the steps behind it.

        0 where there is none, and outside a job. For loops that do without `steps`, which does this by itself.
        """
        keeping = self._keep()
        if keeping is not None:
            self._is_restored = False
            self._position_in(None, keeping)  # in case `steps` is used after all
            self._restore(keeping, state)
        return self._steps

    def _keep(self) -> Keeping | None:
        """None outside a job."""
        control = sys.modules.get("workbench.training.control")  # loaded, if this is a rank
        if control is None or control.Control.current is None:
            return None
        from workbench.training.keeping import Keeping

        self._keeping = Keeping.open(self._observer, self._keeping)
        return self._keeping

    def _position_in(self, loader: Iterable[Any] | None, keeping: Keeping) -> DataPosition:
        if self._position is None:
            from workbench.training.position import DataPosition

            self._position = DataPosition(loader, rank=keeping.team.rank, world_size=keeping.team.world_size)
        self._position.loader = loader
        return self._position

    def _restore(self, keeping: Keeping, state: Mapping[str, Any]) -> None:
        """Once a run."""
        if self._is_restored:
            return
        self._is_restored = True
        behind = keeping.restore(state, self._position)
        if behind is not None:
            self._steps, self._done = behind

    def _counted(self) -> int:
        """Steps, of a loop of the program's own too."""
        return self._steps or (self._observer.step if self._observer is not None else 0)

    def report(self, *, loss: Any = None, samples: float | None = None, tokens: float | None = None) -> None:
        """Attach figures to a step: its loss (a number or a one-element tensor), and this rank's samples and tokens in
        place of what was observed.

        They belong to the step being taken; said right after `optimizer.step()`, before the next batch, forward or
        backward, to the one just finished, unless that has such a figure already. Samples and tokens said several times
        before one step add up. A loss that lies on a device is read at most twice a second, as reading waits for it.
        One that is not finite is told, and the job does what its `on_nan` says.
        """
        number = None if loss is None else self._read(loss)  # also where nobody watches: an error must show there too
        observer = self._observer
        if observer is None:
            return
        if number is not None:
            observer.report("loss", number)
            self._finite.look(number, observer.step)
        if samples is not None:
            observer.report("samples", float(samples))
        if tokens is not None:
            observer.report("tokens", float(tokens))

    def progress(self, done: int, total: int) -> None:
        """Say how far the run is, in any unit; `total` 0 means unknown."""
        if self._observer is not None:
            self._observer.box.progress(done, total)

    def expect(self, seconds: float) -> Expectation:
        """Say that the next step may take `seconds`, so that the job is not held for hung meanwhile.

        Holds until that step has ended; as `with run.expect(60): ...` until the block has.
        """
        if not 0 < seconds < float("inf"):
            raise ValueError(f"expect({seconds!r}): give seconds above 0")
        expectation = Expectation(self._observer)
        expectation.begin(float(seconds))
        return expectation

    def _read(self, loss: Any) -> float | None:
        device = getattr(loss, "device", None)
        if device is None:
            return float(loss)
        if device.type != "cpu":
            now = monotonic()
            if now < self._next_reading:
                return None
            self._next_reading = now + READ_EVERY
        return float(loss.detach())


def _length(loader: object) -> int:
    """0 where it is not known."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return 0

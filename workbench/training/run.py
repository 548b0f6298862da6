"""`Run`: what a training script may say of itself. Outside a job it does the same and nobody listens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from time import monotonic as clock
from typing import Any, ClassVar

from workbench.training.observe import Observer


class Run:
    """The run of this process; get it with `Run.current()`."""

    _current: ClassVar[Run | None] = None

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer = observer
        self._last_loss = 0.0

    @classmethod
    def current(cls) -> Run:
        """This process' run; one that nobody watches when it is no rank of a job."""
        if cls._current is None:
            cls._current = cls()
        return cls._current

    @property
    def is_watched(self) -> bool:
        return self._observer is not None

    def steps(self, loader: Iterable[Any], state: dict[str, Any] | None = None, *, epochs: int = 1) -> Iterator[Any]:
        """`(step, batch)` over `epochs` passes, steps counted from 0; progress goes to the live view.

        A sampler with `set_epoch` is told each epoch. `state` (anything with state_dict/load_state_dict, by name) is
        what checkpoints will hold; at present nothing is saved or restored here.
        """
        total = len(loader) * epochs if isinstance(loader, Sized) else 0
        step = 0
        for epoch in range(epochs):
            sampler = getattr(loader, "sampler", None)
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            for batch in loader:
                yield step, batch
                step += 1
                self.progress(step, total)

    def report(
        self, *, loss: Any = None, samples: float | None = None, tokens: float | None = None, **metrics: Any
    ) -> None:
        """Attach figures to a step: its loss (a number or a one-element tensor), this rank's samples and tokens.

        Samples and tokens replace what was observed. What is said before `optimizer.step()` belongs to that step, what
        is said after it to the next one. Other metrics are accepted and not kept yet.

        A CUDA loss is read at most twice a second, since reading it waits for the device.
        """
        observer = self._observer
        if observer is None:
            return
        if loss is not None and (not getattr(loss, "is_cuda", False) or clock() - self._last_loss > 0.5):
            self._last_loss = clock()
            observer.loss = float(loss)
        if samples is not None:
            observer.said_samples = float(samples)
        if tokens is not None:
            observer.said_tokens = float(tokens)

    def progress(self, done: int, total: int) -> None:
        """How far the run is, in steps; `total` 0 means unknown."""
        if self._observer is not None:
            self._observer.box.progress(done, total)

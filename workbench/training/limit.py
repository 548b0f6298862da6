"""A job that is to end after so many optimizer steps: a short try of a long training, without a change to its program.

A loop over `Run.steps` ends as if the data had, so that what follows it (an evaluation, a last save) still runs. Any
other program leaves from within that `optimizer.step()`, on every rank after the same step, with exit code 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from workbench.training.observe import Observer


class StepLimit:
    """`current` is None where there is no limit. `is_handled`: a loop that knows the limit is at work."""

    current: ClassVar[StepLimit | None] = None

    def __init__(self, most: int, observer: Observer) -> None:
        self.most, self._observer = most, observer
        self.is_handled = False

    @property
    def is_reached(self) -> bool:
        self._observer.attend_late()
        return self._observer.step >= self.most

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._observer.step >= self.most and not self.is_handled:
            raise SystemExit(0)


def install(most: int, observer: Observer) -> None:
    """After the observer's own hook, so that the last step is counted and kept."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    limit = StepLimit.current = StepLimit(most, observer)
    register_optimizer_step_post_hook(limit.after_step)


def is_reached() -> bool:
    """Whether a loop is to end here; asking is handling it."""
    limit = StepLimit.current
    if limit is None:
        return False
    limit.is_handled = True
    return limit.is_reached

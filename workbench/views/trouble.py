"""What is wrong with a job that goes on all the same: numbers that are none, checkpoints that could not be saved."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.events import CheckpointFailed, CheckpointSaved, Event, NonFiniteFound, RecoveryStarted


class Trouble:
    """Add the record's events in order; `sentences` is what a reader should know now."""

    def __init__(self) -> None:
        self._strange: NonFiniteFound | None = None  # the generation's first
        self._unsaved: CheckpointFailed | None = None  # nothing was saved since
        self._saved = 0

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case NonFiniteFound():
                    self._strange = self._strange or event
                case CheckpointFailed():
                    self._unsaved = event
                case CheckpointSaved(checkpoint=saved):
                    self._unsaved, self._saved = None, saved.step
                case RecoveryStarted():
                    self._strange = self._unsaved = None

    @property
    def sentences(self) -> tuple[str, ...]:
        return tuple(filter(None, (self._numbers(), self._checkpoints())))

    def _numbers(self) -> str:
        odd = self._strange
        return "" if odd is None else f"rank {odd.rank}: {odd.what} is not finite at step {odd.step:,}"

    def _checkpoints(self) -> str:
        failed = self._unsaved
        if failed is None:
            return ""
        newest = f"the newest is of step {self._saved:,}" if self._saved else "there is none"
        return f"no checkpoint at step {failed.step:,}: {failed.reason}; {newest}"

"""What is wrong with a job that goes on all the same: checkpoints that could not be saved."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.events import CheckpointFailed, CheckpointSaved, Event, RecoveryStarted


class Trouble:
    """Add the record's events in order; `sentences` is what a reader should know now."""

    def __init__(self) -> None:
        self._unsaved: CheckpointFailed | None = None  # nothing was saved since
        self._saved = 0

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case CheckpointFailed():
                    self._unsaved = event
                case CheckpointSaved(checkpoint=saved):
                    self._unsaved, self._saved = None, saved.step
                case RecoveryStarted():
                    self._unsaved = None

    @property
    def sentences(self) -> tuple[str, ...]:
        failed = self._unsaved
        if failed is None:
            return ()
        newest = f"the newest is of step {self._saved:,}" if self._saved else "there is none"
        return (f"no checkpoint at step {failed.step:,}: {failed.reason}; {newest}",)

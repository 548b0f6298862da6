"""A job's checkpoints as its record tells them: which there are, and why one cannot be used.

Those that the job has thinned out go by the rule that thins them (`checkpoint_keep`, `checkpoint_keep_every`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from workbench.events import CheckpointRefused, CheckpointSaved, Event, LaunchRequested
from workbench.state import Checkpoint, CheckpointTier

MOST: Final = 50


class CheckpointList:
    """Add the record's events in order; `newest_first` is what a reader may choose from."""

    def __init__(self) -> None:
        self._known: dict[tuple[CheckpointTier, int, str], Checkpoint] = {}
        self._keep, self._keep_every = 3, 0

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case LaunchRequested(spec=spec):
                    self._keep, self._keep_every = spec.checkpoint_keep, spec.checkpoint_keep_every
                case CheckpointSaved(checkpoint=saved):
                    self._save(saved)
                case CheckpointRefused(checkpoint=bad):
                    known = self._known.get(_key(bad), bad)
                    self._known[_key(bad)] = replace(known, problem=bad.problem or "it is damaged")

    def _save(self, saved: Checkpoint) -> None:
        """It replaces what was saved of later steps before a resume, and older ones that are thinned out."""
        same_tier = [known for known in self._known.values() if known.tier is saved.tier]
        left_behind = [known for known in same_tier if known.step >= saved.step]
        for known in left_behind:
            del self._known[_key(known)]
        self._known[_key(saved)] = saved
        keep = self._keep if saved.tier is CheckpointTier.DISK else 1
        kept = sorted((k for k in self._known.values() if k.tier is saved.tier), key=lambda k: -k.step)
        for index, known in enumerate(kept):
            is_mark = self._keep_every > 0 and known.step % self._keep_every == 0 and index < MOST
            if index >= max(1, keep) and not is_mark:
                del self._known[_key(known)]

    @property
    def newest_first(self) -> tuple[Checkpoint, ...]:
        return tuple(sorted(self._known.values(), key=lambda known: (-known.step, known.tier.value)))


def _key(checkpoint: Checkpoint) -> tuple[CheckpointTier, int, str]:
    return checkpoint.tier, checkpoint.step, checkpoint.path

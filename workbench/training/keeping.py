"""When the state of a run is saved, and what it goes on from: the spec's wishes, the clock, and whoever asks.

In memory (`remembering`) as often as that costs little, on disk (`checkpoint`) as often as was asked for.

All ranks do the same after the same step. What a rank keeps beside the state is its random states, its place in the
data and its counts, so that going on is as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from workbench.training.asking import Asking
from workbench.training.checkpoint import Checkpointer, say
from workbench.training.control import Control
from workbench.training.loading import Loaded
from workbench.training.remembering import Memory
from workbench.training.rng import rng_state, set_rng_state
from workbench.training.saving import Where
from workbench.training.team import Team

if TYPE_CHECKING:
    from workbench.training.observe import Observer
    from workbench.training.position import DataPosition

NO_GROUP: Final = "no checkpoints: call torch.distributed.init_process_group before Run's steps, load or save"


class Keeping:
    """One run's, in a rank; `open` makes it where there is a job, and its ranks can meet."""

    def __init__(
        self, control: Control, checkpointer: Checkpointer, memory: Memory | None, observer: Observer | None
    ) -> None:
        self._settings, self._checkpointer, self._observer = control.settings, checkpointer, observer
        self._memory = memory
        self._every = int(self._settings.get("checkpoint_every", 0))
        self._seconds = float(self._settings.get("checkpoint_seconds", 0.0))
        self._asked = False
        self._due_at = time.monotonic() + self._seconds
        self._asking = Asking(checkpointer.team.council, self._wants)
        self._saved_at = -1  # steps of the run at the last save
        self._waits = self._remembers = False  # a save, or a copy in memory, was due in the middle of a step
        checkpointer.standing = self._checkpointing
        control.on("checkpoint", lambda *_: self._ask())

    @classmethod
    def open(cls, observer: Observer | None, known: Keeping | None = None) -> Keeping | None:
        """`known` while its process group is the one that there is; None where ranks cannot meet."""
        control = Control.current
        if control is None or not control.settings.get("checkpoint_dir"):
            return None
        team = Team.current()
        if team is None:
            say(NO_GROUP)
            return None
        if known is not None and known.is_of(team):
            return known
        settings = control.settings
        where = Where(
            folder=Path(settings["checkpoint_dir"]),
            job_id=settings.get("job_id", "job"),
            restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            keep=int(settings.get("checkpoint_keep", 3)),
            keep_every=int(settings.get("checkpoint_keep_every", 0)),
            dtrain=settings.get("version", ""),
        )
        memory = known._memory if known is not None else Memory.open(control)
        return cls(control, Checkpointer(where, team, control.fact), memory, observer)

    def _ask(self) -> None:
        self._asked = True

    @property
    def team(self) -> Team:
        return self._checkpointer.team

    def is_of(self, team: Team) -> bool:
        return team is self.team or team.group is self.team.group is None

    # --- going on ---

    def restore(self, state: Mapping[str, Any], position: DataPosition | None) -> tuple[int, int] | None:
        """Steps behind what was loaded: of the run, and of the pass that is gone on with. None: it begins."""
        for source in self._sources():
            if (loaded := source(state)) is not None:
                return self._go_on(loaded, position)
        return None

    def _sources(self) -> tuple[Callable[[Mapping[str, Any]], Loaded | None], ...]:
        """What may be gone on from, the best first."""
        resume, is_afresh = self._settings.get("resume", ""), bool(self._settings.get("from_the_start"))
        on_disk = functools.partial(self._checkpointer.load, resume=resume)
        disk = self._checkpointer.leave_all if is_afresh else on_disk
        if self._memory is None:
            return (disk,)
        newest = self._checkpointer.newest_step(resume) if self.team.leads and not is_afresh else -1
        return functools.partial(self._memory.load, newest=newest), disk

    def _go_on(self, loaded: Loaded, position: DataPosition | None) -> tuple[int, int]:
        """What a rank kept beside the state. With another number of ranks random states begin anew, by rank."""
        is_alike = len(loaded.extras) == self.team.world_size
        own = loaded.extras[self.team.rank if is_alike else 0] or {}
        if self._observer is not None:
            self._observer.go_on_from(own.get("observed", loaded.step))
        random = own.get("rng") if is_alike else None
        places = [extras.get("data") for extras in loaded.extras if extras]
        if random:
            set_rng_state(random)
        if position is not None and places and all(places):
            position.restore(places, then=lambda: set_rng_state(random) if random else None)
        steps = int(own.get("steps", loaded.step))
        self._saved_at = steps
        return steps, int(own.get("done", 0))

    # --- saving ---

    def after_step(self, steps: int, state: Mapping[str, Any], position: DataPosition, done: int) -> None:
        """The body of a step has ended, on every rank."""
        self._waits |= self._asking.step() or bool(self._every and steps % self._every == 0)
        self._remembers |= self._memory is not None and self._memory.is_due(steps)
        if not (self._waits or self._remembers):
            return
        if self._observer is not None and self._observer.is_between_backward_and_step:
            return
        if self._memory is not None:  # for the disk too: what is written is copied once
            self._remember(steps, state, position, done)
        if self._waits:
            self._waits = False
            self.save(steps, state, position, done, wait=False, is_remembered=True)

    def _remember(self, steps: int, state: Mapping[str, Any], position: DataPosition, done: int) -> None:
        assert self._memory is not None
        self._remembers = False
        extras = self._extras(steps, position, done)
        with self._checkpointing():
            self._memory.take(steps, self._number(steps), state, extras)

    def _wants(self) -> bool:
        now = time.monotonic()
        is_late = bool(self._seconds) and now >= self._due_at
        wants, self._asked = self._asked or is_late, False
        if wants:
            self._due_at = now + self._seconds
        return wants

    def save(
        self, steps: int, state: Mapping[str, Any], position: DataPosition | None, done: int = 0, *, wait: bool,
        is_remembered: bool = False,
    ) -> bool:  # fmt: skip
        """`is_remembered`: this very state has just been copied in memory, if that is done at all."""
        extras = self._extras(steps, position, done)
        held = self._memory.hold(steps) if is_remembered and self._memory is not None else None
        is_begun = self._checkpointer.save(state, self._number(steps), extras, wait=wait, held=held)
        if is_begun:
            self._saved_at = steps
        return is_begun

    def _extras(self, steps: int, position: DataPosition | None, done: int) -> dict[str, Any]:
        """What this rank keeps beside the state."""
        observed = self._observer.step if self._observer is not None else 0
        extras: dict[str, Any] = {"steps": steps, "done": done, "observed": observed, "rng": rng_state()}
        return extras if position is None else extras | {"data": position.state_dict()}

    def _number(self, steps: int) -> int:
        """By which a checkpoint is called: optimizer steps, where they are seen."""
        return (self._observer.step if self._observer is not None else 0) or steps

    def _checkpointing(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._observer is None else self._observer.checkpointing()

    def end(self, steps: int, state: Mapping[str, Any], position: DataPosition, done: int) -> None:
        """The loop is over: what was done since the last save is kept too, where the run is kept at all."""
        if (self._every or self._seconds) and steps != self._saved_at:
            self.save(steps, state, position, done, wait=True)
        self._checkpointer.finish()

"""Saving and loading the state of a run: training waits for a copy of it, a thread writes that, and nothing counts
until all of it is durable.

Each rank writes its part into one folder that is no checkpoint yet. When all have said that theirs is on disk, rank 0
writes the manifest and gives the folder its name (`catalogue`). Whatever goes wrong on the way costs that checkpoint
only: what was written is removed, the reason is recorded in words, training goes on. Loading checks every byte before
any value is looked at, and passes over what is not as it was saved.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from workbench.training import catalogue, manifest, states
from workbench.training.catalogue import Found
from workbench.training.guard import Guard
from workbench.training.loading import Choice, Loaded, read_into
from workbench.training.manifest import Manifest
from workbench.training.proof import difference, is_proof, prove
from workbench.training.saving import Copy, Save, SaveError, Where
from workbench.training.staging import Held, Staging
from workbench.training.states import UnfitError
from workbench.training.team import Team

AT_EXIT: Final = 120.0  # s that a process which ends waits for a save on its way
Fact = Callable[..., None]  # (name of an event, fields)


class Checkpointer:
    """One run's. All ranks call its methods at the same points of their programs, in the main thread."""

    def __init__(self, where: Where, team: Team, fact: Fact) -> None:
        self.where, self.team, self._fact = where, team, fact
        self._staging = Staging(team.rank, team.world_size)
        self._thread: threading.Thread | None = None
        self._writing = 0  # the step that is being written
        self._was_skipped = False
        self._is_shared = True  # the ranks held the same when last compared: each copies a share of it
        self._release: Callable[[], object] | None = None  # of the copy that is being written
        self.standing: Callable[[], AbstractContextManager[object]] = nullcontext  # around what training stands for
        if team.leads:
            catalogue.remove_leftovers(where.folder, where.job_id)

    # --- saving ---

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(
        self, state: Mapping[str, Any], step: int, extras: Any = None, *, wait: bool = False, held: Held | None = None
    ) -> bool:
        """Copy the state and have it written; False when the save before is still on its way, unless `wait` is asked.

        Never raises for what the disk does, nor for a state that cannot be kept: that becomes a fact of the job.
        `held`: a copy of this very state, which is written instead of another and then released.
        """
        # Waiting for rank 0 is no checkpoint's time: a rank that does not come has to be noticed as ever.
        if self.team.decide(lambda: "busy" if self.is_busy and not wait else "go") == "busy":
            self._say_skipped(step)
            if held is not None:
                held.release()
            return False
        self.finish()
        with self.standing():
            begun = time.monotonic()
            copied = self._copy(state, step, extras, held)
            self._release = held.release if held is not None else None
            self._start(Save(copied, self.where, self.team), begun, time.monotonic() - begun)
        return True

    def _copy(self, state: Mapping[str, Any], step: int, extras: Any, held: Held | None) -> Copy:
        try:
            taken = states.take(state)
            proof = prove(taken)
            known = held.tensors if held is not None else {}
            tree, objects = self._staging.copy(taken, known, is_shared=self._is_shared)
        except Exception as error:  # the other ranks wait to hear of it
            problem = str(error) if isinstance(error, UnfitError) else f"{type(error).__name__}: {error}"
            return Copy(step=step, problem=problem)
        return Copy(step=step, tree=tree, objects=objects, extras=extras, proof=proof, is_shared=self._is_shared)

    def _start(self, save: Save, begun: float, stalled: float) -> None:
        self._writing, self._was_skipped = save.step, False
        self._thread = threading.Thread(
            target=self._write, args=(save, begun, stalled), name="dtrain-checkpoint", daemon=True
        )
        atexit.unregister(self.finish)
        atexit.register(self.finish)  # again: the last to be registered is the first to be called
        if Guard.current is not None:
            Guard.current.before_destroy["checkpoint"] = self.finish
        self._thread.start()

    def _write(self, save: Save, begun: float, stalled: float) -> None:
        try:
            made, path = self._written(save)
        except SaveError as error:
            if self.team.leads:
                at = "" if error.rank is None or self.team.world_size == 1 else f"rank {error.rank}: "
                say(f"no checkpoint at step {save.step}: {at}{error}")
                self._fact("CheckpointFailed", step=save.step, reason=str(error), rank=error.rank)
            return
        if self.team.leads:
            seconds = time.monotonic() - begun
            self._fact("CheckpointSaved", checkpoint=describe(path, made), seconds=seconds, stalled=stalled)
            catalogue.prune(self.where.folder, self.where.keep, self.where.keep_every)

    def _written(self, save: Save) -> tuple[Manifest, Path]:
        try:
            return save.write()
        finally:
            self._is_shared = save.agreed is not False
            if self._release is not None:
                self._release()

    def _say_skipped(self, step: int) -> None:
        if self.team.leads and not self._was_skipped:
            self._was_skipped = True
            say(f"no checkpoint at step {step}: that of step {self._writing} is still being written")

    def finish(self, timeout: float = AT_EXIT) -> bool:
        """Wait for the save that is on its way; False when it takes longer."""
        if self._thread is not None:
            with self.standing():
                self._thread.join(timeout)
            if self._thread.is_alive():
                say(f"gave up waiting for the checkpoint of step {self._writing} after {timeout:.0f} s")
                return False
        return True

    # --- loading ---

    def newest_step(self, resume: str = "") -> int:
        """Of what `load` would look at first, by its name and manifest; -1: nothing is there. Rank 0 asks."""
        found = catalogue.look(Path(resume)) if resume else catalogue.newest(self.where.folder)
        return found.step if found is not None else -1

    def load(self, state: Mapping[str, Any], resume: str = "") -> Loaded | None:
        """Go back to the newest checkpoint that is what was saved (`resume`: to that one, or the newest before it).

        None: there is none, and the state is as it was. Raises `UnfitError` when the newest is of another program.
        """
        self.finish()
        begun = time.monotonic()
        for path, made in Choice(self.where, self.team, self._refuse, resume):
            extras = read_into(path, state, self.team)
            loaded = prove(states.take(state)).whole if made.proof else ""
            if problem := next(filter(None, self.team.gather(difference(made.proof, loaded))), ""):
                if self.team.leads:
                    self._refuse(Found(path=path, step=made.step, manifest=made, problem=problem))
                continue
            if self.team.leads:
                if made.agreed is False:
                    say(f"goes on from what rank 0 had in {path}: its ranks did not hold the same")
                elif not resume:
                    self._leave_doubtful(path, made.step)
                if resume and path.parent == self.where.folder:
                    catalogue.abandon(self.where.folder, path.name)
                elif resume:  # another job's: of this one's own none is newer
                    catalogue.abandon_all(self.where.folder)
                seconds = time.monotonic() - begun
                proved = is_proof(made.proof, loaded)
                self._fact("RunResumed", step=made.step, tier="disk", path=str(path), seconds=seconds, is_proved=proved)
            return Loaded(step=made.step, path=str(path), extras=extras)
        return None

    def leave_all(self, state: Mapping[str, Any]) -> None:
        """Begin anew: the checkpoints that are there are no longer gone on from by themselves."""
        if self.team.leads:
            catalogue.abandon_all(self.where.folder)
            say("begins anew, as was asked for; the checkpoints from before are left behind")

    def _leave_doubtful(self, path: Path, step: int) -> None:
        """Tell of newer ones that were passed over; they stay, for who asks for them."""
        newer = [found for found in catalogue.candidates(self.where.folder) if found.step > step and found.is_doubtful]
        for found in reversed(newer):
            reason = f"its ranks did not hold the same, unlike those of step {step}; --step {found.step} takes rank 0's"
            self._pass_over(replace(found, problem=found.problem or reason))
        if newer:
            catalogue.abandon(self.where.folder, path.name)

    def _refuse(self, found: Found) -> None:
        manifest.mark(found.path, found.problem)
        self._pass_over(found)

    def _pass_over(self, found: Found) -> None:
        say(f"checkpoint {found.path} is passed over: {found.problem}")
        refused = {**describe(found.path, found.manifest), "step": found.step, "problem": found.problem}
        self._fact("CheckpointRefused", checkpoint=refused)


def describe(path: Path, made: Manifest | None) -> dict[str, Any]:
    """As the record has it: the fields of `workbench.state.Checkpoint`."""
    if made is None:
        return {"step": 0, "path": str(path), "world_size": 0, "saved_at": 0.0}
    return {
        "step": made.step, "path": str(path), "world_size": made.world_size, "saved_at": made.saved_at,
        "size": made.size, "digest": made.digest, "agreed": made.agreed,
    }  # fmt: skip


def say(text: str) -> None:
    """A line for the job's log."""
    sys.stderr.write(f"dtrain: {text}\n")

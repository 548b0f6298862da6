"""One save, from the copy of the state to the folder's name: what a thread of each rank does while training goes on.

Every exchange between the ranks is one that all of them reach, whatever has failed on one: a failure is told to all and
costs that checkpoint only. The disk's own words are kept.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException

from workbench.training import catalogue, files, manifest, states
from workbench.training.manifest import FileRecord, Manifest
from workbench.training.proof import NO_PROOF, Proof
from workbench.training.states import UnfitError
from workbench.training.team import Team

ROOT: Final = "dtrain"  # under it in a checkpoint: what is no tensor of the program


@dataclass(frozen=True, kw_only=True)
class Where:
    """Which folder, whose checkpoints, how many are kept."""

    folder: Path
    job_id: str = "job"
    restart_count: int = 0
    keep: int = 3
    keep_every: int = 0
    dtrain: str = ""

    def partial(self, step: int) -> Path:
        return catalogue.partial_path(self.folder, step, f"{self.job_id}-{self.restart_count}")


class SaveError(RuntimeError):
    """A save did not come about, with the reason in words, and the rank."""

    def __init__(self, reason: str, rank: int | None = None) -> None:
        super().__init__(reason)
        self.rank = rank


@dataclass(frozen=True)
class Copy:
    """What is to be written: this rank's part of the tree, its objects' states, and what it keeps beside.

    `problem`: why there is no such copy on this rank. `is_shared`: of what all ranks should hold alike it is a share;
    else rank 0's has all of it.
    """

    step: int
    tree: Mapping[str, Any] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    extras: Any = None
    problem: str = ""
    proof: Proof = NO_PROOF
    is_shared: bool = True


@dataclass(frozen=True)
class _Opening:
    """What a rank says before it writes."""

    step: int
    problem: str
    objects: str  # digest of its objects' states
    proof: Proof


class Save:
    """`write` does it, on all ranks at once; the folder is as before when it raises."""

    def __init__(self, copy: Copy, where: Where, team: Team) -> None:
        self.copy, self.where, self.team = copy, where, team
        self.step, self.problem = copy.step, copy.problem
        self.partial = where.partial(copy.step)
        self.agreed: bool | None = None  # whether all ranks held the same; None: not compared, or not yet

    def write(self) -> tuple[Manifest, Path]:
        """The checkpoint, committed. Raises `SaveError`, on every rank the same unless a rank is gone."""
        try:
            return self._write()
        except (Exception, CheckpointException) as error:  # torch's is a BaseException
            if self.team.leads:
                catalogue.discard(self.partial)
            reason, rank = explain(error, self.where.folder)
            raise SaveError(reason, rank) from error

    def _write(self) -> tuple[Manifest, Path]:
        rest = self._rest()
        openings = self.team.gather(_Opening(self.step, self.problem, _digest(rest), self.copy.proof))
        for rank, opening in enumerate(openings):
            if opening.problem:
                raise SaveError(opening.problem, rank)
            if opening.step != self.step:
                raise SaveError(f"the ranks are at different steps: {self.step} and {opening.step}", rank)
        if self.team.rank and openings[0].objects == openings[self.team.rank].objects:
            rest.pop("objects")  # rank 0 writes the same
        shared = [opening.proof.shared for opening in openings]
        self.agreed = len(set(shared)) == 1 if len(shared) > 1 and any(shared) else None
        if self.agreed is False and self.copy.is_shared:  # put together it would be what no rank ever had
            raise SaveError("the ranks do not hold the same, of which each has copied a share; rank 0's is saved next")
        written = files.write({**self.copy.tree, ROOT: rest}, self.partial, group=self.team.group)
        records = self.team.gather(written)
        return self._publish({name: record for part in records for name, record in part.items()})

    def _rest(self) -> dict[str, Any]:
        """What is no tensor of the program, as bytes; and a place to write to."""
        rank = str(self.team.rank)
        rest: dict[str, Any] = {}
        try:
            rest["extras"] = {rank: files.pack(self.copy.extras, "what the run keeps of itself")}
            rest["objects"] = {rank: files.pack(self.copy.objects, f"the state of {', '.join(self.copy.objects)}")}
            if self.team.leads:
                catalogue.begin(self.partial)
                self._check_room()
        except (UnfitError, OSError) as error:
            self.problem = self.problem or explain(error, self.where.folder)[0]
        return rest

    def _check_room(self) -> None:
        """Before a disk is filled for nothing; what other ranks will write is not known here."""
        needed = sum(value.nbytes for _, value in states.leaves(self.copy.tree) if isinstance(value, torch.Tensor))
        if files.free_bytes(self.partial) < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _publish(self, records: Mapping[str, FileRecord]) -> tuple[Manifest, Path]:
        """Rank 0's word on how it went is everybody's."""
        outcome: Any = None
        if self.team.leads:
            made = Manifest(
                step=self.step,
                world_size=self.team.world_size,
                saved_at=time.time(),
                files=dict(records),
                job_id=self.where.job_id,
                restart_count=self.where.restart_count,
                torch=torch.__version__,
                dtrain=self.where.dtrain,
                proof=self.copy.proof.whole,
                agreed=self.agreed,
            )
            try:
                outcome = made, commit(self.partial, made)
            except (OSError, SaveError) as error:
                outcome = SaveError(explain(error, self.where.folder)[0], 0)
        outcome = self.team.tell(outcome)
        if isinstance(outcome, SaveError):
            raise outcome
        done: tuple[Manifest, Path] = outcome
        return done


def commit(partial: Path, made: Manifest) -> Path:
    """Make it a checkpoint. `SaveError` when what other ranks have written cannot be seen from here."""
    if problem := manifest.quick_problem(partial, made):
        raise SaveError(f"{problem}; the folder must be one that all hosts share: {partial.parent}")
    return catalogue.publish(partial, made)


def _digest(rest: Mapping[str, Any]) -> str:
    parts: Sequence[torch.Tensor] = list(rest.get("objects", {}).values())
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def explain(error: BaseException, folder: Path) -> tuple[str, int | None]:
    """Why a save failed, in words, and whose fault it was."""
    failures = getattr(error, "failures", None)  # torch's: {rank: (exception, where)}
    if failures:
        rank, (cause, _) = min(failures.items(), key=lambda item: not isinstance(item[1][0], OSError))
        return explain(cause, folder)[0], rank
    if isinstance(error, OSError):
        return _disk_words(error, folder), None
    if isinstance(error, SaveError | UnfitError):
        return str(error), getattr(error, "rank", None)
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:500], None


def _disk_words(error: OSError, folder: Path) -> str:
    strerror = error.strerror or str(error)
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"disk full: {_free(folder)} at {folder}"
        case errno.EFBIG:
            return f"disk full: a file there may not be as large as this ({strerror}), at {folder}"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"{folder} cannot be written: {strerror}"
        case errno.EIO:
            return f"the disk fails: {strerror}, at {folder}"
    return f"{strerror}, at {folder}"


def _free(folder: Path) -> str:
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    return f"{shutil.disk_usage(there).free / 2**20:.1f} MiB free"

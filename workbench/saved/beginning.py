"""What a rerun begins from when not from the start: a checkpoint of the saved job that is, byte for byte, what it was.

It lies where it was saved, or in the session's file, from where it is put into this DTRAIN_HOME. There it stays for a
week after it was last begun from.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workbench.capture import digest_of
from workbench.errors import SavedFileError
from workbench.saved.session import SavedJob
from workbench.state import Checkpoint, CheckpointTier
from workbench.store.home import home_dir, private_dir
from workbench.store.saved.archive import Archive
from workbench.training import catalogue, manifest

NEWEST: Final = -1  # in place of a step
KEPT: Final = 7 * 86_400.0  # s that what was unpacked stays after its last use
PREFIX: Final = "checkpoint-"


@dataclass(frozen=True)
class Beginning:
    """`step`: optimizer steps behind it. `path`: its folder here; with `names`, these files are put there first."""

    step: int
    path: Path
    names: tuple[str, ...] = ()
    digest: str = ""

    def place(self, archive: Archive) -> str:
        """Its folder, once it is there and whole. Raises `SavedFileError` when it is not what was saved."""
        if self.names:
            sweep(self.path.parents[1], time.time() - KEPT)
            if problem_of(self.path, self.digest):
                private_dir(self.path)
                for name in self.names:
                    archive.copy(name, self.path / name.rpartition("/")[2])
            os.utime(self.path.parent)
        if problem := problem_of(self.path, self.digest):
            raise SavedFileError(f"the checkpoint of step {self.step} cannot be used: {problem}")
        return str(self.path)


def sweep(root: Path, before: float) -> None:
    """Remove what was last used earlier than `before` (epoch s): it is in its session's file still."""
    for folder in root.glob(f"{PREFIX}*"):
        if folder.stat().st_mtime < before:
            shutil.rmtree(folder, ignore_errors=True)


def problem_of(path: Path, digest: str = "") -> str:
    """What is wrong with a checkpoint, in words; "": it is what was saved. Reads all of it."""
    found = catalogue.look(path)
    if found.manifest is None or found.problem:
        return found.problem
    if digest and found.manifest.digest != digest:
        return "it is another one than when the session was saved"
    return manifest.find_problem(path, found.manifest)


def beginning_of(job: SavedJob, step: int | None, here: Path | None) -> tuple[Beginning | None, str]:
    """The checkpoint of that step (`NEWEST`: the newest one that can be used), or what keeps it from being used.

    `step` None: what the job itself began from, at `here`; None where that was the start.
    """
    if step is None:
        return _again(here) if here is not None else (None, "")
    entry = job.session.record(job.job_id).entry
    known = [one for one in entry.checkpoints if one.tier is CheckpointTier.DISK]
    if not known:
        return None, "it has saved no checkpoint to begin from: launch with --checkpoint-every N"
    asked = [one for one in known if step in (NEWEST, one.step)]
    if not asked:
        there = ", ".join(map(str, sorted({one.step for one in known})))
        return None, f"it has no checkpoint of step {step}: there are {there}"
    problems = []
    for one in asked:
        found, problem = _usable(job, one)
        if found is not None:
            return found, ""
        problems.append(problem)
    more = f"; nor any of the {len(problems) - 1} before it" if len(problems) > 1 else ""
    return None, f"{problems[0]}{more}"


def _usable(job: SavedJob, one: Checkpoint) -> tuple[Beginning | None, str]:
    archive, what = job.session.archive, f"the checkpoint of step {one.step}"
    prefix = f"checkpoints/{job.job_id}/{one.step}/"
    if names := tuple(name for name in archive.document.files if name.startswith(prefix)):
        known_by = digest_of(f"{job.job_id}\0{one.digest}".encode())[:16]  # a digest from a file may be any text
        folder = home_dir() / "reruns" / f"{PREFIX}{known_by}" / f"step-{one.step:08d}"
        return Beginning(one.step, folder, names, one.digest), ""
    path = Path(one.path).expanduser()
    if not path.is_dir():
        fix = "save with --with-checkpoints, or put it back"
        return None, f"{what} is not in {archive.path.name}, and no longer at {one.path}: {fix}"
    problem = one.problem or problem_of(path, one.digest)
    return (
        (None, f"{what} at {path} cannot be used: {problem}")
        if problem
        else (Beginning(one.step, path, digest=one.digest), "")
    )


def _again(path: Path) -> tuple[Beginning | None, str]:
    if problem := problem_of(path):
        return (
            None,
            f"it began from the checkpoint {path}, which cannot be used: {problem}; give --from-checkpoint STEP",
        )
    return Beginning(catalogue.look(path).step, path), ""

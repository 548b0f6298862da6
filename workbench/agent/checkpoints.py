"""A job's checkpoints as values, for those who ask and for the ranks that are to go on from one.

Where they lie, what is known of them, and what a thorough check has found: that reads every byte, so it is done when
somebody asks for it and its result kept for as long as the files look the same. May be called from any thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from workbench.commands import StartRanks
from workbench.spec import JobSpec
from workbench.state import THE_START, Checkpoint
from workbench.training import catalogue, manifest
from workbench.training.catalogue import Found

Look: TypeAlias = tuple[tuple[str, int, int, int], ...]  # name, size, time of change and inode of each file


def checkpoint_dir(spec: JobSpec, job_folder: Path) -> Path:
    """Where the job's checkpoints lie on this host; it need not be there yet."""
    if spec.checkpoint_dir:
        return Path(spec.cwd or Path.cwd(), spec.checkpoint_dir)
    return job_folder / "checkpoints"


def to_value(found: Found) -> Checkpoint:
    known = found.manifest
    return Checkpoint(
        step=found.step,
        path=str(found.path),
        world_size=known.world_size if known else 0,
        saved_at=known.saved_at if known else 0.0,
        size=known.size if known else 0,
        digest=known.digest if known else "",
        problem=found.problem,
        agreed=known.agreed if known else None,
    )


class Checkpoints:
    """What this host knows of checkpoints."""

    def __init__(self) -> None:
        self._checked: dict[Path, tuple[Look, str]] = {}

    def listing(self, folder: Path, *, thorough: bool = False) -> list[Checkpoint]:
        """Newest first, those with a problem as well; `thorough` reads all of each."""
        return [to_value(self._check(found, thorough=thorough)) for found in catalogue.scan(folder)]

    def environ(self, command: StartRanks, job_folder: Path) -> dict[str, str]:
        """For programs that save and load by themselves: where to, and what to go on from if there is something."""
        folder = checkpoint_dir(command.spec, job_folder)
        newest = "" if command.resume == THE_START else command.resume or self.newest(folder)
        return {"DTRAIN_CHECKPOINT_DIR": str(folder), **({"DTRAIN_RESUME_FROM": newest} if newest else {})}

    def newest(self, folder: Path) -> str:
        """The path of the newest that nothing is known against; "" when there is none. Reads manifests only."""
        checked = (self._check(found, thorough=False) for found in catalogue.candidates(folder))
        return next((str(found.path) for found in checked if not found.problem), "")

    def _check(self, found: Found, *, thorough: bool) -> Found:
        if found.manifest is None:
            return found
        look = _look(found)
        seen = self._checked.get(found.path)
        if seen is None or seen[0] != look:
            if not thorough:
                return found
            problem = manifest.find_problem(found.path, found.manifest)
            manifest.mark(found.path, problem)
            seen = self._checked[found.path] = (look, problem)
        return Found(
            path=found.path,
            step=found.step,
            manifest=found.manifest,
            problem=seen[1],
            is_abandoned=found.is_abandoned,
        )


def _look(found: Found) -> Look:
    assert found.manifest is not None
    return tuple(_status(found.path / name) for name in found.manifest.files)


def _status(path: Path) -> tuple[str, int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return path.name, -1, 0, 0
    return path.name, status.st_size, status.st_mtime_ns, status.st_ino

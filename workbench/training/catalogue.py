"""A job's checkpoints as folders: begun, published, listed, passed over, removed. Standard library only.

    step-00000410                  whole: its manifest was committed before it got this name
    step-00000410.1                the same step, saved again after going back to an earlier one
    step-00000420.partial-JOB-2    being saved by generation 2 of JOB
    .deleted-step-00000400         being removed
    abandoned.json                 names that were left behind when somebody chose an earlier checkpoint

A rename is what makes a checkpoint appear and what makes it vanish, so a process killed at any instant leaves each
whole or not there. Only rank 0 of a job writes here; anybody may list.
"""

from __future__ import annotations

import errno
import itertools
import json
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workbench.training import manifest as mf
from workbench.training.manifest import Manifest, ManifestError

ABANDONED: Final = "abandoned.json"
DELETED: Final = ".deleted-"
_NAME: Final = re.compile(r"step-(\d{8,15})(?:\.(\d{1,6}))?\Z")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A folder that has a checkpoint's name. `manifest` is None when that cannot be used; `problem` says what is wrong.

    `is_abandoned`: somebody went back to an earlier one since, so that it is taken only when it is asked for.
    """

    path: Path
    step: int
    manifest: Manifest | None
    problem: str
    is_abandoned: bool = False

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_doubtful(self) -> bool:
        """Whole, but the ranks that saved it did not hold the same: it is rank 0's."""
        return self.manifest is not None and self.manifest.agreed is False


def scan(folder: Path) -> list[Found]:
    """All of them, newest first, checked by manifest, names and sizes. A folder that is not there has none."""
    abandoned = _abandoned(folder)
    found = [_look(path, path.name in abandoned) for _, path in sorted(_named(folder), reverse=True)]
    return [checkpoint for checkpoint in found if checkpoint is not None]


def _named(folder: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    with suppress(OSError):
        for path in folder.iterdir():
            if match := _NAME.match(path.name):
                yield (int(match[1]), int(match[2] or 0)), path


def look(path: Path) -> Found:
    """One folder, whatever its name."""
    found = _look(path, is_abandoned=False)
    match = _NAME.match(path.name)
    return found or Found(path=path, step=int(match[1]) if match else 0, manifest=None, problem="it is not there")


def _look(path: Path, is_abandoned: bool) -> Found | None:
    """None: removed since it was listed."""
    match = _NAME.match(path.name)
    step = int(match[1]) if match else 0
    try:
        manifest = mf.read(path)
    except ManifestError as error:
        if not path.is_dir():
            return None
        return Found(path=path, step=step, manifest=None, problem=str(error), is_abandoned=is_abandoned)
    problem = mf.quick_problem(path, manifest)
    if match and manifest.step != step:
        problem = f"{mf.NAME} is that of step {manifest.step}"
    return Found(path=path, step=manifest.step, manifest=manifest, problem=problem, is_abandoned=is_abandoned)


def candidates(folder: Path) -> list[Found]:
    """What a job that goes on by itself may take, newest first, those with a problem as well; what is doubtful last."""
    return sorted((found for found in scan(folder) if not found.is_abandoned), key=lambda found: found.is_doubtful)


def newest(folder: Path) -> Found | None:
    """The one to take, that nothing is known against, without reading all of it."""
    return next((found for found in candidates(folder) if not found.problem), None)


# --- saving -----------------------------------------------------------------------------------------------------------


def partial_path(folder: Path, step: int, tag: str) -> Path:
    """Where a checkpoint is written before it is one; `tag` names job and generation."""
    return folder / f"step-{step:08d}.partial-{tag}"


def begin(partial: Path) -> None:
    """Make it anew, for this user only. Raises `OSError`."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, parents=True)


def publish(partial: Path, manifest: Manifest) -> Path:
    """Make the checkpoint appear; its files must be durable already. Raises `OSError`, and then it is not there."""
    mf.write_durably(partial / mf.NAME, mf.encode(manifest))
    folder = partial.parent
    taken = _abandoned(folder)
    for number in itertools.count():
        path = folder / (f"step-{manifest.step:08d}" + (f".{number}" if number else ""))
        if path.name in taken or path.exists():
            continue
        try:
            partial.rename(path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another job's, in a folder that both use
                raise
            continue
        mf.sync_folder(folder)
        return path
    raise AssertionError


def discard(partial: Path) -> None:
    """Remove what could not be finished."""
    shutil.rmtree(partial, ignore_errors=True)


def remove_leftovers(folder: Path, job_id: str) -> None:
    """What earlier generations of this job did not finish saving, or removing."""
    with suppress(OSError):
        for path in list(folder.iterdir()):
            is_partial = re.match(rf"step-\d+\.partial-{re.escape(job_id)}-\d+\Z", path.name)
            if is_partial or path.name.startswith(DELETED):
                shutil.rmtree(path, ignore_errors=True)


# --- what is kept -----------------------------------------------------------------------------------------------------


def prune(folder: Path, keep: int, keep_every: int = 0) -> list[str]:
    """Remove all but the newest `keep` whole ones and each whose step is a multiple of `keep_every`; what went.

    The newest whole one is never removed, nor the newest that is not doubtful; and nothing is while there is none.
    """
    removed = []
    for name in superfluous(scan(folder), keep, keep_every):
        hidden = folder / f"{DELETED}{name}"
        with suppress(OSError):
            shutil.rmtree(hidden, ignore_errors=True)
            (folder / name).rename(hidden)  # a kill on the way leaves nothing that looks whole
            shutil.rmtree(hidden, ignore_errors=True)
            removed.append(name)
    return removed


def superfluous(found: list[Found], keep: int, keep_every: int) -> list[str]:
    """Names to be removed, of a list that is newest first. Damaged ones go when a whole one of their age would."""
    current = [each for each in found if not each.is_abandoned]
    whole = [each for each in current if not each.problem][: max(keep, 1)]
    if not whole:
        return []
    oldest = whole[-1]
    after = current[current.index(oldest) + 1 :]
    left_behind = [each for each in found if each.is_abandoned and each.step <= whole[0].step]
    sound = next((each for each in current if not each.problem and not each.is_doubtful), None)
    is_kept = [each for each in after if keep_every and each.step % keep_every == 0 and not each.problem]
    is_kept += [sound] if sound is not None else []
    return [each.name for each in [*after, *left_behind] if each not in is_kept]


def abandon(folder: Path, chosen: str) -> None:
    """Somebody goes on from `chosen`: what is newer is no longer taken by itself. Raises `OSError`."""
    names, before = [found.name for found in scan(folder)], _abandoned(folder)
    if chosen in names:
        now = {*before, *names[: names.index(chosen)]} - {chosen}
        if now != before:
            _write_abandoned(folder, now)


def abandon_all(folder: Path) -> None:
    """Somebody begins anew. Raises `OSError`."""
    if names := {path.name for _, path in _named(folder)}:
        _write_abandoned(folder, names)


def _abandoned(folder: Path) -> frozenset[str]:
    try:
        return frozenset(map(str, json.loads((folder / ABANDONED).read_bytes())))
    except (OSError, ValueError, TypeError):
        return frozenset()


def _write_abandoned(folder: Path, names: Collection[str]) -> None:
    there = [name for name in sorted(names) if (folder / name).exists()]
    mf.write_durably(folder / ABANDONED, json.dumps(there).encode())

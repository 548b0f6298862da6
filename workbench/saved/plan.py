"""What a rerun would do, made before anything starts: which code, where, what is missing here, what is not as it was.

Reads files and looks up packages; runs nothing of what was saved, and writes nothing.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from msgspec.structs import replace

from workbench.capture import digest_of, installed, modules_of, top_imports
from workbench.errors import UsageError
from workbench.events import CellSent, FaultInjected, ResizeRequested, ResumeRequested
from workbench.origin import Origin
from workbench.saved.beginning import Beginning, beginning_of
from workbench.saved.parameters import Setting, apply, parameters, set_parameters, sweep
from workbench.saved.session import SavedJob, SavedSession
from workbench.spec import EntrypointKind, JobSpec
from workbench.store.saved.scrub import REMOVED

MATTER: Final = ("torch", "numpy")  # packages whose versions change what is computed, whoever imports them
_SHOWN: Final = 8


@dataclass(frozen=True)
class Changes:
    """What is to be other than it was. `settings`: values by name, several of one name are a sweep.

    `checkpoint`: begin from the saved one of that step (`beginning.NEWEST`); None: as the job itself began.
    """

    settings: Sequence[tuple[str, Sequence[str]]] = ()
    nproc_per_node: int | None = None
    steps: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    checkpoint: int | None = None


@dataclass(frozen=True)
class Attempt:
    """One job to launch. `files`: code to be written to a folder of its own, by path; empty: it lies there unchanged.

    `spec.entrypoint` and `spec.cwd` are relative to that folder where `files` are given and they are not absolute.
    """

    spec: JobSpec
    settings: tuple[Setting, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    cells: tuple[CellSent, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One saved job's rerun: `attempts` are queued together. With `problems` nothing may start; `notes` are said.

    `beginning`: the checkpoint that they go on from, None where they begin at the start.
    """

    job: SavedJob
    attempts: tuple[Attempt, ...]
    beginning: Beginning | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def make_plan(session: SavedSession, job: SavedJob, changes: Changes) -> Plan:
    """Raises `UsageError` when something is to be set that the program does not have."""
    spec = job.spec
    problems, notes = _packages(job), _differences(session, job, spec)
    base, files, code_notes, code_problems = _place_code(session, job)
    problems += code_problems
    notes += code_notes
    if spec.kind is EntrypointKind.FUNCTION:
        problems += _unpickled(job)
        notes += _of_pickles(session, spec)
    attempts = tuple(_attempt(base, files, job, changes, settings) for settings in sweep(changes.settings))
    problems += _unfilled(attempts)
    beginning, problem = beginning_of(job, changes.checkpoint, _here(spec.resume_from) if spec.resume_from else None)
    problems += [problem] if problem else []
    if beginning is not None:
        notes.insert(0, f"begins from the checkpoint of step {beginning.step:,}")
    notes += _untold(session, job)
    return Plan(job, attempts, beginning, tuple(dict.fromkeys(problems)), tuple(dict.fromkeys(notes)))


def _attempt(
    base: JobSpec,
    files: Mapping[str, str],
    job: SavedJob,
    changes: Changes,
    settings: tuple[Setting, ...],
) -> Attempt:
    origin = job.origin
    here = files or _as_it_lies(origin)
    texts = {**job.code, **here}
    if base.kind is EntrypointKind.FUNCTION and settings and not origin.sources:
        raise UsageError(
            f"{job.spec.label} is a function, whose arguments are in its pickle",
            hint="launch it with others from its own program",
        )
    name = job.spec.label if base.kind is EntrypointKind.SOURCE else next((s.path for s in origin.sources), "")
    program = texts.get(name, "")
    others = [text for other, text in texts.items() if other != name]
    cells = tuple(event for event in job.events() if isinstance(event, CellSent))
    inside, outside = _of_cells(cells, settings)
    new, args = apply(program, others, base.args, outside)
    spec = replace(base, args=args, env={**base.env, **changes.env}, name=_name(job.spec.label, settings))
    if changes.nproc_per_node is not None:
        spec = replace(spec, nproc_per_node=changes.nproc_per_node, min_ranks=0)
    if changes.steps is not None:
        spec = replace(spec, max_steps=changes.steps)
    if new != program and base.kind is EntrypointKind.SOURCE:
        spec = replace(spec, source=new)
    elif new != program:
        files = {**here, name: new}
        spec = replace(spec, **_in_folder(job, name))
    return Attempt(spec, settings, files, inside)


def _of_cells(cells: tuple[CellSent, ...], settings: Sequence[Setting]) -> tuple[tuple[CellSent, ...], list[Setting]]:
    """Cells with these values for the parameters that they mark, and the settings that none of them has."""
    marked = [parameters(cell.source) for cell in cells]
    new = tuple(
        replace(cell, source=set_parameters(cell.source, [one for one in settings if one[0] in known]))
        for cell, known in zip(cells, marked, strict=True)
    )
    return new, [one for one in settings if not any(one[0] in known for known in marked)]


def _name(label: str, settings: Sequence[Setting]) -> str:
    """`trial-lr0.1`: a sweep's jobs are told apart in the list."""
    words = [label[:40], *(re.sub(r"[^A-Za-z0-9_.-]", "", f"{name}{value}")[:16] for name, value in settings)]
    return "-".join(words)[:64].rstrip("-._")


# --- code -------------------------------------------------------------------------------------------------------------


def _place_code(session: SavedSession, job: SavedJob) -> tuple[JobSpec, Mapping[str, str], list[str], list[str]]:
    """`(spec, files, notes, problems)`: in place where it lies there as it was, else from what was saved."""
    spec, origin = job.spec, job.origin
    notes: list[str] = []
    cwd = _here(spec.cwd)
    if spec.cwd and not cwd.is_dir():
        notes.append(f"its working directory {spec.cwd} is not here: it runs in {_told(Path.cwd())}")
        cwd = Path.cwd()
    spec = replace(spec, cwd=str(cwd), python=_python(spec.python), resume_from="")
    if spec.checkpoint_dir:
        spec = replace(spec, checkpoint_dir="")
        notes.append("its checkpoints go to the new job's own folder, and it begins without one")
    if spec.kind is EntrypointKind.INTERACTIVE:
        return spec, {}, notes, [f"cell {e.cell_id} was too long to be kept" for e in job.events()
                                 if isinstance(e, CellSent) and not e.source]  # fmt: skip
    is_cell = spec.kind in (EntrypointKind.SOURCE, EntrypointKind.FUNCTION)
    own = [spec.label] if spec.kind is EntrypointKind.SOURCE and REMOVED in spec.source else []
    changed = [source.path for source in origin.sources if not _is_unchanged(origin, source.path, source.digest)]
    if not changed:
        root = _here(origin.root)
        path = str(root / origin.sources[0].path) if spec.kind is EntrypointKind.SCRIPT and origin.sources else ""
        problems = _without(own) if is_cell or origin.sources else ["its code was not saved with it"]
        return replace(spec, entrypoint=path or spec.entrypoint), {}, notes, problems
    lost = [source.path for source in origin.sources if not source.text and source.digest != digest_of(b"")]
    problems = _without([*own, *(source.path for source in origin.sources if REMOVED in source.text)])
    problems += [f"{name} has changed, and the text that was launched was too large to be kept" for name in lost]
    problems += [f"{source.path!r} is no path for code" for source in origin.sources if not is_inside(source.path)]
    where = "" if spec.kind is EntrypointKind.SCRIPT else ", in a folder of its own"
    notes.append(f"changed or missing here, so what was saved is run{where}: {_some(changed)}")
    files = {source.path: source.text for source in origin.sources}
    return replace(spec, **_in_folder(job, origin.sources[0].path)), files, notes, problems


def _in_folder(job: SavedJob, program: str) -> dict[str, str]:
    """Fields of a spec whose code is written to a folder; a script looks for what it imports in its own."""
    if job.spec.kind is EntrypointKind.SCRIPT:
        return {"entrypoint": program}
    return {"cwd": "."}


def is_inside(path: str) -> bool:
    """Whether a path from a file that nobody trusts stays in the folder that it is joined to."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not PurePosixPath(path).is_absolute() and ".." not in parts and "\\" not in path


def _as_it_lies(origin: Origin) -> dict[str, str]:
    """Texts of code that is unchanged here, with what was taken out of the saved ones."""
    root, found = _here(origin.root), {}
    for source in origin.sources:
        try:
            found[source.path] = (root / source.path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            found[source.path] = source.text
    return found


def _is_unchanged(origin: Origin, path: str, digest: str) -> bool:
    if not is_inside(path):
        return False
    try:
        return digest_of((_here(origin.root) / path).read_bytes()) == digest
    except OSError:
        return False


def _without(names: Sequence[str]) -> list[str]:
    return [
        f"a secret was taken out of {name}: put it into the environment, or run the program itself" for name in names
    ]


def _here(path: str) -> Path:
    try:
        return Path(path).expanduser() if path else Path.cwd()
    except RuntimeError:
        return Path(path)


def _python(path: str) -> str:
    return str(_here(path)) if path else ""


def _unpickled(job: SavedJob) -> list[str]:
    """What keeps a launched function from being run."""
    if not job.spec.payload:
        return [f"the pickle of the function {job.spec.label} is not in the file: launch it from its own program"]
    was, now = (version.split(".")[:2] for version in (job.origin.python, platform.python_version()))
    if job.origin.python and was != now:
        return [
            f"the function {job.spec.label} is a pickle of Python {'.'.join(was)}, which {'.'.join(now)} cannot read: "
            f"rerun it with Python {'.'.join(was)}, or launch it from its own program"
        ]
    return []


def _of_pickles(session: SavedSession, spec: JobSpec) -> list[str]:
    """What a person has to know who would read before it is run."""
    if not spec.source:
        return [f"the text of the function {spec.label} could not be had: what runs is in a pickle only"]
    return [] if session.is_ours else ["what runs is a pickle; that it does what its text says is the sender's word"]


def _unfilled(attempts: Sequence[Attempt]) -> list[str]:
    gone = [word for attempt in attempts for word in attempt.spec.args if REMOVED in word]
    return ["a secret was taken out of its arguments: give it with --set"] if gone else []


# --- what is here -----------------------------------------------------------------------------------------------------


def _packages(job: SavedJob) -> list[str]:
    """What its code imports and cannot be found."""
    if job.spec.python:
        return []
    own = {source.path.partition("/")[0].removesuffix(".py") for source in job.origin.sources}
    names = {name for text in [*job.code.values(), *_cells(job)] for name in top_imports(text)}
    names |= {name.partition(".")[0] for name in modules_of(job.spec)}
    missing = sorted(name for name in names - own - {*sys.stdlib_module_names, "__main__"} if not _can_import(name))
    was = job.origin.packages
    return [f"{name} is not installed{_version(was, name)}" for name in missing]


def _cells(job: SavedJob) -> list[str]:
    return [event.source for event in job.events() if isinstance(event, CellSent)]


def _can_import(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _version(packages: Mapping[str, str], name: str) -> str:
    near = {"sklearn": "scikit-learn", "PIL": "pillow", "cv2": "opencv-python", "yaml": "pyyaml"}.get(name, name)
    version = packages.get(near.lower().replace("_", "-"))
    return f" (it was {near} {version})" if version else ""


def _differences(session: SavedSession, job: SavedJob, spec: JobSpec) -> list[str]:
    """What is not as it was, and may change what is computed or how fast."""
    origin, notes = job.origin, []
    if spec.python:
        notes.append(f"its ranks ran under {spec.python}: what is installed there is not looked at")
    else:
        used = {name.lower().replace("_", "-") for text in job.code.values() for name in top_imports(text)}
        used |= {"cloudpickle"} if spec.kind is EntrypointKind.FUNCTION else set()
        now, was = installed(), origin.packages
        others = [f"{name} {was[name]} → {now[name]}" for name in sorted({*used, *MATTER} & was.keys() & now.keys())
                  if was[name] != now[name]]  # fmt: skip
        notes += [f"other versions: {_some(others)}"] if others else []
        if origin.python and origin.python != platform.python_version():
            notes.append(f"python {origin.python} → {platform.python_version()}")
    here = f"{platform.system()}-{platform.machine()}"
    if origin.platform and origin.platform != here:
        notes.append(f"{origin.platform} → {here}")
    cores = len(os.sched_getaffinity(0))
    if origin.cores and origin.cores != cores:
        notes.append(f"{origin.cores} cores → {cores}")
    return notes


def _untold(session: SavedSession, job: SavedJob) -> list[str]:
    """What happened to it that is not done again, and what it had that was not saved."""
    events, notes = job.events(), []
    if hidden := session.record(job.job_id).entry.env_left_out:
        notes.append(f"values of {_some(hidden)} were not saved: give them with --env NAME=VALUE")
    if any(isinstance(event, FaultInjected) for event in events):
        notes.append("faults that were injected are not injected again")
    if any(isinstance(event, ResumeRequested | ResizeRequested) for event in events):
        notes.append("it was resumed or resized by hand: that is not repeated")
    if not job.phase.is_terminal:
        notes.append("it was still running when it was saved")
    return notes


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _told(path: Path) -> str:
    return str(path).replace(str(Path.home()), "~")

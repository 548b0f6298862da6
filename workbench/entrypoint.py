"""What is to be launched or sent, made ready before anything is: what can be found wrong here is told here, at once."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import textwrap
import tokenize
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from workbench.errors import CheckpointCorruptError, CheckpointNotFoundError, SpecError
from workbench.spec import MAX_SOURCE, EntrypointKind, JobSpec
from workbench.telemetry import CellFinished
from workbench.training import catalogue


def entry(
    entrypoint: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    module: str | None,
    source: str | None,
    interactive: bool,
) -> tuple[EntrypointKind, dict[str, Any]]:
    """Which kind of program was given, and the spec's fields for it."""
    given = [entrypoint is not None, module is not None, source is not None and entrypoint is None, interactive]
    if sum(given) != 1:
        what = "nothing to launch was given" if not any(given) else "more than one thing to launch was given"
        raise SpecError(what, hint="give one of: a script, module=, source=, interactive=True, a function")
    words = tuple(map(str, args))
    if interactive:
        return EntrypointKind.INTERACTIVE, {"args": words}
    if module is not None:
        return EntrypointKind.MODULE, {"entrypoint": module, "args": words}
    if source is not None:
        return EntrypointKind.SOURCE, {"source": source, "args": words}
    if callable(entrypoint):
        name = getattr(entrypoint, "__name__", type(entrypoint).__name__)
        payload = pickle_value((entrypoint, tuple(args), dict(kwargs)), f"{name}() cannot be sent to the ranks")
        return EntrypointKind.FUNCTION, {"entrypoint": name, "payload": payload, "source": _text_of(entrypoint)}
    return EntrypointKind.SCRIPT, {"entrypoint": os.fspath(entrypoint), "args": words}


def _text_of(function: Any) -> str:
    """What people read to know what it does; empty where it cannot be had."""
    while isinstance(function, functools.partial):
        function = function.func
    is_plain = inspect.isroutine(function) or inspect.isclass(function)
    try:
        text = textwrap.dedent(inspect.getsource(function if is_plain else type(function)))
    except (OSError, TypeError, SyntaxError):
        return ""
    return text if len(text) <= MAX_SOURCE else ""


def spec_of(
    entrypoint: str | os.PathLike[str] | Callable[..., Any] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    module: str | None,
    source: str | None,
    interactive: bool,
    options: Mapping[str, Any],
) -> JobSpec:
    """A launch in words as a spec; `options` are fields of it. Raises `SpecError`."""
    kind, fields = entry(entrypoint, args, kwargs or {}, module, source, interactive)
    known = set(JobSpec.__struct_fields__)
    if unknown := sorted(set(options) - known):
        raise SpecError(f"there is no launch option {unknown[0]!r}", hint=f"options: {', '.join(sorted(known))}")
    try:
        return msgspec.convert({**options, **fields, "kind": kind.value}, JobSpec)
    except msgspec.ValidationError as error:
        raise SpecError(f"a launch option is wrong: {error}") from None


def check_here(spec: JobSpec) -> JobSpec:
    """Make paths absolute, and find out at once what every rank would find out later."""
    cwd = Path(spec.cwd or Path.cwd()).expanduser().absolute()
    if not cwd.is_dir():
        raise SpecError(f"the working directory {cwd} does not exist")
    changes: dict[str, Any] = {"cwd": str(cwd)}
    if spec.python:
        found = shutil.which(spec.python)
        if found is None:
            raise SpecError(f"there is no interpreter {spec.python!r}", hint="give the path of a python executable")
        changes["python"] = str(Path(found).absolute())
    if spec.kind is EntrypointKind.SCRIPT:
        script = (cwd / Path(spec.entrypoint).expanduser()).absolute()
        changes["entrypoint"] = str(script)
        _check_script(script, compiles=not spec.python)
    if spec.resume_from:
        changes["resume_from"] = str(_checkpoint(cwd / Path(spec.resume_from).expanduser()))
    return msgspec.structs.replace(spec, **changes)


def _checkpoint(path: Path) -> Path:
    """Looks at its manifest, names and sizes; ranks read every byte."""
    found = catalogue.look(path.absolute())
    if found.manifest is None:
        raise CheckpointNotFoundError(f"{path} is no checkpoint: {found.problem}", hint="see: %dtrain checkpoints JOB")
    if found.problem:
        raise CheckpointCorruptError(f"the checkpoint {path} cannot be used: {found.problem}", hint="give another one")
    return found.path


def _check_script(script: Path, *, compiles: bool) -> None:
    if not script.is_file():
        near = sorted(path.name for path in script.parent.glob("*.py"))[:8] if script.parent.is_dir() else []
        raise SpecError(
            f"there is no script {script}", hint=f"scripts there: {', '.join(near)}" if near else "check the path"
        )
    try:
        with tokenize.open(script) as file:
            text = file.read()
        if compiles:
            compile(text, str(script), "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise SpecError(f"{script.name}{where}: {error.msg}", hint="correct the script, then launch again") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{script} cannot be read: {error}") from None


def pickle_value(value: Any, complaint: str) -> bytes:
    """The value as cloudpickle has it; `SpecError`, begun by `complaint`, when it cannot be."""
    import cloudpickle  # not needed to launch a script

    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise SpecError(f"{complaint}: {error}", hint="leave out what holds open files, locks or sockets") from error
    return data


def unpickle(answer: CellFinished) -> Any:
    """The value that a rank sent; it comes from the caller's own program."""
    import cloudpickle

    return cloudpickle.loads(answer.payload)

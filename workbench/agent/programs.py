"""The kinds of program a rank can be, each run as the interpreter does: script, module, cell, function, cells."""

# Paths are strings here, as the interpreter has them.
# ruff: noqa: PTH109, PTH112, PTH118

from __future__ import annotations

import io
import linecache
import os
import pickle
import runpy
import sys
import time
import zipfile
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any, Final

from workbench.agent import fresh

if TYPE_CHECKING:
    from workbench.agent.rank import Launch
    from workbench.blackbox import Writer
    from workbench.training.control import Control

RESULT: Final = "result"  # the cell id under which a function's value comes back


def run(launch: Launch, box: Writer, control: Control) -> None:
    """Run the program; what it raises is raised."""
    main = fresh.set_main()
    PROGRAMS[launch.header["kind"]](launch, main.__dict__, box, control)


def _script(launch: Launch, namespace: dict[str, Any], box: Writer, control: Control) -> None:
    entrypoint = launch.header["entrypoint"]
    path = os.path.join(os.getcwd(), entrypoint)
    fresh.set_argv([entrypoint, *launch.header["args"]], [entrypoint, *launch.header["args"]])
    if os.path.isdir(path) or (not path.endswith(".py") and zipfile.is_zipfile(path)):
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    namespace.update(_script_names(path))
    try:
        with io.open_code(path) as file:
            text = file.read()
    except OSError as error:
        # The interpreter's own words and exit code.
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    exec(compile(text, path, "exec", dont_inherit=True), namespace)


def _script_names(path: str) -> dict[str, Any]:
    loader = SourceFileLoader("__main__", path)
    return {"__file__": path, "__loader__": loader, "__spec__": None, "__package__": None, "__cached__": None}


def _module(launch: Launch, namespace: dict[str, Any], box: Writer, control: Control) -> None:
    name = launch.header["entrypoint"]
    fresh.set_argv(["-m", *launch.header["args"]], ["-m", name, *launch.header["args"]])
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _source(launch: Launch, namespace: dict[str, Any], box: Writer, control: Control) -> None:
    """A cell as a program of its own. `__file__` is a copy of it, so that spawned processes find what it defines."""
    copy, name = launch.header["program"], f"<cell {launch.header['label']}>"
    text = launch.payload.decode()
    fresh.set_argv([copy, *launch.header["args"]], [copy, *launch.header["args"]])
    namespace.update(_script_names(copy))
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec", dont_inherit=True), namespace)


def _function(launch: Launch, namespace: dict[str, Any], box: Writer, control: Control) -> None:
    """A pickled call; its value goes back as a cell's answer."""
    fresh.set_argv([launch.header["label"], *launch.header["args"]], [launch.header["label"]])
    function, args, kwargs = pickle.loads(launch.payload)
    start = time.monotonic()
    value = function(*args, **kwargs)
    answer = {"op": "cell", "cell_id": RESULT, "ok": True, "seconds": time.monotonic() - start}
    try:
        payload = _dump(value)
    except Exception as error:
        reason = f"what the function returned cannot be pickled: {type(error).__name__}: {error}"
        answer, payload = {**answer, "ok": False, "error": reason}, b""
    _flush()
    control.send(answer, payload)


def _dump(value: object) -> bytes:
    try:
        import cloudpickle
    except ImportError:  # another interpreter, without it
        return pickle.dumps(value)
    data: bytes = cloudpickle.dumps(value)
    return data


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _interactive(launch: Launch, namespace: dict[str, Any], box: Writer, control: Control) -> None:
    from workbench.training.cells import serve_cells

    fresh.set_argv([""], [])
    serve_cells(control, namespace, box)


PROGRAMS: Final[dict[str, Callable[[Launch, dict[str, Any], Writer, Control], None]]] = {
    "script": _script,
    "module": _module,
    "source": _source,
    "function": _function,
    "interactive": _interactive,
}

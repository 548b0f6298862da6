"""Who may import whom. The rows are ARCHITECTURE's; an import goes to a lower row, never up or sideways.

Imports inside functions and under TYPE_CHECKING count as well: what a module knows is what it names.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What a row's modules may import besides the standard library, and a lower row. msgspec is the vocabulary's own.
ROWS: dict[str, tuple[int, frozenset[str]]] = {
    name: (row, frozenset(allowed.split()))
    for row, names, allowed in [
        (0, "errors faults findings origin spec state events commands telemetry evidence feed requests", "msgspec"),
        (0, "blackbox", ""),
        (1, "policy views", "msgspec"),
        (2, "controller", "msgspec"),
        (3, "past", "msgspec"),
        (3, "store", "msgspec platformdirs"),
        (3, "training", "torch numpy cloudpickle isal"),
        (4, "agent", "msgspec psutil py_spy pynvml torch numpy cloudpickle threadpoolctl"),
        (5, "pool", "distributed dask tornado msgspec psutil"),
        (6, "runner", "msgspec"),
        (6, "entrypoint", "msgspec cloudpickle"),
        (5, "capture", ""),
        (6, "collect", "msgspec"),
        (6, "replays", ""),
        (7, "session", "msgspec"),
        (8, "saved", "msgspec tensorboard pyarrow"),
        (9, "verbs", "msgspec"),
        (10, "magics", "IPython"),
        (10, "cli", "msgspec"),
        (11, "__main__", ""),
        (10, "testing", "msgspec"),
        (
            10,
            "workbench_widgets",
            "ipywidgets panel bokeh numpy param tornado jupyter_server jupyter_server_proxy msgspec IPython",
        ),
    ]
    for name in names.split()
}
# Runs in ranks, perhaps under another interpreter that has nothing but torch.
RANK_SIDE = (
    "blackbox.py",
    "training",
    "agent/wire.py",
    "agent/zygote.py",
    "agent/rank.py",
    "agent/contract.py",
    "agent/environment.py",
)
# cloudpickle for functions and values that are sent, not to start; isal where it is, see `training/crc.py`.
RANKS_HAVE = ("torch", "numpy", "cloudpickle", "isal")


def modules() -> Iterator[tuple[str, Path]]:
    """The layer's name and the file, of all that is shipped."""
    for path in sorted((ROOT / "workbench").rglob("*.py")):
        parts = path.relative_to(ROOT / "workbench").parts
        if parts != ("__init__.py",):  # the lazy front door names what it gives
            yield parts[0].removesuffix(".py"), path
    for path in sorted((ROOT / "widgets").rglob("*.py")):
        yield "workbench_widgets", path


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that the file names in an import, whole, with its line; relative ones made absolute."""
    package = ".".join(path.relative_to(ROOT).parent.parts).removeprefix("widgets.")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1]] if node.level else [])
            whole = ".".join(filter(None, [base, node.module or ""]))
            if whole == "workbench":
                yield from ((f"workbench.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield whole, node.lineno


def is_public(name: str) -> bool:
    import workbench

    return name in ("workbench", "workbench.__version__") or name.removeprefix("workbench.") in workbench.__all__


def complaint(layer: str, path: Path, name: str) -> str:
    """Why this import may not be, or ''."""
    row, allowed = ROWS[layer]
    top = name.partition(".")[0]
    if top == "workbench":
        if layer == "workbench_widgets":
            return "" if is_public(name) or name.startswith("workbench.views") else "widgets use public names and views"
        if is_public(name):
            return "" if name == "workbench.__version__" else "inside, a name is imported from its own module"
        other = name.split(".")[1]
        if other not in ROWS:
            return f"{other} has no row"
        is_own = other == layer or (row == 0 and ROWS[other][0] == 0)
        return "" if is_own or ROWS[other][0] < row else f"row {ROWS[other][0]} from row {row}"
    if top == "workbench_widgets":
        return "" if layer == "workbench_widgets" else "widgets are above"
    if top in sys.stdlib_module_names or top in allowed:
        return ""
    return f"{top} is not allowed in {layer}"


def found(layer: str, path: Path) -> list[str]:
    where = path.relative_to(ROOT)
    told = [(name, line, complaint(layer, path, name)) for name, line in imported(path)]
    return [f"{where}:{line}: import of {name}: {why}" for name, line, why in told if why]


def test_every_module_has_a_row() -> None:
    assert {layer for layer, _ in modules()} <= set(ROWS)


def test_imports_go_down() -> None:
    assert [line for layer, path in modules() for line in found(layer, path)] == []


def test_rank_side_code_needs_only_the_standard_library_and_torch() -> None:
    own = ("workbench.blackbox", "workbench.training", "workbench.agent")
    wrong = []
    for _, path in modules():
        relative = path.relative_to(ROOT / "workbench") if path.is_relative_to(ROOT / "workbench") else path
        if relative.parts[0] in RANK_SIDE or str(relative) in RANK_SIDE:
            for name, line in imported(path):
                top = name.partition(".")[0]
                if top not in {*sys.stdlib_module_names, *RANKS_HAVE} and not name.startswith(own):
                    wrong.append(f"{relative}:{line}: import of {name}")
    assert wrong == []


@pytest.mark.parametrize(
    ("layer", "name", "is_fine"),
    [
        ("spec", "workbench.errors", True),
        ("views", "workbench.policy.health", False),
        ("store", "workbench.training.run", False),
        ("pool", "workbench.runner", False),
        ("session", "workbench.verbs.table", False),
        ("verbs", "workbench.session", True),
        ("verbs", "IPython", False),
        ("magics", "IPython.core.magic", True),
        ("magics", "workbench.cli", False),
        ("controller", "torch", False),
        ("cli", "workbench.Session", False),
        ("workbench_widgets", "workbench.views.job", True),
        ("workbench_widgets", "workbench.Session", True),
        ("workbench_widgets", "workbench.pool.local", False),
    ],
)
def test_the_test_can_fail(layer: str, name: str, is_fine: bool) -> None:
    assert (complaint(layer, ROOT / "x.py", name) == "") is is_fine


def test_rows_0_to_2_read_no_clock_file_socket_or_chance() -> None:
    forbidden = {"time", "datetime", "random", "secrets", "socket", "subprocess", "threading", "asyncio", "tempfile"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for layer, path in modules()
        if ROWS[layer][0] <= 2 and layer != "blackbox"  # the black box is a file, and its times are handed in
        for name, line in imported(path)
        if name.partition(".")[0] in forbidden
    ]
    assert wrong == []

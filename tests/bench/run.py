"""Runs every benchmark and prints its table: what, measured, bar. `run.py launch cell` runs only those two.

A benchmark is a module `bench_NAME.py` with `main() -> list[Row]`. Each runs in a process of its own, so that none
meets what another imported, set or started.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

Row = tuple[str, str, str]
HERE = Path(__file__).parent
LIMIT = 900.0  # s a benchmark
HEAD: Row = ("what", "measured", "bar")


def names() -> list[str]:
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def render(name: str, rows: list[Row]) -> str:
    widths = [max(len(row[column]) for row in [HEAD, *rows]) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [HEAD, *rows]]
    return "\n".join([f"{name}", *(f"  {line.rstrip()}" for line in lines)])


def title(name: str) -> str:
    """The benchmark's first line of docstring."""
    source = (HERE / f"bench_{name}.py").read_text(encoding="utf-8")
    return f"{name}: {source.split(chr(34) * 3)[1].strip().splitlines()[0]}"


def run_here(name: str, target: Path) -> None:
    """In the child: run it and leave its rows in `target`."""
    path = HERE / f"bench_{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.argv = [str(path)]
    spec.loader.exec_module(module)
    target.write_text(json.dumps(module.main() or []), encoding="utf-8")


def run_apart(name: str) -> bool:
    """In a child; print its table, and whether it came to an end."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--here", name, str(target)]
        try:
            code = subprocess.run(command, timeout=LIMIT, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        rows = [tuple(row) for row in json.loads(target.read_text(encoding="utf-8"))] if target.exists() else []
    print(render(title(name), rows) if rows else title(name), flush=True)
    if code:
        print(f"  failed (exit code {code})", flush=True)
    print(flush=True)
    return code == 0


def main(words: list[str]) -> int:
    if words[:1] == ["--here"]:
        run_here(words[1], Path(words[2]))
        return 0
    if unknown := sorted(set(words) - set(names())):
        print(f"no benchmark {unknown[0]}; there are: {' '.join(names())}", file=sys.stderr)
        return 2
    ended = [run_apart(name) for name in words or names()]
    return int(not all(ended))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

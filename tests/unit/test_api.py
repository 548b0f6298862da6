"""The public surface: what `workbench` gives is what the README's table names, and importing it is light."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import workbench

README = Path(__file__).parents[2] / "README.md"


def test_every_name_resolves() -> None:
    assert workbench.__all__ == sorted(workbench.__all__)
    for name in workbench.__all__:
        assert getattr(workbench, name) is not None
        assert name in dir(workbench)


def test_the_readme_has_a_row_for_each_name() -> None:
    rows = re.findall(r"^\|\s*`(?:workbench\.|wb\.)?(\w+)[^`]*`", README.read_text(), re.MULTILINE)
    assert set(workbench.__all__) <= set(rows)


def test_import_is_light_and_quick() -> None:
    code = (
        "import sys, workbench; print(sorted({'torch', 'distributed', 'dask', 'IPython', 'panel'} & set(sys.modules)))"
    )
    times = []
    for _ in range(3):
        argv = [sys.executable, "-X", "importtime", "-c", code]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == "[]"
        (took,) = re.findall(r"\|\s*(\d+) \| workbench$", done.stderr, re.MULTILINE)
        times.append(int(took) / 1e6)
    assert min(times) < 0.3

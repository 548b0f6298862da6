"""Every notebook runs from its first cell to its last, says what it promises, and leaves nothing running."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbclient
import nbformat
import psutil
import pytest

from workbench.saved.notebook import notebook_of
from workbench.saved.session import load_session
from workbench.session import stop_pool

FOLDER = Path(__file__).parents[2] / "notebooks"
SAVED = Path(__file__).parents[1] / "data" / "saved_session_v1" / "run.dtrain"
CELL_LIMIT = 40  # s
HARMLESS = ("Kernel is running over TCP without encryption",)  # ipykernel, of its own connection to this test


@pytest.fixture
def kernel_environment(dtrain_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What the kernel inherits: a home, the `dtrain` command, Jupyter's own files out of the developer's way."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(dtrain_home / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(dtrain_home / "ipython"))
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    yield dtrain_home
    stop_pool()  # of a notebook that did not get to its end


@pytest.mark.timeout(120)  # the notebook itself takes well under a minute; CI's cores may be shared
def test_quickstart(kernel_environment: Path) -> None:
    notebook = run("01_quickstart.ipynb")
    printed = text_of(notebook)
    accuracy = re.search(r"([\d.]+)% of the held-out digits", printed)
    assert accuracy is not None and float(accuracy[1]) >= 95
    assert printed.count("SUCCEEDED") >= 4  # the cell, the script, the command line, the one that reports
    assert "rank 0 of 2: the sum is 3.0" in printed and "rank 1 of 2: the sum is 3.0" in printed
    assert printed.count("tensor([30.])") == 2  # the cell's value on rank 1, and what was pulled from there
    assert "rank 1 killed by SIGKILL" in printed
    assert complaints(notebook) == []
    assert "widgets" not in notebook.metadata
    views = [html for html in outputs(notebook, "text/html") if "dtrain-job" in html]
    assert len(views) >= 4 and max(map(len, views)) < 50_000
    assert processes_of(kernel_environment) == []


@pytest.mark.timeout(180)
def test_gradient_consistency(kernel_environment: Path) -> None:
    notebook = run("02_gradient_consistency.ipynb")
    printed = text_of(notebook)
    assert re.search(r"step \d+: rank 1 deviates in parameters 0.weight, in few bits", printed)
    assert "element" in printed and "bit 22" in printed
    assert re.search(r"step \d+: rank 2 deviates in 0.weight after the all-reduce, in few bits", printed)
    assert re.search(r"step \d+: rank 0 deviates in optimizer state 0.weight.momentum_buffer", printed)
    assert printed.count("put right, bit for bit") >= 3
    assert "3 repaired" in printed
    strips = [line for line in printed.splitlines() if re.match(r"rank \d  [✓↻·]+$", line)]
    assert {line[:6] for line in strips if "↻" in line} == {"rank 0", "rank 1", "rank 2"}
    assert "all ranks got the same batch" in printed
    assert complaints(notebook) == []
    assert processes_of(kernel_environment) == []


@pytest.mark.timeout(180)
def test_save_and_rerun(kernel_environment: Path) -> None:
    notebook = run("03_save_and_rerun.ipynb")
    printed = text_of(notebook)
    assert "agrees with" in printed and "bit for bit" in printed
    assert "halfway it was" in printed and printed.count("SUCCEEDED final loss") == 2
    assert "look.ipynb report.html run.dtrain steps.csv trace.json" in printed
    assert complaints(notebook) == []
    assert processes_of(kernel_environment) == []


def test_a_notebook_made_of_a_saved_session(kernel_environment: Path, tmp_path: Path) -> None:
    shutil.copy(SAVED, tmp_path / "run.dtrain")
    with load_session(tmp_path / "run.dtrain") as session:
        notebook = nbformat.reads(notebook_of(session, "run.dtrain").decode(), as_version=4)
    executed = execute(notebook, tmp_path)
    assert "SUCCEEDED" in text_of(executed) and "accuracy 97.5%" in text_of(executed)
    assert complaints(executed) == []
    assert processes_of(kernel_environment) == []  # looking starts no pool


def run(name: str) -> nbformat.NotebookNode:
    return execute(nbformat.read(FOLDER / name, as_version=4), FOLDER)


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    client = nbclient.NotebookClient(
        notebook, timeout=CELL_LIMIT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    executed: nbformat.NotebookNode = client.execute()
    return executed


def all_outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def outputs(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    return [output.data[kind] for output in all_outputs(notebook) if kind in output.get("data", {})]


def text_of(notebook: nbformat.NotebookNode) -> str:
    printed = [output.text for output in all_outputs(notebook) if output.output_type == "stream"]
    return "\n".join([*printed, *outputs(notebook, "text/plain")])


def complaints(notebook: nbformat.NotebookNode) -> list[str]:
    """Lines on standard error that are not known to be harmless."""
    told = [output.text for output in all_outputs(notebook) if output.get("name") == "stderr"]
    return [line for text in told for line in text.splitlines() if line and not any(map(line.__contains__, HARMLESS))]


def processes_of(home: Path, timeout: float = 10.0) -> list[str]:
    """Command lines of processes that live in the home, when `timeout` s have not ended them."""
    deadline = time.monotonic() + timeout
    while (found := list(_living(home))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _living(home: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("DTRAIN_HOME") == str(home):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found

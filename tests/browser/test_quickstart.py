"""The quickstart as a reader runs it: in JupyterLab, from the first cell to the last, in both themes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from lab import Tab, wait_for

from workbench.session import Session

FOLDER = Path(__file__).parents[2] / "notebooks"
LAUNCH = "%%dtrain launch --nproc-per-node 2 --name digits"


@pytest.mark.timeout(180)  # three trainings, one after the other
def test_the_quickstart_runs_in_jupyterlab(tab: Tab, session: Session) -> None:
    path, shown = prepare(tab.lab.work)
    tab.open(path)
    tab.command("notebook:run-all-cells")
    view = tab.live(60)
    assert "digits" in view.frame.url
    wait_for(lambda: view.step() > 20, "the training is seen", 30)
    scroll_to(tab, shown)
    tab.shot("quickstart-light")
    tab.theme("JupyterLab Dark")
    scroll_to(tab, shown)
    view.frame.wait_for_timeout(1000)
    tab.shot("quickstart-dark")
    tab.theme("JupyterLab Light")
    wait_for(lambda: count_of(tab) is not None, "the last cell has run", 120)
    assert errors_of(tab) == []
    assert "of the held-out digits are read correctly" in all_text(tab)
    tab.save()


def prepare(work: Path) -> tuple[Path, int]:
    """A copy beside its scripts, without the cell that stops the pool; and which cell shows the training."""
    notebook = json.loads((FOLDER / "01_quickstart.ipynb").read_text())
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "%dtrain down" in "".join(codes[-1]["source"])
    notebook["cells"].remove(codes[-1])
    for script in FOLDER.glob("*.py"):
        shutil.copy(script, work)
    path = work / "quickstart.ipynb"
    path.write_text(json.dumps(notebook))
    shown = next(k for k, cell in enumerate(notebook["cells"]) if "".join(cell["source"]).startswith(LAUNCH))
    return path, shown


def scroll_to(tab: Tab, index: int) -> None:
    tab.page.evaluate(
        "index => window.jupyterapp.shell.currentWidget.content.widgets[index].outputArea.node"
        ".scrollIntoView({block: 'center'})",
        index,
    )
    tab.page.wait_for_timeout(500)


def count_of(tab: Tab) -> int | None:
    """The last code cell's execution count, None before it has ended."""
    found = tab.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code').at(-1)"
        ".model.executionCount"
    )
    return None if found is None else int(found)


def errors_of(tab: Tab) -> list[str]:
    """What cells ended in instead of a result."""
    found: list[str] = tab.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code')"
        ".flatMap(c => c.model.outputs.toJSON().filter(o => o.output_type === 'error').map(o => o.evalue))"
    )
    return found


def all_text(tab: Tab) -> str:
    return str(
        tab.page.evaluate(
            "() => JSON.stringify(window.jupyterapp.shell.currentWidget.content.widgets"
            ".filter(c => c.model.type === 'code').map(c => c.model.outputs.toJSON()))"
        )
    )

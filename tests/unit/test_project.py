"""What is kept beside the code: versions agree, notebooks are clean, no file names a machine it was written on."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import workbench

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Directories of one machine or one person, which no other reader of the file has.
SOMEONES = re.compile(r"(?<![\w.~-])/(?:root|Users/\w+|home/(?!jovyan\b|ana\b|you\b)\w+)/")
MADE_UP = re.compile(r"tests/(unit|property|data)/")  # tests that hide or refuse such paths must name some


def tracked() -> list[Path]:
    """Files that git knows or would take."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def texts() -> list[tuple[str, str]]:
    found = []
    for path in tracked():
        data = path.read_bytes()
        if b"\0" not in data[:8000]:
            found.append((str(path.relative_to(ROOT)), data.decode("utf-8", errors="replace")))
    return found


def test_no_file_names_a_machines_path() -> None:
    told = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts()
        if not MADE_UP.match(name)
        for number, line in enumerate(text.splitlines(), 1)
        if SOMEONES.search(line) or f"{ROOT}/" in line
    ]
    assert told == []


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("path='/root/venv/bin'", True),
        ("/home/bob/train.py", True),
        ("a chroot/root-less/balance", False),
        ("https://host/home/page", False),
    ],
)
def test_what_counts_as_a_machines_path(line: str, is_found: bool) -> None:
    assert bool(SOMEONES.search(line)) is is_found


def test_no_conflict_marks_and_a_newline_at_the_end() -> None:
    for name, text in texts():
        assert not re.search(r"^(<{7}|>{7}) ", text, re.MULTILINE), name
        assert not text or text.endswith("\n") or "tests/data" in name, f"{name} has no newline at its end"


def test_versions_agree() -> None:
    assert PROJECT["version"] == workbench.__version__
    assert re.search(rf"^## \[{re.escape(workbench.__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


# --- the set-up -------------------------------------------------------------------------------------------------------


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", name)[0]).lower()  # type: ignore[index]


def test_constraints_are_plain_versions() -> None:
    for name, version in constraints().items():
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
        assert re.fullmatch(r"[0-9][A-Za-z0-9.]*", version), f"{name}=={version}: no local tags, paths or addresses"
    assert list(constraints()) == sorted(constraints(), key=str.lower)


def test_constraints_cover_what_we_ask_for() -> None:
    wanted = [
        *PROJECT["dependencies"],
        *(item for extra in PROJECT["optional-dependencies"].values() for item in extra),
    ]
    pinned = {canonical(name) for name in constraints()} | {"dtrain-workbench"}
    assert {canonical(item) for item in wanted} <= pinned


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)
    assert phony is not None
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    assert re.findall(r"^  make (\w+)", done.stdout, re.MULTILINE) == phony[1].split()
    assert set(phony[1].split()) == set(re.findall(r"^([a-z]\w*):", text, re.MULTILINE))


def test_ci_runs_what_everybody_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o100
    assert "set -euo pipefail" in script.read_text()
    assert script.read_text().splitlines()[-1] == "make test"


@pytest.mark.parametrize("script", sorted((ROOT / ".ci").iterdir()), ids=lambda path: path.name)
def test_shell_scripts_can_be_read(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True, timeout=10)


def test_an_old_python_is_refused_with_what_to_do() -> None:
    script = str(ROOT / ".ci" / "find-python")
    done = subprocess.run(["bash", script, "no-such-python"], capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 1 and "no-such-python is no Python 3.11" in done.stderr
    nothing = subprocess.run(
        ["/bin/bash", script], capture_output=True, text=True, check=False, timeout=20, env={"PATH": "/nonexistent"}
    )
    assert nothing.returncode == 1 and "make PYTHON=" in nothing.stderr


def test_binder_installs_the_package_under_a_python_that_it_supports() -> None:
    folder = ROOT / "binder"
    version = re.fullmatch(r"python-3\.(\d+)\n", (folder / "runtime.txt").read_text())
    assert version is not None
    assert int(version[1]) >= int(PROJECT["requires-python"].removeprefix(">=3."))
    lines = [line for line in (folder / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    package = re.fullmatch(r"\.\[([\w,]+)\]", lines[-1])
    assert package is not None and set(package[1].split(",")) <= set(PROJECT["optional-dependencies"])
    assert "-c ../constraints.txt" in lines
    assert not (ROOT / ".binder").exists()  # only one of the two may be there


# --- notebooks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_clean(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {} or set(cell["metadata"]) == {"tags"}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, "".join(cell["source"])[:80]
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_there_is_a_quickstart() -> None:
    assert "01_quickstart.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_what_the_documents_name_is_there(name: str) -> None:
    """Paths in backticks; pictures are put in at a release."""
    text = (ROOT / name).read_text()
    paths = re.findall(r"`((?:workbench|widgets|tests|notebooks|binder)/[\w./-]+|[A-Z]+\.md|constraints\.txt)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_readme_tells_every_verb_and_no_other() -> None:
    from workbench.verbs.table import COMPLETION, VERBS

    table = (ROOT / "README.md").read_text().partition("## Verbs")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == {v.name for v in (*VERBS, COMPLETION)}


def test_no_two_files_of_tests_have_one_name() -> None:
    """Where folders are no packages pytest takes the second for the first, and collects neither."""
    folders = [path for path in (ROOT / "tests").iterdir() if path.is_dir() and not (path / "__init__.py").exists()]
    names = [path.name for folder in folders for path in folder.glob("test_*.py")]
    assert sorted(names) == sorted(set(names))

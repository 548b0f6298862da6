"""Completion: our words, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from workbench.faults import FAULTS
from workbench.verbs.complete import complete, complete_verb
from workbench.verbs.table import CELL, VERBS, verb_names

SOURCES: dict[str, Callable[[str], Sequence[str]]] = {
    "job": lambda prefix: [name for name in ("train-1f2e", "tune-0001") if name.startswith(prefix)],
    "pool": lambda prefix: [name for name in ("default", "night") if name.startswith(prefix)],
}


def offered(line: str) -> list[str]:
    return complete(line.split(" "), SOURCES)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("la", ["launch"]),
        ("sta", ["status", "stacks"]),
        ("pool st", ["start", "stop", "status"]),
        ("pool --n", ["--name"]),
        ("status tr", ["train-1f2e"]),
        ("status ", ["train-1f2e", "tune-0001"]),
        ("logs -r 1 tu", ["tune-0001"]),
        ("inject ", list(FAULTS)),
        ("inject ex", ["exception", "exit"]),
        ("inject kill tr", ["train-1f2e"]),
        ("jobs --phase fa", ["FAILED"]),
        ("jobs --phase=fa", ["--phase=FAILED"]),
        ("jobs --li", ["--limit"]),
        ("jobs --limit ", []),
        ("jobs --pool n", ["night"]),
        ("launch --nproc_p", ["--nproc-per-node"]),
        ("launch --env A=1 --en", ["--env"]),
        ("launch --name x --na", []),
        ("nonsense ", []),
        ("help la", ["launch"]),
    ],
)
def test_what_is_offered(line: str, words: list[str]) -> None:
    assert offered(line) == words


def test_verbs_and_options_are_all_offered() -> None:
    assert set(offered("")) == {name.split()[0] for name in verb_names()}
    for verb in VERBS:
        flags = complete([*verb.name.split(), "-"], SOURCES)
        assert flags == [flag for option in verb.options for flag in option.flags]


def test_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("train.py", "tune.py", "notes.txt", ".hidden.py", "with space.py", "sub/deep.py"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert offered("launch ") == ["sub/", "train.py", "tune.py"]
    assert offered("launch t") == ["train.py", "tune.py"]
    assert offered("launch sub/") == ["sub/deep.py"]
    assert offered("launch .") == [".hidden.py"]
    assert offered("launch --cwd ") == ["sub/"]
    assert offered("launch train.py -- n") == ["notes.txt"]
    assert offered("launch nowhere/") == []
    assert offered(f"launch {tmp_path}/tr") == [f"{tmp_path}/train.py"]


def test_a_cell_has_its_own_options() -> None:
    assert complete_verb(CELL, ["-r", "0"], "--j", SOURCES) == ["--job"]
    assert complete_verb(CELL, ["--job"], "tu", SOURCES) == ["tune-0001"]

"""What is kept of a program when it is launched: its text, what it imports from its folder, versions, the commit."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from workbench.capture import blob_of, capture, git_head, installed, top_imports
from workbench.origin import MAX_FILES, MAX_TEXT
from workbench.spec import EntrypointKind, JobSpec


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def script(root: Path, name: str = "train.py") -> JobSpec:
    return JobSpec(entrypoint=name, cwd=str(root))


def test_a_script_and_what_it_imports_from_its_folder(tmp_path: Path) -> None:
    write(tmp_path, train="import os, data\nfrom model import net\n", data="import torch\n", unused="1\n")
    write(tmp_path, model__net="from . import layers\nfrom .parts import x\n", model__layers="", model__parts="x = 1\n")
    (tmp_path / "model" / "__init__.py").write_text("")
    origin = capture(script(tmp_path))
    names = [source.path for source in origin.sources]
    assert names[0] == "train.py"
    assert set(names) == {
        "train.py",
        "data.py",
        "model/__init__.py",
        "model/net.py",
        "model/layers.py",
        "model/parts.py",
    }
    first = origin.sources[0]
    assert first.text == (tmp_path / "train.py").read_text()
    assert first.digest == hashlib.sha256(first.text.encode()).hexdigest()
    assert origin.root == str(tmp_path) and origin.left_out == ()
    assert "torch" in origin.packages and origin.python and origin.cores >= 1


def test_a_module_is_looked_for_in_the_working_directory(tmp_path: Path) -> None:
    write(tmp_path, package__train="from package import data\n", package__data="")
    spec = JobSpec(entrypoint="package.train", kind=EntrypointKind.MODULE, cwd=str(tmp_path))
    assert [source.path for source in capture(spec).sources] == ["package/train.py", "package/data.py"]
    elsewhere = capture(JobSpec(entrypoint="json.tool", kind=EntrypointKind.MODULE, cwd=str(tmp_path)))
    assert elsewhere.sources == () and "json.tool" in elsewhere.left_out[0]


def test_a_cell_brings_what_it_imports(tmp_path: Path) -> None:
    write(tmp_path, digits="x = 1\n")
    spec = JobSpec(kind=EntrypointKind.SOURCE, source="import digits, torch", cwd=str(tmp_path))
    assert [source.path for source in capture(spec).sources] == ["digits.py"]


def test_what_cannot_be_kept_is_said(tmp_path: Path) -> None:
    write(tmp_path, train="import big, odd\n", big="#" * MAX_TEXT + "\n")
    (tmp_path / "odd.py").write_bytes(b"# \xff\n")
    origin = capture(script(tmp_path))
    kept = {source.path: source for source in origin.sources}
    assert kept["big.py"].text == "" and kept["big.py"].digest and kept["odd.py"].text == ""
    assert [line.split(":")[0] for line in origin.left_out] == ["the text of big.py", "the text of odd.py"]
    assert capture(script(tmp_path, "nothing.py")).left_out


def test_the_number_of_files_is_bounded(tmp_path: Path) -> None:
    names = [f"m{k}" for k in range(MAX_FILES + 5)]
    write(tmp_path, train="\n".join(f"import {name}" for name in names), **dict.fromkeys(names, ""))
    origin = capture(script(tmp_path))
    assert len(origin.sources) == MAX_FILES and "files" in origin.left_out[-1]


def test_another_interpreters_packages_are_not_ours(tmp_path: Path) -> None:
    write(tmp_path, train="")
    origin = capture(JobSpec(entrypoint="train.py", cwd=str(tmp_path), python="/usr/bin/python3"))
    assert origin.packages == {} and origin.python == ""


def test_imports_of_a_program_that_cannot_be_parsed() -> None:
    assert top_imports("import os.path\nfrom a.b import c\nfrom . import d") == {"os", "a", "d"}
    assert top_imports("def (") == set()


def test_versions_are_those_that_python_tells() -> None:
    import importlib.metadata

    found = installed()
    for name in ("msgspec", "torch", "dask"):
        assert found[name] == importlib.metadata.version(name)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    write(tmp_path, train="x = 1\n")
    who = ("-c", "user.name=x", "-c", "user.email=x@y")
    for words in (("init", "-q", "-b", "main"), ("add", "."), (*who, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=20, capture_output=True)
    return tmp_path


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, check=True, timeout=20, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_the_one_git_tells(checkout: Path) -> None:
    (checkout / "deep").mkdir()
    head = git(checkout, "rev-parse", "HEAD")
    assert git_head(checkout / "deep") == (head, "main", str(checkout))
    git(checkout, "pack-refs", "--all")
    assert git_head(checkout) == (head, "main", str(checkout))
    git(checkout, "checkout", "-q", head)
    assert git_head(checkout) == (head, "", str(checkout))
    tree = checkout / "tree"
    git(checkout, "worktree", "add", "-q", "-b", "other", str(tree))
    assert git_head(tree) == (head, "other", str(tree))
    assert git(checkout, "hash-object", "train.py") == blob_of(b"x = 1\n")


def test_no_checkout_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    assert git_head(tmp_path) == ("", "", "")

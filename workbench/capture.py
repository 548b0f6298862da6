"""What a rerun needs and a file on disk cannot promise to keep: code, versions and commit at the moment of launch.

Nothing here raises, runs code or waits: what cannot be read is left out and said. A launch pays a few milliseconds.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from workbench.origin import MAX_FILES, MAX_TEXT, Origin, Source
from workbench.spec import EntrypointKind, JobSpec
from workbench.store.saved import pickles
from workbench.store.saved.document import GitState

_DIST: Final = re.compile(r"(.+?)-([^-]+)(?:-py[\d.]+)?\.(?:dist-info|egg-info)\Z")
GIT: Final = 5.0  # s
_UP: Final = 24  # folders above a program in which its checkout is looked for


def capture(spec: JobSpec) -> Origin:
    """The origin of what `spec` would launch now."""
    root, sources, left_out = _program(spec)
    commit, branch, repository = git_head(Path(root or spec.cwd or Path.cwd()))
    return Origin(
        root=root,
        sources=sources,
        packages={} if spec.python else installed(),
        python="" if spec.python else platform.python_version(),
        platform=f"{platform.system()}-{platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        commit=commit,
        branch=branch,
        repository=repository,
        left_out=left_out,
    )


# --- code -------------------------------------------------------------------------------------------------------------


def _program(spec: JobSpec) -> tuple[str, tuple[Source, ...], tuple[str, ...]]:
    """Folder, sources, and what is missing from them."""
    cwd = Path(spec.cwd or Path.cwd())
    if spec.kind is EntrypointKind.SCRIPT:
        path = (cwd / spec.entrypoint).resolve()
        root = path.parent
    elif spec.kind is EntrypointKind.MODULE:
        found = _module_file(cwd, spec.entrypoint)
        if found is None:
            return "", (), (f"the code of module {spec.entrypoint}: it is not in the working directory",)
        path, root = found, cwd
    elif spec.kind is EntrypointKind.SOURCE:
        return str(cwd), *_closure(cwd, list(_imports(spec.source, ())), [])
    elif spec.kind is EntrypointKind.FUNCTION:
        sources, left_out = _closure(cwd, [*sorted(modules_of(spec)), *_imports(spec.source, ())], [])
        untold = () if spec.source else (f"the text of the function {spec.label}: it cannot be found",)
        return str(cwd), sources, (*left_out, *untold)
    else:
        return "", (), ()
    if not path.is_file() or path.suffix not in (".py", ".pyw", ""):
        return str(root), (), (f"the code of {path.name}: it is no single file",)
    return str(root), *_closure(root, [], [path])


def modules_of(spec: JobSpec) -> set[str]:
    """Modules that a pickled function imports when it is loaded; it is not loaded here."""
    try:
        return pickles.modules(spec.payload) if spec.payload else set()
    except ValueError:
        return set()


def _module_file(root: Path, name: str) -> Path | None:
    base = root.joinpath(*name.split("."))
    candidates = (base.with_suffix(".py"), base / "__main__.py")
    return next((path for path in candidates if path.is_file()), None)


def _closure(root: Path, names: list[str], first: list[Path]) -> tuple[tuple[Source, ...], tuple[str, ...]]:
    """The files, and all that they import from `root`; in the order in which they are met."""
    waiting = first + [path for name in names for path in _files_of(root, name)]
    found: dict[Path, Source] = {}
    left_out: list[str] = []
    room = MAX_TEXT
    while waiting:
        path = waiting.pop(0)
        if path in found:
            continue
        if len(found) == MAX_FILES:
            left_out.append(f"more than {MAX_FILES} files of code")
            break
        try:
            data = path.read_bytes()
            name = path.relative_to(root).as_posix()
        except (OSError, ValueError):
            left_out.append(f"the code of {path.name}: it cannot be read")
            continue
        text = _text(data, room)
        room -= len(data) if text else 0
        if data and not text:
            left_out.append(f"the text of {name}: it is too large, or no UTF-8; its digest is kept")
        found[path] = Source(path=name, digest=digest_of(data), blob=blob_of(data), text=text)
        package = path.relative_to(root).parent.parts
        waiting += [file for module in _imports(text, package) for file in _files_of(root, module)]
    return tuple(found.values()), tuple(left_out)


def _text(data: bytes, room: int) -> str:
    try:
        return data.decode("utf-8") if len(data) <= room else ""
    except UnicodeDecodeError:
        return ""


def _imports(text: str, package: tuple[str, ...]) -> Iterator[str]:
    """Dotted names that a program imports; those of a `from` twice, with and without what is taken from it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            if base:
                yield base
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)


def top_imports(text: str) -> set[str]:
    """First parts of the names of all modules that a program imports absolutely."""
    return {name.partition(".")[0] for name in _imports(text, ())}


def _files_of(root: Path, name: str) -> Iterator[Path]:
    """The files under `root` that importing a dotted name runs."""
    at = root
    for part in name.split("."):
        if not part.isidentifier():
            return
        at = at / part
        if (at / "__init__.py").is_file():
            yield at / "__init__.py"
        elif at.with_suffix(".py").is_file():
            yield at.with_suffix(".py")
            return
        elif not at.is_dir():
            return


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob_of(data: bytes) -> str:
    """As `git hash-object` has it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


# --- packages ---------------------------------------------------------------------------------------------------------


def installed() -> dict[str, str]:
    """Versions of what is installed, by distribution, told by the names of folders: nothing is opened."""
    found: dict[str, str] = {}
    for entry in sys.path:
        try:
            stamp = os.stat(entry).st_mtime_ns if entry else 0  # noqa: PTH116
        except OSError:
            continue
        for name, version in _installed_in(entry, stamp):
            found.setdefault(name, version)
    return dict(sorted(found.items()))


@functools.lru_cache(maxsize=64)
def _installed_in(folder: str, stamp: int) -> tuple[tuple[str, str], ...]:
    """`stamp` makes the answer of a folder that has changed another one."""
    try:
        with os.scandir(folder or ".") as entries:
            matches = [match for entry in entries if (match := _DIST.match(entry.name))]
    except OSError:
        return ()
    return tuple((re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]) for match in matches)


# --- git --------------------------------------------------------------------------------------------------------------


def git_head(folder: Path) -> tuple[str, str, str]:
    """`(commit, branch, checkout)` read from git's files; empty strings where there is no checkout."""
    for above in [folder, *folder.parents][:_UP]:
        mark = above / ".git"
        if mark.exists():
            try:
                return *_head(_git_dir(mark)), str(above)
            except (OSError, UnicodeDecodeError, IndexError):
                break
    return "", "", ""


def _git_dir(mark: Path) -> Path:
    if mark.is_dir():
        return mark
    return (mark.parent / mark.read_text().partition("gitdir:")[2].strip()).resolve()


def _head(git: Path) -> tuple[str, str]:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head, ""
    ref = head.removeprefix("ref:").strip()
    common = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
    for place in (git, common):
        if (place / ref).is_file():
            return (place / ref).read_text().strip(), ref.removeprefix("refs/heads/")
    packed = (common / "packed-refs").read_text().splitlines() if (common / "packed-refs").is_file() else []
    lines = [line.split() for line in packed if line.endswith(f" {ref}")]
    return (lines[0][0] if lines else ""), ref.removeprefix("refs/heads/")


def git_state(origin: Origin | None) -> GitState | None:
    """Which files of the job's code were not those of the commit."""
    if origin is None or not origin.commit:
        return None
    try:
        below = Path(origin.root).resolve().relative_to(Path(origin.repository).resolve())
        names = {str(below / source.path): source for source in origin.sources}
        tree = _ls_tree(origin, list(names))
    except (OSError, ValueError, subprocess.SubprocessError):
        return GitState(commit=origin.commit, branch=origin.branch)
    changed = tuple(source.path for name, source in names.items() if tree.get(name) != source.blob)
    return GitState(commit=origin.commit, branch=origin.branch, changed=changed)


def _ls_tree(origin: Origin, names: Sequence[str]) -> Mapping[str, str]:
    """Blobs of the commit by path."""
    if not names:
        return {}
    command = ["git", "-C", origin.repository, "ls-tree", "-r", "-z", origin.commit, "--", *names]
    done = subprocess.run(command, capture_output=True, timeout=GIT, check=True, stdin=subprocess.DEVNULL)
    rows = [row.split("\t", 1) for row in done.stdout.decode(errors="replace").split("\0") if "\t" in row]
    return {path: head.split()[2] for head, path in rows}

"""A notebook made from a saved session: it looks, and runs again when its parameter says so. papermill runs it too."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from workbench.saved.session import SavedSession


def notebook_of(session: SavedSession, path: str) -> bytes:
    """The notebook as a file; `path`: the session's, as the notebook is to open it."""
    name = session.archive.path.name
    told = session.document
    jobs = "\n".join(f"- `{entry.job_id}`: {entry.phase}, {entry.world_size} ranks" for entry in told.jobs)
    out = f"\n\nLeft out of the file: {'; '.join(told.left_out)}." if told.left_out else ""
    cells = [
        _text(f"# {name}\n\nSaved by dtrain workbench {told.dtrain}.\n\n{jobs}{out}"),
        _code(f'path = {path!r}\nrun_again = False  # True runs the code of the file on this machine\nsettings = {{}}  '
              f'# such as {{"lr": 0.1}}', ["parameters"]),
        _code("import workbench as wb\n\nsession = wb.load_session(path)\nsession.jobs()"),
    ]  # fmt: skip
    for entry in told.jobs:
        cells.append(_text(f"## {entry.job_id}"))
        cells.append(_code(f"job = session.attach({entry.job_id!r})\njob"))
        cells.append(_code('for name, text in job.code.items():\n    print(f"# --- {name} ---\\n{text}")'))
        cells.append(_code("print(job.logs(tail=20))"))
    cells.append(_text("## Run it again\n\nOnly when `run_again` is set above; a rerun starts this machine's pool."))
    cells.append(
        _code(
            "if run_again:\n    result = wb.rerun(path, set=settings, check=not settings, yes=True)\n"
            "    for done in result.done:\n        print(done.job.job_id, done.job.phase.value, done.reason)\n"
            "        for line in done.lines:\n"
            "            print(f'  {line.what}: {line.before} / {line.now} {line.verdict.value} {line.note}')\n"
            "    assert result.is_well"
        )
    )
    document = {
        "cells": [{**cell, "id": _id(number, cell)} for number, cell in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"


def _text(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": source.splitlines(keepends=True)}


def _code(source: str, tags: list[str] | None = None) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {"tags": tags} if tags else {},
        "outputs": [],
        "source": source.splitlines(keepends=True),
    }


def _id(number: int, cell: dict[str, Any]) -> str:
    return hashlib.sha256(f"{number}{cell['source']}".encode()).hexdigest()[:12]

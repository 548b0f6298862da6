"""A launch as a form has it: what is wrong with it, the `%dtrain` line that does the same, and the fields of the spec.

Pure: whether the script is there is found out when it is launched.
"""

from __future__ import annotations

import shlex
from typing import Any, Final, NamedTuple

MOST: Final = 100_000  # ranks, restarts


class Form(NamedTuple):
    """As it is typed. `ranks` empty: one on every slot. `pool` empty: the only one, or that which is called default."""

    script: str = ""
    args: str = ""
    ranks: str = ""
    restarts: str = ""
    pool: str = ""
    address: str = ""  # of a cluster that is not this machine's


FIELDS: Final = (  # field, label, what it may look like, what it means
    ("script", "script", "~/train.py", "the whole path of the script that every rank runs"),
    ("args", "arguments", "--lr 0.1", "the script's own arguments, as in a shell"),
    ("ranks", "ranks", "all slots", "how many ranks; empty: one on every slot of the pool"),
    ("restarts", "restarts", "0", "how often a failed job is started again without getting further"),
)


def wrong(form: Form) -> str:
    """Why it cannot be launched so; empty when it can."""
    script = form.script.strip()
    if not script:
        return "give the script that the ranks are to run"
    if not script.startswith(("/", "~")):
        return "give the script's whole path: the pool does not know your notebook's folder"
    for name, value, least in (("ranks", form.ranks, 1), ("restarts", form.restarts, 0)):
        text = value.strip()
        if text and not (text.isascii() and text.isdigit() and least <= int(text[:9]) <= MOST):
            return f"{name}: a whole number, at least {least}"
    try:
        shlex.split(form.args)
    except ValueError as error:
        return f"arguments: {str(error).lower()}"
    return ""


def folder_of(form: Form) -> str:
    """Where the ranks run: beside the script."""
    return form.script.strip().rpartition("/")[0] or "/"


def line_of(form: Form, prefix: str = "%dtrain") -> str:
    """What does the same in a cell, or in a shell; of a form that is not wrong."""
    words = [prefix, "launch", "--cwd", folder_of(form)]
    words += ["-n", form.ranks.strip()] if form.ranks.strip() else []
    words += ["--max-restarts", form.restarts.strip()] if form.restarts.strip() else []
    words += ["--pool", form.pool] if form.pool else []
    words += ["--address", form.address] if form.address else []
    words += [form.script.strip(), *shlex.split(form.args)]
    return " ".join(word if word.startswith("~") and " " not in word else shlex.quote(word) for word in words)


def launch_options(form: Form) -> dict[str, Any]:
    """What `Session.launch` takes, besides the script."""
    options: dict[str, Any] = {"args": shlex.split(form.args), "cwd": folder_of(form)}
    if form.ranks.strip():
        options["nproc_per_node"] = int(form.ranks)
    if form.restarts.strip():
        options["max_restarts"] = int(form.restarts)
    return options

"""Verbs about dtrain itself: version, help, completion."""

from __future__ import annotations

import importlib.metadata
import platform

from workbench.verbs.context import Context
from workbench.verbs.declare import Arguments, Outcome
from workbench.verbs.shown import Text

_PARTS = ("torch", "distributed", "ipython", "panel")

_BASH = """\
_dtrain() {
    local IFS=$'\\n'
    COMPREPLY=($(dtrain complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${COMPREPLY[0]} == */ ]] && compopt -o nospace
}
complete -o bashdefault -F _dtrain dtrain
"""
_ZSH = """\
#compdef dtrain
_dtrain() {
    local -a found
    found=(${(f)"$(dtrain complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    compadd -- $found
}
compdef _dtrain dtrain
"""


def version(context: Context, args: Arguments) -> Outcome:
    """Versions of this and of what matters to it."""
    found = {"dtrain-workbench": _version("dtrain-workbench"), "python": platform.python_version()}
    found |= {name: _version(name) for name in _PARTS}
    text = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    return Outcome(value=Text(text), text=text, document=found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def completion(context: Context, args: Arguments) -> Outcome:
    """A script for the shell's own completion."""
    return Outcome(text=(_BASH if args.shell == "bash" else _ZSH).rstrip("\n"))

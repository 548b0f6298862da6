"""What could stand where the cursor is: our words only, for the magic and for shells alike.

Pure but for `files`: ids and names come from the sources that are handed in, which must answer at once or with nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from workbench.faults import FAULTS
from workbench.spec import MismatchPolicy, NanPolicy
from workbench.state import JobPhase
from workbench.verbs.declare import Option, Verb
from workbench.verbs.parse import find_option
from workbench.verbs.table import VERBS, find_verb, verb_names

Sources = Mapping[str, Callable[[str], Sequence[str]]]  # by an option's `offers`: words that begin with a prefix
_MOST_FILES: Final = 2000  # entries of a folder that are looked at
_AWKWARD: Final = frozenset(" \t'\"\\#;$&|<>()[]{}*?!`\n")  # would have to be quoted


def complete(words: Sequence[str], sources: Sources, verbs: Sequence[Verb] = VERBS) -> list[str]:
    """Words that could stand in place of the last one, which may be empty."""
    *before, fragment = words
    if not before:
        return _begins(fragment, dict.fromkeys(name.split()[0] for name in verb_names(verbs)))
    seconds = [name.split()[1] for name in verb_names(verbs) if name.startswith(f"{before[0]} ")]
    if seconds and len(before) == 1 and not fragment.startswith("-"):
        return _begins(fragment, seconds)
    try:
        verb, rest = find_verb(before, verbs)
    except ValueError:
        return []
    return complete_verb(verb, rest, fragment, sources)


def complete_verb(verb: Verb, before: Sequence[str], fragment: str, sources: Sources) -> list[str]:
    """Options, values of options, and operands of one verb."""
    all_sources = {**_FIXED, **sources}
    if verb.takes_program and "--" in before:
        return list(_FIXED["file"](fragment))
    last = find_option(verb, before[-1]) if before and before[-1].startswith("-") else (None, None)
    if last[0] is not None and last[0].takes_value and last[1] is None:
        return _values(last[0].offers, fragment, all_sources)
    if fragment.startswith("--") and "=" in fragment:
        option, value = find_option(verb, fragment)
        found = _values(option.offers, value or "", all_sources) if option is not None else []
        return [f"{fragment.partition('=')[0]}={word}" for word in found]
    if fragment.startswith("-"):
        return _begins(fragment, _flags(verb, before, fragment))
    operands = _operands(verb, before, fragment, all_sources)
    return operands if operands or fragment else _flags(verb, before, "--")


def _operands(verb: Verb, before: Sequence[str], fragment: str, sources: Sources) -> list[str]:
    at = len(_loose(verb, before))
    if verb.operands and verb.operands[-1].repeats:
        at = min(at, len(verb.operands) - 1)
    return _values(verb.operands[at].offers, fragment, sources) if at < len(verb.operands) else []


def _loose(verb: Verb, words: Sequence[str]) -> list[str]:
    """Words that are neither options nor their values."""
    found, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word.startswith("-"):
            option, value = find_option(verb, word)
            skip = option is not None and option.takes_value and value is None
        else:
            found.append(word)
    return found


def _flags(verb: Verb, before: Sequence[str], fragment: str) -> list[str]:
    """Flags of options that can still be given; the short ones only where a single dash was typed."""
    used = {option.key for word in before if (option := find_option(verb, word)[0]) is not None}
    options = [option for option in verb.options if option.repeats or option.key not in used]
    return [flag for option in options for flag in _spelled(option, fragment)]


def _spelled(option: Option, fragment: str) -> list[str]:
    return [flag for flag in option.flags if flag.startswith("--") or not fragment.startswith("--")]


def _values(offers: str, fragment: str, sources: Sources) -> list[str]:
    return [word for name in offers.split("|") if (source := sources.get(name)) for word in source(fragment)]


def _begins(fragment: str, words: Mapping[str, object] | Sequence[str]) -> list[str]:
    """Those that begin so; `_` in a long option counts as `-`."""
    wanted = fragment.replace("_", "-") if fragment.startswith("--") else fragment
    return [word for word in words if word.startswith(wanted)]


def files(fragment: str, suffixes: tuple[str, ...] = (), *, only_folders: bool = False) -> list[str]:
    """Folders, with a slash, and files; what would have to be quoted is left out."""
    folder, slash, start = fragment.rpartition("/")
    where = Path(folder + slash or ".").expanduser()
    found = []
    try:
        with os.scandir(where) as entries:
            for entry in itertools.islice(entries, _MOST_FILES):
                name = entry.name
                if not name.startswith(start) or (name.startswith(".") and not start) or _AWKWARD & set(name):
                    continue
                if entry.is_dir():
                    found.append(f"{folder}{slash}{name}/")
                elif not only_folders and name.endswith(suffixes or ("",)):
                    found.append(f"{folder}{slash}{name}")
    except (OSError, RuntimeError):
        return []
    return sorted(found)


def _scripts(fragment: str) -> list[str]:
    return files(fragment, (".py",))


def _sessions(fragment: str) -> list[str]:
    return files(fragment, (".dtrain",))


def _folders(fragment: str) -> list[str]:
    return files(fragment, only_folders=True)


_FIXED: Final[Sources] = {
    "phase": lambda text: _begins(text.upper(), [phase.value for phase in JobPhase]),
    "fault": lambda text: _begins(text, FAULTS),
    "mismatch": lambda text: _begins(text, [policy.value for policy in MismatchPolicy]),
    "nan": lambda text: _begins(text, [policy.value for policy in NanPolicy]),
    "shell": lambda text: _begins(text, ("bash", "zsh")),
    "verb": lambda text: _begins(text, verb_names()),
    "script": _scripts,
    "session": _sessions,
    "file": files,
    "dir": _folders,
}

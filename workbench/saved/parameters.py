"""What of a program can be set from outside: names that it assigns under a mark, and options of its command line.

A line `# dtrain: parameters` marks the assignments of plain values right below it; papermill's `# parameters`, and the
`parameters` tag of a notebook that is kept as text, mean the same. An option is a string that begins with `--` and is
the first argument of a call, as in `add_argument("--lr")`. Pure.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from workbench.errors import UsageError

Setting = tuple[str, str]  # name, value as it was typed
_MARK: Final = re.compile(
    r"""^\#\s*(?:dtrain:\s*parameters | parameters | (?:%%|\+).*\btags\s*[=:]\s*\[[^]]*["']parameters["'].*)\s*$""",
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)


def parameters(source: str) -> dict[str, ast.expr]:
    """Names that are assigned under a mark, with the expressions that they are given."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, ast.expr] = {}
    for mark in _MARK.finditer(source):
        line = source.count("\n", 0, mark.start()) + 1
        below = (statement for statement in body if statement.lineno > line)
        for statement in itertools.takewhile(_assigned, below):
            found.update(_assigned(statement))
    return found


def _assigned(statement: ast.stmt) -> dict[str, ast.expr]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_literal(value):
            return {name: value}
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if _is_literal(value):
            return {name: value}
    return {}


def set_parameters(source: str, settings: Sequence[Setting]) -> str:
    """The program with other values for its parameters, all else as it was; `UsageError` when a value does not fit."""
    known = parameters(source)
    lines = source.splitlines(keepends=True)
    for name, text in sorted(settings, key=lambda setting: _place(known[setting[0]]), reverse=True):
        node = known[name]
        new = repr(_value(name, text, node))
        start, end = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        head = lines[start].encode()[: node.col_offset].decode()
        tail = lines[end].encode()[node.end_col_offset :].decode()
        lines[start : end + 1] = [head + new + tail]
    return "".join(lines)


def _place(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _value(name: str, text: str, node: ast.expr) -> Any:
    """What was typed, in the type of what it replaces where that is plain."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        words = {"true": True, "false": False, "none": None}
        value = words.get(text.lower(), text)
    old = ast.literal_eval(node)
    if isinstance(old, str):
        return text
    if isinstance(old, bool) and not isinstance(value, bool):
        raise UsageError(f"{name} is {old!r} and cannot be {text!r}", hint="give True or False")
    if isinstance(old, int | float) and not isinstance(old, bool) and not isinstance(value, int | float | None):
        raise UsageError(f"{name} is {old!r} and cannot be {text!r}", hint="give a number")
    return float(value) if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool) else value


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


# --- options of a command line ----------------------------------------------------------------------------------------


def options(sources: Iterable[str]) -> dict[str, bool]:
    """Options that a program's texts declare, by `--name`; whether they are flags without a value."""
    found: dict[str, bool] = {}
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                found.update(dict.fromkeys(_spelled(node), _is_flag(node)))
    return found


def _spelled(call: ast.Call) -> list[str]:
    words = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    is_declared = bool(call.args) and isinstance(call.args[0], ast.Constant) and words and words[0].startswith("-")
    return [word for word in words if re.fullmatch(r"--[A-Za-z][\w-]*", word)] if is_declared else []


def _is_flag(call: ast.Call) -> bool:
    said = {keyword.arg: keyword.value for keyword in call.keywords}
    action = said.get("action")
    name = action.value if isinstance(action, ast.Constant) else getattr(action, "attr", "")
    return str(name).startswith("store_") or name == "BooleanOptionalAction" or "is_flag" in said


def set_option(args: Sequence[str], option: str, value: str, *, is_flag: bool) -> tuple[str, ...]:
    """Arguments with another value for the option: in place of the old one, else at the end."""
    words = list(args)
    at = next((k for k, word in enumerate(words) if word == option or word.startswith(f"{option}=")), None)
    if is_flag:
        rest = [word for word in words if word != option]
        return tuple(rest if value.lower() in ("false", "0", "no", "off") else [*rest, option])
    if at is None:
        return (
            *words,
            f"{option}={value}" if value.startswith("-") else option,
            *([] if value.startswith("-") else [value]),
        )
    if words[at] == option and at + 1 < len(words):
        words[at + 1] = value
    else:
        words[at] = f"{option}={value}"
    return tuple(words)


def set_word(args: Sequence[str], name: str, value: str) -> tuple[str, ...] | None:
    """Arguments with another value for a word `name=old`, as Hydra has them; None where there is none."""
    found = [word for word in args if word.startswith(f"{name}=")]
    return tuple(f"{name}={value}" if word in found else word for word in args) if found else None


# --- together ---------------------------------------------------------------------------------------------------------


def apply(
    source: str, others: Sequence[str], args: tuple[str, ...], settings: Sequence[Setting]
) -> tuple[str, tuple[str, ...]]:
    """The program and its arguments with these settings. `others`: texts that it imports, which may declare options.

    Raises `UsageError`, which lists what can be set.
    """
    marked, declared = parameters(source), options([source, *others])
    inside: list[Setting] = []
    for name, value in settings:
        option = next((known for known in (f"--{name}", f"--{name.replace('_', '-')}") if known in declared), None)
        given = next(
            (word for word in args if word.partition("=")[0] in (f"--{name}", f"--{name.replace('_', '-')}")), ""
        )
        if name in marked:
            inside.append((name, value))
        elif option or given:
            key = option or given.partition("=")[0]
            args = set_option(args, key, value, is_flag=declared.get(key, False))
        elif (words := set_word(args, name, value)) is not None:
            args = words
        else:
            raise _unknown(name, [*marked, *(known.removeprefix("--") for known in declared)])
    return set_parameters(source, inside), args


def _unknown(name: str, known: Sequence[str]) -> UsageError:
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    there = f"it has: {', '.join(dict.fromkeys(known))}" if known else "mark some with a line: # dtrain: parameters"
    return UsageError(f"the program has no parameter {name!r}", hint=f"{meant}{there}")


def sweep(settings: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[Setting, ...]]:
    """All combinations of the values, the last name varying fastest; one empty one where nothing is set."""
    names = [name for name, _ in settings]
    return [tuple(zip(names, values, strict=True)) for values in itertools.product(*(v for _, v in settings))]

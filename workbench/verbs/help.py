"""Help from the same table that the parser reads: of one verb, and the overview with a line a verb."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from workbench.verbs.declare import Operand, Option, Verb

_WIDTH = 100
_COLUMN = 30

PROGRAM_RULE = (
    "Whose option is it? With --, what stands before it is dtrain's and what stands after it is the program's. Without "
    "--, as with torchrun, options before SCRIPT are dtrain's and all words after SCRIPT are the program's; only where "
    "no option stands before SCRIPT may dtrain's follow it, and the first word that is none of them begins the "
    "program's arguments."
)


def usage(verb: Verb, prefix: str) -> str:
    """`dtrain logs [JOB] [options]`."""
    words = [f"{prefix} {verb.name}", *map(_operand, verb.operands)]
    if verb.takes_program:
        words += ["[options] [-- ARGS]"]
    elif verb.options:
        words += ["[options]"]
    return " ".join(words)


def verb_help(verb: Verb, prefix: str) -> str:
    """All about one verb. `prefix` is `dtrain` in a shell, `%dtrain` in a notebook."""
    parts = [f"usage: {usage(verb, prefix)}", "", _filled(verb.summary[:1].upper() + verb.summary[1:] + ".")]
    if verb.notes:
        parts += ["", _filled(verb.notes)]
    if verb.operands:
        parts += ["", *_rows((operand.value, operand.help) for operand in verb.operands)]
    if verb.listed:
        parts += ["", *_rows(verb.listed, column=18)]
    if verb.options:
        parts += ["", "options:", *_rows((_flags(option), _option_help(option)) for option in verb.options)]
    if verb.takes_program:
        parts += ["", _filled(PROGRAM_RULE)]
    if verb.examples:
        parts += ["", "examples:", *(f"  {prefix} {example}" for example in verb.examples)]
    return "\n".join(parts)


def overview(verbs: Sequence[Verb], prefix: str) -> str:
    """A line a verb."""
    rows = ((verb.name, verb.summary) for verb in verbs)
    return "\n".join(_rows(rows, column=18)) + f"\n\n{prefix} VERB --help tells all about a verb."


def _operand(operand: Operand) -> str:
    word = f"{operand.value} …" if operand.repeats else operand.value
    return word if operand.required else f"[{word}]"


def _flags(option: Option) -> str:
    return ", ".join(option.flags) + (f" {option.value}" if option.value else "")


def _option_help(option: Option) -> str:
    return f"{option.help} (may be repeated)" if option.repeats else option.help


def _rows(rows: Iterable[tuple[str, str]], column: int = _COLUMN) -> list[str]:
    lines: list[str] = []
    for left, right in rows:
        body = textwrap.wrap(right, _WIDTH - column) or [""]
        head = f"  {left}".ljust(column)
        if len(head) > column:
            lines.append(head)
            head = " " * column
        lines += [head + body[0], *(" " * column + line for line in body[1:])]
    return lines


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH)

"""Words to arguments. No clock, no file, no pool: what a word names is looked up by the verb that runs.

A long option is the same with `-` and with `_`, a value may follow `=` or stand in the next word. Where a program is
launched there are two sorts of words, ours and the program's own. The rule, which `dtrain launch --help` tells:

1. With `--`: what stands before it is ours, what stands after it is the program's.
2. Without, as with torchrun: options before SCRIPT are ours, every word after SCRIPT is the program's.
3. Without, and no option before SCRIPT: options of ours may follow it. From the first word that is none, all words are
   the program's; one among them that could be ours is an error, for nobody can tell whose it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn

from workbench.errors import UsageError
from workbench.verbs.declare import Arguments, Option, Verb

# What torchrun takes and the pool does by itself; said plainly, because command lines are carried over.
_TORCHRUN: Final = (
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--node-rank",
    "--local-addr",
    "--log-dir",
    "--redirects",
    "--tee",
    "--role",
    "--monitor-interval",
    "--start-method",
    "--no-python",
    "--run-path",
)
_IGNORED: Final = "--standalone"  # torchrun's: each of our pools is


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word that this one was probably meant to be, or ''."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def parse(verb: Verb, words: Sequence[str], *, is_cell: bool = False) -> Arguments:
    """Arguments of `verb`; raises `UsageError`. `is_cell`: the program is the cell, so there is no SCRIPT."""
    ours, extra = _halves(verb, words, is_cell)
    values: dict[str, Any] = {option.key: _unset(option) for option in verb.options}
    values.update({operand.key: None for operand in verb.operands})
    loose: list[str] = []
    at = 0
    while at < len(ours):
        if not _is_option(ours[at]):
            loose.append(ours[at])
            at += 1
            continue
        at = _take_option(verb, ours, at, values)
    if not values.get("help"):
        _place(verb, loose, values)
        _demand(verb, values, len(loose))
    return Arguments(**values, args=tuple(extra))


def _unset(option: Option) -> Any:
    """What stands for an option that is not given."""
    if option.repeats:
        return []
    return option.default if option.takes_value else False


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not word[1:2].isdigit()


def _split(word: str) -> tuple[str, str | None]:
    """`--env=K=V` → ("--env", "K=V"); `--nproc_per_node` → ("--nproc-per-node", None)."""
    if not word.startswith("--"):
        return word, None
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-"), value if equals else None


def find_option(verb: Verb, word: str) -> tuple[Option | None, str | None]:
    """The option a word names, and the value that stands in the same word."""
    flag, value = _split(word)
    option = verb.option(flag)
    if option is None and not word.startswith("--") and len(word) > 2:  # -n4
        option, value = verb.option(word[:2]), word[2:].removeprefix("=")
        if option is not None and not option.takes_value:
            option = None
    return option, value


def _take_option(verb: Verb, words: Sequence[str], at: int, values: dict[str, Any]) -> int:
    """Read the option at `at` into `values`; where the next word begins."""
    option, value = find_option(verb, words[at])
    if option is None:
        if verb.takes_program and _split(words[at])[0] == _IGNORED:
            return at + 1
        _unknown(verb, words[at])
    flag = _split(words[at])[0]
    if not option.takes_value:
        if value is not None:
            raise UsageError(f"{flag} takes no value", hint=f"write {flag}")
        values[option.key] = True
        return at + 1
    after = at + 1
    if value is None:
        if after == len(words) or (_is_option(words[after]) and find_option(verb, words[after])[0] is not None):
            raise UsageError(f"{flag} wants a value: {option.value}", hint=option.help)
        value, after = words[after], after + 1
    try:
        read = option.read(value)
    except ValueError as error:
        raise UsageError(f"{flag} wants {error}, not {value!r}") from None
    if option.repeats:
        values[option.key].append(read)
    else:
        values[option.key] = read
    return after


def _unknown(verb: Verb, word: str) -> NoReturn:
    flag = _split(word)[0]
    flags = [flag for option in verb.options for flag in option.flags if flag.startswith("--")]
    if verb.takes_program and flag in _TORCHRUN:
        raise UsageError(f"{flag} is torchrun's, and the pool does what it is for", hint=f"leave {flag} out")
    near = nearest(flag, flags)
    meant = f"did you mean {near}? " if near else ""
    own = "; arguments of the program itself go after --" if verb.takes_program else ""
    raise UsageError(f"{verb.name} has no option {flag}", hint=f"{meant}options: {' '.join(flags)}{own}")


def _place(verb: Verb, loose: Sequence[str], values: dict[str, Any]) -> None:
    """Words that stand by themselves, to the operands in order."""
    many = verb.operands[-1] if verb.operands and verb.operands[-1].repeats else None
    operands = [*verb.operands, *([many] * (len(loose) - len(verb.operands)) if many else ())]
    for operand, word in zip(operands, loose, strict=False):
        try:
            value = operand.read(word)
        except ValueError as error:
            raise UsageError(f"{operand.value} wants {error}, not {word!r}") from None
        if many is not None and operand is many:
            values[many.key] = [*(values[many.key] or ()), value]
        else:
            values[operand.key] = value
    if len(loose) > len(operands):
        word = loose[len(verb.operands)]
        takes = f"it takes {' '.join(operand.value for operand in verb.operands)}" if verb.operands else ""
        raise UsageError(f"{verb.name} does not know what to do with {word!r}", hint=takes)


def _demand(verb: Verb, values: dict[str, Any], given: int) -> None:
    """What cannot be left out."""
    for operand in verb.operands[given:]:
        if operand.required:
            raise UsageError(f"{verb.name} wants {operand.value}: {operand.help}")
    for option in verb.options:
        if option.required and values[option.key] is None:
            raise UsageError(f"{verb.name} wants {option.flags[-1]} {option.value}: {option.help}")


# --- ours and the program's -------------------------------------------------------------------------------------------


def _halves(verb: Verb, words: Sequence[str], is_cell: bool) -> tuple[list[str], list[str]]:
    """Our words, and the program's."""
    if not verb.takes_program:
        return [word for word in words if word != "--"], []
    if "--" in words:
        at = list(words).index("--")
        return list(words[:at]), list(words[at + 1 :])
    if is_cell:
        return list(words), []
    end = _program_ends(verb, words)
    if end is None:
        return list(words), []
    before, after = list(words[:end]), list(words[end:])
    if _has_options_before(verb, before):
        return before, after
    own = _first_foreign(verb, after)
    _refuse_mixed(verb, after[own:])
    return before + after[:own], after[own:]


def _program_ends(verb: Verb, words: Sequence[str]) -> int | None:
    """Where the words after SCRIPT, or after `-m MODULE`, begin; None when there is neither."""
    at = 0
    while at < len(words):
        if not _is_option(words[at]):
            return at + 1
        option, value = find_option(verb, words[at])
        at += 2 if option is not None and option.takes_value and value is None else 1
        if option is not None and option.key == "module":
            return min(at, len(words))
    return None


def _has_options_before(verb: Verb, before: Sequence[str]) -> bool:
    """Whether options stand before the program; `-m MODULE` is the program."""
    option = find_option(verb, before[0])[0] if _is_option(before[0]) else None
    return _is_option(before[0]) and not (option is not None and option.key == "module")


def _first_foreign(verb: Verb, words: Sequence[str]) -> int:
    """How many of these words are options of ours with their values."""
    at = 0
    while at < len(words) and _is_option(words[at]):
        option, value = find_option(verb, words[at])
        if option is None:
            break
        at += 2 if option.takes_value and value is None else 1
    return min(at, len(words))


def _refuse_mixed(verb: Verb, words: Sequence[str]) -> None:
    flags = [flag for option in verb.options for flag in option.flags]
    if words and words[0].startswith("--") and (near := nearest(_split(words[0])[0], flags, cutoff=0.85)):
        hint = f"did you mean {near}? if it is the program's own, write -- before it"
        raise UsageError(f"{verb.name} has no option {_split(words[0])[0]}", hint=hint)
    for word in words:
        if _is_option(word) and find_option(verb, word)[0] is not None:
            raise UsageError(
                f"is {_split(word)[0]} for dtrain or for the program?",
                hint="put dtrain's options first and the program's arguments after --",
            )

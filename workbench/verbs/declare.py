"""The words a verb is declared with: data only. What they mean to a command line is in `parse`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from workbench.verbs.context import Context

Arguments = SimpleNamespace  # one attribute an option or operand, by its key


@dataclass(frozen=True, slots=True)
class Option:
    """`-n/--nproc-per-node N`. Without `value` it is a flag. `read` raises ValueError with what it wants instead.

    `offers` names what completion offers as its value: see `complete.SOURCES`.
    """

    flags: tuple[str, ...]
    help: str
    value: str = ""
    read: Callable[[str], Any] = str
    default: Any = None
    repeats: bool = False  # the values are gathered in a list
    required: bool = False
    offers: str = ""
    named: str = ""  # the key, when it is not that of the last flag

    @property
    def key(self) -> str:
        return self.named or max(self.flags, key=len).lstrip("-").replace("-", "_")

    @property
    def takes_value(self) -> bool:
        return bool(self.value)


@dataclass(frozen=True, slots=True)
class Operand:
    """A word that stands by itself, such as JOB."""

    value: str
    help: str
    required: bool = False
    read: Callable[[str], Any] = str
    offers: str = ""
    named: str = ""
    repeats: bool = False  # the last one: all words that are left, as a list

    @property
    def key(self) -> str:
        return self.named or self.value.lower()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a verb came to: `value` is what a magic gives, `text` what a shell shows, `document` what --json prints.

    `then`: what a shell goes on with once that was said, until it is interrupted.
    """

    value: Any = None
    text: str = ""
    document: Any = None
    code: int = 0
    then: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb. `takes_program`: SCRIPT and its arguments follow, by `parse`'s rule.

    `is_act`: its text only says that it was done, and --quiet leaves it out.
    """

    name: str
    summary: str
    run: Callable[[Context, Arguments], Outcome]
    operands: tuple[Operand, ...] = ()
    options: tuple[Option, ...] = ()
    examples: tuple[str, ...] = ()
    notes: str = ""
    listed: tuple[tuple[str, str], ...] = ()  # the choices of an operand, each with a line of help
    takes_program: bool = False
    is_act: bool = False
    aliases: tuple[str, ...] = ()

    def option(self, flag: str) -> Option | None:
        return next((option for option in self.options if flag in option.flags), None)


HELP: Final = Option(("-h", "--help"), "show this text")
JSON: Final = Option(("--json",), "one JSON document, and nothing else on standard output")
QUIET: Final = Option(("-q", "--quiet"), "say nothing but what was asked for")
WHERE: Final = (
    Option(("--pool",), "the pool of this machine with that name; left out: the current one", "NAME", offers="pool"),
    Option(("--address",), "a cluster of your own: its scheduler's address, or its scheduler file", "ADDRESS"),
)
COMMON: Final = (*WHERE, JSON, QUIET, HELP)
JOB: Final = Operand(
    "JOB",
    "a job's id or the beginning of it; left out: the current one, else that which runs or ran last",
    offers="job",
)

"""`%dtrain` and `%%dtrain`: the verbs of `workbench.verbs` in a notebook or in IPython.

Loading this imports neither torch, Dask nor any widget library. Every mistake of the user's becomes IPython's own
`UsageError`, without a traceback; what the pool or a job did is shown in a few lines. All output is written by the
thread that runs the cell.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.error import UsageError as IPythonUsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import display

from workbench.errors import UsageError, WorkbenchError
from workbench.verbs.cells import run_cell
from workbench.verbs.context import Context
from workbench.verbs.declare import Outcome
from workbench.verbs.help import overview, verb_help
from workbench.verbs.launch import launch
from workbench.verbs.parse import parse
from workbench.verbs.screen import TerminalScreen
from workbench.verbs.table import CELL, VERBS, find_verb, run

INTERVAL: Final = 1.0  # s between two updates of a progress line in a notebook
PREFIX: Final = "%dtrain"

_INTRODUCTION = """\
Launch, watch, stop and talk to multi-rank training jobs.

examples:
  %dtrain up -n 4                                            the pool of this machine
  job = %dtrain launch train.py --nproc-per-node 4 -- --lr 0.1
  %dtrain status
  %dtrain logs -r 1 --tail 50 --grep loss
  %dtrain launch --interactive -n 2                          ranks that wait for cells

  %%dtrain                                                   this cell on all of them, state stays there
  %%dtrain -r 0,2                                            on some of them
  %%dtrain launch -n 2 --name trial -- --lr 0.1              this cell is a program of its own, in the background

A `;` at the end keeps quiet, `# …` is a comment, $name and {expression} are filled in.

verbs:
"""


class NotebookScreen:
    """A cell's output. Progress is one display that is updated, so that the saved notebook holds its last state."""

    width = 100
    has_color = False
    redraws = True
    interval = INTERVAL

    def __init__(self) -> None:
        self._handle: Any = None

    def write(self, text: str, *, is_error: bool = False) -> None:
        stream = sys.stderr if is_error else sys.stdout
        stream.write(text)
        stream.flush()

    def update(self, text: str) -> None:
        bundle = {"text/plain": text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)

    def settle(self) -> None:
        self._handle = None

    def display(self, bundle: Mapping[str, str]) -> None:
        display(dict(bundle), raw=True)  # type: ignore[no-untyped-call]


@magics_class
class DtrainMagics(Magics):
    """Holds the notebook's context: its pool, its current job."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        screen = NotebookScreen() if hasattr(shell, "kernel") else TerminalScreen()
        self.context = Context(screen=screen, namespace=shell.user_ns, prefix=PREFIX)

    @line_cell_magic
    def dtrain(self, line: str, cell: str | None = None) -> Any:
        with_errors_shown = _run_line if cell is None else _run_cell
        try:
            words, is_quiet = split_line(line)
            outcome = with_errors_shown(self.context, words, _marked(self.shell, cell or ""), is_quiet)
            return None if is_quiet else _shown(self.context, outcome, words)
        except UsageError as error:
            raise IPythonUsageError(str(error)) from None
        except WorkbenchError as error:
            raise _short(error) from None

    @context_matcher(identifier="dtrain")  # type: ignore[untyped-decorator]
    def match(self, context: CompletionContext) -> SimpleMatcherResult:
        """Our words, and no others, where a line is ours."""
        words = our_words(context.text_until_cursor, context.cursor_line)
        if words is None:
            return SimpleMatcherResult(completions=[])
        found = self._complete(words)
        return SimpleMatcherResult(
            completions=[SimpleCompletion(text=word, type="dtrain") for word in found],
            matched_fragment=words[-1],
            suppress=True,
            ordered=True,
        )

    def _complete(self, words: Sequence[str]) -> list[str]:
        from workbench.verbs.complete import complete, complete_verb

        is_cell, *rest = words
        sources = {"job": self.context.quick_job_ids, "pool": _pools, "name": self._names}
        if is_cell == "%%" and rest[0] != "launch":
            found = complete_verb(CELL, rest[:-1], rest[-1], sources)
            return found + (["launch"] if len(rest) == 1 and "launch".startswith(rest[0]) else [])
        return complete(rest, sources)

    def _names(self, prefix: str) -> list[str]:
        return sorted(
            name for name in self.context.namespace or () if name.startswith(prefix) and not name.startswith("_")
        )


def _marked(shell: Any, cell: str) -> str:
    """The cell; one that the notebook tags `parameters`, as papermill wants it, with a line that says so."""
    asked = shell.get_parent() if hasattr(shell, "get_parent") else {}
    tags = (asked.get("metadata") or {}).get("tags") or () if isinstance(asked, dict) else ()
    is_told = not cell.strip() or re.search(r"^#\s*(?:dtrain:\s*)?parameters\s*$", cell, re.MULTILINE)
    return cell if is_told or "parameters" not in tags else f"# dtrain: parameters\n{cell}"


DtrainMagics.dtrain.__doc__ = _INTRODUCTION + overview(VERBS, PREFIX)


# --- lines ------------------------------------------------------------------------------------------------------------


def split_line(line: str) -> tuple[list[str], bool]:
    """`(words, whether a ; at the end asks for quiet)`. Comments are dropped; quotes are as in a shell."""
    text = _without_comment(line).rstrip()
    is_quiet = text.endswith(";")
    try:
        return shlex.split(text.removesuffix(";") if is_quiet else text), is_quiet
    except ValueError as error:
        what = "a quote is not closed" if "quotation" in str(error) else "there is a backslash at the end"
        raise UsageError(f"{what}: {text}", hint="write ' and \" in pairs") from None


def _without_comment(line: str) -> str:
    """Up to a `#` that begins a word and is in no quotes."""
    quote, before = "", " "
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote and (before != "\\" or quote == "'") else quote
        elif char in "'\"" and before != "\\":
            quote = char
        elif char == "#" and before.isspace():
            return line[:at]
        before = char
    return line


def our_words(text: str, line_number: int) -> list[str] | None:
    """The kind of magic and the words until the cursor, the last of them perhaps empty; None where nothing is ours."""
    stripped = text.lstrip()
    for kind in ("%%", "%"):
        head, found, rest = stripped.partition(f"{kind}dtrain")
        is_first = not head if kind == "%%" else not head or head.rstrip().endswith("=")
        if found and is_first and rest[:1].isspace() and (kind == "%" or line_number == 0):
            return [kind, *rest.split(), *([""] if rest[-1].isspace() else [])]
    return None


def _run_line(context: Context, words: Sequence[str], _: str, is_quiet: bool) -> Outcome:
    if not words or words[0] in ("-h", "--help"):
        words = ["help", *words[1:]]
    if words[0] in ("-r", "--rank", "--ranks", "--job"):
        raise UsageError("only a cell runs on ranks", hint="write %%dtrain at the top of a cell, and the code below it")
    return run(context, words, is_quiet=is_quiet)


def _run_cell(context: Context, words: Sequence[str], cell: str, is_quiet: bool) -> Outcome:
    """The cell on the ranks of the current interactive job, or as a program of its own."""
    if words and not words[0].startswith("-"):
        verb, rest = find_verb(words)
        if verb.name != "launch":
            raise UsageError(f"{verb.name} takes no cell", hint=f"write it in a line: {PREFIX} {verb.name}")
        args = parse(verb, rest, is_cell=True)
        args.verb = verb.name
        if args.help:
            return Outcome(text=verb_help(verb, f"%{PREFIX}"))
        _demand_cell(cell)
        args.quiet = args.quiet or is_quiet
        return launch(context, args, source=cell)
    args = parse(CELL, words)
    if args.help:
        return Outcome(text=verb_help(CELL, "%").replace("% %dtrain", "%%dtrain"))
    _demand_cell(cell)
    run_cell(context, context.interactive_job(args), cell, args.rank, is_quiet=args.quiet or is_quiet)
    return Outcome()


def _demand_cell(cell: str) -> None:
    if not cell.strip():
        raise UsageError("the cell is empty", hint="write what the ranks are to run below %%dtrain")


# --- what comes back --------------------------------------------------------------------------------------------------


def _shown(context: Context, outcome: Outcome, words: Sequence[str]) -> Any:
    """What the magic returns; text without a value is printed."""
    if "--json" in words and outcome.document is not None:
        return outcome.document
    if outcome.value is None and outcome.text:
        context.screen.write(outcome.text + "\n")
    return outcome.value


def _short(error: WorkbenchError) -> WorkbenchError:
    """The same error, which IPython shows as what happened and what to do."""
    if not hasattr(error, "_render_traceback_"):
        lines = [f"{type(error).__name__}: {error.args[0] if error.args else ''}", *filter(None, [error.hint])]
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return error


def _pools(prefix: str) -> list[str]:
    from workbench.pool.local import list_pools

    return [name for name, _ in list_pools() if name.startswith(prefix)]


# --- the extension ----------------------------------------------------------------------------------------------------


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext workbench`; a second time changes nothing."""
    if _loaded(shell) is not None:
        return
    magics = DtrainMagics(shell)
    shell.register_magics(magics)
    if shell.Completer is not None:
        shell.Completer.custom_matchers.append(magics.match)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext workbench`: the magics, the completion and the connection go; pool and jobs stay."""
    magics = _loaded(shell)
    if magics is None:
        return
    magics.context.forget_session()
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("dtrain", None)
    shell.magics_manager.registry.pop(DtrainMagics.__name__, None)
    if shell.Completer is not None:
        shell.Completer.custom_matchers[:] = [m for m in shell.Completer.custom_matchers if m != magics.match]


def _loaded(shell: InteractiveShell) -> DtrainMagics | None:
    found = shell.magics_manager.registry.get(DtrainMagics.__name__)
    return found if isinstance(found, DtrainMagics) else None

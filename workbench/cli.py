"""`dtrain …` in a shell: the verbs of `workbench.verbs`, with the exit codes and streams that scripts rely on.

    0    it was done (with --wait: the job SUCCEEDED)
    1    it was not, or the job did not succeed; the reason is on standard error
    2    the command line is wrong
    130  Ctrl-C ended the watching; a job goes on

With --json standard output holds exactly one JSON document, also when something went wrong.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Final

from workbench.errors import RankFailedError, UsageError, WorkbenchError
from workbench.verbs.context import Context
from workbench.verbs.declare import Outcome
from workbench.verbs.screen import TerminalScreen
from workbench.verbs.table import COMPLETION, VERBS, run

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141  # as of a process that SIGPIPE ended
_ALL: Final = (*VERBS, COMPLETION)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _main(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `dtrain jobs | head`
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _main(words: list[str]) -> int:
    if words[:1] == ["complete"]:
        return _complete(words[1:])
    wants_json = "--json" in words[: words.index("--") if "--" in words else len(words)]
    context = Context(screen=TerminalScreen(progress_to_error=wants_json))
    try:
        return _show(_run(context, words), wants_json)
    except KeyboardInterrupt as error:
        _complain(str(error) or "interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        return _failed(error, wants_json)
    finally:
        context.forget_session()


def _run(context: Context, words: list[str]) -> Outcome:
    if not words:
        print(run(context, ["help"], _ALL).text, file=sys.stderr)
        return Outcome(code=2)
    if words[0] in ("-h", "--help"):
        words = ["help"]
    elif words[0] in ("-V", "--version"):
        words = ["version", *words[1:]]
    return run(context, words, _ALL)


def _show(outcome: Outcome, wants_json: bool) -> int:
    if wants_json and outcome.document is not None:
        _print_json(outcome.document)
    elif outcome.text:
        print(outcome.text)
    if outcome.then is not None:
        sys.stdout.flush()
        outcome.then()
    return outcome.code


def _print_json(document: Any) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def _failed(error: Exception, wants_json: bool) -> int:
    """Say what went wrong in a line or two; the exit code."""
    if os.environ.get("DTRAIN_DEBUG", "") not in ("", "0"):
        traceback.print_exc()
    is_ours = isinstance(error, WorkbenchError)
    message = str(error.args[0]) if is_ours and error.args else f"{type(error).__name__}: {error}"
    hint = _in_shell(getattr(error, "hint", "")) if is_ours else "a bug here, please report; DTRAIN_DEBUG=1 tells more"
    if isinstance(error, RankFailedError) and error.traceback:
        print(error.traceback, file=sys.stderr)
    _complain(_in_shell(message), hint)
    if wants_json:
        told = {"type": type(error).__name__, "message": message, "hint": hint}
        document = getattr(error, "document", None)
        _print_json({**document, "error": told} if document else {"error": told})
    return 2 if isinstance(error, UsageError) else 1


def _complain(message: str, hint: str = "") -> None:
    print(f"dtrain: {message}", file=sys.stderr)
    if hint:
        print(f"  {hint}", file=sys.stderr)


def _in_shell(text: str) -> str:
    """Hints speak of the magic; in a shell the same verb has no percent sign."""
    return text.replace("%dtrain", "dtrain")


# --- completion -------------------------------------------------------------------------------------------------------


def _complete(words: Sequence[str]) -> int:
    """`dtrain complete -- WORDS…`, for the scripts that `dtrain completion` prints: a candidate a line."""
    from workbench.verbs.complete import complete

    typed = list(words[1:] if words[:1] == ["--"] else words) or [""]
    for word in complete(typed, {"job": _recorded_ids, "pool": _pools}, _ALL):
        print(word)
    return 0


def _recorded_ids(prefix: str) -> list[str]:
    """From the list on disk: a shell has no session open, and must not wait for one."""
    from workbench.store.home import index_path
    from workbench.store.index import JobIndex

    try:
        if not index_path().is_file():
            return []
        with JobIndex(index_path()) as index:
            return index.ids(prefix=prefix, limit=50)
    except (WorkbenchError, OSError):
        return []


def _pools(prefix: str) -> list[str]:
    from workbench.pool.local import list_pools

    return [name for name, _ in list_pools() if name.startswith(prefix)]

"""Runs one cell's source in a namespace as IPython does: the value of the last expression, `await` at top level."""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import linecache
import tokenize
import traceback
from pathlib import Path
from types import CodeType
from typing import Any, Final

OURS: Final = f"{Path(__file__).parent}/"
MOST_TEXT: Final = 64 * 1024  # characters of a traceback
NO_MAGICS: Final = "magics and shell commands do not work inside a rank's cell; write Python here"


class Program:
    """The namespace that cells run in."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self._loop: asyncio.Runner | None = None  # one for all cells: what a cell began may go on in the next

    def run(self, source: str, name: str) -> Any:
        """The last expression's value; None where there is none, or where a semicolon ends it."""
        remember(name, source)
        tree = parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if tree.body:
            self._evaluate(_compile(tree, name, "exec"))
        if not isinstance(last, ast.Expr):
            return None
        value = self._evaluate(_compile(ast.Expression(last.value), name, "eval"))
        if value is not None:
            self.namespace["_"] = value
        return None if is_quiet(source) else value

    def value(self, expression: str) -> Any:
        return self._evaluate(_compile(_tree(expression.strip(), "<pull>", "eval"), "<pull>", "eval"))

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()

    def _evaluate(self, code: CodeType) -> Any:
        if not code.co_flags & inspect.CO_COROUTINE:
            return eval(code, self.namespace)
        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop.run(eval(code, self.namespace))


def _compile(tree: ast.Module | ast.Expression, name: str, mode: str) -> CodeType:
    code: CodeType = compile(tree, name, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return code


def remember(name: str, source: str) -> None:
    """Lets tracebacks, `inspect.getsource` and torch.compile find the cell's lines."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def parse(source: str, name: str) -> ast.Module:
    try:
        tree: ast.Module = _tree(source, name, "exec")
        return tree
    except SyntaxError as error:
        if any(line.lstrip().startswith(("%", "!")) for line in source.splitlines()):
            error.add_note(NO_MAGICS)
        raise


def _tree(source: str, name: str, mode: str) -> Any:
    """As `ast.parse`, which would show as a frame of the user's syntax error."""
    return compile(source, name, mode, flags=ast.PyCF_ONLY_AST, dont_inherit=True)


def is_quiet(source: str) -> bool:
    """Whether the last token is a semicolon, comments aside."""
    last = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER):
                last = token.string
    except (tokenize.TokenError, SyntaxError):
        return False
    return last == ";"


def explain(error: BaseException) -> dict[str, str]:
    """`error` (one line) and `traceback`, without frames of ours."""
    whole = traceback.TracebackException.from_exception(error)
    _leave_us_out(whole, set())
    text = "".join(whole.format())
    if len(text) > MOST_TEXT:
        half = MOST_TEXT // 2
        text = f"{text[:half]}\n… {len(text) - MOST_TEXT} characters left out …\n{text[-half:]}"
    whole.__notes__ = None  # the line is the error's own
    return {"error": list(whole.format_exception_only())[-1].strip()[:2000], "traceback": text}


def _leave_us_out(shown: traceback.TracebackException | None, seen: set[int]) -> None:
    if shown is None or id(shown) in seen:
        return
    seen.add(id(shown))
    kept = [frame for frame in shown.stack if not frame.filename.startswith(OURS)]
    shown.stack = traceback.StackSummary.from_list(kept)
    for other in (shown.__cause__, shown.__context__, *(getattr(shown, "exceptions", None) or ())):
        _leave_us_out(other, seen)

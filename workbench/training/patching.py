"""Putting wrappers around functions of torch, and taking them off again.

A wrapper must not change what a caller, a pickle or torch.compile sees. Where torch has decorated the function, the
wrapper goes under the decorator, into its closure: the public function stays the same object, so names imported earlier
are watched too, and Dynamo, which knows collectives by identity, still rewrites them. Elsewhere the module's attribute
is replaced. Dynamo never compiles a wrapper's own frame; where it inlines one it must find the plain call at once: a
wrapper begins with `if tracing(): return plain(...)`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

Function: TypeAlias = Callable[..., Any]


class Patches:
    """Wrappers that were put on; `undo` takes them off, the newest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owners: tuple[Any, ...], name: str, make: Callable[[Function], Function]) -> None:
        """Put `make(plain)` around `name` of the first owner, and of the others that have the same object there."""
        plain = getattr(owners[0], name)
        cell = _decorated(plain)
        if cell is not None:
            self._fill(cell, make)
            return
        wrapper = _disguise(make(plain), plain)
        for owner in owners:
            if getattr(owner, name, None) is plain:
                self.set(owner, name, wrapper)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute that the owner has itself."""
        old = vars(owner)[name]
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, old))

    def on_undo(self, act: Callable[[], None]) -> None:
        self._undo.append(act)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _fill(self, cell: Any, make: Callable[[Function], Function]) -> None:
        plain = cell.cell_contents
        cell.cell_contents = _disguise(make(plain), plain)
        self._undo.append(lambda: setattr(cell, "cell_contents", plain))


def _decorated(function: Any) -> Any:
    """The closure cell in which torch's logging decorator keeps the function proper; None where there is no such."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_freevars != ("func",) or not hasattr(function, "__wrapped__"):
        return None
    return function.__closure__[0]


def _disguise(wrapper: Function, plain: Function) -> Function:
    functools.update_wrapper(wrapper, plain)
    skip_frame(wrapper)
    return wrapper


def skip_frame(function: Any, *, recursive: bool = False) -> None:
    """Have Dynamo run this function's frame as it is when it is called from compiled code; loads no Dynamo.

    `recursive`: and all that it calls, which must then be ours.
    """
    with contextlib.suppress(Exception):  # how it is told differs by version of torch, and none of it is public
        from torch._C import _dynamo

        eval_frame: Any = _dynamo.eval_frame
        if hasattr(eval_frame, "set_code_exec_strategy"):
            action = eval_frame._FrameAction
            strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if recursive else action.DEFAULT)
            eval_frame.set_code_exec_strategy(function.__code__, strategy)
        else:
            eval_frame.skip_code(function.__code__)

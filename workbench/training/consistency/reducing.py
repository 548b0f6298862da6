"""Puts the hook of `reduce` into DDP models, at their first forward that reduces, when the job asks for it.

A program's own hook is never displaced: where it has one by then, that stays, and it is said. Where it registers one
later it takes our place.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling as tracing

from workbench.training.consistency.check import ReplicasDifferError
from workbench.training.consistency.reduce import Reducer
from workbench.training.consistency.reports import say
from workbench.training.consistency.room import Room
from workbench.training.consistency.settle import Settler
from workbench.training.consistency.watch import Watch
from workbench.training.patching import Function


class Wish(NamedTuple):
    """What is asked for; see `reduce.MODES`. `width` of integers in bits, `every`: backwards between two checks."""

    mode: str
    width: int = 64
    every: int = 1

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Wish | None:
        every = max(1, settings.get("consistency_every", 0))
        if width := settings.get("exact_reduce", 0):
            return cls("exact", width)
        if settings.get("bitwise", False):
            return cls("bitwise", every=every)
        return cls("checked", every=every) if settings.get("check_reduce", False) else None


class Reducing:
    """Of one process: the models whose reduces are checked."""

    def __init__(self, watch: Watch, wish: Wish) -> None:
        self.watch, self.wish = watch, wish
        self.settlers: dict[int, Settler] = {}  # by the id of the DDP model
        self._seen: set[int] = set()
        self._depth = 0
        self._thread = get_ident()

    # --- models -------------------------------------------------------------------------------------------------------

    def around_forward(self, plain: Function) -> Function:
        seen = self._seen

        def forward(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
            if tracing():
                return plain(ddp, *inputs, **kwargs)
            if id(ddp) not in seen and ddp.require_backward_grad_sync and torch.is_grad_enabled():
                seen.add(id(ddp))
                self.adopt(ddp)
            return plain(ddp, *inputs, **kwargs)

        return forward

    def adopt(self, ddp: Any) -> None:
        """All ranks come here at the same forward."""
        if reason := why_not(ddp):
            say(f"all-reduces of {type(ddp.module).__name__} are not checked: {reason}")
            return
        try:
            reducer = Reducer(ddp, *self.wish)
            if reducer.ranks < 2:
                return
            c10d: Any = torch.distributed
            c10d._register_comm_hook(ddp.reducer, None, reducer.hook)  # the model keeps no word of it: pickles stay
            names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
            checker = self.watch.checker
            self.settlers[id(ddp)] = Settler(
                reducer, Room.open(ddp.process_group), checker.reports, checker.step_of, checker.policy,
                lambda parameter: names.get(id(parameter), "?"),
            )  # fmt: skip
        except Exception as error:
            say(f"all-reduces of {type(ddp.module).__name__} are not checked: {type(error).__name__}: {error}")

    def around_registering(self, plain: Function) -> Function:
        def register_comm_hook(ddp: Any, state: object, hook: Any) -> None:
            settler = self.settlers.get(id(ddp))
            if settler is None:
                plain(ddp, state, hook)
                return
            ddp._check_comm_hook(hook)
            ddp._comm_hooks.append((hook, state))
            settler.reducer.inner = state, hook
            say(f"all-reduces of {type(ddp.module).__name__} are no longer checked: the program has a hook of its own")

        return register_comm_hook

    # --- backward -----------------------------------------------------------------------------------------------------

    def around_backward(self, plain: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.settlers or get_ident() != self._thread:
                return plain(*args, **kwargs)
            self._depth += 1  # a checkpointed module runs a backward within the backward
            try:
                found = plain(*args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth:
                self.settle()
            return found

        return call

    def settle(self) -> None:
        for settler in self.settlers.values():
            if settler.reducer.is_off:
                continue
            try:
                settler.settle()
            except ReplicasDifferError:
                raise
            except Exception as error:
                settler.reducer.is_off = True
                say(f"all-reduces are no longer checked: {type(error).__name__}: {error}")

    def forget(self) -> None:
        """Process groups are about to go."""
        self.settlers.clear()
        self._seen.clear()


def why_not(ddp: Any) -> str:
    """Why the hook cannot be put there; empty: it can."""
    hooks = [getattr(hook, "__qualname__", "a hook") for hook, _ in getattr(ddp, "_comm_hooks", ())]
    if hooks:
        return f"the program has a communication hook of its own, {hooks[0]}"
    join = getattr(ddp, "_join_config", None)
    if getattr(join, "enable", False) and not getattr(ddp, "_divide_by_initial_world_size", True):
        return "under Join it divides by the ranks that have input left"
    return ""


def install(watch: Watch, wish: Wish) -> Reducing:
    """Before the program is there. Undone with the watch's patches."""
    from torch.nn.parallel import DistributedDataParallel as Ddp

    reducing = Reducing(watch, wish)
    patches = watch.patches
    patches.wrap((Ddp,), "forward", reducing.around_forward)
    patches.wrap((Ddp,), "register_comm_hook", reducing.around_registering)
    engine = "_engine_run_backward" if hasattr(torch.autograd, "_engine_run_backward") else "backward"
    patches.wrap((torch.autograd,), engine, reducing.around_backward)
    watch.on_forget.append(reducing.forget)
    return reducing

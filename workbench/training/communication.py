"""Calls of torch.distributed, timed and named in the box while they last: a hung rank says where it hangs."""

from __future__ import annotations

import inspect
from functools import partial
from threading import get_ident
from typing import Any, Final

import torch
from torch.compiler import is_dynamo_compiling as tracing

from workbench.training.observe import COMM, Observer
from workbench.training.patching import Function

COLLECTIVES: Final = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "init_process_group", "monitored_barrier", "new_group",
    "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "split_group",
)  # fmt: skip
POINT_TO_POINT: Final = (
    "batch_isend_irecv", "irecv", "isend", "recv", "recv_object_list", "send", "send_object_list",
)  # fmt: skip

MOST: Final = 256  # descriptions kept of one function


def watch_communication(observer: Observer) -> None:
    dist = torch.distributed
    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    for name in (*COLLECTIVES, *POINT_TO_POINT):
        if hasattr(c10d, name):
            observer.patches.wrap((c10d, dist), name, partial(_timed, observer, name))
    observer.patches.wrap((dist.Work,), "wait", partial(_timed_wait, observer))


def _timed(observer: Observer, name: str, plain: Function) -> Function:
    at = _position(plain, "group")
    numbered = name in COLLECTIVES
    group_of = torch.distributed.group
    # What was said before of one tensor, and its bytes: a step says little that is new.
    known: dict[tuple[int, torch.dtype], tuple[str, int]] = {}

    def told(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, int]:
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor):
            return describe(name, args, kwargs), volume(args, kwargs)
        key = (first.numel(), first.dtype)
        found = known.get(key)
        if found is None:
            if len(known) > MOST:
                known.clear()
            found = known[key] = describe(name, args, kwargs), volume(args, kwargs)
        return found

    def call(*args: Any, **kwargs: Any) -> Any:
        if tracing() or observer.thread != get_ident() or observer.activity == COMM:
            return plain(*args, **kwargs)
        group = kwargs.get("group") if len(args) <= at else args[at]
        is_default = group is None or group is group_of.WORLD
        text, size = told(args, kwargs)
        frame = observer.begin_collective(text, numbered and is_default)
        if size:
            observer.count(name, 1, size)
        try:
            return plain(*args, **kwargs)
        finally:
            observer.leave(frame)

    return call


def _timed_wait(observer: Observer, plain: Function) -> Function:
    def wait(*args: Any, **kwargs: Any) -> Any:
        if tracing() or observer.thread != get_ident() or observer.activity == COMM:
            return plain(*args, **kwargs)
        frame = observer.enter(COMM)  # the box keeps the name of what was called last
        try:
            return plain(*args, **kwargs)
        finally:
            observer.leave(frame)

    return wait


def _position(function: Function, parameter: str) -> int:
    """Where `parameter` may stand among positional arguments; beyond all where it cannot."""
    try:
        return list(inspect.signature(function).parameters).index(parameter)
    except ValueError:
        return 99


def volume(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of the largest buffer handed in, a list of tensors being one; 0 where there is none."""
    sizes = [0]
    for value in (*args, *kwargs.values()):
        several = [value] if isinstance(value, torch.Tensor) else value if isinstance(value, list) else ()
        tensors = [getattr(one, "tensor", one) for one in several]
        sizes.append(sum(one.numel() * one.element_size() for one in tensors if isinstance(one, torch.Tensor)))
    return max(sizes)


def describe(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """`all_reduce[1024 float32]`, where a tensor, or the first of a list of them, says so."""
    several = None
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return f"{name}[{value.numel()} {str(value.dtype)[6:]}]"
        if several is None and isinstance(value, list) and value:
            several = getattr(value[0], "tensor", value[0])  # a P2POp has one
    if isinstance(several, torch.Tensor):
        return f"{name}[{several.numel()} {str(several.dtype)[6:]}, …]"
    return name

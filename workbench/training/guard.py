"""Keeps init → DDP → train → destroy_process_group working, time after time, in one process.

On gloo in torch 2.13 the last reference to a destroyed group is often that of a DDP object's reducer. When that is
freed, the group's destructor joins its threads while it holds the GIL, for which one of those threads waits: a
deadlock. So a destroyed group is retired, not released: a reference is kept until every DDP object made while it was
there is gone, then dropped through the group's own binding, which gives up the GIL. At the interpreter's end what is
left is leaked on purpose. Besides, a group made again over an agent's store gets keys of its own (`meeting`), and the
sockets of groups are known (`sockets`), so that a collective can be interrupted.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final

from workbench.training.meeting import Meeting, seconds
from workbench.training.patching import Function, Patches
from workbench.training.sockets import GroupSockets

DEFAULT_TIMEOUT: Final = 1800.0  # s, torch's for gloo
MOST_RETIRED: Final = 4  # groups kept for models that may be garbage; looking takes 0.1 s and more


class Guard:
    """Groups that were destroyed, and the DDP objects that may still refer to them."""

    current: ClassVar[Guard | None] = None  # of this process, while installed

    def __init__(self) -> None:
        self.retired: list[tuple[Any, weakref.WeakSet[Any]]] = []
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        self.sockets = GroupSockets()
        self.patches = Patches()
        self.before_destroy: dict[str, Callable[[], object]] = {}  # by name: what still uses the groups
        self.always_meet = False  # also for the first group: in an interactive rank that one may have been given up
        self._groups_made = 0
        self._words_used: set[bytes] = set()

    def retire(self, groups: list[Any]) -> None:
        """Keep groups that are about to be destroyed."""
        self.retired += [(group, weakref.WeakSet(self.models)) for group in groups]

    def release(self, *, collect: bool) -> None:
        """Drop the groups that no model refers to any more; `collect`: look for models that are garbage."""
        if collect and sum(bool(owners) for _, owners in self.retired) >= MOST_RETIRED:
            gc.collect()
        self.retired = [(group, owners) for group, owners in self.retired if len(owners)]

    def leak(self) -> None:
        """Give every group that may still be referred to one reference that nothing drops."""
        increment = ctypes.pythonapi.Py_IncRef
        increment.argtypes = [ctypes.py_object]
        for group in [*(group for group, _ in self.retired), *live_groups()]:
            increment(group)

    def uninstall(self) -> None:
        self.patches.undo()
        atexit.unregister(self.leak)
        if Guard.current is self:
            Guard.current = None

    # --- what is put around torch's functions ---

    def around_init(self, plain: Function) -> Function:
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            self.release(collect=True)
            _begin_names_anew()
            with self.sockets.recording():
                made = plain(*args, **kwargs)
            self._groups_made += 1
            return made

        return init_process_group

    def around_new_group(self, plain: Function) -> Function:
        def new_group(*args: Any, **kwargs: Any) -> Any:
            with self.sockets.recording():
                return plain(*args, **kwargs)

        return new_group

    def around_destroy(self, plain: Function) -> Function:
        def destroy_process_group(group: Any = None) -> Any:
            for end in tuple(self.before_destroy.values()):
                end()
            self.retire(live_groups() if group is None else [group])
            return plain(group)

        return destroy_process_group

    def around_model(self, plain: Function) -> Function:
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            self.models.add(model)
            plain(model, *args, **kwargs)

        return __init__

    def around_rendezvous(self, plain: Function) -> Function:
        def rendezvous(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
            for store, rank, world_size in plain(url, *args, **kwargs):
                yield self._meet(url, store, rank, world_size, kwargs.get("timeout")), rank, world_size

        return rendezvous

    def _meet(self, url: str, store: Any, rank: int, world_size: int, timeout: Any) -> Any:
        outlives_us = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and url.startswith(("env://", "tcp://"))
        if not outlives_us or not (self.always_meet or self._groups_made):
            return store
        from torch._C._distributed_c10d import PrefixStore

        room = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        prefix = Meeting(room, rank, world_size).agree(self._words_used, seconds(timeout, DEFAULT_TIMEOUT))
        return PrefixStore(f"dtrain/group/{prefix}", store)


def install() -> Guard:
    """Guard this process; a second call gives the guard that is there. Needs torch."""
    if Guard.current is not None:
        return Guard.current
    guard = Guard()
    import torch.distributed as dist

    if dist.is_available():
        _install(guard)
        atexit.register(guard.leak)
        Guard.current = guard
    return guard


def _install(guard: Guard) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.nn.parallel import DistributedDataParallel

    both = (c10d, dist)
    guard.patches.wrap(both, "init_process_group", guard.around_init)
    guard.patches.wrap(both, "new_group", guard.around_new_group)
    guard.patches.wrap(both, "destroy_process_group", guard.around_destroy)
    guard.patches.wrap((DistributedDataParallel,), "__init__", guard.around_model)
    guard.patches.wrap((c10d,), "rendezvous", guard.around_rendezvous)


def live_groups() -> list[Any]:
    """The process groups that exist now."""
    from torch.distributed import distributed_c10d as c10d

    return list(c10d._world.pg_map)


def _begin_names_anew() -> None:
    """An init that failed has used up the group's name, which must be the same in every rank."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if not dist.is_initialized():
        with contextlib.suppress(AttributeError):
            c10d._world.group_count = 0

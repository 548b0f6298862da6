"""Makes a second process group in one process safe: cell after cell may init, wrap in DDP, train and destroy.

Two traps of torch 2.13 on gloo:

- The last reference to a destroyed group is often the DDP object's reducer. When that is freed, the group's destructor
  joins its threads while it holds the GIL, and one of those threads waits for the GIL: deadlock. So a destroyed group
  is retired, not released: a reference is kept until every DDP object that lived with it is gone, and is then dropped
  through the group's own binding, which gives up the GIL. At the interpreter's end what is left is leaked on purpose.
- A second `init_process_group` finds the first one's addresses in the store, which outlives the group, under the same
  keys. So each one after the first gets a prefix of its own. Only those that succeeded are counted: an interrupted one
  must not set this rank apart from its peers.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any


class Guard:
    """Groups that were destroyed, and the DDP objects that may still refer to them."""

    def __init__(self) -> None:
        self.retired: list[tuple[Any, weakref.WeakSet[Any]]] = []
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        self.inits = 0

    def retire(self, groups: list[Any]) -> None:
        """Keep groups that are about to be destroyed."""
        owners: weakref.WeakSet[Any] = weakref.WeakSet(self.models)
        self.retired += [(group, owners) for group in groups]

    def release(self) -> None:
        """Drop the groups that no model can refer to any more."""
        if any(len(owners) for _, owners in self.retired):
            gc.collect()  # a DDP object lies in cycles
        self.retired = [(group, owners) for group, owners in self.retired if len(owners)]

    def leak(self) -> None:
        """Give every group that may still be referred to one reference that nothing drops."""
        increment = ctypes.pythonapi.Py_IncRef
        increment.argtypes = [ctypes.py_object]
        for group in [*(group for group, _ in self.retired), *live_groups()]:
            increment(group)


def install() -> Guard:
    """Wrap what makes and destroys groups and models; once a process."""
    guard = Guard()
    _wrap_groups(guard)
    _wrap_models(guard)
    _wrap_rendezvous(guard)
    atexit.register(guard.leak)
    return guard


def live_groups() -> list[Any]:
    """The process groups that exist now."""
    from torch.distributed import distributed_c10d as c10d

    return list(c10d._world.pg_map)


def _wrap_groups(guard: Guard) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    made, destroyed = dist.init_process_group, dist.destroy_process_group

    @functools.wraps(made)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        guard.release()
        made(*args, **kwargs)
        guard.inits += 1

    @functools.wraps(destroyed)
    def destroy_process_group(group: Any = None) -> None:
        guard.retire([group] if group is not None else live_groups())
        destroyed(group)

    for module in (dist, c10d):
        vars(module).update(init_process_group=init_process_group, destroy_process_group=destroy_process_group)


def _wrap_models(guard: Guard) -> None:
    from torch.nn.parallel import DistributedDataParallel

    built = DistributedDataParallel.__init__

    @functools.wraps(built)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        guard.models.add(self)
        built(self, *args, **kwargs)

    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]


def _wrap_rendezvous(guard: Guard) -> None:
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import distributed_c10d as c10d

    plain = c10d.rendezvous  # type: ignore[attr-defined]

    @functools.wraps(plain)
    def rendezvous(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for store, rank, world_size in plain(*args, **kwargs):
            fresh = PrefixStore(f"dtrain/{guard.inits}", store) if guard.inits else store
            yield fresh, rank, world_size

    c10d.rendezvous = rendezvous  # type: ignore[attr-defined]

"""Deterministic mode inside a rank: the same program, ranks and kind of hardware give the same bits, and so does a
resumed run. What torch can be told is told here; what depends on the environment is `agent.launch`'s.

- **Buckets of DDP.** DDP reduces in one layout in its first step, and in another, found in that step's order, from the
  second on. With three or more ranks another layout is another order of additions; so a run that was resumed would
  differ in its first step from one that was not. Here the layout is fixed before the first step: parameters in the
  reverse order of their registration, which is about that in which gradients come; the first bucket and the others as
  large as DDP was told.
- **Uninitialised memory** is filled (NaN, or the largest number), which costs one pass over what `torch.empty` gives.
- **Warnings** about an operation that has no deterministic form come once, from one rank.

`say` tells once, on rank 0, what is out of reach. Standard library and torch only.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, ClassVar, Final

from workbench.training.patching import Function, Patches

UNDETERMINED: Final = ".*does not have a deterministic implementation.*"


class Determinism:
    """What was set in this process; `undo` is for tests."""

    current: ClassVar[Determinism | None] = None

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.patches = Patches()
        self._told: set[str] = set()

    def say(self, text: str) -> None:
        """Once, by one rank for all."""
        if self.rank == 0 and text not in self._told:
            self._told.add(text)
            sys.stderr.write(f"dtrain: not deterministic: {text}\n")

    def undo(self) -> None:
        import torch

        self.patches.undo()
        torch.use_deterministic_algorithms(False)
        Determinism.current = None


def install(rank: int, *, is_elastic: bool = False) -> Determinism:
    """To be called before the program is. Needs torch."""
    import torch

    mode = Determinism.current = Determinism(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    onednn: Any = torch.backends.mkldnn
    if hasattr(onednn, "deterministic"):
        onednn.deterministic = True
    warnings.filterwarnings("once" if rank == 0 else "ignore", UNDETERMINED)
    if is_elastic:
        mode.say("this job may go on with fewer ranks, and other sums then; leave --min-ranks and --nnodes MIN:MAX out")
    if torch.distributed.is_available():
        _pin_buckets(mode)
    _watch_loaders(mode)
    return mode


def _pin_buckets(mode: Determinism) -> None:
    from torch.nn.parallel import DistributedDataParallel

    def make(plain: Function) -> Function:
        def _ddp_init_helper(ddp: Any, parameters: Any, sparse: Any, names: Any, static_graph: Any) -> None:
            if reason := _why_not(ddp):
                mode.say(f"the bucket layout of a DDP model {reason}")
            elif static_graph or not ddp.find_unused_parameters:  # else DDP keeps the layout that it begins with
                last = len(parameters) - 1
                names = {last - index: name for index, name in names.items()}
                plain(ddp, parameters[::-1], sparse[::-1], names, static_graph)
                ddp.reducer._push_all_rebuilt_params()  # the order, for the rebuild before the first step
                return
            plain(ddp, parameters, sparse, names, static_graph)

        return _ddp_init_helper

    mode.patches.wrap((DistributedDataParallel,), "_ddp_init_helper", make)


def _why_not(ddp: Any) -> str:
    """Why the layout cannot be fixed; empty: it can."""
    if getattr(ddp, "mixed_precision", None) is not None:
        return "with mixed_precision follows from its first step; use torch.autocast"
    if getattr(ddp, "_use_python_reducer", False):
        return "under torch.compile's python_reducer is the compiler's"
    return ""


def _watch_loaders(mode: Determinism) -> None:
    """Torch seeds its workers from the rank's generator: torch, random and numpy. Their order it may not."""
    from torch.utils.data import DataLoader

    def make(plain: Function) -> Function:
        def __iter__(loader: Any) -> Any:
            if loader.num_workers and not getattr(loader, "in_order", True):
                mode.say("a DataLoader with in_order=False gives batches as workers finish them; leave it out")
            return plain(loader)

        return __iter__

    mode.patches.wrap((DataLoader,), "__iter__", make)

"""Watches a rank without a change to its program: steps, phases, samples, collectives go into the black box.

Rules of counting:
- A step ends when the first optimizer that ever stepped finishes its `step()` (another takes over when that one is
  gone), so that a GAN's second optimizer does not count twice. A step that GradScaler skips does not count.
- Samples are the first dimension of the first tensor of each batch drawn from a DataLoader while gradients are on,
  since the last step; an evaluation loop under `no_grad` adds none.
- forward is the time from the batch (or the last optimizer step) to `backward()`; what DDP waits for its buckets is
  taken from its own timers, sampled a few times a second, as a share of the backward.

Watching never stops training: what a wrapper does besides the call it wraps cannot raise, or is caught.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from time import monotonic as clock
from typing import Any, Final

from workbench.blackbox import NO_LOSS, Activity, Writer

COLLECTIVES: Final = (
    *("all_reduce", "reduce", "broadcast", "barrier", "monitored_barrier", "send", "recv", "batch_isend_irecv"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("broadcast_object_list", "scatter_object_list"),
)
SAMPLE_EVERY: Final = 0.5  # s between two looks at DDP's timers
DDP_RATE: Final = 16  # steps between two that DDP times

_RUNNING, _DATA, _FORWARD = int(Activity.RUNNING), int(Activity.DATA), int(Activity.FORWARD)
_BACKWARD, _COLLECTIVE, _OPTIMIZER = int(Activity.BACKWARD), int(Activity.COLLECTIVE), int(Activity.OPTIMIZER)


class Observer:
    """Sums of the step that is being taken. One thread writes; its methods are the hot path."""

    def __init__(self, box: Writer, offset: float) -> None:
        self.box, self.offset = box, offset
        self.step = 0
        self.activity = _RUNNING
        self.data = self.forward = self.backward = self.comm = self.optimizer = self.checkpoint = 0.0
        self.samples = 0.0
        self.said_samples = self.said_tokens = -1.0
        self.loss = NO_LOSS
        self.began = self.mark = clock()
        self.collective_seq = 0
        self.depth = 0
        self.exposed = 0.0  # share of the backward that DDP waits for its buckets
        self.looked = 0.0
        self.clock_owner: weakref.ref[Any] | None = None
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        self.undo: list[Callable[[], None]] = []

    def say(self, activity: int, now: float) -> None:
        self.activity = activity
        self.box.now(self.step, activity, now + self.offset)

    # --- the optimizer's step is the clock ---

    def before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        now = clock()
        self.optimizer -= now
        self.say(_OPTIMIZER, now)

    def after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        now = clock()
        self.optimizer += now
        owner = self.clock_owner and self.clock_owner()
        if owner is None:
            self.clock_owner = weakref.ref(optimizer)
        elif owner is not optimizer:
            self.mark = now
            return
        self.finish_step(now)

    def finish_step(self, now: float) -> None:
        self.step += 1
        if self.models and now - self.looked > SAMPLE_EVERY:
            self.looked = now
            try:
                self.exposed = self._exposed()
            except Exception:  # a private interface of torch: without it communication counts as backward
                self.models.clear()
                self.exposed = 0.0
        waited = self.backward * self.exposed
        self.box.record(
            self.step,
            now + self.offset,
            now - self.began,
            self.data,
            self.forward,
            self.backward - waited,
            self.comm + waited,
            self.optimizer,
            self.checkpoint,
            self.samples if self.said_samples < 0 else self.said_samples,
            0.0 if self.said_tokens < 0 else self.said_tokens,
            self.loss,
        )
        self.data = self.forward = self.backward = self.comm = self.optimizer = self.checkpoint = self.samples = 0.0
        self.said_samples = self.said_tokens = -1.0
        self.loss = NO_LOSS
        self.began = self.mark = now
        self.say(_RUNNING, now)

    def _exposed(self) -> float:
        """Σ (communication − its overlap) / Σ backward of the steps that DDP timed last, over this rank's models."""
        waited = whole = 0
        for model in self.models:
            times = model._get_ddp_logging_data()
            comm = times.get("backward_comm_time", 0) - times.get("backward_compute_comm_overlap_time", 0)
            waited += max(0, comm)
            whole += max(0, comm) + times.get("backward_compute_time", 0)
        return waited / whole if whole else 0.0


def install(box: Writer, *, offset: float) -> Observer:
    """Begin to watch this process; `offset` is the epoch minus CLOCK_MONOTONIC. `uninstall` takes it back."""
    observer = Observer(box, offset)
    observer.say(_RUNNING, clock())
    for probe in (_watch_optimizers, _watch_loaders, _watch_backward, _watch_collectives, _watch_models):
        probe(observer)
    return observer


def uninstall(observer: Observer) -> None:
    """Take back all that `install` put in place."""
    while observer.undo:
        observer.undo.pop()()


def _watch_optimizers(observer: Observer) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    for register, hook in (
        (register_optimizer_step_pre_hook, observer.before_step),
        (register_optimizer_step_post_hook, observer.after_step),
    ):
        observer.undo.append(register(hook).remove)


def _watch_loaders(observer: Observer) -> None:
    import torch
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    plain = _BaseDataLoaderIter.__next__
    training = torch.is_grad_enabled

    @functools.wraps(plain)
    def __next__(self: Any) -> Any:
        start = clock()
        observer.say(_DATA, start)
        try:
            batch = plain(self)
        finally:
            now = clock()
            observer.data += now - start
            observer.mark = now
            observer.say(_FORWARD, now)
        if training():
            observer.samples += batch_size(batch)
        return batch

    _patch(observer, _BaseDataLoaderIter, "__next__", __next__)


def batch_size(batch: Any, depth: int = 4) -> int:
    """The first dimension of the first tensor found; 0 when there is none within `depth` containers."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 1
    if depth and isinstance(batch, dict):
        batch = list(batch.values())
    if depth and isinstance(batch, (list, tuple)):
        return next((size for item in batch[:8] if (size := batch_size(item, depth - 1))), 0)
    return 0


def _watch_backward(observer: Observer) -> None:
    import torch

    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        if observer.depth:
            plain(*args, **kwargs)
            return
        start = clock()
        observer.forward += max(0.0, start - observer.mark)
        comm = observer.comm
        observer.depth = 1
        observer.say(_BACKWARD, start)
        try:
            plain(*args, **kwargs)
        finally:
            now = clock()
            observer.depth = 0
            observer.backward += now - start - (observer.comm - comm)
            observer.mark = now
            observer.say(_RUNNING, now)

    _patch(observer, torch.autograd, "backward", backward)


def _watch_collectives(observer: Observer) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if not dist.is_available():
        return
    for name in COLLECTIVES:
        plain = getattr(dist, name, None)
        if plain is not None:
            wrapped = _collective(observer, name, plain)
            for module in (dist, c10d):
                if getattr(module, name, None) is plain:
                    _patch(observer, module, name, wrapped)


def _collective(observer: Observer, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = observer.activity
        start = clock()
        if before != _COLLECTIVE:
            observer.collective_seq += 1
            observer.box.collective(observer.collective_seq, describe(name, args))
            observer.say(_COLLECTIVE, start)
        try:
            return plain(*args, **kwargs)
        finally:
            now = clock()
            if before != _COLLECTIVE:
                observer.comm += now - start
                if before != _BACKWARD:
                    observer.mark = now
                observer.say(before, now)

    return call


def describe(name: str, args: tuple[Any, ...]) -> str:
    """`all_reduce[1024 float32]`, where the first tensor says so."""
    tensor = next((a for a in args[:2] if hasattr(a, "numel") and hasattr(a, "dtype")), None)
    return name if tensor is None else f"{name}[{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}]"


def _watch_models(observer: Observer) -> None:
    from torch.nn.parallel import DistributedDataParallel

    plain = DistributedDataParallel.__init__

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self._set_ddp_runtime_logging_sample_rate(DDP_RATE)
        observer.models.add(self)

    _patch(observer, DistributedDataParallel, "__init__", __init__)


def _patch(observer: Observer, owner: Any, name: str, value: Any) -> None:
    plain = getattr(owner, name)
    setattr(owner, name, value)
    observer.undo.append(lambda: setattr(owner, name, plain))

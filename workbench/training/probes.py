"""Where torch is watched: loaders, DDP's forward, the autograd engine, optimizers, `torch.save`, torch.distributed.

Only what a plain `import torch` has loaded is touched. `tracing()` is True where Dynamo traces, and only there.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as tracing

from workbench.training.communication import watch_communication
from workbench.training.observe import BACKWARD, CHECKPOINT, DATA, FORWARD, Observer
from workbench.training.overlap import Overlap
from workbench.training.patching import Function, skip_frame


def install(observer: Observer) -> None:
    for watch in (_watch_optimizers, _watch_loaders, _watch_backward, _watch_models, _watch_save, watch_communication):
        watch(observer)


def _watch_optimizers(observer: Observer) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    mark = observer.mark

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if tracing():
            return
        if observer.thread == get_ident() or observer.follow(get_ident()):
            observer.before_step()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if tracing():
            mark.stepped = True
            return
        if observer.thread == get_ident():
            observer.after_step(optimizer)

    for register, hook in (
        (register_optimizer_step_pre_hook, before),
        (register_optimizer_step_post_hook, after),
    ):
        skip_frame(hook)
        observer.patches.on_undo(register(hook).remove)


def _watch_loaders(observer: Observer) -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    training = torch.is_grad_enabled

    def make(plain: Function) -> Function:
        def __next__(self: Any) -> Any:
            if tracing() or observer.thread != get_ident() or observer.activity == DATA:
                return plain(self)
            frame = observer.enter(DATA)
            batch = None
            try:
                batch = plain(self)
                return batch
            finally:
                observer.end_data(frame, self, batch, training())

        return __next__

    observer.patches.wrap((_BaseDataLoaderIter,), "__next__", make)


def _watch_backward(observer: Observer) -> None:
    """The engine's own entry: `Tensor.backward`, `autograd.backward` and `autograd.grad` stay as they are."""

    def make(plain: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            if tracing() or observer.thread != get_ident() or observer.activity == BACKWARD:
                return plain(*args, **kwargs)
            frame = observer.begin_backward()
            try:
                return plain(*args, **kwargs)
            finally:
                observer.end_backward(frame)

        return call

    name = "_engine_run_backward" if hasattr(torch.autograd, "_engine_run_backward") else "backward"
    observer.patches.wrap((torch.autograd,), name, make)


def _watch_models(observer: Observer) -> None:
    if not torch.distributed.is_available():
        return
    from torch.nn.parallel import DistributedDataParallel

    overlap = Overlap(observer)

    def make(plain: Function) -> Function:
        def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            if tracing() or observer.thread != get_ident() or observer.activity == FORWARD:
                return plain(self, *inputs, **kwargs)
            overlap.look(self)
            frame = observer.begin_forward()
            try:
                return plain(self, *inputs, **kwargs)
            finally:
                observer.leave(frame)

        return forward

    observer.patches.wrap((DistributedDataParallel,), "forward", make)


def _watch_save(observer: Observer) -> None:
    def make(plain: Function) -> Function:
        def save(*args: Any, **kwargs: Any) -> Any:
            if tracing() or observer.thread != get_ident() or observer.activity == CHECKPOINT:
                return plain(*args, **kwargs)
            frame = observer.enter(CHECKPOINT)
            try:
                return plain(*args, **kwargs)
            finally:
                observer.leave(frame)

        return save

    observer.patches.wrap((torch, torch.serialization), "save", make)

"""Where torch is watched: loaders, DDP's forward, the autograd engine, optimizers, `torch.save`, torch.distributed.

Only what a plain `import torch` has loaded is touched. `tracing()` is True where Dynamo traces, and only there.
"""

from __future__ import annotations

from threading import get_ident
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling as tracing

from workbench.blackbox import CAPACITY, FIRST_WORD, HEAD_WORD, NO_LOSS, NOW_WORD, ROW_WORDS
from workbench.training.batches import BatchSizes
from workbench.training.communication import watch_communication
from workbench.training.observe import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EACH,
    FORWARD,
    NOTHING_SAID,
    OPTIMIZER,
    SHORT,
    Observer,
)
from workbench.training.overlap import Overlap
from workbench.training.patching import Function, skip_frame


def install(observer: Observer) -> None:
    for owner in (Observer, Overlap, BatchSizes):
        for method in vars(owner).values():
            if isinstance(method, FunctionType):
                skip_frame(method, recursive=True)
    watches = (_watch_optimizers, _watch_loaders, _watch_backward, _watch_models, _watch_modes, _watch_save)
    for watch in (*watches, watch_communication):
        watch(observer)


def _watch_optimizers(observer: Observer) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    for register, hook in (
        (register_optimizer_step_pre_hook, _before_step(observer)),
        (register_optimizer_step_post_hook, _after_step(observer)),
    ):
        skip_frame(hook, recursive=True)
        observer.patches.on_undo(register(hook).remove)


def _before_step(observer: Observer) -> Function:
    mark, clock, offset, say = observer.mark, observer.clock, observer.offset, observer.box.now

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if tracing():
            return
        observer.is_stepping = True
        if not observer.is_whole or (observer.thread != get_ident() and not observer.follow(optimizer)):
            return
        try:
            now = clock()
            if mark.stepped is not False:
                observer.attend(now)
            if observer.optimizer_frame is not None and observer.activity == OPTIMIZER:
                return  # a subclass' or wrapper's step() calls this one: from the outer's start to the inner's end
            observer.optimizer_frame = (OPTIMIZER, observer.activity, now, observer.sum)
            observer.activity = OPTIMIZER
            say(observer.step, OPTIMIZER, now + offset)
        except Exception as error:
            observer.fail(error)

    return before


def _after_step(observer: Observer) -> Function:
    mark, clock, offset, pending = observer.mark, observer.clock, observer.offset, observer.pending
    words, times, say = observer.box.words, observer.box.times, observer.box.now

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if tracing():
            mark.stepped = True
            return
        if not observer.is_stepping:
            return  # the outer of two has ended, whose inner has been counted
        is_clock = observer.owner() is optimizer
        if not is_clock and observer.thread != get_ident() and not observer.follow(optimizer):
            return
        observer.is_stepping = False
        try:
            now = clock()
            if not is_clock or not observer.is_plain:
                in_full(optimizer, now, is_clock=is_clock)
                return
            # As `finish` and `record` do: each call of a function of ours would cost 1 to 2 µs, half of all that this
            # does, as nothing of it is in the caches by now.
            if observer.is_trained:
                observer.is_trained = False
                while pending:
                    observer.samples += pending.popitem()[1]
            observer.step = step = observer.step + 1
            duration, data = now - observer.began, observer.waited
            left, (forward, backward, comm, own) = duration - data, observer.shares
            head = words[HEAD_WORD]
            at = FIRST_WORD + head % CAPACITY * ROW_WORDS
            words[at] = step
            times[at + 1] = times[NOW_WORD + 2] = now + offset
            times[at + 2] = duration
            times[at + 3] = data
            times[at + 4] = forward * left
            times[at + 5] = backward * left
            times[at + 6] = comm * left
            times[at + 7] = own * left
            times[at + 8] = times[at + 10] = 0.0
            times[at + 9] = observer.samples
            times[at + 11] = NO_LOSS
            words[HEAD_WORD] = head + 1
            words[NOW_WORD] = step
            words[NOW_WORD + 1] = observer.base
            observer.waited = observer.samples = 0.0
            observer.began = now
            observer.last_said = NOTHING_SAID
            if duration > SHORT or not step % EACH:
                observer.is_whole, observer.is_plain, observer.gap, observer.gap_sum = True, False, now, observer.sum
        except Exception as error:
            observer.fail(error)

    def in_full(optimizer: Any, now: float, *, is_clock: bool) -> None:
        frame = observer.optimizer_frame
        if frame is not None:
            observer.optimizer_frame = None
            _, observer.activity, start, before = frame
            own = now - start - (observer.sum - before)
            observer.sum += own
            observer.spent[OPTIMIZER] += own
        if is_clock or observer.takes_over(optimizer):
            observer.finish(now)
        else:
            observer.gap, observer.gap_sum = now, observer.sum
            say(observer.step, observer.activity, now + offset)

    return after


def _watch_loaders(observer: Observer) -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    training = torch.is_grad_enabled
    mark, clock, offset, say = observer.mark, observer.clock, observer.offset, observer.box.now
    size, pending = observer.sizes.size, observer.pending

    def make(plain: Function) -> Function:
        def __next__(self: Any) -> Any:
            if observer.thread != get_ident() or observer.activity == DATA:
                return plain(self)
            if observer.is_trained:
                observer.learn()
            if mark.stepped is not False:
                observer.attend(clock())
            if observer.is_whole:
                return whole(self)
            before, start = observer.activity, clock()
            observer.activity = DATA
            try:
                batch = plain(self)
                if training():
                    # What `size` gives, without the call, of what most loaders give: a list that begins with a tensor.
                    is_usual = type(batch) is list and batch and type(batch[0]) is Tensor
                    shape = batch[0].shape if is_usual else None
                    pending[id(self)] = shape[0] if shape else size(batch)
                return batch
            except StopIteration:
                pending.pop(id(self), None)
                raise
            finally:
                observer.waited += clock() - start
                observer.activity = before
                observer.last_said = None

        def whole(self: Any) -> Any:
            before, sum_before, start = observer.activity, observer.sum, clock()
            observer.activity = DATA
            say(observer.step, DATA, start + offset)
            batch = None
            try:
                batch = plain(self)
            finally:
                try:
                    now = clock()
                    own = now - start - (observer.sum - sum_before)
                    observer.spent[DATA] += own
                    observer.gap_sum = observer.sum = observer.sum + own
                    observer.gap = now
                    observer.activity = after = before
                    if batch is None:
                        pending.pop(id(self), None)
                    elif training():
                        pending[id(self)] = size(batch)
                        observer.last_said = None
                        after = observer.after_data
                    say(observer.step, after, now + offset)
                except Exception as error:
                    observer.fail(error)
            return batch

        return __next__

    observer.patches.wrap((_BaseDataLoaderIter,), "__next__", make)


def _watch_backward(observer: Observer) -> None:
    """The engine's own entry, which Dynamo never traces: `Tensor.backward` and `torch.autograd` stay as they are."""
    mark, clock, offset, say = observer.mark, observer.clock, observer.offset, observer.box.now

    def make(plain: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            observer.is_trained = (
                True  # of another thread's too: to ask which one this is would cost as much as all here
            )
            observer.last_said = None
            if not observer.is_whole:
                if mark.stepped and observer.thread == get_ident():
                    observer.attend(clock())
                return plain(*args, **kwargs)
            if observer.thread != get_ident() or observer.activity == BACKWARD:
                return plain(*args, **kwargs)
            before, sum_before, start = observer.activity, observer.sum, clock()
            if mark.stepped is not False:
                observer.attend(start)
            forward = start - observer.gap - (sum_before - observer.gap_sum)
            if forward > 0.0:
                observer.spent[FORWARD] += forward
            observer.activity = BACKWARD
            say(observer.step, BACKWARD, start + offset)
            try:
                return plain(*args, **kwargs)
            finally:
                try:
                    now = clock()
                    own = now - start - (observer.sum - sum_before)
                    observer.spent[BACKWARD] += own
                    observer.gap_sum = observer.sum = observer.sum + own
                    observer.gap = now
                    observer.activity = before
                    say(observer.step, before, now + offset)
                except Exception as error:
                    observer.fail(error)

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
            if not observer.is_whole:
                observer.last_said = None
                return plain(self, *inputs, **kwargs)
            overlap.look(self)
            frame = observer.begin_forward()
            try:
                return plain(self, *inputs, **kwargs)
            finally:
                observer.leave(frame)

        return forward

    observer.patches.wrap((DistributedDataParallel,), "forward", make)


def _watch_modes(observer: Observer) -> None:
    """`Module.train` calls itself for every submodule: the outermost call says what the program is about to do."""
    is_inside = False

    def make(plain: Function) -> Function:
        def train(self: Any, mode: bool = True) -> Any:
            nonlocal is_inside
            if tracing() or is_inside or observer.thread != get_ident():
                return plain(self, mode)
            is_inside = True
            try:
                return plain(self, mode)
            finally:
                is_inside = False
                if not mode or observer.is_unusual:
                    observer.allow(evaluating=int(not mode))

        return train

    observer.patches.wrap((torch.nn.Module,), "train", make)


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

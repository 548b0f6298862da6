"""Where torch is watched: loaders, DDP's forward, the autograd engine, optimizers, `torch.save`, torch.distributed.

Only what a plain `import torch` has loaded is touched. `tracing()` is True where Dynamo traces, and only there.
"""

from __future__ import annotations

from threading import get_ident
from types import FunctionType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as tracing

from workbench.blackbox import BRIEF_WORDS, HEAD_WORD
from workbench.training.batches import BatchSizes
from workbench.training.communication import watch_communication
from workbench.training.observe import (
    BACKWARD,
    CHECKPOINT,
    DATA,
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
    skip_frame(_spend, recursive=True)
    watches = (_watch_optimizers, _watch_loaders, _watch_backward, _watch_models, _watch_modes, _watch_save)
    for watch in (*watches, watch_communication):
        watch(observer)


def _watch_optimizers(observer: Observer) -> None:
    from torch.optim import optimizer as module

    before = module.register_optimizer_step_pre_hook(_before_step(observer))
    observer.patches.on_undo(before.remove)
    switch = _switch(observer, module._global_optimizer_pre_hooks, before.id)
    observer.patches.on_undo(module.register_optimizer_step_post_hook(_after_step(observer, switch)).remove)


def _switch(observer: Observer, hooks: dict[int, Function], key: int) -> Function:
    """`switch()` has the hook before a step do nothing while steps are plain, for which it has nothing to do.

    By exchanging it in torch's table, since to call it and to find that out would cost a µs more; nothing is taken out
    or put in, as another thread may be going through the table.
    """
    before = hooks[key]

    def pass_by(optimizer: Any, args: Any, kwargs: Any) -> None:
        """Instead of the other."""

    def switch() -> None:
        if key in hooks:
            hooks[key] = pass_by if observer.is_plain else before
            observer.is_stepping = observer.is_plain

    for function in (pass_by, switch):
        skip_frame(function, recursive=True)
    return switch


def _before_step(observer: Observer) -> Function:
    clock, offset, say = observer.clock, observer.offset, observer.box.now

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if tracing():
            return
        if observer.is_stepping:
            observer.is_nested = True
        observer.is_stepping = True
        if not observer.is_whole or (observer.thread != get_ident() and not observer.follow(optimizer)):
            return
        try:
            now = clock()
            if observer.stepped is not False:
                observer.attend(now)
            if observer.optimizer_frame is not None and observer.activity == OPTIMIZER:
                return  # a subclass' or wrapper's step() calls this one: from the outer's start to the inner's end
            observer.optimizer_frame = (OPTIMIZER, observer.activity, now, observer.sum)
            observer.activity = OPTIMIZER
            say(observer.step, OPTIMIZER, now + offset)
        except Exception as error:
            observer.fail(error)

    skip_frame(before, recursive=True)
    return before


def _after_step(observer: Observer, switch: Function) -> Function:
    clock, times = observer.clock, observer.box.times
    seldom = _seldom_stepped(observer, switch)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if tracing():
            observer.stepped = True
            return
        if not observer.is_trained or not observer.is_plain or id(optimizer) != observer.owner_id:
            seldom(optimizer)
            return
        try:
            # Nothing of this is in the caches by now: a call of a function of ours would cost a µs or two, a store that
            # the step before did not need as well.
            observer.is_trained = False
            now, at = clock(), observer.row
            times[at] = now
            times[at + 1] = observer.waited
            times[at + 2] = observer.samples + observer.drawn
            observer.drawn, observer.waited, observer.samples = 0, 0.0, 0.0
            observer.step = step = observer.step + 1
            times[HEAD_WORD] = step - observer.ahead
            observer.row = at = at + BRIEF_WORDS
            observer.last_said = NOTHING_SAID
            duration, observer.began = now - observer.began, now
            if duration > SHORT or at >= observer.until:
                observer.is_whole, observer.is_plain, observer.gap, observer.gap_sum = True, False, now, observer.sum
                switch()
        except Exception as error:
            observer.fail(error)

    skip_frame(after, recursive=True)
    return after


def _seldom_stepped(observer: Observer, switch: Function) -> Function:
    """The end of a step that is not plain, or not the clock's."""
    clock, offset, say = observer.clock, observer.offset, observer.box.now

    def seldom(optimizer: Any) -> None:
        if not observer.is_stepping:
            return  # the outer of two has ended, whose inner has been counted
        is_clock = observer.owner() is optimizer
        if not is_clock and observer.thread != get_ident() and not observer.follow(optimizer):
            return
        observer.is_stepping = False
        try:
            in_full(optimizer, clock(), is_clock=is_clock)
            switch()
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

    return seldom


def _watch_loaders(observer: Observer) -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    training, clock, size = torch.is_grad_enabled, observer.clock, observer.sizes.size
    seldom = _seldom_drawn(observer)

    def make(plain: Function) -> Function:
        def __next__(self: Any) -> Any:
            if id(self) != observer.iterator or not observer.is_plain or observer.stepped is not False:
                return seldom(plain, self)
            if observer.is_trained:
                observer.learn()
            before, start = observer.activity, clock()
            observer.activity = DATA
            try:
                batch = plain(self)
                if training():
                    observer.usual = left = observer.usual - 1
                    observer.drawn = observer.batch if left >= 0 else size(batch)
                return batch
            except BaseException:  # there is no more, first of all
                observer.iterator = observer.drawn = 0
                raise
            finally:
                observer.waited += clock() - start
                observer.activity = before
                observer.last_said = None

        return __next__

    observer.patches.wrap((_BaseDataLoaderIter,), "__next__", make)


def _seldom_drawn(observer: Observer) -> Function:
    """The first batch of an iterator, and all in steps that are not plain."""
    training, clock, size = torch.is_grad_enabled, observer.clock, observer.sizes.size
    offset, say, pending = observer.offset, observer.box.now, observer.pending

    def draw(plain: Function, iterator: Any) -> Any:
        try:
            batch = plain(iterator)
        except BaseException:  # there is no more, first of all
            pending.pop(id(iterator), None)
            if observer.iterator == id(iterator):
                observer.iterator = observer.drawn = 0
            raise
        if training():
            observer.draw(iterator, size(batch))
        return batch

    def seldom(plain: Function, iterator: Any) -> Any:
        if observer.thread != get_ident() or observer.activity == DATA:
            return plain(iterator)
        if observer.is_trained:
            observer.learn()
        if observer.stepped is not False:
            observer.attend(clock())
        if observer.is_whole:
            return whole(plain, iterator)
        before, start = observer.activity, clock()
        observer.activity = DATA
        try:
            return draw(plain, iterator)
        finally:
            observer.waited += clock() - start
            observer.activity = before
            observer.last_said = None

    def whole(plain: Function, iterator: Any) -> Any:
        before, sum_before, start = observer.activity, observer.sum, clock()
        observer.activity = DATA
        say(observer.step, DATA, start + offset)
        is_given = False
        try:
            batch = draw(plain, iterator)
            is_given = True
            return batch
        finally:
            try:
                now = clock()
                _spend(observer, DATA, start, sum_before, now)
                observer.activity = after = before
                if is_given and training():
                    observer.last_said = None
                    after = observer.after_data
                say(observer.step, after, now + offset)
            except Exception as error:
                observer.fail(error)

    for function in (draw, seldom, whole):
        skip_frame(function)
    return seldom


def _spend(observer: Observer, phase: int, start: float, sum_before: float, now: float) -> None:
    """A phase has ended, less what lay inside it; from here on it may be forward."""
    own = now - start - (observer.sum - sum_before)
    observer.spent[phase] += own
    observer.gap_sum = observer.sum = observer.sum + own
    observer.gap = now


def _watch_backward(observer: Observer) -> None:
    """The engine's own entry, which Dynamo never traces: `Tensor.backward` and `torch.autograd` stay as they are."""
    clock, offset, say = observer.clock, observer.offset, observer.box.now

    def make(plain: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            observer.is_trained = True  # of another thread's too: to ask which one this is would cost as much as all
            observer.last_said = None
            if observer.is_plain and observer.stepped is False:
                return plain(*args, **kwargs)
            if not observer.is_whole:
                if observer.stepped and observer.thread == get_ident():
                    observer.attend(clock())
                return plain(*args, **kwargs)
            if observer.thread != get_ident() or observer.activity == BACKWARD:
                return plain(*args, **kwargs)
            before, sum_before, start = observer.activity, observer.sum, clock()
            if observer.stepped is not False:
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
                    _spend(observer, BACKWARD, start, sum_before, now)
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
            if tracing():
                return plain(self, *inputs, **kwargs)
            if not observer.is_whole:
                observer.last_said = None
                return plain(self, *inputs, **kwargs)
            if observer.thread != get_ident() or observer.activity == FORWARD:
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

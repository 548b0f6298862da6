"""Where torch is watched so that a program need not change: DDP being made and called, all_reduce, optimizers.

A step that is not checked costs a look into a dict and a comparison. Only the thread that installed is watched.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, ClassVar, Final

import torch
from torch.compiler import is_dynamo_compiling as tracing

from workbench.training.consistency.check import Checker, ReplicasDifferError
from workbench.training.consistency.loops import Loops
from workbench.training.consistency.origin import Origin
from workbench.training.consistency.replicas import Member, Model, Unit, inner_optimizer
from workbench.training.consistency.reports import say
from workbench.training.consistency.room import PATIENCE, Room
from workbench.training.consistency.wrapping import compare_structure, process_group_of
from workbench.training.guard import Guard
from workbench.training.meeting import Meeting
from workbench.training.patching import Function, Patches, skip_frame

MOST_UNITS: Final = 16
APART: Final = ("ZeroRedundancyOptimizer",)  # each rank steps a part of what all have
LOOKS: Final = 3  # steps of an optimizer without DDP in which all_reduce is looked for


class Watch:
    """What this process has of models and optimizers that are replicated."""

    current: ClassVar[Watch | None] = None

    def __init__(self, checker: Checker) -> None:
        self.checker, self.patches = checker, Patches()
        self.thread = get_ident()
        self.rooms: dict[int, Room] = {}  # by the id of the process group
        self.models: dict[int, Model] = {}
        self.units: dict[int, Unit | None] = {}  # by the optimizer's id; None: it is not checked
        self.made = 0  # units
        self.loops = Loops()
        self.origin = Origin(checker.step_of, lambda: list(self.models.values()), lambda: self.scaler() is not None)
        checker.on_broken = self.origin.broke
        self.is_told = False  # that nothing is checked
        self.sharded: Callable[[list[Any]], tuple[Room, list[Model], list[Member]] | None] = lambda _: None
        self.on_forget: list[Callable[[], object]] = []  # called before process groups go
        self.scaler: Callable[[], Any] = lambda: None
        checker.scale_of, checker.scaling = self.scale, self.scaling

    # --- rooms --------------------------------------------------------------------------------------------------------

    def room(self, group: Any) -> Room | None:
        """For the ranks of a process group; None: there is no other. All of them call."""
        import torch.distributed as dist

        whole = group if group is not None else dist.group.WORLD
        if whole is None or dist.get_world_size(whole) < 2:
            return None
        if id(whole) not in self.rooms:
            self.rooms[id(whole)] = Room.open(whole)
        return self.rooms[id(whole)]

    def forget(self) -> None:
        """Process groups are about to go."""
        for unit in [unit for unit in self.units.values() if unit is not None]:
            self.checker.reports.flush(unit)
        for call in self.on_forget:
            call()
        self.rooms.clear()
        self.models.clear()
        self.units.clear()
        self.loops.forget()

    # --- DDP ----------------------------------------------------------------------------------------------------------

    def around_making(self, plain: Function) -> Function:
        def __init__(ddp: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            room, is_alike = None, True
            try:
                room = self.room(process_group_of(plain, args, kwargs)) if not self.checker.off else None
                is_alike = room is None or compare_structure(room, module, self.checker)
            except ReplicasDifferError:
                raise
            except Exception as error:
                self.give_up(error)
            plain(ddp, module, *args, **kwargs)
            if room is not None:
                self.adopt_model(ddp, room, is_alike=is_alike)

        return __init__

    def adopt_model(self, ddp: Any, room: Room, *, is_alike: bool) -> None:
        label = f"{type(ddp.module).__name__}{len(self.models)}." if self.models else ""
        model = self.models[id(ddp)] = Model(ddp, room, label)
        model.is_alike = is_alike
        weakref.finalize(ddp, self.origin.feel(model)).atexit = False
        weakref.finalize(ddp, self.models.pop, id(ddp), None).atexit = False
        for key in [key for key, unit in self.units.items() if unit is None]:
            del self.units[key]  # its parameters may be in this one

    def around_forward(self, plain: Function) -> Function:
        models, origin, data = self.models, self.origin, self.checker.data

        def forward(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
            if tracing():
                return plain(ddp, *inputs, **kwargs)
            model = models.get(id(ddp))
            if model is not None and torch.is_grad_enabled():
                model.was_synced = ddp.require_backward_grad_sync
                model.synced += model.was_synced
                model.unsynced += not model.was_synced
                origin.saw(inputs)
                data.saw(inputs, kwargs)
            return plain(ddp, *inputs, **kwargs)

        return forward

    def around_inner_forward(self, plain: Function) -> Function:
        """DDP has sent rank 0's buffers by now, if it is going to."""
        models, measure = self.models, self.checker.measure

        def _run_ddp_forward(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
            if tracing():
                return plain(ddp, *inputs, **kwargs)
            model = models.get(id(ddp))
            if model is not None and model.wants_buffers and ddp.training and torch.is_grad_enabled():
                try:
                    measure.see_buffers(model)
                except Exception as error:
                    self.give_up(error)
            return plain(ddp, *inputs, **kwargs)

        return _run_ddp_forward

    # --- loops that reduce by themselves ------------------------------------------------------------------------------

    def around_reduce(self, plain: Function) -> Function:
        loops = self.loops

        def call(*args: Any, **kwargs: Any) -> Any:
            if not tracing() and get_ident() == self.thread:
                loops.saw(args, kwargs)
            return plain(*args, **kwargs)

        return call

    # --- GradScaler ---------------------------------------------------------------------------------------------------

    def around_scaling(self, plain: Function) -> Function:
        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            self.scaler = weakref.ref(scaler)
            return plain(scaler, *args, **kwargs)

        return step

    def scale(self) -> int:
        """What a GradScaler multiplies by, where it can be read without waiting; 0: there is none."""
        found = getattr(self.scaler(), "_scale", None)
        return int(found.view(torch.int32)) if isinstance(found, torch.Tensor) and found.device.type == "cpu" else 0

    def scaling(self) -> Any:
        """The same as a tensor, where it lies; 1: there is none."""
        found = getattr(self.scaler(), "_scale", None)
        return found.detach().double() if isinstance(found, torch.Tensor) else 1.0

    # --- NaN ----------------------------------------------------------------------------------------------------------

    def around_backward(self, plain: Function) -> Function:
        look = self.origin.look

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.models and get_ident() == self.thread:
                look(args)
            return plain(*args, **kwargs)

        return call

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if tracing() or get_ident() != self.thread:
            return
        key = id(optimizer)
        unit = self.units[key] if key in self.units else self.adopt(optimizer)
        if unit is None:
            return
        unit.steps += 1
        if unit.steps >= unit.due and not any(model.is_joining for model in unit.models):
            self.checker.check(unit)

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if tracing():
            return
        unit = self.units.get(id(optimizer))
        if unit is None or get_ident() != self.thread:
            return
        try:
            if unit.looked is not None and unit.looked.has_weights:
                self.checker.stepped(unit)
            if unit.steps + 1 == unit.due:
                self.checker.prepare(unit)
        except Exception as error:
            self.give_up(error)

    def adopt(self, optimizer: Any) -> Unit | None:
        """Find out at its first step, or after a few, what is replicated of what an optimizer steps."""
        try:
            unit = self._unit_of(optimizer)
        except Exception as error:
            self.give_up(error)
            unit = None
        key = id(optimizer)
        if unit is None and not self.models and not self.is_told and self.loops.is_undecided(key, LOOKS):
            return None  # it is looked at again at its next step
        if unit is None and not self.models:
            self._say_nothing()
        self.loops.decided(key)
        self.units[key] = unit
        weakref.finalize(optimizer, self._drop, key).atexit = False
        return unit

    def _drop(self, key: int) -> None:
        """An optimizer is gone."""
        unit = self.units.pop(key, None)
        if unit is not None:
            self.checker.reports.flush(unit)

    def _unit_of(self, optimizer: Any) -> Unit | None:
        import torch.distributed as dist

        if self.checker.off or self.made >= MOST_UNITS or not (dist.is_available() and dist.is_initialized()):
            return None
        inner = inner_optimizer(optimizer)
        if inner is not None and type(optimizer).__name__ in APART:
            self.units[id(inner)] = None
        elif inner is not None:
            return None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found = self._of_models(parameters) or self.sharded(parameters) or self._of_loop(optimizer, parameters)
        if found is None:
            return None
        room, models, members = found
        self.made += 1
        unit = Unit(optimizer, room, self.made - 1, models, members)
        unit.has_parts = type(optimizer).__name__ in APART
        self.loops.watch(unit)
        return unit

    def _of_models(self, parameters: list[Any]) -> tuple[Room, list[Model], list[Member]] | None:
        known = {id(m.parameter): (model, m) for model in self.models.values() for m in model.members}
        hits = [known[id(parameter)] for parameter in parameters if id(parameter) in known]
        if not hits:
            return None
        models = list({id(model): model for model, _ in hits}.values())
        reason = next(filter(None, (model.why_not() for model in models)), "")
        if not all(model.is_alike for model in models):
            reason = "ranks wrap different parameters"
        if reason or any(model.room is not models[0].room for model in models):
            self._say_nothing(reason or "its models are replicated over different ranks")
            return None
        return models[0].room, models, [member for _, member in hits]

    def _of_loop(self, optimizer: Any, parameters: list[Any]) -> tuple[Room, list[Model], list[Member]] | None:
        if self.models:
            return None
        found = self.loops.replicated(optimizer, parameters)
        if found is None or not self._meet(found.group):
            return None
        room = self.room(found.group)
        return (room, [], found.members) if room is not None else None

    def _meet(self, group: Any) -> bool:
        """Whether all ranks of a group have come to the same point: it may be that only one of them steps."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        whole = group if group is not None else dist.group.WORLD
        if id(whole) in self.rooms:
            return True
        store = PrefixStore("dtrain/consistency", _get_default_store())
        name = "-".join(map(str, dist.get_process_group_ranks(whole)))[:64]
        meeting = Meeting(store, dist.get_rank(whole), dist.get_world_size(whole), room=name)
        try:
            meeting.agree(set(), PATIENCE)
        except TimeoutError:
            self._say_nothing("not every rank steps an optimizer")
            return False
        return True

    # --- when it ends -------------------------------------------------------------------------------------------------

    def _say_nothing(
        self, reason: str = "no DistributedDataParallel, and no all_reduce of gradients, was seen"
    ) -> None:
        if not self.is_told:
            self.is_told = True
            self.checker.reports.nothing(int(os.environ.get("RANK", "0")), self.checker.step_of(), reason)

    def give_up(self, error: Exception) -> None:
        if not self.checker.off:
            self.checker.end(f"{type(error).__name__}: {error}")
            say(f"replicas are no longer compared: {self.checker.off}")
        for unit in [unit for unit in self.units.values() if unit is not None]:
            unit.due = sys.maxsize

    def flush(self) -> None:
        for unit in [unit for unit in self.units.values() if unit is not None]:
            self.checker.reports.flush(unit)

    def uninstall(self) -> None:
        self.patches.undo()
        if Watch.current is self:
            Watch.current = None


def install(watch: Watch) -> None:
    """Put the probes on, before the program is there."""
    from torch.distributed import distributed_c10d as c10d
    from torch.nn.parallel import DistributedDataParallel as Ddp
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    Watch.current = watch
    patches = watch.patches
    patches.wrap((Ddp,), "__init__", watch.around_making)
    patches.wrap((Ddp,), "forward", watch.around_forward)
    if hasattr(Ddp, "_run_ddp_forward"):
        patches.wrap((Ddp,), "_run_ddp_forward", watch.around_inner_forward)
    for name in ("all_reduce", "all_reduce_coalesced"):
        patches.wrap((c10d, torch.distributed), name, watch.around_reduce)
    patches.wrap((torch.amp.GradScaler,), "step", watch.around_scaling)
    engine = "_engine_run_backward" if hasattr(torch.autograd, "_engine_run_backward") else "backward"
    patches.wrap((torch.autograd,), engine, watch.around_backward)
    watch.checker.data.install(patches)
    hooks: tuple[tuple[Callable[..., Any], Any], ...] = (
        (register_optimizer_step_pre_hook, watch.before),
        (register_optimizer_step_post_hook, watch.after),
    )
    for register, hook in hooks:
        patches.on_undo(register(hook).remove)
    for method in (Watch.before, Watch.after):
        skip_frame(method, recursive=True)
    if Guard.current is not None:
        Guard.current.before_destroy["consistency"] = watch.forget

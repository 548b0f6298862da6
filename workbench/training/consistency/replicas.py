"""What is compared: which parameters are the same on which ranks, under which names, stepped by which optimizer.

DDP says so itself. A loop that reduces by itself is known by the gradients that it hands to `all_reduce`. Of anything
else nothing is known to be meant the same, and nothing is compared.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import torch

from workbench.training.consistency.cadence import Costs
from workbench.training.consistency.lanes import signed
from workbench.training.consistency.room import Room

LOCAL_HOOKS: Final = ("post_localSGD_hook", "noop_hook")  # after these, replicas differ and are meant to
PLAIN: Final = (bool, int, float, str, type(None))


class Member(NamedTuple):
    """A parameter that is compared."""

    name: str
    parameter: torch.nn.Parameter


class Model:
    """A DDP model that was seen being made."""

    def __init__(self, ddp: Any, room: Room, label: str) -> None:
        self.ref, self.room = weakref.ref(ddp), room
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        self.members = [
            Member(label + name, parameter)
            for name, parameter in ddp.module.named_parameters()
            if name not in ignored and is_plain(parameter)
        ]
        self.buffer_names = [
            label + name for name, buffer in ddp.module.named_buffers() if name not in ignored and is_plain(buffer)
        ]
        self.label = label
        self.is_alike = True  # wrapped alike by all ranks
        self.synced = self.unsynced = 0  # forwards since the optimizer's last step whose backward reduces, or does not
        self.was_synced = True  # the last one of them
        self.wants_buffers = False  # the next step is checked
        self.buffer_digest = torch.zeros((), dtype=torch.int64)
        self.buffer_copies: list[torch.Tensor] = []

    @property
    def ddp(self) -> Any:
        return self.ref()

    @property
    def broadcasts(self) -> bool:
        return bool(getattr(self.ddp, "forward_sync_buffers", getattr(self.ddp, "broadcast_buffers", True)))

    @property
    def is_joining(self) -> bool:
        """Inside `with model.join()` ranks may end at different steps."""
        return bool(getattr(getattr(self.ddp, "_join_config", None), "enable", False))

    def buffers(self) -> list[torch.Tensor]:
        known = dict(self.ddp.module.named_buffers())
        return [known[name.removeprefix(self.label)] for name in self.buffer_names]

    def why_not(self) -> str:
        """Why its replicas may differ; empty: they may not."""
        for hook, _ in getattr(self.ddp, "_comm_hooks", ()):
            name = getattr(hook, "__qualname__", "")
            if name in LOCAL_HOOKS:
                return f"its communication hook {name} lets ranks go different ways"
        return ""


def local(tensor: Any) -> Any:
    """What is there of it on this rank."""
    return getattr(tensor, "_local_tensor", tensor)


def on_accumulated(parameter: Any, hook: Callable[[Any], None]) -> Any:
    """Have this called with it whenever its gradient has been accumulated, before DDP takes it; what removes that."""
    return parameter.register_post_accumulate_grad_hook(hook)


def is_plain(tensor: Any) -> bool:
    """Whether what is there is all of it: not a part on this rank, as fully_shard and others make."""
    return not hasattr(tensor, "device_mesh") and tensor.layout is torch.strided and not tensor.is_meta


class Unit:
    """One optimizer and what it steps of what is replicated. `number`: in the order in which they came.

    `frozen`: members of its models that no optimizer steps, compared with its parameters.
    """

    def __init__(self, optimizer: Any, room: Room, number: int, models: list[Model], members: list[Member]) -> None:
        self.ref = weakref.ref(optimizer)
        self.room, self.number, self.models, self.members = room, number, models, members
        self.frozen = [m for model in models for m in model.members if not m.parameter.requires_grad]
        self.steps = 0  # begun
        self.due = 1  # the step that is checked next
        self.checks = 0
        self.every = self.parts = 1
        self.part = 0
        self.reduces = 0  # of a loop that reduces by itself: all_reduces since its last step
        self.kept: tuple[int, int, int] | None = None  # part, digests of parameters and state after the last step
        self.changed: dict[str, bool] = {}  # whether they are others now
        self.has_parts = False  # each rank has the state of a part of the parameters
        self.agreements = 0  # checks in which all were alike
        self.digest = 0  # of the gradients, at the last check
        self.late: Any = None  # digests on their way from a device
        self.is_late = False
        self.costs = Costs(0.0, 0.0, 0.0)
        self.dear_time = 0.0  # s that the last check took for parameters and state
        self.is_timed = True  # the next check
        self.look: Any = None  # at the gradients of the step under way: a `looks.Look`
        self.looked: Any = None  # the last one
        self.has_told: Any = None  # the last look whose numbers all ranks have
        self.looks = 0  # so far
        self.look_every, self.looked_at, self.wants_look = 1, -sys.maxsize, False
        self.look_time = self.look_outside = (
            0.0  # s of CPU time: of a look in its check; outside of any check since one
        )
        self.timed_at: tuple[int, float] | None = None  # step and CPU time at the end of the last check
        self._groups: tuple[int, ...] = ()
        self._structure = 0

    @property
    def optimizer(self) -> Any:
        return self.ref()

    @property
    def is_wrapped(self) -> bool:
        return bool(self.models)

    def structure(self) -> int:
        """A number for what is compared; found out again when the optimizer gets other groups."""
        groups = tuple(len(group["params"]) for group in self.optimizer.param_groups)
        if groups != self._groups:
            self._groups, self._structure = groups, digest_of(str([self.number, *describe(self.members)]))
        return self._structure

    def settings(self) -> list[str]:
        return [text for number, group in enumerate(self.optimizer.param_groups) for text in options(number, group)]

    def gradients(self) -> list[torch.Tensor]:
        found = [local(member.parameter.grad) for member in self.members]
        return [grad for grad in found if grad is not None and grad.layout is torch.strided]

    def absent(self) -> bytes:
        return bytes(member.parameter.grad is None for member in self.members)

    def stretch(self) -> tuple[list[Member], list[Member]]:
        """The members, and the frozen ones, whose turn it is."""
        return self.members[self.part :: self.parts], self.frozen[self.part :: self.parts]

    def state_of(self, members: Iterable[Member]) -> Iterator[tuple[str, Any]]:
        """Names and values of the optimizer's state, in an order that is the same everywhere."""
        state = {} if self.has_parts else self.optimizer.state
        for name, parameter in members:
            known: Mapping[str, Any] = state.get(parameter, {})
            for key in sorted(map(str, known)):
                yield f"{name}.{key}", local(known[key])


def describe(members: Iterable[Member]) -> list[str]:
    """`0.weight (16, 8) float32`, with what more DDP takes for granted."""
    return [
        f"{name} {tuple(p.shape)} {str(p.dtype)[6:]}{'' if p.is_contiguous() else f' strides {p.stride()}'}"
        f"{'' if p.requires_grad else ' frozen'}"
        for name, p in members
    ]


def options(number: int, group: Mapping[str, Any]) -> Iterator[str]:
    """What the optimizer is told for one group of parameters, in words that are the same on every rank."""
    yield f"group {number}: {len(group['params'])} parameters"
    for key in sorted(map(str, group)):
        value = group[key]
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        if isinstance(value, list | tuple) and all(isinstance(part, PLAIN) for part in value):
            value = tuple(value)
        elif not isinstance(value, PLAIN):
            continue
        yield f"group {number}: {key} = {value!r}"


def digest_of(text: str | bytes) -> int:
    data = text if isinstance(text, bytes) else text.encode()
    return signed(int.from_bytes(blake2b(data, digest_size=8).digest(), "little"))


def inner_optimizer(optimizer: Any) -> Any:
    """The one that a wrapping optimizer steps; that is where gradients are as they will be used."""
    found = vars(optimizer).values()
    return next((value for value in found if isinstance(value, torch.optim.Optimizer)), None)

"""A rank of a replayed job: notes what every part of its first steps computes, sends that to its agent, and ends.

What is noted, in the order in which it comes about (`policy.replay` compares it with another run's):

    start      a parameter before the first forward           gradient   of a parameter, before any all-reduce
    batch      what a DataLoader gave                         reduced    the same as the optimizer will use it
    random     states of generators: first, after a batch,    parameter  after the step
               at a forward
    input      of the outermost module                        loss       what backward began with
    output     of every module, the inner ones first

Of each: a 64-bit digest of all bits, the number of elements, their root mean square, and `SAMPLE` of them, evenly
spread, from which the size of a deviation is told. Only the thread that trains is looked at. Nothing here changes what
the program computes. What is inside a compiled region is noted as one module. Standard library and torch only.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.compiler import is_dynamo_compiling as tracing

from workbench.training.consistency.digest import Digests
from workbench.training.control import Control
from workbench.training.patching import Function, Patches, skip_frame

ANSWER: Final = "replay"  # the cell id under which the notes go to the agent
SAMPLE: Final = 24
MOST: Final = 200_000  # notes; a program that has more modules and steps is cut short there
DEEP: Final = 4  # containers in containers that are looked into for tensors
Note = list[Any]  # step, kind, name, digest, elements, root mean square, sample


class Recorder:
    """`step_of`: optimizer steps that are finished. `send` gets the notes once: when `steps` are, or at the end."""

    def __init__(self, steps: int, step_of: Callable[[], int], send: Callable[[bytes], object]) -> None:
        self.steps, self.step_of, self._send = steps, step_of, send
        self.notes: list[Note] = []
        self.patches = Patches()
        self.thread = threading.get_ident()
        self._digests = Digests()
        self._names: dict[int, str] = {}  # of modules and parameters, by id
        self._kept: list[Any] = []  # whose ids these are
        self._open: list[int] = []  # modules whose forward goes on
        self._local: dict[str, Note] = {}  # gradients of this step, before the reduce
        self._is_sent = False

    # --- notes --------------------------------------------------------------------------------------------------------

    def note(self, kind: str, name: str, value: Any) -> None:
        if len(self.notes) < MOST and (made := self.made(kind, name, value)) is not None:
            self.notes.append(made)

    def made(self, kind: str, name: str, value: Any) -> Note | None:
        """None where there is no tensor in `value`."""
        found = [readable(tensor) for tensor in tensors_in(value)]
        if not found:
            return None
        with torch.no_grad():
            digest = int(self._digests.of([tensor.cpu() for tensor in found])) & 2**64 - 1
            first = next((tensor for tensor in found if tensor.is_floating_point()), found[0])
            return [self.step_of(), kind, name, f"{digest:016x}", sum(t.numel() for t in found), *summary(first)]

    def note_generators(self) -> None:
        states = {"torch": torch.default_generator.get_state(), "random": as_tensor(repr(random.getstate()).encode())}
        if numpy := sys.modules.get("numpy"):
            states["numpy"] = as_tensor(repr(numpy.random.get_state()[1:3]).encode() + numpy.random.get_state()[1].data)
        for name, state in states.items():
            self.note("random", name, state)

    # --- modules ------------------------------------------------------------------------------------------------------

    def before_forward(self, module: Any, inputs: Any) -> None:
        if tracing() or threading.get_ident() != self.thread or not torch.is_grad_enabled():
            return
        if not self._open:
            self.note_generators()
            if id(module) not in self._names:
                self.meet(module)
            self.note("input", self._names[id(module)], inputs)
        self._open.append(id(module))

    def after_forward(self, module: Any, inputs: Any, output: Any) -> None:
        if tracing() or id(module) not in self._open:
            return
        while self._open.pop() != id(module):  # one that raised
            pass
        self.note("output", f"{self._names.get(id(module), '')}|{type(module).__name__}", output)

    def meet(self, root: Any) -> None:
        """Give its parts their names, and its parameters a hook before DDP's."""
        for name, module in root.named_modules():
            self._kept.append(module)
            self._names.setdefault(id(module), plain(name) or type(module).__name__)
        for name, parameter in root.named_parameters():
            if id(parameter) not in self._names:
                self._kept.append(parameter)
                self._names[id(parameter)] = plain(name)
                self.note("start", plain(name), parameter)
                if parameter.requires_grad:
                    parameter.register_hook(self._local_hook(plain(name)))

    def _local_hook(self, name: str) -> Callable[[Any], None]:
        def hook(gradient: Any) -> None:
            made = self.made("gradient", name, gradient)
            if made is not None and (before := self._local.get(name)) is not None:  # several backwards in a step
                made[3] = f"{3 * int(before[3], 16) + int(made[3], 16) & 2**64 - 1:016x}"
            if made is not None:
                self._local[name] = made

        return hook

    # --- steps --------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if tracing():
            return
        self.notes += [self._local[name] for name in sorted(self._local)]
        self._local.clear()
        for name, parameter in self.parameters_of(optimizer):
            self.note("reduced", name, parameter.grad)

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if tracing():
            return
        self._open.clear()
        # The step that this was: the count has gone on by now.
        begin = len(self.notes)
        for name, parameter in self.parameters_of(optimizer):
            self.note("parameter", name, parameter)
        for made in self.notes[begin:]:
            made[0] = max(0, made[0] - 1)
        if self.step_of() >= self.steps:
            self.finish()
            raise SystemExit(0)

    def parameters_of(self, optimizer: Any) -> Iterator[tuple[str, Any]]:
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield self._names.get(id(parameter), f"group {number}, parameter {index}"), parameter

    def finish(self) -> None:
        """Send what there is, once."""
        if not self._is_sent:
            self._is_sent = True
            self._send(zlib.compress(json.dumps({**circumstances(), "notes": self.notes}).encode()))


def circumstances() -> dict[str, Any]:
    """What may explain a difference without being one."""
    return {
        "rank": int(os.environ.get("RANK", "0")),
        "threads": torch.get_num_threads(),
        "strings": hash("dtrain"),
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "host": os.uname().nodename,
    }


def install(control: Control, steps: int) -> Recorder:
    """To be called after the observer's probes are put on, whose count of steps is used, and before the program is."""
    from workbench.training.observe import Observer

    def send(payload: bytes) -> None:
        control.send({"op": "cell", "cell_id": ANSWER, "ok": True, "seconds": 0.0}, payload)

    recorder = Recorder(steps, lambda: Observer.current.step if Observer.current is not None else 0, send)
    recorder.note_generators()  # from here on, who draws from them shows
    watch(recorder)
    atexit.register(recorder.finish)  # a program that is over before
    os.register_at_fork(after_in_child=lambda: setattr(recorder, "_is_sent", True))
    return recorder


def watch(recorder: Recorder) -> None:
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    registers: Mapping[Callable[..., Any], Callable[..., None]] = {
        register_module_forward_pre_hook: recorder.before_forward,
        register_module_forward_hook: recorder.after_forward,
        register_optimizer_step_pre_hook: recorder.before_step,
        register_optimizer_step_post_hook: recorder.after_step,
    }
    for register, hook in registers.items():
        skip_frame(hook, recursive=True)
        recorder.patches.on_undo(register(hook).remove)

    def around_next(plain: Function) -> Function:
        def __next__(iterator: Any) -> Any:
            batch = plain(iterator)
            if threading.get_ident() == recorder.thread:
                recorder.note("batch", "DataLoader", batch)
                recorder.note_generators()
            return batch

        return __next__

    def around_backward(plain: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and threading.get_ident() == recorder.thread:
                recorder.note("loss", "loss", args[0])
            return plain(*args, **kwargs)

        return call

    recorder.patches.wrap((_BaseDataLoaderIter,), "__next__", around_next)
    name = "_engine_run_backward" if hasattr(torch.autograd, "_engine_run_backward") else "backward"
    recorder.patches.wrap((torch.autograd,), name, around_backward)


# --- tensors ----------------------------------------------------------------------------------------------------------


def tensors_in(value: Any, depth: int = DEEP) -> Iterator[torch.Tensor]:
    """In their order; dicts by their own."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, depth - 1)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part, with a place for every element."""
    tensor = tensor.detach()
    local: Any = getattr(tensor, "to_local", None)  # a DTensor's
    if local is not None:
        tensor = local()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def summary(tensor: torch.Tensor) -> tuple[float, list[float]]:
    """Root mean square, and elements evenly spread."""
    if not tensor.numel():
        return 0.0, []
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    values = tensor.reshape(-1)
    every = -(-values.numel() // SAMPLE)
    kind = torch.float64 if values.device.type == "cpu" else torch.float32
    return float(values.to(kind).square().mean().sqrt()), values[::every].to(kind).tolist()


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def plain(name: str) -> str:
    """Without what wrappers put before it."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod", "_fsdp_wrapped_module"))

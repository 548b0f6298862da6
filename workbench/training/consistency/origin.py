"""Where the first number that is none comes from: the rank, the step, the batch, the module; before a reduce makes it
everybody's.

    loss        looked at when a backward begins, where that costs nothing: one number on the CPU. The graph of that
                loss still has what its operations kept, and the first of it that is not finite names the module
    gradient    of a loss that is finite: felt in one small parameter of the first layer, the last that backward comes
                to; then all others are looked at, which are this rank's own until then. And in every look (`looks`)

Who scales with a GradScaler overflows now and then, and it skips such steps: nothing is told of gradients then, nor of
a loss that is infinite.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.compiler import is_dynamo_compiling as tracing

from workbench.training.consistency.replicas import Member, Model, on_accumulated
from workbench.training.control import Control

FIRST: Final = 4  # parameters of which the smallest is felt
ENOUGH: Final = 4096  # elements of it
MOST: Final = 200_000  # operations of a graph that are looked at
PASSED: Final = ("mask", "bias", "weight")  # saved by these names may be infinite on purpose, or is no output


class Origin:
    """Tells once, and again only when losses, or gradients, have been finite in between."""

    def __init__(
        self, step_of: Callable[[], int], models: Callable[[], Sequence[Model]], is_scaled: Callable[[], bool]
    ) -> None:
        self._step_of, self._models, self._is_scaled = step_of, models, is_scaled
        self._inputs: list[weakref.ref[torch.Tensor]] = []
        self._is_broken = self._is_gradient_broken = False
        self.tell: Callable[..., None] = tell

    # --- losses -------------------------------------------------------------------------------------------------------

    def saw(self, inputs: tuple[Any, ...]) -> None:
        """A model's forward begins with these."""
        self._inputs = [weakref.ref(value) for value in inputs if isinstance(value, torch.Tensor)]

    def look(self, args: tuple[Any, ...]) -> None:
        """At the roots of a backward that is about to run."""
        roots = args[0]
        root = roots[0] if isinstance(roots, tuple | list) and len(roots) == 1 else roots
        if not isinstance(root, torch.Tensor) or root.numel() != 1 or root.device.type != "cpu":
            return
        value = root.item()
        if value - value == 0:  # neither NaN nor infinite
            self._is_broken = False
        elif not self._is_broken and not (math.isinf(value) and self._is_scaled()):
            self._is_broken = True
            if self._is_origin():
                self._tell_loss(root)

    def _is_origin(self) -> bool:
        """Whether this rank's parameters were still finite: else it is a consequence."""
        return all(bool(p.isfinite().all()) for model in self._models() for _, p in model.members)

    def _tell_loss(self, root: torch.Tensor) -> None:
        names = {id(p): name for model in self._models() for name, p in model.members}
        is_batch = self._is_batch()
        kind, module = ("", "") if is_batch else first_broken(root, names)
        why = " (its batch is not finite)" if is_batch else f" ({kind} appears after module {module})" if module else ""
        self.tell(step=self._step_of(), what=f"loss, before the all-reduce{why},", module=module)

    def _is_batch(self) -> bool:
        inputs = [value for ref in self._inputs if (value := ref()) is not None and value.is_floating_point()]
        return any(not bool(value.isfinite().all()) for value in inputs)

    # --- gradients ----------------------------------------------------------------------------------------------------

    def feel(self, model: Model) -> Callable[[], object]:
        """Look at one parameter of this model at every backward; what ends that."""
        some = [m.parameter for m in model.members if m.parameter.requires_grad and m.parameter.is_floating_point()]
        if not some:
            return lambda: None
        ref = weakref.ref(model)

        def hook(parameter: Any) -> None:
            if (found := ref()) is not None:
                self.felt(parameter.grad, found.members)

        remove: Callable[[], object] = on_accumulated(min(some[:FIRST], key=lambda p: p.numel()), hook).remove
        return remove

    def felt(self, gradient: Any, members: Sequence[Member]) -> None:
        """It has been accumulated, and DDP has not taken it yet."""
        if tracing() or gradient is None or gradient.device.type != "cpu" or gradient.layout is not torch.strided:
            return
        some = gradient.detach().view(-1)[:ENOUGH] if gradient.is_contiguous() else gradient.detach()
        if math.isfinite(some.sum()) or bool(some.isfinite().all()):
            self._is_gradient_broken = False
        elif not self._is_gradient_broken:
            there = [(name, p.grad) for name, p in members if p.grad is not None]
            self.broke([name for name, grad in there if not bool(grad.isfinite().all())])

    def broke(self, names: Sequence[str]) -> None:
        """Gradients of these were not finite on this rank; the last is the nearest to the loss, where it began."""
        if self._is_broken or self._is_gradient_broken or not names or self._is_scaled():
            return
        self._is_gradient_broken = True
        self.tell(
            step=self._step_of(),
            what=f"gradient of {names[-1]}, before the all-reduce,",
            module=names[-1].rpartition(".")[0],
        )


def tell(**fields: Any) -> None:
    if Control.current is not None:
        Control.current.fact("NonFiniteFound", **fields)


# --- a graph ----------------------------------------------------------------------------------------------------------


def first_broken(root: torch.Tensor, names: Mapping[int, str]) -> tuple[str, str]:
    """What the first value is that is NaN or infinite, and the module whose parameters were used last before it.

    Minus infinity, with which programs mask, only where there is nothing else.

    Of what operations have kept for backward, in the order of forward; "" where nothing is known. What is kept by
    somebody's hook, as a checkpointed module does, is left alone: to ask for it would compute it again.
    """
    order = in_order(root.grad_fn)
    used = modules_used(order, names)
    for is_bad in (overflowed, is_broken):
        for node in order:
            for name, value in saved(node):
                if is_bad(value):
                    kind = "NaN" if bool(value.isnan().any()) else "infinity"
                    is_output = "result" in name or "output" in name
                    return kind, used[node] if is_output else last_of(node, order, used)
    return "", ""


def overflowed(tensor: torch.Tensor) -> bool:
    return not bool((tensor < math.inf).all())


def is_broken(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isfinite().all())


def in_order(root: Any) -> dict[Any, int]:
    """Operations from which `root` comes, what was done first first, with their place."""
    order: dict[Any, int] = {}
    stack = [(root, False)] if root is not None else []
    while stack and len(order) < MOST:
        node, has_inputs = stack.pop()
        if node in order:
            continue
        if has_inputs:
            order[node] = len(order)
            continue
        stack.append((node, True))
        stack += [(before, False) for before, _ in node.next_functions if before is not None and before not in order]
    return order


def modules_used(order: Mapping[Any, int], names: Mapping[int, str]) -> dict[Any, str]:
    """By operation: the module whose parameters it has used, or else the last that was used before it."""
    used: dict[Any, str] = {}
    for node in order:
        variable = getattr(node, "variable", None)
        name = names.get(id(variable)) if variable is not None else None
        own = [used[before] for before, _ in node.next_functions if before in used and is_weight(before)]
        found = name.rpartition(".")[0] or name if name is not None else next(filter(None, own), "")
        used[node] = found or last_of(node, order, used)
    return used


def last_of(node: Any, order: Mapping[Any, int], used: Mapping[Any, str]) -> str:
    """The module that was used last for what goes into an operation, its own parameters left out."""
    before = [one for one, _ in node.next_functions if one in order and not is_weight(one)]
    return next((used[one] for one in sorted(before, key=lambda one: -order[one]) if used.get(one)), "")


def is_weight(node: Any) -> bool:
    """A parameter, or a view of one."""
    while not hasattr(node, "variable"):
        before = [one for one, _ in node.next_functions if one is not None]
        if len(before) != 1 or list(saved(node)):
            return False
        node = before[0]
    return True


def saved(node: Any) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name in dir(node):
        if name.startswith("_raw_saved_") and not any(word in name for word in PASSED):
            try:
                value = getattr(node, name).data
            except (AttributeError, RuntimeError):  # let go already, or changed since
                continue
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_sparse:
                found.append((name, value))
    return found

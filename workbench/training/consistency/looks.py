"""A look at the gradients of one step: this rank's own, before the all-reduce, and their mean, which is used.

A hook on each parameter sees its gradient when it has been accumulated: torch runs it before DDP takes the gradient
into its bucket, so that a communication hook, and a backward under `no_sync`, are as ever. Hooks are there for that
step only. Norms are of all elements. For everything else about `SAMPLE` elements of all parameters together are copied,
others at each look; memory and time are bounded by that. What was reduced before it could be seen, or is not whole on
any rank, is "not measured".

Nothing here waits for a device, but `numbers`, for a copy that was begun a step ago.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from time import thread_time
from typing import Any, Final, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling as tracing

from workbench.training.consistency.digest import flat
from workbench.training.consistency.replicas import Unit, is_plain, local, on_accumulated

SAMPLE: Final = 2**15  # elements
BINS: Final = 32  # of absolute values, each a factor of 4 wide; see `telemetry.Histogram`
LOWEST: Final = -48  # exponent of 2 at which the first begins
TURN: Final = 0.6180339887498949  # of the stride by which the sample moves from look to look: golden section
HALF: Final = (torch.float16, torch.bfloat16)
PLAIN: Final = 7  # numbers besides the counts
MEASURED: Final = 1
UNSEEN, SHARDED, REDUCED, STRANGE = 0, 2, 3, 4


class Numbers(NamedTuple):
    """Of one rank. `state` is MEASURED, or a reason why what is local is not known."""

    state: float
    square: float  # of its own gradient, the sum of squares
    cosine: float  # to the mean; NaN: not known
    zeros: float  # share of the elements
    nans: float
    infinite: float
    mean_square: float
    counts: tuple[float, ...]

    @classmethod
    def unseen(cls) -> Numbers:
        return cls.of([UNSEEN, *[math.nan] * 6, *[0.0] * BINS])

    @classmethod
    def of(cls, values: Sequence[float]) -> Numbers:
        return cls._make([*values[:PLAIN], tuple(values[PLAIN:])])


LENGTH: Final = PLAIN + BINS


def packed(numbers: Numbers) -> list[int]:
    """As ranks exchange them: the bits of doubles."""
    values = (*numbers[:-1], *numbers.counts)
    return list(struct.unpack(f"<{LENGTH}q", struct.pack(f"<{LENGTH}d", *values)))


def unpacked(bits: Sequence[int]) -> Numbers:
    return Numbers.of(struct.unpack(f"<{LENGTH}d", struct.pack(f"<{LENGTH}q", *bits)))


class Look:
    """At one step of one optimizer. `number` counts the looks; `has_layers`: this rank tells of layers."""

    def __init__(self, unit: Unit, number: int, *, has_layers: bool) -> None:
        self.unit, self.has_layers = unit, has_layers
        begun = thread_time()
        total = sum(local(member.parameter).numel() for member in unit.members)
        self._stride = math.ceil(total / SAMPLE) | 1  # odd: it must not keep to some columns of a matrix
        self._start = int(number * TURN % 1.0 * self._stride)
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = {}
        self._broken: dict[int, tuple[int, int]] = {}  # NaN and infinite, exactly, of what is on the CPU
        self._weights: list[torch.Tensor] = []
        self._sums: torch.Tensor | None = None
        self._sent: tuple[torch.Tensor, Any] | None = None
        self._arrived: Any = None  # the event after which `_sums` are on the CPU
        self.state = UNSEEN if all(is_plain(member.parameter) for member in unit.members) else SHARDED
        is_own = self.state != SHARDED
        places = [n for n, member in enumerate(unit.members) if is_own and member.parameter.requires_grad]
        self._hooks = [on_accumulated(unit.members[n].parameter, functools.partial(self.saw, n)) for n in places]
        self.spent = thread_time() - begun  # s of CPU time, all in all
        self.problem = ""

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def has_weights(self) -> bool:
        """The step after it is still to be seen."""
        return bool(self._weights)

    # --- in backward --------------------------------------------------------------------------------------------------

    def saw(self, place: int, parameter: Any) -> None:
        """A gradient has been accumulated. Of several backwards before a step the last one stands: it has them all."""
        if tracing() or (self.unit.is_wrapped and not any(model.was_synced for model in self.unit.models)):
            return
        begun = thread_time()
        try:
            self._saw(place, parameter.grad)
        except Exception as error:  # watching never stops training
            self.problem = f"{type(error).__name__}: {error}"
        self.spent += thread_time() - begun

    @torch.no_grad()
    def _saw(self, place: int, gradient: Any) -> None:
        if gradient is None or gradient.layout is not torch.strided or gradient.is_complex():
            self.state = STRANGE
        elif self.unit.reduces:
            self.state = REDUCED
        elif self.state in (UNSEEN, MEASURED):
            self.state = MEASURED
            norm = norm_of(gradient)
            self._seen[place] = norm, self._part(gradient), gradient.stride()
            if gradient.device.type == "cpu" and not math.isfinite(norm):
                self._broken[place] = int(gradient.isnan().sum()), int(gradient.isinf().sum())
            else:
                self._broken.pop(place, None)

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        return flat(tensor)[self._start :: self._stride].to(torch.float32, copy=True)

    @property
    def broken(self) -> list[str]:
        """Parameters whose gradient was not finite on this rank, in their order."""
        members = self.unit.members
        return [members[place].name for place, counts in sorted(self._broken.items()) if any(counts)]

    # --- before the step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, scale: Any) -> None:
        """Gradients are reduced now. `scale`: what a GradScaler has multiplied by, a number or tensor of one."""
        begun = thread_time()
        self.close()
        there = [(place, local(p.grad)) for place, (_, p) in enumerate(self.unit.members) if p.grad is not None]
        there = [(place, g) for place, g in there if g.layout is torch.strided and not g.is_complex()]
        parts = {place: self._part(gradient) for place, gradient in there}
        norms = [norm_of(gradient) for _, gradient in there]
        self._measure(parts, norms, {place: gradient.stride() for place, gradient in there}, scale)
        self._seen = {}
        if self.has_layers:
            self._weights = [self._part(local(member.parameter)) for member in self.unit.members]
            self._layer_sums(parts)
        self.spent += thread_time() - begun

    def _measure(
        self, mean: dict[int, torch.Tensor], norms: list[torch.Tensor], strides: dict[int, Any], scale: Any
    ) -> None:
        """All numbers as one tensor, where the gradients are, on its way to the CPU."""
        if not mean:
            return  # nothing was sent: it counts as not seen
        device = next(iter(mean.values())).device
        is_alike = all(strides.get(place) == stride for place, (_, _, stride) in self._seen.items())
        own = [self._seen[place][1] if place in self._seen else torch.zeros_like(part) for place, part in mean.items()]
        all_mean = together(list(mean.values()), device)
        all_own = together(own, device) if self.state == MEASURED and is_alike else all_mean
        square = (together([norm for norm, _, _ in self._seen.values()], device) / scale).square().sum()
        cosine = torch.dot(all_own, all_mean) / (norm_of(all_own) * norm_of(all_mean))
        counts = histogram(all_own / scale if self.state == MEASURED else all_mean)
        broken = torch.stack([all_own.isnan().sum(), all_own.isinf().sum()])
        size = max(1, all_own.numel())
        values = [
            square, cosine if is_alike else torch.full_like(cosine, math.nan), counts[BINS] / size, *broken,
            together(norms, device).square().sum(),
        ]  # fmt: skip
        self._sent = sent(torch.cat([torch.stack([value.double() for value in values]), counts[:BINS].double()]))

    def numbers(self) -> Numbers:
        """Waits for what was sent before the step, which is long here where a step lies between."""
        if self._sent is None:
            return Numbers.unseen()
        values, event = self._sent
        if event is not None:
            event.synchronize()
        found: list[float] = values.tolist()
        if self._broken:
            found[3:5] = [float(sum(counts[n] for counts in self._broken.values())) for n in (0, 1)]
        return Numbers.of([self.state, *found])

    # --- after the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def stepped(self) -> None:
        """What the optimizer has added to the weights, by parameter."""
        if not self._weights or self._sums is None:
            return
        begun = thread_time()
        pairs = zip(self.unit.members, self._weights, strict=True)
        moved = [(self._part(local(member.parameter)) - before).square().sum() for member, before in pairs]
        self._sums = torch.stack([*self._sums.unbind(), torch.stack([one.to(self._sums.device) for one in moved])])
        self._sums, self._arrived = sent(self._sums)
        self._weights = []
        self.spent += thread_time() - begun

    def _layer_sums(self, parts: dict[int, torch.Tensor]) -> None:
        device = self._weights[0].device if self._weights else torch.device("cpu")
        nothing = torch.zeros((), device=device)
        rows = [
            [float(weight.numel()) + nothing for weight in self._weights],
            [weight.square().sum().to(device) for weight in self._weights],
            [
                parts[place].square().sum().to(device) if place in parts else nothing
                for place in range(len(self._weights))
            ],
        ]
        self._sums = torch.stack([torch.stack(row) for row in rows])

    def layers(self) -> list[tuple[str, float, float, float]]:
        """Name, RMS of mean gradient and of weights, and RMS of the update over the weights', by module."""
        if self._sums is None or len(self._sums) < 4:
            return []
        if self._arrived is not None:
            self._arrived.synchronize()
        counts, weights, gradients, moved = self._sums.tolist()
        names = layer_names([member.name for member in self.unit.members])
        found: dict[str, list[float]] = {}
        for name, *values in zip(names, counts, weights, gradients, moved, strict=True):
            sums = found.setdefault(name, [0.0] * 4)
            found[name] = [one + other for one, other in zip(sums, values, strict=True)]
        return [
            (name, root(g, n), root(w, n), root(d, w)) for name, (n, w, g, d) in found.items() if n and math.isfinite(g)
        ]


# --- parts of it ------------------------------------------------------------------------------------------------------


def norm_of(tensor: torch.Tensor) -> torch.Tensor:
    """L2, in single precision at least."""
    found: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.dtype in HALF else None)
    return found.double()


def together(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not tensors:
        return torch.zeros(1, dtype=torch.float64, device=device)
    return torch.cat([tensor.reshape(-1).to(device, non_blocking=True) for tensor in tensors])


def histogram(values: torch.Tensor) -> torch.Tensor:
    """`BINS` counts of absolute values by their binary exponent, then how many are zero, and how many not finite."""
    bits = values.float().abs().contiguous().view(torch.int32)
    exponent = (bits >> 23) - 127
    place = ((exponent - LOWEST) >> 1).clamp(0, BINS - 1)
    place = torch.where(bits == 0, BINS, torch.where(exponent == 128, BINS + 1, place)).long()
    if values.device.type == "cpu":
        return torch.bincount(place, minlength=BINS + 2)
    counts = torch.zeros(BINS + 2, dtype=torch.int64, device=values.device)  # bincount would wait for the device
    return counts.scatter_add_(0, place, torch.ones_like(place))


def sent(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """On the CPU at once, or on its way there, with the event of its arrival."""
    if not values.is_cuda:
        return values, None
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return there, event


def root(square: float, of: float) -> float:
    return math.sqrt(square / of) if of > 0 and math.isfinite(square / of) else 0.0


MOST_LAYERS: Final = 48


def layer_names(names: Sequence[str]) -> list[str]:
    """The module of each parameter; of very many the modules that hold them, as deep as there are not too many."""
    paths = [name.split(".")[:-1] or [name] for name in names]
    depth = max((len(path) for path in paths), default=1)
    while depth > 1 and len({tuple(path[:depth]) for path in paths}) > MOST_LAYERS:
        depth -= 1
    short = [".".join(path[:depth]) for path in paths]
    kept = set(list(dict.fromkeys(short))[: MOST_LAYERS - 1]) if len(set(short)) > MOST_LAYERS else set(short)
    return [name if name in kept else "others" for name in short]

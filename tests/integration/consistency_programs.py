"""Small training programs whose ranks disagree, each modelled on a public report; and some whose ranks do not.

`run(case, rank, ...)` runs one in a rank with checking on, and gives what it told. Nothing in a program knows of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 8
AT = 4  # the step that goes wrong
CASES: dict[str, Callable[[], Any]] = {}
Optimizer = torch.optim.Optimizer


class Told(NamedTuple):
    """Facts and reports of one rank, what its program raised, why checking ended, what the program gave."""

    facts: list[tuple[str, dict[str, Any]]]
    reports: list[dict[str, Any]]
    error: str
    off: str
    result: Any


def run(
    case: str, rank: int, *, policy: str = "warn", every: int = 1, budget: float = 0.02, often: bool = False
) -> Told:
    """`often`: a report after every look."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from workbench.training import guard
    from workbench.training.consistency import reports as reporting
    from workbench.training.consistency import watch
    from workbench.training.consistency.check import Checker, ReplicasDifferError
    from workbench.training.consistency.reports import Reports

    torch.set_num_threads(1)
    facts: list[tuple[str, dict[str, Any]]] = []
    reports: list[dict[str, Any]] = []
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    guard.install()
    reporting.EVERY = 0.0 if often else reporting.EVERY  # type: ignore[misc]
    told = Reports(lambda event, **fields: facts.append((event, fields)), lambda **fields: reports.append(fields))
    checker = Checker(told, lambda: steps, policy=policy, every=every, budget=budget)
    watching = watch.Watch(checker)
    watch.install(watching)
    watching.origin.tell = lambda **fields: facts.append(("NonFiniteFound", {**fields, "rank": rank}))
    register_optimizer_step_post_hook(count)
    dist.init_process_group("gloo")
    error, result = "", None
    try:
        result = CASES[case]()
    except ReplicasDifferError as raised:
        error = str(raised)
    watching.flush()
    dist.destroy_process_group()
    return Told(facts, reports, error, checker.off, result)


def case(program: Callable[[], Any]) -> Callable[[], Any]:
    CASES[program.__name__] = program
    return program


def net(batch_norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(16)] if batch_norm else []
    return nn.Sequential(nn.Linear(8, 16), *norm, nn.ReLU(), nn.Linear(16, 4))


def batch(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def loss(model: nn.Module, step: int, size: int = 8) -> torch.Tensor:
    x, y = batch(step, size)
    return F.cross_entropy(model(x), y)


def backward(model: nn.Module, step: int) -> None:
    loss(model, step).backward()  # type: ignore[no-untyped-call]


def nothing(model: Any, optimizer: Any, step: int) -> None:
    """After a step."""


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fit(
    model: nn.Module,
    back: Callable[[Any, int], object] = backward,
    after: Callable[[Any, Optimizer, int], object] = nothing,
    *,
    make: Callable[[Any], Optimizer] = momentum,
    steps: int = STEPS,
    **ddp: Any,
) -> Any:
    """The state at the end: parameters and optimizer state as bytes."""
    wrapped = DDP(model, **ddp)
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        back(wrapped, step)
        optimizer.step()
        after(wrapped, optimizer, step)
    return state_of(model, optimizer)


def state_of(model: nn.Module, optimizer: Optimizer) -> list[bytes]:
    held = [value for p in model.parameters() for value in optimizer.state.get(p, {}).values()]
    tensors = [*model.parameters(), *(value for value in held if isinstance(value, torch.Tensor))]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    tensor.data.view(-1)[element : element + 1].view(torch.int32).bitwise_xor_(1 << bit)


def is_here(step: int, rank: int = 1) -> bool:
    return step == AT and dist.get_rank() == rank


# --- replicas that agree ----------------------------------------------------------------------------------------------


@case
def clean() -> Any:
    return fit(net())


@case
def clean_adam() -> Any:
    return fit(net(), make=lambda p: torch.optim.AdamW(p, lr=1e-2))


@case
def clean_batch_norm() -> Any:
    """DDP sends rank 0's buffers before each forward, so that they differ after it; that is no fault."""
    return fit(net(batch_norm=True))


@case
def clean_accumulation() -> Any:
    def back(model: Any, step: int) -> None:
        with model.no_sync():
            backward(model, step)
        backward(model, step + 50)

    return fit(net(batch_norm=True), back)


@case
def clean_bucket_views() -> Any:
    return fit(net(), gradient_as_bucket_view=True)


@case
def clean_half_precision_hook() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DDP(net())
    wrapped.register_comm_hook(None, fp16_compress_hook)
    optimizer = momentum(wrapped.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(wrapped, step)
        optimizer.step()


@case
def clean_unused_parameters() -> Any:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused, self.sometimes = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            made: torch.Tensor = self.used(x)
            return made + self.sometimes(x) if self.calls % 2 else made

    return fit(Partly(), find_unused_parameters=True)


@case
def clean_dropout_and_uneven_last_batch() -> Any:
    layers = [*net().children()]
    model = nn.Sequential(layers[0], nn.Dropout(0.5), *layers[1:])
    torch.manual_seed(dist.get_rank())

    def back(wrapped: Any, step: int) -> None:
        size = 3 + dist.get_rank() if step == STEPS - 1 else 8
        loss(wrapped, step, size).backward()  # type: ignore[no-untyped-call]

    return fit(model, back)


@case
def clean_autocast_with_a_scaler_that_skips() -> Any:
    wrapped = DDP(net())
    optimizer = momentum(wrapped.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(wrapped, step)
        scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        if step == AT:
            for parameter in wrapped.parameters():  # an overflow that the all-reduce has spread to all
                parameter.grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
    return float(scaler.get_scale())


@case
def clean_two_optimizers() -> Any:
    """As in a GAN: one steps twice as often, and each model is trained through the other."""
    one, two = DDP(net()), DDP(nn.Linear(4, 1))
    first, second = momentum(one.parameters()), torch.optim.Adam(two.parameters())
    for step in range(STEPS):
        for turn in range(2):
            second.zero_grad()
            two(one(batch(step + 10 * turn)[0]).detach()).square().mean().backward()
            second.step()
        first.zero_grad()
        one(batch(step)[0]).square().mean().backward()
        first.step()


@case
def clean_noise_on_rank_0_before_the_reduce() -> Any:
    """As opacus does it, on purpose: noise is added once, and the sum is shared."""
    model = net()
    optimizer = momentum(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        for parameter in model.parameters():
            assert parameter.grad is not None
            if dist.get_rank() == 0:
                parameter.grad.add_(torch.randn_like(parameter))
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        optimizer.step()


@case
def clean_loop_with_a_flat_all_reduce() -> Any:
    model = net()
    optimizer = momentum(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        whole = torch.cat([gradient.view(-1) for gradient in gradients])
        dist.all_reduce(whole)
        for gradient, part in zip(gradients, whole.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient) / dist.get_world_size())
        optimizer.step()


@case
def every_rank_for_itself() -> Any:
    """A search over seeds: ranks are meant to differ, and take as many steps as they like."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(8, 4)
    optimizer = momentum(model.parameters())
    for step in range(STEPS + 3 * dist.get_rank()):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    dist.barrier()


@case
def only_rank_0_steps() -> Any:
    """Gradients are reduced to all, one rank steps and sends what comes of it: nothing may wait for the others."""
    model = net()
    optimizer = momentum(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        if dist.get_rank() == 0:
            optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)


@case
def a_model_that_drifts_apart_on_purpose() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    wrapped = DDP(net())
    wrapped.register_comm_hook(None, noop_hook)
    optimizer = momentum(wrapped.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(wrapped, step)
        optimizer.step()


# --- reduces that are missing -----------------------------------------------------------------------------------------


@case
def inverted_no_sync() -> Any:
    """modelscope/FunASR#3472"""

    def back(model: Any, step: int) -> None:
        for micro in range(2):
            with model.no_sync() if micro == 1 else contextlib.nullcontext():
                backward(model, step + 50 * micro)

    return fit(net(), back)


@case
def always_no_sync() -> Any:
    def back(model: Any, step: int) -> None:
        with model.no_sync():
            backward(model, step)

    return fit(net(), back)


@case
def forward_bypasses_ddp() -> Any:
    """Lightning-AI/pytorch-lightning#16856"""
    return fit(net(), lambda model, step: backward(model.module, step))


@case
def a_loop_that_forgets_its_all_reduce() -> Any:
    model = net()
    optimizer = momentum(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        for parameter in model.parameters() if step != AT else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()


# --- gradients that are changed ---------------------------------------------------------------------------------------


@case
def clip_on_one_rank() -> Any:
    """As in deepspeed#1801, of BLOOM-176B."""

    def back(model: Any, step: int) -> None:
        backward(model, step)
        if dist.get_rank() == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    return fit(net(), back)


@case
def noise_on_one_rank() -> Any:
    def back(model: Any, step: int) -> None:
        backward(model, step)
        if is_here(step):
            model.module[0].weight.grad.add_(torch.randn(16, 8))

    return fit(net(), back)


@case
def bit_flip_in_gradient() -> Any:
    def back(model: Any, step: int) -> None:
        backward(model, step)
        if is_here(step):
            flip(model.module[0].weight.grad, 5, 3)

    return fit(net(), back)


@case
def no_gradient_on_one_rank() -> Any:
    def back(model: Any, step: int) -> None:
        backward(model, step)
        if is_here(step):
            model.module[2].bias.grad = None

    return fit(net(), back)


@case
def nan_in_a_gradient_after_the_reduce() -> Any:
    def back(model: Any, step: int) -> None:
        backward(model, step)
        if is_here(step):
            model.module[2].weight.grad[1, 2] = float("nan")

    return fit(net(), back)


# --- what ranks hold --------------------------------------------------------------------------------------------------


@case
def bit_flip_in_parameter() -> Any:
    return fit(net(), after=lambda m, o, step: is_here(step) and flip(m.module[2].weight, 3, 0))


@case
def bit_flip_in_momentum() -> Any:
    return fit(
        net(),
        after=lambda m, o, step: is_here(step) and flip(o.state[m.module[2].weight]["momentum_buffer"], 3, 12),
    )


@case
def weights_written_on_one_rank() -> Any:
    return fit(net(), after=lambda m, o, step: is_here(step) and m.module[2].weight.data.mul_(1.5))


@case
def weights_loaded_on_rank_0_only() -> Any:
    """vllm-project/speculators#926"""
    model = net()
    wrapped = DDP(model)
    if dist.get_rank() == 0:
        torch.manual_seed(7)
        model.load_state_dict(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).state_dict())
    optimizer = momentum(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(wrapped, step)
        optimizer.step()


@case
def optimizer_state_loaded_on_rank_0_only() -> Any:
    model = net()
    wrapped = DDP(model)
    optimizer = momentum(model.parameters())
    if dist.get_rank() == 0:
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(wrapped, step)
        optimizer.step()
    return state_of(model, optimizer)


@case
def learning_rate_of_one_rank() -> Any:
    """A scheduler that looks at the rank's own loss."""

    def after(model: Any, optimizer: Optimizer, step: int) -> None:
        if is_here(step):
            optimizer.param_groups[0]["lr"] = 0.05

    return fit(net(), after=after)


@case
def batch_norm_not_synchronised() -> Any:
    """maskrcnn-benchmark#692"""
    return fit(net(batch_norm=True), forward_sync_buffers=False)


@case
def one_rank_skips_a_step() -> Any:
    wrapped = DDP(net())
    optimizer = momentum(wrapped.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(wrapped, step)
        if not is_here(step):
            optimizer.step()


# --- at wrapping ------------------------------------------------------------------------------------------------------


@case
def parameters_in_another_order() -> Any:
    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            for name in ("a", "b") if dist.get_rank() == 0 else ("b", "a"):
                self.add_module(name, nn.Linear(8, 8))
            self.out = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.out(F.relu(self.b(F.relu(self.a(x)))))
            return made

    return fit(Swapped())


@case
def parameters_of_another_type() -> Any:
    """DDP adds the bits of two kinds of half precision up."""
    DDP(nn.Linear(8, 4).to(torch.float16 if dist.get_rank() == 0 else torch.bfloat16))


# --- not finite -------------------------------------------------------------------------------------------------------


@case
def nan_in_the_batch_of_one_rank() -> Any:
    def back(model: Any, step: int) -> None:
        x, y = batch(step)
        if is_here(step):
            x[0, 0] = float("nan")
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]

    return fit(net(), back)


# --- numbers that are none, and what gradients are like ---------------------------------------------------------------


class Log(nn.Module):
    """Of nothing, at one step on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return torch.log(x * 0 - 1) if is_here(self.step - 1) else torch.relu(x)


@case
def nan_in_a_module_of_one_rank() -> Any:
    torch.manual_seed(0)
    return fit(nn.Sequential(nn.Linear(8, 16), Log(), nn.Linear(16, 4)))


@case
def nan_in_the_backward_of_one_rank() -> Any:
    """The loss is finite: the derivative of a root at zero is not."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step, self.inner = 0, nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.step += 1
            found: torch.Tensor = self.inner(x)
            return found + (found * 0).abs().sqrt() if is_here(self.step - 1) else found

    torch.manual_seed(0)
    return fit(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Root()))


def alike(model: nn.Module, step: int, size: int = 64) -> torch.Tensor:
    """What is to be learned is the same on all ranks; batches are each rank's own."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(size, 8, generator=generator)
    return (model(x) - x[:, :4] * 2).square().mean()


@case
def wrong_labels_on_rank_1() -> Any:
    sign = -1.0 if dist.get_rank() == 1 else 1.0
    return fit(net(), lambda model, step: (sign * alike(model, step)).backward(), steps=16)


@case
def a_large_shard_on_rank_1() -> Any:
    factor = 30.0 if dist.get_rank() == 1 else 1.0
    return fit(net(), lambda model, step: (factor * alike(model, step)).backward(), steps=16)


def norm(model: nn.Module) -> float:
    return float(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).norm())


@case
def accumulated_with_no_sync() -> Any:
    """What a look sees is the sum of both micro-batches, as the all-reduce gets it: the norms of it are returned."""
    model = net()
    plain = net()
    norms: list[float] = []

    def back(ddp: Any, step: int) -> None:
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        for micro in (2 * step, 2 * step + 1):
            alike(plain, micro).backward()
        norms.append(norm(plain))
        with ddp.no_sync():
            alike(ddp, 2 * step).backward()
        alike(ddp, 2 * step + 1).backward()

    fit(model, back, gradient_as_bucket_view=True)
    return norms


@case
def reduced_by_a_loop() -> Any:
    model = net()
    optimizer = momentum(model.parameters())
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        alike(model, step).backward()
        norms.append(norm(model))
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
    return norms

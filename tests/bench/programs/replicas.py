"""One rank of a DDP job that measures what its checks cost, and does faults to itself to see whether they are found.

python replicas.py LAYERS BLOCKS TRIALS      RANK, WORLD_SIZE and a rendezvous in the environment; prints JSON
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections.abc import Callable
from time import thread_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workbench.training import guard
from workbench.training.consistency import watch
from workbench.training.consistency.check import Checker
from workbench.training.consistency.looks import Look
from workbench.training.consistency.replicas import Unit
from workbench.training.consistency.reports import Reports

BATCH = 64
STEPS = 4  # a block
FRESH = 18  # faults that are done to the gradients of one backward, one after the other
SITES = ("gradients", "parameters", "optimizer state")


class Trainer:
    """A model, and the CPU time that its steps and their checks take."""

    def __init__(self, layers: list[int]) -> None:
        self.facts: list[dict[str, Any]] = []
        reports = Reports(lambda event, **fields: self.facts.append({"event": event, **fields}), lambda **fields: None)
        self.checker = Checker(reports, lambda: 0, every=1)
        self.watch = watch.Watch(self.checker)
        watch.install(self.watch)
        torch.manual_seed(0)
        pairs = list(itertools.pairwise(layers))
        model = nn.Sequential(*[part for pair in pairs for part in (nn.Linear(*pair), nn.ReLU())][:-1])
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.inputs = torch.randn(BATCH, layers[0])
        self.spent = 0.0
        for name in ("check", "prepare"):
            setattr(self.checker, name, self._timed(getattr(self.checker, name)))
        for name in ("saw", "stepped"):  # of looks: what they do outside of a check
            setattr(Look, name, self._timed(getattr(Look, name)))

    def _timed(self, plain: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            start = thread_time()
            plain(*args)
            self.spent += thread_time() - start

        return call

    @property
    def unit(self) -> Unit:
        return next(unit for unit in self.watch.units.values() if unit is not None)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()

    def steps(self, count: int) -> tuple[float, float]:
        """CPU time of a step without its check, and of the check."""
        self.spent, start = 0.0, thread_time()
        for _ in range(count):
            self.backward()
            self.optimizer.step()
        return (thread_time() - start - self.spent) / count, self.spent / count


def cost(trainer: Trainer, blocks: int) -> dict[str, float]:
    """Shares of a plain step: of checks of everything at each step, of gradients alone, and as the budget has it."""
    checker, unit = trainer.checker, trainer.unit
    every, plain = [], []
    for _ in range(blocks):
        unit.due = sys.maxsize
        plain.append(trainer.steps(STEPS)[0])
        unit.due = unit.steps + 1
        every.append(trainer.steps(STEPS)[1])
    step = min(plain)
    checker.every, unit.checks = 0, 0
    trainer.steps(2 * STEPS)
    while unit.checks < 20:
        trainer.steps(max(STEPS, unit.every))
    budgeted = [trainer.steps(max(8, 2 * unit.every))[1] for _ in range(blocks)]
    found = {"step": step, "every": min(every) / step, "budget": sum(budgeted) / len(budgeted) / step}
    found |= {"cadence": float(unit.every), "parts": float(unit.parts)}
    found |= {"look": unit.costs.look / step, "looks": float(unit.look_every)}
    unit.every = unit.parts = checker.every = 1
    measure = checker.measure
    ways: dict[str, Callable[[], Any]] = {
        "gradients": lambda: int(measure.gradients(unit)),
        "weights": lambda: int(measure.together([p.detach() for p in trainer.parameters])),
        "sha1": lambda: [hashlib.sha1(p.detach().numpy()).digest() for p in trainer.parameters],
        "hash_tensor": lambda: [torch.hash_tensor(p.detach()).tolist() for p in trainer.parameters],
    }
    return found | {name: best(way) / step for name, way in ways.items()}


def best(act: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        start = thread_time()
        act()
        times.append(thread_time() - start)
    return min(times)


# --- faults -----------------------------------------------------------------------------------------------------------


def flip(tensor: torch.Tensor, draw: random.Random) -> None:
    place = draw.randrange(tensor.numel())
    bit = draw.randrange(32)
    tensor[place : place + 1].view(torch.int32).bitwise_xor_(-(2**31) if bit == 31 else 1 << bit)


def swap(tensor: torch.Tensor, draw: random.Random) -> None:
    one, other = draw.randrange(tensor.numel()), draw.randrange(tensor.numel())
    tensor[[one, other]] = tensor[[other, one]]


def stick(tensor: torch.Tensor, draw: random.Random) -> None:
    tensor.view(torch.uint8)[draw.randrange(4) :: 4 * draw.choice((1, 16, 64))] |= 0x40


def stride(tensor: torch.Tensor, draw: random.Random) -> None:
    tensor.view(torch.int32)[draw.randrange(64) :: 64] ^= 1 << draw.randrange(31)


def drop(tensor: torch.Tensor, draw: random.Random) -> None:
    tensor[-8:] = 0


def stale(tensor: torch.Tensor, draw: random.Random) -> None:
    tensor.copy_(tensor.roll(1))


FAULTS = {"bit": flip, "swap": swap, "stuck byte": stick, "stride": stride, "dropped end": drop, "stale": stale}


def detect(trainer: Trainer, trials: int) -> dict[str, list[int]]:
    """By site and fault: done, found, the right tensor, the right rank or (where nobody can tell) nobody."""
    draw = random.Random(5)
    found: dict[str, list[int]] = {}
    trainer.checker.policy = "warn"
    kinds = [(site, fault) for site in SITES for fault in FAULTS]
    for number in range(trials):
        site, fault = kinds[number % len(kinds)]
        victim, index = draw.randrange(dist.get_world_size()), draw.randrange(len(trainer.parameters))
        parameter = trainer.parameters[index]
        if number % FRESH == 0:
            trainer.backward()
        held = {"gradients": parameter.grad, "parameters": parameter.data}.get(site)
        tensor = trainer.optimizer.state[parameter]["momentum_buffer"] if held is None else held
        told = _try(trainer, tensor, FAULTS[fault], random.Random(draw.random()), victim)
        if told is not None:
            counts = found.setdefault(f"{site}: {fault}", [0, 0, 0, 0])
            name = trainer.unit.members[index].name
            for place, holds in enumerate((True, *told(name, victim))):
                counts[place] += holds
    return found


def _try(
    trainer: Trainer, tensor: torch.Tensor, fault: Callable[[torch.Tensor, random.Random], None], draw: random.Random,
    victim: int,
) -> Callable[[str, int], tuple[bool, bool, bool]] | None:  # fmt: skip
    """Do it on one rank, check, and undo it; None: it happened to change nothing."""
    before = tensor.clone()
    trainer.checker.prepare(trainer.unit)
    fault(tensor.view(-1), draw)
    is_none = torch.equal(tensor.view(torch.int32), before.view(torch.int32))
    if dist.get_rank() != victim:
        tensor.copy_(before)
    if is_none:
        return None
    trainer.facts.clear()
    trainer.unit.wants_look = False
    trainer.unit.steps += 1
    trainer.checker.check(trainer.unit)
    facts = [fact["mismatch"] for fact in trainer.facts if fact["event"] == "GradientMismatched"]
    tensor.copy_(before)
    trainer.unit.steps += 1
    trainer.checker.check(trainer.unit)  # agrees again
    can_tell = dist.get_world_size() > 2 or not (facts and facts[0]["compared"] == "gradients")
    return lambda name, rank: (
        len(facts) == 1,
        bool(facts) and facts[0]["tensors"][0].startswith(name) and facts[0]["count"] == 1,
        bool(facts) and facts[0]["ranks"] == ([rank] if can_tell else []),
    )


def main(layers: list[int], blocks: int, trials: int) -> None:
    torch.set_num_threads(1)
    guard.install()
    dist.init_process_group("gloo")
    trainer = Trainer(layers)
    trainer.steps(3)
    costs = cost(trainer, blocks) if blocks else {}
    found = detect(trainer, trials)
    if dist.get_rank() == 0:
        assert not trainer.checker.off, trainer.checker.off
        parameters = sum(p.numel() for p in trainer.parameters)
        print(json.dumps({"parameters": parameters, "costs": costs, "found": found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main([int(part) for part in sys.argv[1].split(",")], int(sys.argv[2]), int(sys.argv[3]))

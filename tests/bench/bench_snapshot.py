"""What a copy in memory costs a step of 100 ms: models of 1, 10 and 50 million parameters, each step and as chosen.

A copy is taken as a rank takes it, and costs all that training waits for: collecting the state and random states too.
The bar is 3 % of the step: each step where that is enough, else as often as the tier chooses by itself. Beside it: the
same tensors copied by torch alone into memory that is there, which nothing on this machine can beat by much.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "20"))
STEP = 0.1  # s
SIZES = (1, 10, 50)  # million parameters
LAYERS = 24


def main() -> list[tuple[str, str, str]]:
    """Rows of (what, measured, bar)."""
    import torch

    torch.set_num_threads(1)
    rows = []
    for millions in SIZES:
        for name in ("SGD", "Adam"):
            rows += _rows(f"{millions} M, {name}", *_measure(torch, millions, name))
    return rows


def _rows(what: str, size: int, cost: float, chosen: int, plain: float) -> list[tuple[str, str, str]]:
    share = cost / STEP
    return [
        (f"{what}: one copy of {size / 2**20:.0f} MiB", f"{cost * 1e3:.2f} ms, {size / cost / 1e9:.1f} GB/s", "–"),
        (f"{what}: the same by torch alone", f"{plain * 1e3:.2f} ms, {size / plain / 1e9:.1f} GB/s", "–"),
        (f"{what}: share of a step of {STEP * 1e3:.0f} ms, each step", f"{share:.2%}", "–"),
        (f"{what}: as the tier chooses, each {chosen}", f"{share / chosen:.2%}", "≤ 3 %"),
    ]


def _measure(torch: Any, millions: int, name: str) -> tuple[int, float, int, float]:
    """Bytes, s a copy with what it takes to collect the state, steps between two, and s of plain clones in place."""
    from workbench.training import states
    from workbench.training.pace import Pace
    from workbench.training.rng import rng_state
    from workbench.training.slot import Kind
    from workbench.training.slots import Slots, Who

    width = int((millions * 1e6 / LAYERS) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters()) if name == "Adam" else torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    slots, pace, plain = Slots(Who(0, 0, 1), lambda *_: None, lambda: 2**40), Pace(), []
    costs = []
    copies = _plain_copies(torch, model, optimizer)
    for step in range(ROUNDS):
        start = time.perf_counter()
        taken = states.take({"model": model, "optimizer": optimizer})
        extras = {"extras": {"steps": step, "rng": rng_state()}, "objects": taken.objects}
        slots.write(step, {"state": taken.tree, "extras": extras}, Kind.WHOLE)
        costs.append(time.perf_counter() - start)
        pace.took(costs[-1])
        pace.stepped(STEP)
        start = time.perf_counter()
        copies()
        plain.append(time.perf_counter() - start)
        time.sleep(STEP / 10)
    newest = slots.newest()
    assert newest is not None
    assert newest.header is not None
    assert newest.header.step == ROUNDS - 1, "not every step was copied"
    return newest.header.data_size, statistics.median(costs[2:]), pace.every(), statistics.median(plain[2:])


def _plain_copies(torch: Any, model: Any, optimizer: Any) -> Any:
    """What anybody would do at the least: copies into tensors that are there."""
    sources = [*model.state_dict().values()]
    sources += [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    sources = [value for value in sources if isinstance(value, torch.Tensor)]
    targets = [torch.empty_like(value) for value in sources]

    def copy() -> None:
        with torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

    return copy


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))

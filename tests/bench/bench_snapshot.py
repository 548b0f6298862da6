"""What a copy in memory costs a step of 100 ms: models of 1, 10 and 50 million parameters on two ranks over gloo.

A copy is taken as ranks take it, and costs all that training waits for: collecting the state and random states too.
The bar is 3 % of the step: each step where that is enough, else as often as the tier chooses by itself. By turns with
it: one rank copying all of it while the other waits, and the same tensors copied by torch alone into memory that is
there. Times are those of the slower rank; processor time, which a busy machine changes less, that of the busier one.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "20"))
WARM_UP = 3
STEP = 0.1  # s
SIZES = (1, 10, 50)  # million parameters
LAYERS = 24
RANKS = 2
WAYS = ("shares", "whole", "plain")


class Took(NamedTuple):
    """One copy on one rank, in s."""

    wall: float
    cpu: float


def main() -> list[tuple[str, str, str]]:
    """Rows of (what, measured, bar)."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(folder,), nprocs=RANKS)
        lines = [line.split() for path in Path(folder).glob("times*") for line in path.read_text().splitlines()]
    rows = []
    for millions, name in itertools.product(SIZES, ("SGD", "Adam")):
        mine = [line[2:] for line in lines if line[:2] == [str(millions), name]]
        size = int(mine[0][0])
        rounds = {way: _slowest([line[1:] for line in mine if line[1] == way]) for way in WAYS}
        rows += _rows(f"{millions} M, {name}", size, rounds)
    return rows


def _slowest(lines: list[list[str]]) -> list[Took]:
    """By round, of the ranks; lines of (way, round, wall, cpu)."""
    by_round: dict[str, list[Took]] = {}
    for _, number, wall, cpu in lines:
        by_round.setdefault(number, []).append(Took(float(wall), float(cpu)))
    return [Took(max(one.wall for one in both), max(one.cpu for one in both)) for both in by_round.values()]


def _rows(what: str, size: int, rounds: dict[str, list[Took]]) -> list[tuple[str, str, str]]:
    from workbench.training import pace

    wall, cpu = (_median(rounds["shares"], way) for way in (_wall, _cpu))
    every = pace.every(wall, STEP)
    return [
        (
            f"{what}: a copy of {size / 2**20:.0f} MiB by {RANKS} ranks",
            f"{wall * 1e3:.2f} ms, {cpu * 1e3:.2f} CPU",
            "–",
        ),
        (f"{what}: time / that of one rank for all", _ratios(rounds, "whole"), "< 1"),
        (f"{what}: time / that of torch's copies of all on one rank", _ratios(rounds, "plain"), "–"),
        (f"{what}: share of a step of {STEP * 1e3:.0f} ms", f"{wall / STEP:.2%}, {cpu / STEP:.2%} CPU", "≤ 3 %"),
        (f"{what}: as the tier chooses, each {every}", f"{wall / STEP / every:.2%}", "≤ 3 %"),
    ]


def _wall(took: Took) -> float:
    return took.wall


def _cpu(took: Took) -> float:
    return took.cpu


def _median(rounds: list[Took], of: Callable[[Took], float]) -> float:
    return statistics.median(map(of, rounds))


def _ratios(rounds: dict[str, list[Took]], other: str) -> str:
    """Medians of the rounds' own: what else the machine does is the same for both."""
    wall, cpu = (
        statistics.median(of(one) / of(two) for one, two in zip(rounds["shares"], rounds[other], strict=True))
        for of in (_wall, _cpu)
    )
    return f"{wall:.2f}, {cpu:.2f} CPU"


def _rank(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    with Path(folder, f"times{rank}").open("w") as log:
        for millions, name in itertools.product(SIZES, ("SGD", "Adam")):
            for line in _measure(torch, rank, millions, name):
                log.write(" ".join(map(str, (millions, name, *line))) + "\n")
    dist.destroy_process_group()


def _measure(torch: Any, rank: int, millions: int, name: str) -> list[tuple[Any, ...]]:
    """Lines of (bytes, way, round, wall, cpu)."""
    width = int((millions * 1e6 / LAYERS) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters()) if name == "Adam" else torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    ways = {
        "shares": _copier(rank, {"model": model, "optimizer": optimizer}, RANKS),
        "whole": _copier(rank, {"model": model, "optimizer": optimizer}, 1),
        "plain": _plain_copies(torch, rank, model, optimizer),
    }
    lines = []
    for number in range(ROUNDS + WARM_UP):
        for way, copy in ways.items():
            optimizer.step()  # they come from there
            size, took = _timed(torch, copy)
            if number >= WARM_UP:
                lines.append((size, way, number, *took))
    return lines


def _timed(torch: Any, copy: Callable[[], int]) -> tuple[int, Took]:
    torch.distributed.barrier()
    cpu, wall = time.thread_time(), time.perf_counter()
    size = copy()
    took = Took(time.perf_counter() - wall, time.thread_time() - cpu)
    total = torch.tensor([size])
    torch.distributed.all_reduce(total)
    return int(total), took


def _copier(rank: int, state: dict[str, Any], parts: int) -> Callable[[], int]:
    """What `Memory.take` does, on each of so many ranks."""
    from workbench.training import states
    from workbench.training.rng import rng_state
    from workbench.training.sharing import Sharing
    from workbench.training.slot import Kind
    from workbench.training.slots import Slots, Who
    from workbench.training.snapshots import divide

    slots = Slots(Who(0, rank, RANKS), lambda *_: None, lambda: 2**40)
    sharing, steps = Sharing(parts), itertools.count()

    def copy() -> int:
        step = next(steps)
        taken = states.take(state)
        extras = {"extras": {"steps": step, "rng": rng_state()}, "objects": taken.objects}
        if rank >= parts:
            value, share = None, None
        else:
            value, share = divide(taken.tree, [list(part.values()) for part in sharing.parts(taken)], rank)
        made = slots.write(step, {"state": value, "extras": extras}, Kind.WHOLE, share=share)
        assert made is not None
        assert made.header is not None
        return made.header.data_size

    return copy


def _plain_copies(torch: Any, rank: int, model: Any, optimizer: Any) -> Callable[[], int]:
    """What anybody would do at the least: rank 0 copies into tensors that are there."""
    sources = [*model.state_dict().values()]
    sources += [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    sources = [value for value in sources if isinstance(value, torch.Tensor)]
    targets = [torch.empty_like(value) for value in sources]

    def copy() -> int:
        if rank == 0:
            with torch.no_grad():
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)
        return 0

    return copy


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))

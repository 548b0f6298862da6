"""What integrity of all-reduces costs, and which flipped bits it finds: 2 ranks over gloo, a model of 1 M parameters.

Cost is CPU time over that of a plain step: wall clock lies on shared machines. A flip hits one value of one rank, after
its checksum was taken and before the sum, or what the sum gave; it is found when a row is flagged. `BENCH_FLIPS` a bit.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import statistics
import tempfile
import time
from typing import Any

RANKS = 2
BLOCKS, STEPS = 6, 5
FLIPS = int(os.environ.get("BENCH_FLIPS", "8"))  # a bit
MODES = {"checked": ("checked", 64), "bitwise": ("bitwise", 64), "exact, 32 bits": ("exact", 32),
         "exact, 64 bits": ("exact", 64)}  # fmt: skip
Row = tuple[str, str, str]


def main() -> list[Row]:
    """Rows of (what, measured, bar)."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        near, far = context.Pipe(duplex=False)
        ranks = [context.Process(target=rank_main, args=(rank, f"{folder}/store", far)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        try:
            if not near.poll(400):
                raise TimeoutError("the ranks do not answer")
            costs, rates = near.recv()
            for process in ranks:
                process.join(30)
        finally:
            for process in ranks:
                process.kill()
    return [*cost_rows(costs), *rate_rows(rates)]


def cost_rows(costs: dict[str, list[float]]) -> list[Row]:
    plain = costs["plain"]
    rows = [("plain DDP, CPU time of a step", f"{1e3 * statistics.median(plain):.1f} ms", "")]
    for mode in MODES:
        ratios = [mine / other for mine, other in zip(costs[mode], plain, strict=True)]
        own = statistics.median(costs[f"{mode}, own"]) / statistics.median(plain)
        text = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}), ours {100 * own:.0f} % of it"
        rows.append((f"{mode}, CPU time of a step over plain", text, "as measured"))
    return rows


def rate_rows(rates: dict[tuple[str, str], list[tuple[int, bool, float]]]) -> list[Row]:
    rows = []
    for (mode, stage), flips in rates.items():
        bits = sorted({bit for bit, _, _ in flips})
        thirds = [bits[: len(bits) // 2], bits[len(bits) // 2 :]]
        parts = []
        for some in thirds:
            found = [is_found for bit, is_found, _ in flips if bit in some]
            parts.append(f"bits {some[0]}–{some[-1]}: {sum(found)}/{len(found)}")
        missed = max((size for _, is_found, size in flips if not is_found), default=0.0)
        worst = f"; largest missed {100 * missed:.3f} % of RMS" if missed else ""
        bar = "all" if mode.startswith("exact") else "all that move the mean by 0.2 % of its RMS"
        rows.append((f"{mode}, flips {stage} the sum", ", ".join(parts) + worst, bar))
    return rows


# --- in the ranks -----------------------------------------------------------------------------------------------------


def rank_main(rank: int, store: str, result: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    trainers = {name: trainer(*wish) for name, wish in {"plain": ("", 64), **MODES}.items()}
    costs: dict[str, list[float]] = {}
    for block in range(BLOCKS + 1):
        for name, (step, reducer) in trainers.items():
            before = reducer.spent if reducer is not None else 0.0
            begun = time.process_time()
            for _ in range(STEPS):
                step()
            spent = (time.process_time() - begun) / STEPS
            if block:  # the first warms up
                costs.setdefault(name, []).append(spent)
                own = (reducer.spent - before) / STEPS if reducer is not None else 0.0
                costs.setdefault(f"{name}, own", []).append(own)
    rates = {
        (name, stage): flips(reducer, stage, rank)
        for name, (_, reducer) in trainers.items()
        if reducer is not None
        for stage in ("before", "after")
    }
    if rank == 0:
        result.send((costs, rates))
    dist.barrier()
    dist.destroy_process_group()


def trainer(mode: str, width: int) -> tuple[Any, Any]:
    """A step of a model with that hook, and its reducer."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as Ddp

    from workbench.training.consistency.reduce import Reducer
    from workbench.training.consistency.reports import Reports
    from workbench.training.consistency.room import Room
    from workbench.training.consistency.settle import Settler

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    ddp = Ddp(model)
    settler = None
    if mode:
        reducer = Reducer(ddp, mode, width)
        c10d: Any = dist
        c10d._register_comm_hook(ddp.reducer, None, reducer.hook)
        told = Reports(lambda *a, **b: None, lambda **b: None)
        settler = Settler(reducer, Room.open(None), told, lambda: 0, "warn", lambda parameter: "")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 784, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        if settler is not None:
            settler.settle()
        optimizer.step()

    return step, settler.reducer if settler is not None else None


def flips(reducer: Any, stage: str, rank: int) -> list[tuple[int, bool, float]]:
    """Of each flip: the bit, whether a row was flagged on any rank, and how far the mean moved, in parts of its RMS."""
    import torch
    import torch.distributed as dist

    bucket = max(reducer._buckets.values(), key=lambda one: one.size)
    words = {4: torch.int32, 8: torch.int64}
    width = 8 * bucket.values.element_size()
    reducer.again(bucket)
    right = bucket.result.clone()
    rms = float(right.square().mean().sqrt())
    generator = torch.Generator().manual_seed(1)
    plain, found = reducer.send, []
    for number in range(FLIPS * width):
        bit, place = number % width, int(torch.randint(bucket.size, (), generator=generator))
        mask = -(2 ** (width - 1)) if bit == width - 1 else 1 << bit
        view = bucket.values.view(words[bucket.values.element_size()])
        is_here = rank == number % RANKS

        def send(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, view: Any = view, place: int = place,
                 mask: int = mask, is_here: bool = is_here) -> Any:  # fmt: skip
            is_it = tensor.data_ptr() == view.data_ptr()
            if is_it and is_here and stage == "before":
                view[place] ^= mask
            future = plain(tensor, op)
            if is_it and stage == "after":
                future.wait()
                if is_here:
                    view[place] ^= mask
            return future

        reducer.send = send
        reducer.again(bucket)
        moved = (bucket.result - right).abs().nan_to_num(1e30, 1e30, 1e30).max()
        both = torch.stack([bucket.flagged.any().double(), moved.double()])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        found.append((bit, bool(both[0]), float(both[1]) / rms))
    reducer.send = plain
    return found


if __name__ == "__main__":
    for row in main():
        print(" | ".join(row))

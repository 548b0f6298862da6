"""What a checkpoint of 200 MB costs training: the stall beside `dcp.save`'s and `dcp.async_save`'s, and the checksums.

Two ranks over gloo, the same DDP model and optimizer by turns in one run. The stall is what the slower rank waits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
SIZE = 200e6  # bytes of model and optimizer
RANKS = 2


def main() -> list[tuple[str, str, str]]:
    """Rows of (what, measured, bar)."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "times"
        mp.spawn(_rank, args=(folder, str(target)), nprocs=RANKS)
        lines = [line.split() for path in sorted(Path(folder).glob("times*")) for line in path.read_text().splitlines()]
    names = ("save", "async", "ours", "alone", "torch", "none")
    stalls = {name: _slowest([line for line in lines if line[0] == name]) for name in names}
    shares = [float(line[3]) / float(line[2]) for line in lines if line[0] == "crc"]
    sync, threaded, ours = (statistics.median(stalls[name]) for name in ("save", "async", "ours"))
    return [
        ("dcp.save, stall", f"{sync * 1e3:.0f} ms", "the yardstick"),
        ("dcp.async_save, stall", f"{threaded * 1e3:.0f} ms", "the yardstick"),
        ("Run.save, stall", f"{ours * 1e3:.0f} ms", "a copy of the rank's share"),
        ("Run.save / dcp.save", f"{_ratio(stalls['ours'], stalls['save']):.2f}", "≤ 0.5"),
        ("Run.save / dcp.async_save", f"{_ratio(stalls['ours'], stalls['async']):.2f}", "≤ 1.1"),
        ("Run.save until durable", f"{statistics.median(stalls['alone']):.2f} s", ""),
        ("checksums: processor time / time of the save", f"{statistics.median(shares):.1%}", "in another thread"),
        (
            "a save's time / that of one with torch's sums only",
            f"{_ratio(stalls['alone'], stalls['torch']):.2f}",
            "≤ 1.05",
        ),
        ("a save's time / that of one without any sums", f"{_ratio(stalls['alone'], stalls['none']):.2f}", "≤ 1.05"),
    ]


def _slowest(lines: list[list[str]]) -> list[float]:
    """By round."""
    rounds = sorted({line[1] for line in lines})
    return [max(float(line[2]) for line in lines if line[1] == number) for number in rounds]


def _ratio(ours: list[float], others: list[float]) -> float:
    """The median of the rounds' own: what else the machine does is the same for both."""
    return statistics.median(one / other for one, other in zip(ours, others, strict=True))


def _rank(rank: int, folder: str, target: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    other = dist.new_group(backend="gloo")  # for async_save, whose collectives must not meet training's
    state = _program(torch)
    with Path(f"{target}.{rank}").open("w") as log:
        for number in range(ROUNDS + 1):
            for line in _round(state, Path(folder), number, other):
                if number:  # the first one gets its memory
                    log.write(" ".join(map(str, line)) + "\n")
    dist.destroy_process_group()


def _program(torch: Any) -> dict[str, Any]:
    """Model, exponential averages and their squares: three times the parameters."""
    width, layers = 1024, max(1, round(SIZE / 3 / 4 / 1024**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(1, width)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def _round(state: dict[str, Any], folder: Path, number: int, group: Any) -> list[tuple[Any, ...]]:
    """Each way once; a barrier before and the whole writing after, so that none meets another's."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def states() -> dict[str, Any]:
        model, optimizer = get_state_dict(state["model"], state["optimizer"])
        return {"model": model, "optimizer": optimizer}

    lines: list[tuple[Any, ...]] = []
    dist.barrier()
    start = time.perf_counter()
    dcp.save(states(), checkpoint_id=folder / "sync" / str(number))
    lines.append(("save", number, time.perf_counter() - start))
    dist.barrier()
    start = time.perf_counter()
    future = dcp.async_save(states(), checkpoint_id=folder / "async" / str(number), process_group=group)
    lines.append(("async", number, time.perf_counter() - start))
    future.result()
    lines += _ours(state, folder / "ours", number)
    dist.barrier()
    if dist.get_rank() == 0:
        for name in ("sync", "async"):
            shutil.rmtree(folder / name / str(number))
    return lines


KEPT: list[Any] = []  # the checkpointer, from round to round


def _ours(state: dict[str, Any], folder: Path, number: int) -> list[tuple[Any, ...]]:
    import torch.distributed as dist

    from workbench.training import files
    from workbench.training.checkpoint import Checkpointer
    from workbench.training.saving import Where
    from workbench.training.team import Team

    if not KEPT:
        team = Team.current()
        assert team is not None
        KEPT.extend([Checkpointer(Where(folder=folder, keep=1), team, _fact), files.crc32])
    summed = [0.0]

    def crc32(data: Any, value: int = 0) -> int:
        begun = time.thread_time()  # what others do on the machine is not counted
        result: int = KEPT[1](data, value)
        summed[0] += time.thread_time() - begun
        return result

    once = files._summed_once
    ways = {"alone": (crc32, once), "torch": (_no_sum, contextlib.nullcontext), "none": (_no_sum, once)}
    order = [*ways, *ways][number % 3 :][:3]  # each is the first as often: it meets what the disk still does
    took = {name: _save(dist, files, state, 3 * number + at, *ways[name]) for at, name in enumerate(order)}
    stall, whole = took["alone"]
    lines = [("ours", number, stall), ("crc", number, whole, summed[0])]
    return [*lines, *((name, number, times[1]) for name, times in took.items())]


def _save(dist: Any, files: Any, state: Any, number: int, crc32: Any, once: Any) -> tuple[float, float]:
    """The stall, and the time until it is durable."""
    before = files._summed_once
    files.crc32, files._summed_once = crc32, once
    dist.barrier()
    start = time.perf_counter()
    KEPT[0].save(state, number, {"step": number})
    stall = time.perf_counter() - start
    KEPT[0].finish()
    whole = time.perf_counter() - start
    files._summed_once = before
    return stall, whole


def _no_sum(data: Any, value: int = 0) -> int:
    return value


def _fact(event: str, **fields: Any) -> None:
    assert event == "CheckpointSaved", fields


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))

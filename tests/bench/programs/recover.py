"""A DDP program that notes each finished step: `recover.py FOLDER EPOCHS PAUSE`; resumes by `Run`, or by torch.save.

An epoch is 100 steps of 8 samples on 2 ranks.
"""

import hashlib
import itertools
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from workbench.training import Run


def main(folder: Path, epochs: int, pause: float) -> None:
    dist.init_process_group("gloo")
    rank, restart = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(1600, 64), torch.randn(1600, 1))
    sampler = torch.utils.data.DistributedSampler(data, dist.get_world_size(), rank, seed=7)
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
    with (folder / f"rank{rank}.txt").open("a", buffering=1) as notes:
        if os.environ.get("DTRAIN_JOB_ID"):
            taken = Run.current().steps(loader, {"model": model, "optimizer": optimizer}, epochs=epochs)
        else:
            taken = by_hand(loader, epochs, model, optimizer, folder / "saved.pt", rank)
        for step, (x, y) in taken:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            notes.write(f"{time.time()} {step} {restart} {os.getpid()} {x.double().sum().item()}\n")
            time.sleep(pause)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    (folder / f"final{rank}.txt").write_text(hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    dist.destroy_process_group()


def by_hand(loader, epochs, model, optimizer, path, rank):
    """As a careful script does under torchrun: every 10 steps, whole or not at all."""
    done = 0
    if path.exists():
        state = torch.load(path)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    for step, batch in enumerate(itertools.chain.from_iterable(loader for _ in range(epochs))):
        if step < done:
            continue
        yield step, batch
        if rank == 0 and step % 10 == 9:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

"""The model of `recover.py` under torchft: `survive.py FOLDER RANK RESTART PAUSE`; one rank a replica group.

Notes each step that torchft committed. TORCHFT_LIGHTHOUSE says where the lighthouse is.
"""

import datetime
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.ddp import DistributedDataParallel


def main(folder: Path, rank: int, restart: int, pause: float) -> None:
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    adam = torch.optim.Adam(layers.parameters())

    def load(state):
        layers.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ten = datetime.timedelta(seconds=10)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=ten), load_state_dict=load, min_replica_size=1, rank=0, world_size=1,
        state_dict=lambda: {"model": layers.state_dict(), "optimizer": adam.state_dict()}, replica_id=f"rank{rank}",
        store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1", timeout=ten,
    )  # fmt: skip
    model, optimizer = DistributedDataParallel(manager, layers), Optimizer(manager, adam)
    with (folder / f"rank{rank}.txt").open("a", buffering=1) as notes:
        while True:
            x, y, before = torch.randn(8, 64), torch.randn(8, 1), manager.current_step()
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            if manager.current_step() > before:
                notes.write(f"{time.time()} {before} {restart} {os.getpid()} {manager.num_participants()}\n")
            time.sleep(pause)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))

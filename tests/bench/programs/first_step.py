"""One DDP step on each rank; rank 0 writes when the step had finished (CLOCK_REALTIME) to the file named by argv[1]."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        if step == 0 and dist.get_rank() == 0:
            target = Path(sys.argv[1])
            target.with_suffix(".tmp").write_text(repr(time.time()))
            target.with_suffix(".tmp").rename(target)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

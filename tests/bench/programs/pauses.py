"""10,000 steps of a small DDP model with pauses that are no hang; argv[1]: their unit in s.

A slow first step, an evaluation, a checkpoint that only rank 0 writes, a step that was announced.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from workbench.training import Run

STEPS, UNIT = 10_000, float(sys.argv[1])


class Slow:
    """Takes its time to be saved."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        time.sleep(1.5 * UNIT)
        return (int, ())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.ones(8, 32)
    for step in range(STEPS):
        if step == 0:
            time.sleep(UNIT)
        if step == 2000:
            model.eval()
            time.sleep(2 * UNIT)
            model.train()
        if step == 4000 and dist.get_rank() == 0:
            torch.save(Slow(), os.devnull)
        if step == 6000:
            Run.current().expect(10 * UNIT)
            time.sleep(UNIT)
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

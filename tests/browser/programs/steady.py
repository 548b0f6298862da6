"""Trains for as long as it is told, slowly enough to share a small machine; prints now and then."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from workbench.training import Run

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
STEPS = round(SECONDS / 0.05)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = torch.randn(64, 16)
loader = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=8)
run, step = Run.current(), 0
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    for batch, target in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        run.report(loss=loss.item())
        run.progress(min(step, STEPS), STEPS)
        time.sleep(0.04 + 0.02 * dist.get_rank())
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        step += 1
dist.destroy_process_group()

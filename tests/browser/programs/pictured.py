"""What pictures of the panels show: DDP with several buckets, a schedule, checkpoints, output.

`pictured.py EPOCHS [FATAL]`: rank 1 raises at step FATAL.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from workbench.training import Run

EPOCHS, FATAL = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = torch.nn.Sequential(*(part for _ in range(3) for part in (torch.nn.LazyLinear(256), torch.nn.ReLU())))
net.append(torch.nn.LazyLinear(10))
net(torch.zeros(1, 64))
model = DistributedDataParallel(net, bucket_cap_mb=0.2)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
inputs = torch.randn(1024, 64)
targets = (inputs[:, :10] + 0.5 * torch.randn(1024, 10)).argmax(1)
data = TensorDataset(inputs, targets)
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, EPOCHS * len(loader) + 1)
run = Run.current()
state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
for step, (batch, target) in run.steps(loader, state, epochs=EPOCHS):
    if step == FATAL and rank == 1:
        raise RuntimeError(f"expected {batch.shape[1]} features in shard 17, found {batch.shape[1] - 3}")
    loss = torch.nn.functional.cross_entropy(model(batch), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    run.report(loss=loss.item(), samples=len(batch))
    time.sleep(0.03 + 0.01 * rank)
    if step % 20 == 0:
        print(f"step {step:5d}  loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()

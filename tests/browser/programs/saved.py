"""Trains for many short steps whose state is saved every few; goes on from there when it is started again."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from workbench.training import Run

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = torch.randn(64, 16)
loader = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=8)
run = Run.current()
state = {"model": model, "optimizer": optimizer, "loader": loader}
for _ in range(EPOCHS):
    for _, (batch, target) in run.steps(loader, state):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        run.report(loss=loss.item())
        time.sleep(0.04)
dist.destroy_process_group()

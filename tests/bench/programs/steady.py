"""Steps of about 1 ms on each rank for argv[2] seconds; rank 0 writes steps/s (after a warm-up) to the file argv[1].

The ranks are independent, so that the figure is that of the loop and not of two cores shared by gloo.
"""

import sys
import time
from pathlib import Path

import torch


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.randn(4096, 128), torch.randint(0, 10, (4096,)))
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    model = torch.nn.Sequential(torch.nn.Linear(128, 1152), torch.nn.ReLU(), torch.nn.Linear(1152, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_function = torch.nn.CrossEntropyLoss()
    seconds, steps, start = float(sys.argv[2]), 0, 0.0
    began = time.perf_counter()
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
        now = time.perf_counter()
        if not start and now - began > 1.0:
            start, steps = now, 0
        if start and now - start > seconds:
            break
    Path(sys.argv[1]).write_text(repr(steps / (now - start)))


if __name__ == "__main__":
    main()

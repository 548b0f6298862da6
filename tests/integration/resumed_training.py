"""A training program that saves after every step, resumes from what it finds, and kills itself where it is told.

python resumed_training.py FOLDER STEPS KILL_AT WORKERS PERSISTENT
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from workbench.training.position import DataPosition
from workbench.training.rng import rng_state, set_rng_state

SAMPLES = 118  # of two ranks' 59: 15 batches an epoch, the last smaller
EPOCHS = 10


class Augmented(Dataset[Any]):
    """Draws random numbers where its samples are loaded, of every kind."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(8) + random.random() + float(np.random.rand())
        return torch.sin(torch.arange(8.0) + index) + 0.1 * noise, torch.tensor([index / SAMPLES])


def main(folder: Path, steps: int, kill_at: int, workers: int, is_persistent: bool) -> None:
    torch.set_num_threads(1)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    data = Augmented()
    sampler: DistributedSampler[Any] = DistributedSampler(data, 2, 1, seed=5)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=workers, persistent_workers=is_persistent)
    position = DataPosition(loader, rank=0, world_size=1)
    losses: list[float] = []
    newest = folder / "newest.pt"
    if newest.exists():
        saved = torch.load(newest, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])  # type: ignore[attr-defined]
        losses = saved["losses"]
        position.restore([saved["data"]], then=lambda: set_rng_state(saved["rng"]))
    for _, (inputs, wanted) in position.epochs(EPOCHS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        saved = {name: part.state_dict() for name, part in parts.items()}  # type: ignore[attr-defined]
        torch.save(saved | {"losses": losses, "data": position.state_dict(), "rng": rng_state()}, folder / "new.pt")
        (folder / "new.pt").replace(newest)
        if len(losses) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(losses) == steps:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "persistent")

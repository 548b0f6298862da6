"""Train a small network on scikit-learn's handwritten digits, data parallel.

An ordinary torchrun script; each of these runs it:

    dtrain launch digits.py --nproc-per-node 2 --wait
    torchrun --nproc-per-node 2 digits.py
    python digits.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=16, help="images a rank and step")
    return parser.parse_args()


def setup() -> tuple[int, int, torch.device]:
    """Join the process group when there is one to join; rank, world size, device."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if has_cuda else torch.device("cpu")
    if has_cuda:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return 0, 1, device
    dist.init_process_group("nccl" if has_cuda else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def load() -> tuple[TensorDataset, TensorDataset]:
    """1,347 images to train on, 450 that are never trained on; the same split in every rank."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
    parts = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in parts)
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset, rank: int, world_size: int, device: torch.device) -> float:
    """Accuracy on the held-out part; each rank judges its share once."""
    model.eval()
    images, labels = (part[rank::world_size].to(device) for part in test.tensors)
    count = torch.tensor([(model(images).argmax(1) == labels).sum().item(), len(labels)], device=device)
    if world_size > 1:
        dist.all_reduce(count)
    return float(count[0] / count[1])


def main() -> None:
    args = parse_args()
    rank, world_size, device = setup()
    torch.manual_seed(0)
    train, test = load()
    sampler = DistributedSampler(train, world_size, rank, seed=0)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    net = make_model().to(device)
    model = DistributedDataParallel(net) if world_size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        schedule.step()
        print(f"epoch {epoch + 1} of {args.epochs}: loss {loss.item():.4f}", flush=True)
    accuracy = evaluate(net, test, rank, world_size, device)
    if rank == 0:
        print(f"accuracy {accuracy:.2%} on {len(test)} held-out digits", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

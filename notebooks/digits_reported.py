"""digits.py with what only the script knows told to `Run`: its loss, how far it is, and what a checkpoint has to hold.

`Run` does nothing outside a job, so this runs under torchrun and plain python as well.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import evaluate, load, make_model, parse_args, setup
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from workbench.training import Run


def main() -> None:
    args = parse_args()
    rank, world_size, device = setup()
    torch.manual_seed(0)
    train, test = load()
    loader = DataLoader(train, args.batch_size, sampler=DistributedSampler(train, world_size, rank, seed=0))
    net = make_model().to(device)
    model = DistributedDataParallel(net) if world_size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

    run = Run.current()
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    for step, (images, labels) in run.steps(loader, state, epochs=args.epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        run.report(loss=loss, samples=len(images))
        optimizer.step()
        schedule.step()
        if (step + 1) % len(loader) == 0:
            print(f"epoch {(step + 1) // len(loader)} of {args.epochs}: loss {loss.item():.4f}", flush=True)

    accuracy = evaluate(net, test, rank, world_size, device)
    if rank == 0:
        print(f"accuracy {accuracy:.2%} on {len(test)} held-out digits", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

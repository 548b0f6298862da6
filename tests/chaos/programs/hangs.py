"""Trains a small DDP model; from step BEGIN on, the fault named by the argument. Says `INJECTED <epoch s>` then."""

import os
import re
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BEGIN = 30
FAULT = sys.argv[1]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CULPRIT = 1


def said() -> None:
    if RANK == CULPRIT:
        print("INJECTED", time.time(), flush=True)


def sleeping() -> None:
    time.sleep(1e6)


def regular_expression() -> None:
    re.match("(a?){28}a{28}", "a" * 28)


def live_lock() -> None:
    while True:
        pass


def polling() -> None:
    while not Path("/nowhere").exists():
        time.sleep(0.01)


def dead_mutex() -> None:
    mutex = threading.Lock()
    mutex.acquire()
    mutex.acquire()


def nothing() -> None:
    threading.Event().wait()


def culprit_only(fault):
    def inject() -> None:
        said()
        if RANK == CULPRIT:
            fault()

    return inject


def skipped() -> None:
    said()
    if RANK != CULPRIT:
        dist.all_reduce(torch.ones(64))
    dist.broadcast(torch.ones(32), 0)
    dist.barrier()


def other_order() -> None:
    said()
    for name in ("all_reduce", "broadcast") if RANK != CULPRIT else ("broadcast", "all_reduce"):
        dist.all_reduce(torch.ones(64)) if name == "all_reduce" else dist.broadcast(torch.ones(64), 0)


def other_shape() -> None:
    said()
    dist.all_reduce(torch.ones(8 if RANK == CULPRIT else 4096))


def two_groups() -> None:
    first, second = GROUPS
    said()
    for group in (first, second) if RANK != CULPRIT else (second, first):
        dist.all_reduce(torch.ones(16), group=group)


def returned() -> None:
    said()
    if RANK == CULPRIT:
        threading.Thread(target=sleeping).start()  # keeps the process
        sys.exit(0)


class Batches(torch.utils.data.Dataset):
    def __init__(self, fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if RANK == CULPRIT and index >= BEGIN and self.fault:
            print("INJECTED", time.time(), flush=True)
            self.fault()
        time.sleep(0.005)
        return torch.ones(4)


FAULTS = {
    "regular_expression": culprit_only(regular_expression),
    "live_lock": culprit_only(live_lock),
    "polling": culprit_only(polling),
    "dead_mutex": culprit_only(dead_mutex),
    "skipped": skipped,
    "other_order": other_order,
    "other_shape": other_shape,
    "two_groups": two_groups,
    "returned": returned,
    "slow_once": culprit_only(lambda: time.sleep(float(os.environ["SECONDS"]))),
}
LOADERS = {"sleeping_loader": (sleeping, 0), "looping_loader": (live_lock, 0), "looping_worker": (live_lock, 1),
           "stopped_worker": (None, 1)}  # fmt: skip

if FAULT == "before_init" and RANK == CULPRIT:
    print("INJECTED", time.time(), flush=True)
    nothing()
dist.init_process_group("gloo")
GROUPS = dist.new_group(range(WORLD)), dist.new_group(range(WORLD))
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fault, workers = LOADERS.get(FAULT, (None, 0))
if FAULT == "slow_first":
    time.sleep(float(os.environ["SECONDS"]))
for step, batch in enumerate(torch.utils.data.DataLoader(Batches(fault), num_workers=workers)):
    if step == BEGIN and FAULT in FAULTS:
        FAULTS[FAULT]()
    if step == BEGIN and FAULT == "evaluation":
        said()
        model.eval()
        time.sleep(float(os.environ["SECONDS"]))
        model.train()
    if step == BEGIN and FAULT == "checkpoint" and RANK == 0:

        class Slow:
            def __reduce__(self):
                time.sleep(float(os.environ["SECONDS"]))
                return (int, ())

        torch.save(Slow(), os.devnull)
    if step == BEGIN and FAULT == "expected":
        from workbench.training import Run

        Run.current().expect(60)
        time.sleep(float(os.environ["SECONDS"]))
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    if step == BEGIN - 5:
        print("READY", flush=True)

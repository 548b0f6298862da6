"""Small training programs whose ranks read the wrong data, each modelled on a public report; and some that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, Subset, TensorDataset

EPOCHS = 2
SAMPLES = 64
Batch = tuple[torch.Tensor, torch.Tensor]
CASES: dict[str, Callable[[], Any]] = {}


def case(program: Callable[[], Any]) -> Callable[[], Any]:
    CASES[program.__name__] = program
    return program


def run(name: str, rank: int, *, every: int = 1) -> list[dict[str, Any]]:
    """The doubts that a rank told, with their steps."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from workbench.training import guard
    from workbench.training.consistency import watch
    from workbench.training.consistency.check import Checker
    from workbench.training.consistency.reports import Reports

    torch.set_num_threads(1)
    facts: list[dict[str, Any]] = []
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    guard.install()
    told = Reports(lambda event, **fields: facts.append({"event": event, **fields}), lambda **fields: None)
    checker = Checker(told, lambda: steps, every=every)
    watch.install(watch.Watch(checker))
    register_optimizer_step_post_hook(count)
    dist.init_process_group("gloo")
    CASES[name]()
    dist.destroy_process_group()
    assert not checker.off, checker.off
    return [fact for fact in facts if fact["event"] != "ConsistencyPaced"]


def dataset(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(samples, 8, generator=generator), torch.randint(0, 4, (samples,), generator=generator)
    )


def batches(
    loader: Iterable[Batch], epochs: int, begin: Callable[[int], object] = lambda epoch: None
) -> Iterator[Batch]:
    for epoch in range(epochs):
        begin(epoch)
        yield from loader


def fit(data: Iterable[Batch], *, dropout: float = 0.0, evaluate: Callable[[nn.Module], object] = id) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))
    wrapped = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        evaluate(wrapped)


def sampled(**options: Any) -> tuple[DataLoader[Any], DistributedSampler[Any]]:
    data = dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(data, **options)
    return DataLoader(data, batch_size=4, sampler=sampler), sampler


# --- as it should be --------------------------------------------------------------------------------------------------


@case
def clean() -> None:
    loader, sampler = sampled(shuffle=True)
    fit(batches(loader, EPOCHS, sampler.set_epoch))


@case
def clean_without_shuffling() -> None:
    """The same order each epoch, as asked."""
    fit(batches(sampled(shuffle=False)[0], EPOCHS))


@case
def clean_constant_data() -> None:
    """A benchmark: one made-up batch for all ranks and steps."""
    x, y = dataset(8).tensors
    fit((x, y) for _ in range(12))


@case
def clean_zeros() -> None:
    fit((torch.zeros(8, 8), torch.zeros(8, dtype=torch.long)) for _ in range(12))


@case
def clean_own_seeds() -> None:
    """Dropout under a seed of its own, set once the model is there."""

    def data() -> Iterator[Batch]:
        torch.manual_seed(100 + dist.get_rank())
        loader, sampler = sampled(shuffle=True)
        yield from batches(loader, EPOCHS, sampler.set_epoch)

    fit(data(), dropout=0.5)


@case
def clean_evaluation() -> None:
    """All ranks evaluate on the same data, between epochs and within."""
    loader, sampler = sampled(shuffle=True)
    test = DataLoader(dataset(16), batch_size=8)

    def evaluate(model: nn.Module) -> None:
        model.eval()
        with torch.no_grad():
            for x, _ in test:
                model(x)
        model.train()

    fit(batches(loader, EPOCHS, sampler.set_epoch), evaluate=evaluate)


@case
def clean_last_batch() -> None:
    """The last batch of an epoch is smaller, on all ranks."""
    data = dataset(52)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    fit(batches(DataLoader(data, batch_size=8, sampler=sampler), EPOCHS, sampler.set_epoch))


@case
def clean_workers() -> None:
    data = dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    generator = torch.Generator().manual_seed(dist.get_rank())
    loader = DataLoader(
        data, batch_size=4, sampler=sampler, num_workers=1, persistent_workers=True, generator=generator
    )
    fit(batches(loader, EPOCHS, sampler.set_epoch))


# --- as it should not be ----------------------------------------------------------------------------------------------


@case
def every_rank_reads_the_same_shard() -> None:
    fit(batches(DataLoader(dataset(), batch_size=8), EPOCHS))


@case
def the_same_made_up_batches() -> None:
    def data() -> Iterator[Batch]:
        for step in range(12):
            generator = torch.Generator().manual_seed(step)
            yield torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)

    fit(data())


@case
def every_sampler_deals_for_rank_0() -> None:
    fit(batches(sampled(num_replicas=dist.get_world_size(), rank=0)[0], EPOCHS))


@case
def split_for_twice_as_many() -> None:
    loader, sampler = sampled(num_replicas=2 * dist.get_world_size(), rank=dist.get_rank())
    fit(batches(loader, EPOCHS, sampler.set_epoch))


@case
def set_epoch_forgotten() -> None:
    fit(batches(sampled(shuffle=True)[0], EPOCHS))


@case
def set_epoch_forgotten_with_workers() -> None:
    data = dataset()
    generator = torch.Generator().manual_seed(dist.get_rank())
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1, generator=generator)
    fit(batches(loader, EPOCHS))


@case
def set_epoch_differs() -> None:
    loader, sampler = sampled(shuffle=True)
    fit(batches(loader, EPOCHS, lambda epoch: sampler.set_epoch(epoch + (dist.get_rank() == 1))))


@case
def each_rank_reads_all_in_its_own_order() -> None:
    data = dataset()
    generator = torch.Generator().manual_seed(dist.get_rank())
    fit(batches(DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=generator)), EPOCHS))


class Half(Sampler[int]):
    """Starts at its rank's place, and goes on into the next rank's."""

    def __init__(self, rank: int, size: int) -> None:
        self.start, self.size = rank * size // 2, size

    def __iter__(self) -> Iterator[int]:
        return iter([(self.start + n) % SAMPLES for n in torch.randperm(self.size).tolist()])

    def __len__(self) -> int:
        return self.size


@case
def shards_overlap() -> None:
    def data() -> Iterator[Batch]:
        torch.manual_seed(10 + dist.get_rank())
        yield from batches(DataLoader(dataset(), batch_size=4, sampler=Half(dist.get_rank(), 40)), EPOCHS)

    fit(data())


@case
def uneven_batches() -> None:
    def data() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        size = 4 if dist.get_rank() == 1 else 12
        for _ in range(12):
            yield torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)

    fit(data())


@case
def the_same_random_numbers() -> None:
    loader, sampler = sampled(shuffle=True)
    fit(batches(loader, EPOCHS, sampler.set_epoch), dropout=0.5)


@case
def workers_with_the_same_seed() -> None:
    data = dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1, generator=generator)
    fit(batches(loader, EPOCHS, sampler.set_epoch))


@case
def a_shard_of_one_rank_is_anothers() -> None:
    """Subsets cut by a wrong number: ranks 0 and 1 have the same."""
    data, world = dataset(), dist.get_world_size()
    part = max(0, dist.get_rank() - 1)
    size = SAMPLES // world
    subset: Subset[Any] = Subset(data, range(part * size, (part + 1) * size))
    fit(batches(DataLoader(subset, batch_size=4), EPOCHS))

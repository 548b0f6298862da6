"""Many process groups in one process, on real gloo: what deadlocks in torch 2.13 unless guarded."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import training_ranks
from tests.integration.training_ranks import run_in_ranks

JOBS = 20


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    yield
    training_ranks.end_forkserver()


def one_job(number: int) -> object:
    """What nearly every example does: destroy, then return, so that the DDP object goes last."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    return model


def count(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def guarded_jobs(rank: int) -> list[tuple[int, int, int]]:
    """Descriptors, threads and retired groups after each job."""
    from workbench.training import guard

    watch = guard.install()
    counts = []
    for number in range(JOBS):
        one_job(number)
        counts.append((count("/proc/self/fd"), count("/proc/self/task"), len(watch.retired)))
    return counts


def unguarded_jobs(rank: int) -> bool:
    """With keys of its own for each group, so that the deadlock is all that is wrong."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    plain = dist.init_process_group
    for number in range(JOBS):
        prefix = dist.PrefixStore(str(number), store)
        dist.init_process_group = lambda *a, prefix=prefix: plain("gloo", store=prefix, rank=rank, world_size=2)
        one_job(number)
    return True


def jobs_whose_models_live_on(rank: int) -> int:
    from workbench.training import guard

    watch = guard.install()
    models = [one_job(number) for number in range(6)]
    held = len(watch.retired)
    del models
    gc.collect()
    watch.release(collect=False)
    return held * 100 + len(watch.retired)


def ends_with_a_model_alive(rank: int) -> bool:
    from workbench.training import guard

    guard.install()
    globals()["kept"] = one_job(0)
    return True


@pytest.mark.parametrize("repetition", range(3))
def test_twenty_jobs_in_a_row(repetition: int) -> None:
    for counts in run_in_ranks(guarded_jobs):
        descriptors, threads, retired = zip(*counts, strict=True)
        assert max(descriptors[10:]) <= max(descriptors[:10])
        assert max(threads[10:]) <= max(threads[:10])
        assert max(retired) <= 5


def test_without_the_guard_they_hang() -> None:
    try:
        run_in_ranks(unguarded_jobs, timeout=6.0)
    except TimeoutError:
        return
    pytest.skip("this torch did not deadlock; the guard may have become needless")


def test_groups_are_kept_while_a_model_refers_to_them() -> None:
    assert run_in_ranks(jobs_whose_models_live_on) == [600, 600]


def test_a_process_ends_with_a_model_alive_after_its_group() -> None:
    assert run_in_ranks(ends_with_a_model_alive) == [True, True]  # which also waits for the processes

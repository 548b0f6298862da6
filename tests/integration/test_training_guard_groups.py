"""Groups of all kinds made again and again in one rank, and ranks that end with a model alive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import training_ranks
from tests.integration.training_ranks import Rank, ranks

TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group('gloo'{how})
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8){options})
for _ in range(2): model(torch.randn(4, 8)).sum().backward()
"""


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    yield
    training_ranks.end_forkserver()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Rank]]:
    with ranks(tmp_path, 2) as made:
        yield made


def both(pair: list[Rank], source: str) -> None:
    for each in pair:
        each.begin(source)
    answers = [each.answer() for each in pair]
    assert [answer["ok"] for answer in answers] == [True, True], answers


BY_ADDRESS = (
    """, init_method='tcp://127.0.0.1:' + os.environ['MASTER_PORT'], rank=int(os.environ['RANK']), world_size=2"""
)


def test_by_environment_and_by_address_in_turn(pair: list[Rank]) -> None:
    """As under torchrun, an address must be the job's: a rank keeps no store where an agent does."""
    both(pair, "import os")
    for how in ("", BY_ADDRESS, BY_ADDRESS, "", BY_ADDRESS):
        both(pair, TRAIN.format(how=how, options="") + "dist.destroy_process_group()")


def test_a_subgroup_that_a_model_uses(pair: list[Rank]) -> None:
    for _ in range(5):
        both(
            pair,
            "import torch.distributed as dist\nif dist.is_initialized(): dist.destroy_process_group()"
            + TRAIN.format(how="", options=", process_group=dist.new_group([0, 1])")
            + "dist.destroy_process_group(model.process_group)",
        )
        both(pair, "t = torch.ones(1); dist.all_reduce(t); assert t.item() == 2; dist.destroy_process_group()")


@pytest.mark.parametrize("end", ["dist.destroy_process_group()", "pass"])
def test_a_rank_ends_well_with_a_model_alive(tmp_path: Path, end: str) -> None:
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        with ranks(folder, 2) as pair:
            both(pair, TRAIN.format(how="", options="") + end)
            for each in pair:
                each.control.close()
            for each in pair:
                each.process.join(10)
            assert [each.process.exitcode for each in pair] == [0, 0]


def test_descriptors_and_threads_do_not_grow_once_models_die(pair: list[Rank]) -> None:
    counts = []
    for _ in range(12):
        both(pair, TRAIN.format(how="", options="") + "dist.destroy_process_group()\ndel model")
        pid = pair[0].process.pid
        counts.append((len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))))  # noqa: PTH208
    descriptors, threads = zip(*counts, strict=True)
    assert max(descriptors[6:]) <= max(descriptors[:6]) and max(threads[6:]) <= max(threads[:6]), counts

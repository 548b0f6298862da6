"""Two gloo ranks: who waits for whom, and what a rank says while it hangs in a collective."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.integration import training_ranks
from tests.integration.training_ranks import Rank
from workbench.blackbox import Activity, StepRecord, iter_steps, read_header, read_steps

INIT = "import time, torch, torch.distributed as dist; dist.init_process_group('gloo'); rank = dist.get_rank()"
SLEEP = 0.03  # s; well above what a busy machine adds to a step


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    yield
    training_ranks.end_forkserver()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Rank]]:
    with training_ranks.ranks(tmp_path, 2) as made:
        yield made


def both(pair: list[Rank], source: str) -> None:
    for each in pair:
        each.begin(source)
    answers = [each.answer() for each in pair]
    assert [answer["ok"] for answer in answers] == [True, True], answers


def steps(rank: Rank) -> list[StepRecord]:
    return list(iter_steps(read_steps(rank.box, 0)[0]))


def share(records: list[StepRecord], phase: str) -> float:
    whole: float = sum(record.duration for record in records)
    return float(sum(getattr(record, phase) for record in records)) / whole


TRAIN = """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for (x,) in DataLoader(TensorDataset(torch.randn(8 * 80, 64)), batch_size=8):
    if rank == 1:
        time.sleep({sleep})
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
"""


def test_the_fast_rank_waits_in_communication_for_the_slow_one(pair: list[Rank]) -> None:
    both(pair, INIT)
    both(pair, TRAIN.format(sleep=SLEEP))
    fast, slow = (steps(each)[30:] for each in pair)  # DDP's own timers are looked at now and then
    assert len(fast) == len(slow) == 50 and {record.samples for record in fast} == {8}
    waits = [median(record.comm for record in records) for records in (fast, slow)]
    assert waits[0] - waits[1] > SLEEP / 2, waits
    for record in fast + slow:
        assert sum(record[3:9]) <= record.duration * 1.001 and min(record[3:9]) >= 0
    for seen in (read_header(each.box) for each in pair):
        assert seen.learning_rate == 0.01
        assert seen.hidden is not None and 0 <= seen.hidden <= 1
        ((calls, size),) = [(calls, size) for name, calls, size in seen.traffic if name == "all_reduce (DDP)"]
        assert calls > 30 and size == calls * (64 * 64 + 64) * 4, "a bucket a step, of all gradients"


def test_gradients_reduced_by_hand_show_as_communication(pair: list[Rank]) -> None:
    both(pair, INIT)
    source = """
        from torch.distributed import all_reduce
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(10):
            if rank == 1: time.sleep(0.03)
            model(torch.ones(2, 4)).sum().backward()
            for parameter in model.parameters(): all_reduce(parameter.grad)
            optimizer.step()
    """
    both(pair, "if True:\n" + source)
    fast, slow = (steps(each)[1:] for each in pair)
    assert all(record.comm >= 0.8 * SLEEP for record in fast)
    assert share(slow, "comm") < 0.5
    seen = read_header(pair[0].box)
    assert ("all_reduce", 20, 10 * (4 + 1) * 4) in seen.traffic and seen.hidden is None
    assert read_header(pair[0].box).collective_seq == read_header(pair[1].box).collective_seq >= 21


def test_a_hung_collective_is_named_and_numbered(pair: list[Rank]) -> None:
    both(pair, INIT)
    before = read_header(pair[0].box).collective_seq
    both(pair, "dist.barrier(); from torch.distributed import all_reduce")
    pair[0].begin("all_reduce(torch.ones(1024))")
    began = time.time()
    seen = pair[0].until(Activity.COLLECTIVE, "all_reduce")
    assert seen.collective == "all_reduce[1024 float32]" and seen.collective_seq == before + 2
    time.sleep(0.05)
    assert read_header(pair[0].box).since <= began + 0.5 and read_header(pair[0].box).activity is Activity.COLLECTIVE
    pair[1].run("all_reduce(torch.ones(1024))")
    assert pair[0].answer()["ok"]
    pair[0].until(Activity.IDLE)


def test_an_asynchronous_call_is_seen_where_it_is_waited_for(pair: list[Rank]) -> None:
    both(pair, INIT)
    assert pair[0].run("work = dist.all_reduce(torch.ones(3), async_op=True)")["ok"]
    pair[0].begin("work.wait()")
    seen = pair[0].until(Activity.COLLECTIVE)
    assert seen.collective == "all_reduce[3 float32]"
    assert pair[1].run("dist.all_reduce(torch.ones(3))")["ok"] and pair[0].answer()["ok"]


def test_subgroups_and_point_to_point_do_not_count_in_the_sequence(pair: list[Rank]) -> None:
    both(pair, f"{INIT}\nalone = [dist.new_group([0]), dist.new_group([1])][rank]")
    before = [read_header(each.box).collective_seq for each in pair]
    both(pair, "dist.all_reduce(torch.ones(1), group=alone)\nif rank: dist.all_reduce(torch.ones(1), group=alone)")
    both(pair, "dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(2), 0)")
    assert [read_header(each.box).collective_seq for each in pair] == [0, 0], (
        "no number by which they could be compared"
    )
    assert read_header(pair[1].box).collective == "recv[2 float32]"
    both(pair, "dist.all_reduce(torch.ones(1))")
    assert [read_header(each.box).collective_seq for each in pair] == [number + 1 for number in before]

"""Cells in real ranks: values, errors, interrupts in Python and inside gloo, groups again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from tests.integration import training_ranks
from tests.integration.training_ranks import Rank
from workbench.blackbox import Activity, read_header, read_steps

INIT = "import torch, torch.distributed as dist; dist.init_process_group('gloo')"


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    yield
    training_ranks.end_forkserver()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with training_ranks.ranks(tmp_path, 1) as made:
        yield made[0]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Rank]]:
    with training_ranks.ranks(tmp_path, 2) as made:
        yield made


def both(pair: list[Rank], source: str) -> list[dict[str, object]]:
    for each in pair:
        each.begin(source)
    return [each.answer() for each in pair]


def test_values_state_and_quiet_cells(rank: Rank) -> None:
    assert rank.run("x = 20\nx + 1")["data"] == {"text/plain": "21"}
    assert rank.run("_ * 2")["data"] == {"text/plain": "42"}
    assert rank.run("x;  # quiet")["data"] == {}
    assert rank.run("import asyncio\nawait asyncio.sleep(0, 'slept')")["data"] == {"text/plain": "'slept'"}
    assert rank.run("None")["data"] == {}
    rich = rank.run("class R:\n    def _repr_html_(self): return '<b>r</b>'\n    def __repr__(self): return 'r'\nR()")
    assert rich["data"] == {"text/plain": "r", "text/html": "<b>r</b>"}
    assert rank.run("import inspect\ndef f():\n    return 1  # found\ninspect.getsource(f)")["data"][
        "text/plain"
    ].count("found")


def test_errors_name_the_cells_lines_and_end_nothing(rank: Rank) -> None:
    answer = rank.run("def broken():\n    raise ValueError('bad batch')\nbroken()")
    assert not answer["ok"] and answer["error"] == "ValueError: bad batch"
    assert "<cell 1>" in answer["traceback"] and "raise ValueError('bad batch')" in answer["traceback"]
    assert "workbench" not in answer["traceback"]
    assert rank.run("import sys; sys.exit(3)")["error"] == "SystemExit: 3"
    syntax = rank.run("%time x = 1")
    assert syntax["error"].startswith("SyntaxError") and "magics" in syntax["traceback"]
    assert rank.run("1")["ok"]


def test_push_and_pull(rank: Rank) -> None:
    rank.ask({"op": "push", "name": "f"}, cloudpickle.dumps(lambda n: n + 1))
    assert rank.answer()["ok"]
    rank.ask({"op": "pull", "name": "f(41)"})
    header, payload = rank.answer_with_payload()
    assert header["ok"] and cloudpickle.loads(payload) == 42
    rank.ask({"op": "pull", "name": "(n for n in 'ab')"})
    refused = rank.answer()
    assert not refused["ok"] and "cannot be sent" in refused["error"]
    rank.ask({"op": "push", "name": "not a name"}, cloudpickle.dumps(1))
    assert "not a name" in rank.answer()["error"]


def test_cells_wait_their_turn_and_the_box_tells_idle_from_busy(rank: Rank) -> None:
    rank.until(Activity.IDLE)
    rank.begin("import time; time.sleep(0.5); order = ['first']")
    rank.begin("order.append('second'); order")
    rank.until(Activity.CELL)
    assert rank.answer()["cell_id"] == "cell-1"
    assert rank.answer()["data"]["text/plain"] == "['first', 'second']"
    rank.until(Activity.IDLE)


def test_interrupt_in_python_and_when_idle(rank: Rank) -> None:
    rank.until(Activity.IDLE)
    rank.interrupt()
    assert rank.run("kept = 7")["ok"]
    rank.begin("import time\nfor _ in range(1000): time.sleep(0.05)")
    rank.until(Activity.CELL)
    start = time.monotonic()
    rank.interrupt()
    answer = rank.answer()
    assert answer["error"] == "KeyboardInterrupt" and time.monotonic() - start < 1.0
    assert rank.run("kept")["data"]["text/plain"] == "7"


def test_threads_of_the_user_go_on_between_cells(rank: Rank) -> None:
    rank.run(
        "import threading, time\nbeats = []\ndef beat():\n    while len(beats) < 50: beats.append(1); time.sleep(0.002)"
    )
    rank.run("t = threading.Thread(target=beat); t.start()")
    assert rank.run("t.join(); len(beats)")["data"]["text/plain"] == "50"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("dist.all_reduce(torch.ones(8))", "all_reduce"),
        ("dist.barrier()", "barrier"),
        ("dist.recv(torch.ones(2), 1)", "recv"),
        ("ddp(torch.ones(1, 2)).sum().backward()", "backward()"),
    ],
)
def test_interrupt_inside_a_collective(pair: list[Rank], source: str, name: str) -> None:
    assert [a["ok"] for a in both(pair, INIT)] == [True, True]
    build = "ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)); kept = 7"
    assert [a["ok"] for a in both(pair, build)] == [True, True]
    pair[0].begin(source)
    pair[0].until(Activity.BACKWARD if "backward" in name else Activity.COLLECTIVE)
    time.sleep(0.1)
    start = time.monotonic()
    pair[0].interrupt()
    answer = pair[0].answer()
    took = time.monotonic() - start
    assert answer["error"] == "KeyboardInterrupt", answer
    assert took < 2.0
    told = pair[0].run("import sys, io; sys.stderr = io.StringIO(); kept")
    assert told["data"]["text/plain"] == "7"
    assert pair[1].run("kept")["data"]["text/plain"] == "7"
    assert [a["ok"] for a in both(pair, "dist.destroy_process_group()")] == [True, True]
    again = both(pair, f"{INIT}; t = torch.ones(3); dist.all_reduce(t); t.tolist()")
    assert [a["data"] for a in again] == [{"text/plain": "[2.0, 2.0, 2.0]"}] * 2


def test_the_broken_group_is_told_of_once(pair: list[Rank]) -> None:
    both(pair, INIT)
    pair[0].run("import io, sys; sys.stderr = said = io.StringIO()")
    pair[0].begin("dist.all_reduce(torch.ones(1))")
    pair[0].until(Activity.COLLECTIVE, "all_reduce")
    time.sleep(0.1)  # it is inside gloo: on the way there an interrupt breaks no group
    pair[0].interrupt()
    pair[0].answer()
    pair[0].run("1")
    first = str(pair[0].run("said.getvalue()")["data"])
    assert first.count("interrupted inside all_reduce; destroy_process_group()") == 1


def test_interrupt_while_a_rank_waits_for_its_peer_in_init(pair: list[Rank]) -> None:
    for _ in range(2):
        pair[0].begin(INIT)
        pair[0].until(Activity.COLLECTIVE, "init_process_group")
        time.sleep(0.2)
        start = time.monotonic()
        pair[0].interrupt()
        assert pair[0].answer()["error"] == "KeyboardInterrupt"
        assert time.monotonic() - start < 2.0
    again = both(pair, f"{INIT}; t = torch.ones(3); dist.all_reduce(t); t.tolist()")
    assert [a.get("data") for a in again] == [{"text/plain": "[2.0, 2.0, 2.0]"}] * 2, again


TRAIN = """
import os, threading, torch, torch.distributed as dist
dist.init_process_group('gloo')
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad(); model(torch.randn(4, 8)).sum().backward(); optimizer.step()
dist.destroy_process_group()
len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task'))
"""


@pytest.mark.timeout(60)
def test_twenty_cells_that_destroy_the_group_while_ddp_lives(pair: list[Rank]) -> None:
    counts = []
    for _ in range(20):
        answers = both(pair, TRAIN)
        assert [a["ok"] for a in answers] == [True, True], answers
        counts.append([eval(str(a["data"]["text/plain"])) for a in answers])  # type: ignore[index]
    assert read_header(pair[0].box).step == 60
    assert len(read_steps(pair[0].box, 0)[0]) > 0
    fds, threads = zip(*(pair0 for pair0, _ in counts), strict=True)
    assert max(fds[10:]) <= max(fds[:10]) and max(threads[10:]) <= max(threads[:10]), (fds, threads)

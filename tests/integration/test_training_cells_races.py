"""What can go wrong between an interrupt and a cell, and what a cell's functions must be able to do."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import training_ranks
from tests.integration.training_ranks import Rank
from workbench.blackbox import Activity


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    yield
    training_ranks.end_forkserver()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with training_ranks.ranks(tmp_path, 1) as made:
        yield made[0]


def test_every_cell_is_answered_whenever_an_interrupt_comes(rank: Rank) -> None:
    """Before, within, at the end of, and after the cell; the rank lives, the next cell is whole."""
    rank.run("kept = 7")
    dice = random.Random(0)
    outcomes = set()
    for _ in range(100):
        cell_id = rank.begin("sum(range(5000))")
        time.sleep(dice.random() * 0.002)
        rank.interrupt()
        answer = rank.answer()
        assert answer["cell_id"] == cell_id
        assert answer["ok"] or answer["error"] == "KeyboardInterrupt", answer
        outcomes.add(answer["ok"])
    rank.until(Activity.IDLE)
    time.sleep(0.1)  # the last signal is delivered
    assert [rank.run("kept")["data"] for _ in range(20)] == [{"text/plain": "7"}] * 20
    assert True in outcomes


def test_an_interrupt_right_behind_a_cell_ends_it(rank: Rank) -> None:
    """It may be heard before the cell has begun; lost, the cell would run on."""
    rank.run("import time")
    for _ in range(30):
        rank.begin("time.sleep(20)")
        rank.interrupt()
        assert rank.answer(3.0)["error"] == "KeyboardInterrupt"
    rank.until(Activity.IDLE)
    time.sleep(0.1)
    assert rank.run("1")["ok"]


def test_idle_interrupts_cost_the_next_cell_nothing(rank: Rank) -> None:
    rank.until(Activity.IDLE)
    for _ in range(100):
        rank.interrupt()
    time.sleep(0.1)
    assert rank.run("1")["ok"]


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(30)",
        "while True: pass",
        "import asyncio\nawait asyncio.sleep(30)",
        "import threading\nthreading.Event().wait(30)",
        "import subprocess\nsubprocess.run(['sleep', '30'])",
        "import os\nos.read(os.pipe()[0], 1)",
    ],
)
def test_interrupt_ends_whatever_python_waits_for(rank: Rank, source: str) -> None:
    rank.begin(source)
    rank.until(Activity.CELL)
    time.sleep(0.1)
    start = time.monotonic()
    rank.interrupt()
    answer = rank.answer(5.0)
    assert answer["error"] == "KeyboardInterrupt", answer
    assert time.monotonic() - start < 2.0
    assert rank.run("await asyncio.sleep(0, 3)" if "asyncio" in source else "3")["data"] == {"text/plain": "3"}


def test_a_cell_that_swallows_an_interrupt_goes_on(rank: Rank) -> None:
    rank.begin("import time\ntry:\n    time.sleep(30)\nexcept KeyboardInterrupt:\n    x = 'caught'\nx")
    rank.until(Activity.CELL)
    time.sleep(0.05)
    rank.interrupt()
    assert rank.answer()["data"] == {"text/plain": "'caught'"}


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_cells_dataset_works_in_loader_workers(rank: Rank, context: str) -> None:
    rank.run(
        "import torch\n"
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return i * i\n"
        "def collate(items): return sum(items)"
    )
    options = f"batch_size=4, num_workers=2, collate_fn=collate, multiprocessing_context='{context}'"
    answer = rank.run(f"list(torch.utils.data.DataLoader(Squares(), {options}))")
    if context == "fork":
        assert answer["data"] == {"text/plain": "[14, 126]"}, answer
    else:  # as in a notebook: a spawned worker cannot import what a cell defined; said, not hung
        assert not answer["ok"] and rank.run("1")["ok"]


def test_functions_are_of_main_and_can_be_pickled(rank: Rank) -> None:
    rank.run("import pickle\ndef f(n): return n + 1")
    assert rank.run("f.__module__, pickle.loads(pickle.dumps(f))(41)")["data"] == {"text/plain": "('__main__', 42)"}


def test_a_huge_value_is_cut(rank: Rank) -> None:
    text = rank.run("'x' * 5_000_000")["data"]["text/plain"]
    assert len(text) <= 2**20 and text.endswith("characters left out")


def test_exits_of_all_kinds_leave_the_rank_alive(rank: Rank) -> None:
    for source in ("exit(2)", "raise SystemExit", "import sys; sys.exit('bye')", "raise GeneratorExit"):
        assert not rank.run(source)["ok"]
    assert rank.run("1")["ok"]


def test_an_unknown_request_and_a_broken_payload_are_answered(rank: Rank) -> None:
    rank.ask({"op": "dance"})
    assert "dance" in rank.answer()["error"]
    rank.ask({"op": "push", "name": "x"}, b"no pickle")
    assert not rank.answer()["ok"]
    rank.ask({"op": "pull", "name": "missing"})
    assert rank.answer()["error"] == "NameError: name 'missing' is not defined"
    rank.ask({"op": "pull", "name": "1 +"})
    assert "SyntaxError" in rank.answer()["error"]


def test_streams_that_the_user_replaced_or_closed(rank: Rank) -> None:
    assert rank.run("import sys, io\nsys.stdout = io.StringIO()\nprint('kept')\nsys.stdout.getvalue()")["ok"]
    assert rank.run("sys.stdout.close(); sys.stdout = None")["ok"]
    assert rank.run("1")["ok"]

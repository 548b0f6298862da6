"""torch.compile makes of watched code the graphs that it makes of any; each time in a process of its own, on gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration import training_ranks
from tests.integration.training_ranks import run_in_ranks


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    yield
    training_ranks.end_forkserver()


def graphs(rank: int) -> dict[str, list[int]]:
    """Nodes of each graph that Dynamo hands over, by program."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    x = torch.randn(8, 4)

    def make_step() -> Callable[[], Any]:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> Any:
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            return loss

        return step

    def make_optimizer_step() -> Callable[[], Any]:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(x).sum().backward()
        return optimizer.step

    def make_model(wrap: Callable[[Any], Any]) -> Callable[[], Any]:
        model = wrap(torch.nn.Linear(4, 4))
        return lambda: model(x) * 2

    def reduce() -> Any:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    def gather() -> Any:
        out = torch.empty(8, 4)
        dist.all_gather_into_tensor(out, x * 2)
        return out + 1

    def broadcast() -> Any:
        y = x * 2
        dist.broadcast(y, 0)
        return y + 1

    programs = {
        "step": make_step(),
        "optimizer": make_optimizer_step(),
        "model": make_model(lambda model: model),
        "ddp": make_model(DistributedDataParallel),
        "all_reduce": reduce,
        "all_gather": gather,
        "broadcast": broadcast,
    }
    return {name: _count(program) for name, program in programs.items()}


def _count(program: Callable[[], Any]) -> list[int]:
    import torch

    found: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        found.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend)
    for _ in range(2):
        compiled()
    return found


def watched_graphs(rank: int) -> tuple[dict[str, list[int]], int]:
    """And how many steps were seen; a compiled one is with the next probe, or at the end."""
    from workbench import blackbox
    from workbench.training import guard, observe

    buffer = bytearray(blackbox.SIZE)
    blackbox.format_box(buffer)
    guard.install()
    observer = observe.install(blackbox.Writer(buffer), offset=0.0)
    found = graphs(rank)
    observer.uninstall()
    return found, blackbox.read_header(buffer).step


def test_the_graphs_are_the_same() -> None:
    plain = run_in_ranks(graphs, world_size=1)[0]
    watched, steps = run_in_ranks(watched_graphs, world_size=1)[0]
    assert watched == plain
    assert plain["all_reduce"] and len(plain["all_reduce"]) == 1
    assert steps == 2  # the first of `step`; the others, between which no probe lies, as one

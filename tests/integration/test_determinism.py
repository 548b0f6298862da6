"""Deterministic jobs: the same bits again, in fresh processes and after a resume; and what differs without the mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.agent_host import AgentHost, agent_host

# Dropout, Adam, two buckets. "resumed": the model is made anew in the middle, as a restart does. Random numbers are
# taken from the rank's own generator where the job has seeded it.
TRAIN = """
import hashlib, io, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def make():
    layers = nn.Linear(300, 777), nn.ReLU(), nn.Dropout(0.3), nn.Linear(777, 501), nn.ReLU(), nn.Linear(501, 10)
    return nn.Sequential(*layers)

def wrap(model):
    ddp = DistributedDataParallel(model)
    return ddp, torch.optim.Adam(ddp.parameters(), 1e-3)

dist.init_process_group("gloo")
model = make()
ddp, optimizer = wrap(model)
for step in range(6):
    if step == 3 and "resumed" in sys.argv:
        kept = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()), kept)
        kept.seek(0)
        weights, state, random = torch.load(kept)
        model = make()
        model.load_state_dict(weights)
        ddp, optimizer = wrap(model)
        optimizer.load_state_dict(state)
        torch.set_rng_state(random)
    loss = ddp(torch.randn(8, 300)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(digest.hexdigest())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentHost]:
    with agent_host(tmp_path_factory.mktemp("determinism")) as found:
        yield found


pytestmark = pytest.mark.timeout(180)  # several jobs each, of up to 4 ranks, from a zygote that is still to come


def output(host: AgentHost, text: str, ranks: int = 1, **fields: Any) -> str:
    """What a script that ends well writes on rank 0, however busy the machine is."""
    job = host.run(host.spec(text, **fields), ranks, timeout=120.0)
    assert [exit.exit_code for exit in host.ended(job, ranks)] == [0] * ranks, host.log(job)
    return host.log(job)


def trained(host: AgentHost, ranks: int, **fields: Any) -> str:
    return output(host, TRAIN, ranks, **fields)


@pytest.mark.parametrize("ranks", [2, 4])
def test_two_runs_and_a_resumed_one_give_the_same_bits(host: AgentHost, ranks: int) -> None:
    first = trained(host, ranks, deterministic=True)
    assert trained(host, ranks, deterministic=True) == first
    assert trained(host, ranks, deterministic=True, args=("resumed",)) == first


def test_checked_all_reduces_keep_the_bits_and_exact_ones_are_the_same_after_a_resume(host: AgentHost) -> None:
    plain = trained(host, 4, deterministic=True)
    assert trained(host, 4, deterministic=True, check_reduce=True, bitwise=True) == plain
    exact = trained(host, 4, deterministic=True, exact_reduce=64)
    assert trained(host, 4, deterministic=True, exact_reduce=64, args=("resumed",)) == exact


def test_without_the_mode_runs_differ_unless_seeded(host: AgentHost) -> None:
    assert trained(host, 2) != trained(host, 2)
    assert trained(host, 2, seed=1) == trained(host, 2, seed=1)


def test_without_the_mode_a_seeded_run_of_four_ranks_differs_once_resumed(host: AgentHost) -> None:
    """DDP's first step has another bucket layout than the rest."""
    plain = trained(host, 4, seed=1)
    assert trained(host, 4, seed=1) == plain
    assert trained(host, 4, seed=1, args=("resumed",)) != plain


@pytest.mark.parametrize(
    ("option", "layout"),
    [
        ("static_graph", "1579192, 935508"),
        ("gradient_as_bucket_view", "1579192, 935508"),
        ("find_unused_parameters", "22084, 2492616"),  # DDP's own, which it keeps
    ],
)
def test_every_kind_of_ddp_trains_with_a_fixed_layout(host: AgentHost, option: str, layout: str) -> None:
    text = TRAIN.replace("DistributedDataParallel(model)", f"DistributedDataParallel(model, {option}=True)")
    name = "bucket_sizes" if option == "find_unused_parameters" else "rebuilt_bucket_sizes"
    text = text.replace("dist.destroy", f"print(ddp._get_ddp_logging_data()[{name!r}])\ndist.destroy")
    digest, sizes = output(host, text, 2, deterministic=True).splitlines()[-2:]
    assert sizes == layout
    assert output(host, text, 2, deterministic=True).splitlines()[-2:] == [digest, sizes]


def test_strings_hash_alike_in_warm_and_in_fresh_ranks(host: AgentHost) -> None:
    text = "import os; print(hash('a'), os.environ['PYTHONHASHSEED'], os.environ['OMP_NUM_THREADS'])"
    warm = output(host, text, deterministic=True)
    assert warm.split()[1:] == ["0", "1"] and output(host, text, deterministic=True, cold=True) == warm
    assert output(host, text, deterministic=True, env={"PYTHONHASHSEED": "5"}) != warm


def test_what_is_out_of_reach_is_told_once_by_one_rank(host: AgentHost) -> None:
    text = """
    import torch
    from torch.utils.data import DataLoader
    for _ in range(2):
        list(DataLoader(list(range(8)), num_workers=1, in_order=False))
    """
    job = host.run(host.spec(text, deterministic=True, min_ranks=1), 2, timeout=120.0)
    told = [line.split(": ")[1:] for line in host.log(job).splitlines()]
    assert [line[0] for line in told] == ["not deterministic"] * 2
    assert "may go on with fewer ranks" in told[0][1] and "in_order=False" in told[1][1]
    assert host.log(job, 1) == ""

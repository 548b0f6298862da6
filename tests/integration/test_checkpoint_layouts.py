"""Checkpoints of several real ranks over gloo: saved together, read by any number of them and by torch's tools."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.integration.training_ranks import end_forkserver, run_in_ranks
from workbench.training import catalogue

Facts = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    yield
    end_forkserver()


def checkpointer(folder: Path, facts: Facts) -> Any:
    from workbench.training.checkpoint import Checkpointer
    from workbench.training.saving import Where
    from workbench.training.team import Team

    team = Team.current()
    assert team is not None
    return Checkpointer(Where(folder=folder), team, lambda event, **fields: facts.append((event, fields)))


def program(kind: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    match kind:
        case "ddp":
            model = DDP(model)
        case "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in (model[0], model[2], model):  # type: ignore[index]
                fully_shard(layer, mesh=mesh)
        case "compiled":
            model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def train(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(4, 8)).square().mean().backward()
        state["optimizer"].step()
        state["scheduler"].step()


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [whole(part) for part in value]
    if isinstance(value, torch.Tensor):
        full = value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[operator]
        return full.detach().clone()
    return value


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """All of it, whole, without wrappers' names; the same for every layout."""
    names = {
        name.removeprefix("module.").removeprefix("_orig_mod."): value
        for name, value in state["model"].state_dict().items()
    }
    optimizer = state["optimizer"].state_dict()
    return {"model": whole(names), "optimizer": whole(optimizer["state"]), "lr": optimizer["param_groups"][0]["lr"]}


def numbers(value: Any) -> Any:
    """As plain lists, to be sent and compared."""
    if isinstance(value, dict):
        return {key: numbers(part) for key, part in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def save(folder: Path, kind: str, steps: int, rank: int) -> Any:
    if dist_is_wanted():
        dist.init_process_group("gloo")
    facts: Facts = []
    keeper = checkpointer(folder, facts)
    state = program(kind, seed=1)
    torch.manual_seed(100 + rank)
    train(state, steps)
    assert keeper.save(state, steps, {"rank": rank})
    before = snapshot(state)
    assert keeper.finish(30)
    return numbers(before), facts


def load(folder: Path, kind: str, rank: int) -> Any:
    if dist_is_wanted():
        dist.init_process_group("gloo")
    facts: Facts = []
    keeper = checkpointer(folder, facts)
    state = program(kind, seed=2)
    loaded = keeper.load(state)
    result = numbers(snapshot(state)), loaded and (loaded.step, loaded.extras), facts
    train(state, 1)  # it can be gone on with
    return result


def dist_is_wanted() -> bool:
    return os.environ["WORLD_SIZE"] != "1"


KINDS = [("ddp", 2), ("plain", 1), ("fsdp", 2), ("ddp", 3), ("compiled", 1)]


@pytest.mark.parametrize("saver", KINDS[:4], ids=str)
def test_any_layout_and_number_of_ranks_reads_it(tmp_path: Path, saver: tuple[str, int]) -> None:
    kind, ranks = saver
    saved = run_in_ranks(functools.partial(save, tmp_path, kind, 3), ranks)
    state, facts = saved[0]
    assert [event for event, _ in facts] == ["CheckpointSaved"]
    assert facts[0][1]["checkpoint"]["world_size"] == ranks
    assert all(not told for _, told in saved[1:])
    for other, count in KINDS:
        found = run_in_ranks(functools.partial(load, tmp_path, other), count)
        for rank, (loaded, where, told) in enumerate(found):
            assert where == (3, [{"rank": k} for k in range(ranks)])
            assert loaded == state, (other, rank)
            assert [event for event, _ in told] == (["RunResumed"] if rank == 0 else [])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_work_is_shared_and_plain_dcp_reads_it(tmp_path: Path) -> None:
    (state, _), _ = run_in_ranks(functools.partial(save, tmp_path, "ddp", 2))
    newest = catalogue.newest(tmp_path)
    assert newest is not None and newest.manifest is not None
    sizes = [newest.manifest.files[f"__{rank}_0.distcp"].size for rank in (0, 1)]
    assert min(sizes) > max(sizes) / 4
    target = {"model": {name: torch.zeros_like(torch.tensor(value)) for name, value in state["model"].items()}}
    dcp.load(target, checkpoint_id=newest.path, no_dist=True)
    assert numbers(target["model"]) == state["model"]


# --- failures ---------------------------------------------------------------------------------------------------------


def fail_on_one(folder: Path, rank: int) -> Any:
    """Rank 1's disk is full for a while; later the ranks are at different steps."""
    from workbench.training import files

    dist.init_process_group("gloo")
    facts: Facts = []
    keeper = checkpointer(folder, facts)
    state = program("ddp", seed=1)
    train(state, 1)
    keeper.save(state, 1)
    plain = files._Summed.write

    def full(summed: Any, data: Any) -> int:
        summed._files.error = OSError(errno.ENOSPC, "No space left on device")
        raise summed._files.error

    if rank == 1:
        keeper.finish()
        files._Summed.write = full  # type: ignore[method-assign]
    keeper.save(state, 2, wait=True)
    keeper.finish()
    files._Summed.write = plain  # type: ignore[method-assign]
    keeper.save(state, 3 + rank, wait=True)
    keeper.save(state, 5, wait=True)
    keeper.finish()
    return facts


def test_what_fails_on_one_rank_fails_the_save_on_all_and_is_named(tmp_path: Path) -> None:
    told, silent = run_in_ranks(functools.partial(fail_on_one, tmp_path))
    assert silent == []
    assert [event for event, _ in told] == [
        "CheckpointSaved",
        "CheckpointFailed",
        "CheckpointFailed",
        "CheckpointSaved",
    ]
    full, apart = told[1][1], told[2][1]
    assert (full["step"], full["rank"]) == (2, 1) and full["reason"].startswith("disk full: ")
    assert "the ranks are at different steps: 3 and 4" in apart["reason"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000005"]


def refuse(folder: Path, rank: int) -> Any:
    dist.init_process_group("gloo")
    facts: Facts = []
    keeper = checkpointer(folder, facts)
    state = program("ddp", seed=1)
    for step in (1, 2):
        train(state, 1)
        keeper.save(state, step, wait=True)
    keeper.finish()
    dist.barrier()
    if rank == 0:
        weights = folder / "step-00000002" / "__1_0.distcp"
        data = bytearray(weights.read_bytes())
        data[len(data) // 2] ^= 16
        weights.write_bytes(data)
    dist.barrier()
    loaded = keeper.load(state)
    return loaded.step, [(event, fields) for event, fields in facts if event == "CheckpointRefused"]


def test_all_ranks_agree_on_the_one_that_is_whole(tmp_path: Path) -> None:
    (step, told), (other, _) = run_in_ranks(functools.partial(refuse, tmp_path))
    assert step == other == 1
    assert told[0][1]["checkpoint"]["problem"].startswith("__1_0.distcp is damaged")


class Own:
    """An object whose state differs by rank."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def own_state(folder: Path, alike: bool, rank: int) -> Any:
    dist.init_process_group("gloo")
    facts: Facts = []
    keeper = checkpointer(folder, facts)
    keeper.save({"own": Own(7 if alike else 10 + rank)}, 1)
    fresh = Own(0)
    keeper.load({"own": fresh})
    return fresh.value


@pytest.mark.parametrize(("alike", "values"), [(True, [7, 7]), (False, [10, 11])])
def test_objects_that_differ_by_rank_come_back_to_their_ranks(tmp_path: Path, alike: bool, values: list[int]) -> None:
    assert run_in_ranks(functools.partial(own_state, tmp_path, alike)) == values


def leave_at_once(folder: Path, rank: int) -> Any:
    from workbench.training import guard

    guard.install()
    dist.init_process_group("gloo")
    facts: Facts = []
    keeper = checkpointer(folder, facts)
    keeper.save(program("ddp", seed=1), 1)
    dist.destroy_process_group()
    return [event for event, _ in facts]


def test_a_group_is_not_destroyed_under_a_save(tmp_path: Path) -> None:
    told, _ = run_in_ranks(functools.partial(leave_at_once, tmp_path))
    assert told == ["CheckpointSaved"]


def limited(folder: Path, rank: int) -> Any:
    """No file may be larger than 100 kB for a while, by the kernel's own word."""
    import resource

    dist.init_process_group("gloo")
    facts: Facts = []
    keeper = checkpointer(folder, facts)
    state = {"model": DDP(nn.Linear(300, 300))}
    keeper.save(state, 1)
    keeper.finish()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    keeper.save(state, 2)
    keeper.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    keeper.save(state, 3)
    keeper.finish()
    return facts


def test_a_limit_on_the_size_of_files_costs_that_checkpoint_only(tmp_path: Path) -> None:
    told, _ = run_in_ranks(functools.partial(limited, tmp_path))
    assert [event for event, _ in told] == [f"Checkpoint{how}" for how in ("Saved", "Failed", "Saved")]
    assert told[1][1]["reason"].startswith("disk full: a file there may not be as large as this")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]

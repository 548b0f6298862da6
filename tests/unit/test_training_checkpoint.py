"""A state saved and gone back to in one process: exact, by names, safe to read, and never at training's cost."""

from __future__ import annotations

import errno
import importlib
import os
import pickle
import random
import sys
import threading
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from workbench.training import catalogue, files, manifest, saving
from workbench.training.checkpoint import Checkpointer
from workbench.training.saving import Where
from workbench.training.staging import Held
from workbench.training.states import UnfitError, plain_name
from workbench.training.team import Team

Facts = list[tuple[str, dict[str, Any]]]


class Rank:
    """A checkpointer alone, and what it has told."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.facts: Facts = []
        where = Where(folder=folder, **options)
        self.checkpointer = Checkpointer(where, Team(), self._tell)

    def _tell(self, event: str, **fields: Any) -> None:
        self.facts.append((event, fields))

    def save(self, state: Mapping[str, Any], step: int, extras: Any = None) -> Path:
        assert self.checkpointer.save(state, step, extras)
        assert self.checkpointer.finish(20)
        event, fields = self.facts[-1]
        assert event == "CheckpointSaved", fields
        return Path(fields["checkpoint"]["path"])

    def failure(self, state: Mapping[str, Any], step: int = 1, extras: Any = None) -> str:
        assert self.checkpointer.save(state, step, extras)
        assert self.checkpointer.finish(20)
        event, fields = self.facts[-1]
        assert event == "CheckpointFailed", fields
        return str(fields["reason"])


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path / "checkpoints")


def program(seed: int = 0, width: int = 6) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5], gamma=0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(8, 4)).square().mean().backward()
        state["optimizer"].step()
        state["scheduler"].step()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def states(state: dict[str, Any]) -> dict[str, Any]:
    return {key: thing.state_dict() for key, thing in state.items()}


def test_everything_comes_back_exactly(rank: Rank) -> None:
    state = program()
    train(state, 3)
    rank.save(state, 3, {"rng": torch.get_rng_state(), "epoch": 1})
    before = pickle.loads(pickle.dumps(states(state)))
    train(state, 4)
    fresh = program(seed=9)
    loaded = rank.checkpointer.load(fresh)
    assert loaded is not None and loaded.step == 3
    assert same(states(fresh), before)
    assert isinstance(fresh["scheduler"].milestones, Counter)
    (extras,) = loaded.extras
    assert extras["epoch"] == 1
    torch.set_rng_state(extras["rng"])
    train(fresh, 4)
    assert same(states(fresh), states(state))
    assert rank.facts[-1][0] == "RunResumed" and rank.facts[-1][1]["step"] == 3


def test_what_goes_on_meanwhile_is_not_in_it(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    state = program()
    train(state, 2)
    before = pickle.loads(pickle.dumps(states(state)))
    monkeypatch.setattr(saving.Save, "write", _late(saving.Save.write, lambda: train(state, 3)))
    rank.save(state, 2)
    fresh = program(seed=9)
    rank.checkpointer.load(fresh)
    assert same(states(fresh), before)


def _late(plain: Any, first: Any) -> Any:
    def write(save: Any) -> Any:
        first()
        return plain(save)

    return write


def test_plain_dcp_reads_it(rank: Rank) -> None:
    state = program()
    train(state, 2)
    path = rank.save(state, 2)
    target = {"model": {name: torch.zeros_like(value) for name, value in state["model"].state_dict().items()}}
    dcp.load(target, checkpoint_id=path, no_dist=True)
    assert same(target["model"], dict(state["model"].state_dict()))


def test_torchs_format_utils_read_it(rank: Rank, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    state = program()
    train(state, 2)
    dcp_to_torch_save(rank.save(state, 2), tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert same(whole["model"], dict(state["model"].state_dict()))
    assert same(whole["optimizer"]["state"]["0.weight"], state["optimizer"].state[state["model"][0].weight])
    assert whole["optimizer"]["param_groups"][0]["initial_lr"] == 0.01


def test_all_that_is_in_it_can_be_read_without_trust(rank: Rank) -> None:
    state = program()
    train(state, 1)
    reader = files.Reader(rank.save(state, 1, {"rng": torch.get_rng_state()}))
    tree = reader.read(dict.fromkeys(reader.values()))
    assert tree["optimizer"]["param_groups"][0]["params"][0] == "0.weight"


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_a_metadata_file_that_calls_something_is_refused(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    path = rank.save(program(), 1)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print"):
        files.Reader(path)
    assert capsys.readouterr().out == ""


class Keeper:
    """Has any state it is given."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("value", [{1: "a", (2, 3): [torch.ones(2)]}, Counter({5: 1}), None, b"bytes", {1, 2}])
def test_other_objects_keep_their_types(rank: Rank, value: Any) -> None:
    rank.save({"thing": Keeper(value)}, 1)
    fresh = Keeper("other")
    rank.checkpointer.load({"thing": fresh})
    assert same(fresh.value, value) and type(fresh.value) is type(value)


def test_a_state_that_could_not_be_read_again_is_told_at_the_save(rank: Rank) -> None:
    assert "test_training_checkpoint.Keeper" in rank.failure({"thing": Keeper(Keeper(1))})
    assert "has no state_dict" in rank.failure({"count": 3})
    assert catalogue.scan(rank.checkpointer.where.folder) == []


def test_an_optimizer_that_has_not_stepped_is_left_so(rank: Rank) -> None:
    state = program()
    rank.save(state, 0)
    assert not state["optimizer"].state
    fresh = program(seed=9)
    rank.checkpointer.load(fresh)
    assert not fresh["optimizer"].state and same(states(fresh), states(state))


def test_two_models_and_optimizers_over_both(rank: Rank) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        one, two = nn.Linear(2, 2), nn.Linear(2, 2)
        both = torch.optim.SGD(
            [{"params": one.parameters(), "lr": 0.5}, {"params": two.parameters()}], lr=0.1, momentum=0.9
        )
        return {"one": one, "two": two, "both": both, "own": torch.optim.Adam(two.parameters())}

    state = make(0)
    for optimizer in ("both", "own", "both"):
        state["two"](state["one"](torch.ones(1, 2))).sum().backward()
        state[optimizer].step()
    path = rank.save(state, 3)
    fresh = make(1)
    rank.checkpointer.load(fresh)
    assert same(states(fresh), states(state))
    names = {".".join(map(str, place)) for place, _, _ in files.Reader(path).tensors()}
    assert {"both.state.one.weight.momentum_buffer", "own.state.weight.exp_avg"} <= names


def test_an_optimizer_over_other_parameters_is_kept_as_it_is(rank: Rank) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    rank.save({"optimizer": optimizer}, 1)
    fresh = torch.optim.Adam([nn.Parameter(torch.ones(3))])
    rank.checkpointer.load({"optimizer": fresh})
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_only_a_wrappers_part_is_not_in_the_name() -> None:
    odd = nn.Module()
    odd.module = nn.Linear(1, 1)
    assert plain_name(odd, "module.weight") == "module.weight"
    assert plain_name(nn.DataParallel(odd), "module.module.weight") == "module.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.update(model=nn.Linear(4, 2)), "has no"),
        (lambda state: state.update(program(width=7)), r"0.weight is \(6, 4\) in it, \(7, 4\) here"),
        (lambda state: state.update(ema=nn.Linear(1, 1)), "has no 'ema'"),
        (
            lambda state: state.update(optimizer=torch.optim.AdamW(state["model"][0].parameters())),
            "its parameters, or their groups, are not those",
        ),
    ],
)
def test_another_program_is_told_what_does_not_fit(rank: Rank, change: Any, words: str) -> None:
    state = program()
    train(state, 1)
    rank.save(state, 1)
    fresh = program()
    change(fresh)
    with pytest.raises(UnfitError, match=words):
        rank.checkpointer.load(fresh)


def test_part_of_a_checkpoint_can_be_loaded(rank: Rank) -> None:
    state = program()
    train(state, 1)
    rank.save(state, 1)
    fresh = program(seed=5)["model"]
    rank.checkpointer.load({"model": fresh})
    assert same(fresh.state_dict(), state["model"].state_dict())


# --- what is wrong is passed over -------------------------------------------------------------------------------------


def test_a_damaged_one_is_refused_and_the_one_before_loaded(rank: Rank) -> None:
    state = program()
    train(state, 1)
    rank.save(state, 1)
    before = pickle.loads(pickle.dumps(states(state)))
    train(state, 1)
    newest = rank.save(state, 2)
    weights = newest / "__0_0.distcp"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    fresh = program(seed=9)
    loaded = rank.checkpointer.load(fresh)
    assert loaded is not None and loaded.step == 1 and same(states(fresh), before)
    refused = next(fields for event, fields in rank.facts if event == "CheckpointRefused")["checkpoint"]
    assert refused["step"] == 2 and refused["problem"].startswith("__0_0.distcp is damaged")
    assert catalogue.scan(rank.checkpointer.where.folder)[0].problem == refused["problem"]  # others know it now


def test_nothing_to_load_leaves_the_state_alone(rank: Rank) -> None:
    state = program()
    before = pickle.loads(pickle.dumps(states(state)))
    assert rank.checkpointer.load(state) is None and same(states(state), before)


def test_a_chosen_one_is_taken_and_those_after_it_left_behind(rank: Rank) -> None:
    state = program()
    paths = [rank.save(state, step) for step in (1, 2, 3)]
    loaded = rank.checkpointer.load(state, str(paths[1]))
    assert loaded is not None and loaded.step == 2
    again = rank.checkpointer.load(state)
    assert again is not None and again.step == 2
    (paths[1] / ".metadata").unlink()
    chosen_is_broken = rank.checkpointer.load(state, str(paths[1]))
    assert chosen_is_broken is not None and chosen_is_broken.step == 1


# --- the disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "disk full: "),
        (errno.EIO, "the disk fails: "),
        (errno.EACCES, "cannot be written: Permission denied"),
        (errno.EFBIG, "may not be as large"),
    ],
)
@pytest.mark.parametrize("at", [0, 20_000])
def test_a_disk_that_fails_costs_that_checkpoint_only(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, number: int, words: str, at: int
) -> None:
    state = program(width=2000)
    good = rank.save(state, 1)
    with monkeypatch.context() as patch:
        patch.setattr(files._Summed, "write", _failing(files._Summed.write, number, at))
        assert words in rank.failure(state, 2)
    folder = rank.checkpointer.where.folder
    assert [path.name for path in folder.iterdir()] == [good.name]
    rank.save(state, 3)
    assert [found.step for found in catalogue.scan(folder)] == [3, 1]


def _failing(plain: Any, number: int, at: int) -> Any:
    def write(summed: Any, data: Any) -> int:
        if summed.size + len(data) > at:
            error = OSError(number, os.strerror(number))
            summed._files.error = error
            raise error
        return int(plain(summed, data))

    return write


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    reason = Rank(tmp_path / "file" / "checkpoints").failure(program())
    assert "Not a directory" in reason


def test_a_disk_without_room_is_not_filled(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda folder: 100)
    assert rank.failure(program()).startswith("disk full: ")


# --- by and by --------------------------------------------------------------------------------------------------------


def test_a_save_that_is_due_while_one_is_written_is_left_out(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    go = threading.Event()
    monkeypatch.setattr(saving.Save, "write", _late(saving.Save.write, lambda: go.wait(20)))
    state = program()
    assert rank.checkpointer.save(state, 1)
    assert not rank.checkpointer.save(state, 2) and not rank.checkpointer.save(state, 3)
    go.set()
    assert rank.checkpointer.save(state, 4, wait=True)
    assert rank.checkpointer.finish(20)
    assert [fields["checkpoint"]["step"] for _, fields in rank.facts] == [1, 4]
    assert capsys.readouterr().err.count("is still being written") == 1


def test_the_memory_of_a_copy_is_used_again(rank: Rank) -> None:
    state = program()
    rank.save(state, 1)
    buffers = {path: buffer.data_ptr() for path, buffer in rank.checkpointer._staging._buffers.items()}
    train(state, 1)
    rank.save(state, 2)
    now = {path: buffer.data_ptr() for path, buffer in rank.checkpointer._staging._buffers.items()}
    assert buffers.items() <= now.items()


def test_old_ones_are_removed(tmp_path: Path) -> None:
    rank = Rank(tmp_path, keep=2, keep_every=4)
    for step in range(1, 8):
        rank.save(program(), step)
    assert [found.step for found in catalogue.scan(tmp_path)] == [7, 6, 4]


def test_a_manifest_tells_what_made_it(tmp_path: Path) -> None:
    rank = Rank(tmp_path, job_id="train-1", restart_count=2, dtrain="9.9")
    made = manifest.read(rank.save(program(), 5))
    assert (made.step, made.job_id, made.restart_count, made.dtrain) == (5, "train-1", 2, "9.9")
    assert made.torch == torch.__version__ and set(made.files) == {".metadata", "__0_0.distcp"}


def test_what_an_earlier_generation_left_is_removed(tmp_path: Path) -> None:
    partial = Where(folder=tmp_path, job_id="a").partial(7)
    catalogue.begin(partial)
    Rank(tmp_path, job_id="a", restart_count=1)
    assert not partial.exists()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    random.seed(0)
    yield


def test_the_programs_own_files_are_summed_by_torch_as_ever(rank: Rank, tmp_path: Path) -> None:
    """Ours leave that out, as they have a sum of the whole; only in the thread that writes them."""

    def crcs(path: Path) -> set[int]:
        with zipfile.ZipFile(path) as file:
            return {one.CRC for one in file.infolist()}

    weight = torch.randn(300_000)
    with files._summed_once():
        thread = threading.Thread(target=torch.save, args=(weight, tmp_path / "meanwhile.pt"))
        thread.start()
        thread.join()
    rank.save({"model": nn.Linear(600, 600)}, 1)
    torch.save(weight, tmp_path / "after.pt")
    for name in ("meanwhile.pt", "after.pt"):
        assert zlib.crc32(weight.numpy().tobytes()) in crcs(tmp_path / name)


def test_what_is_summed_in_another_thread_is_summed_right(rank: Rank) -> None:
    """A large tensor, and what is written around it."""
    path = rank.save({"model": nn.Linear(600, 600)}, 1)
    found = catalogue.look(path)
    assert found.manifest is not None
    assert max(record.size for record in found.manifest.files.values()) > files.LARGE
    for name, record in found.manifest.files.items():
        assert zlib.crc32((path / name).read_bytes()) == record.crc


@pytest.mark.parametrize("is_there", [True, False])
def test_sums_are_zlibs_with_and_without_the_faster_way(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.training import crc

    if not is_there:
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    summed = importlib.reload(crc).crc32
    data = memoryview(bytes(range(256)) * 4097)
    assert [summed(data[at:], 7) for at in (0, 1, 3, 4096)] == [zlib.crc32(data[at:], 7) for at in (0, 1, 3, 4096)]
    assert (summed is zlib.crc32) is not is_there
    monkeypatch.undo()
    importlib.reload(crc)


def test_a_copy_that_is_held_is_written_instead_of_another_and_released(rank: Rank) -> None:
    state = {"model": nn.Linear(3, 4)}
    before = state["model"].weight.detach().clone()
    released: list[bool] = []
    held = Held({("model", "weight"): before}, lambda: released.append(rank.checkpointer.is_busy))
    assert rank.checkpointer.save(state, 1, held=held)
    state["model"].weight.data.zero_()
    assert rank.checkpointer.finish(20)
    assert released == [True]
    assert set(rank.checkpointer._staging._buffers) == {("model", "bias")}
    assert rank.checkpointer.load(state) is not None
    assert torch.equal(state["model"].weight, before)


def test_a_held_copy_of_another_shape_is_not_written(rank: Rank) -> None:
    state = {"model": nn.Linear(3, 4)}
    before = state["model"].weight.detach().clone()
    assert rank.checkpointer.save(state, 1, held=Held({("model", "weight"): torch.zeros(3, 4)}, lambda: None))
    assert rank.checkpointer.finish(20)
    assert rank.checkpointer.load(state) is not None
    assert torch.equal(state["model"].weight, before)

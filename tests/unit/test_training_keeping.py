"""When a run saves and where it goes on: one rank in a pretended job, its agent a list of what it was told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from workbench import blackbox
from workbench.training import Run, catalogue
from workbench.training.control import Control
from workbench.training.observe import Observer


class Job:
    """`rank()` begins the next generation in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        self.told: list[dict[str, Any]] = []
        self.generation = -1
        monkeypatch.delenv("WORLD_SIZE", raising=False)

    def rank(self, **settings: Any) -> Run:
        self.generation += 1
        self._patch.setenv("TORCHELASTIC_RESTART_COUNT", str(self.generation))
        known = {"checkpoint_dir": str(self.folder), "job_id": "job", "version": "1", "snapshot_every": -1, **settings}
        self.control = Control(lambda: ({}, b"", ()), lambda header, *_: self.told.append(header), known)
        self._patch.setattr(Control, "current", self.control)
        buffer = bytearray(blackbox.SIZE)
        blackbox.format_box(buffer)
        self.observer = Observer(blackbox.Writer(buffer), 0.0)
        return Run(self.observer)

    def facts(self, event: str) -> list[dict[str, Any]]:
        return [header["fields"] for header in self.told if header.get("event") == event]

    def saved(self) -> list[int]:
        return [fields["checkpoint"]["step"] for fields in self.facts("CheckpointSaved")]

    def step(self) -> None:
        """As the probes would see it."""
        self.observer.finish(self.observer.clock())


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    yield Job(tmp_path / "checkpoints", monkeypatch)


def loader(batches: int = 10) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(batches * 2.0)), batch_size=2, shuffle=True)


def settle(run: Run) -> None:
    assert run._keeping is not None
    run._keeping._checkpointer.finish()


def test_saves_at_every_nth_step_and_at_the_end(job: Job) -> None:
    run, model = job.rank(checkpoint_every=4), nn.Linear(1, 1)
    for _ in run.steps(loader(), {"model": model}):
        job.step()
        settle(run) if run._keeping else None
    assert job.saved() == [4, 8, 10]


def test_without_a_wish_nothing_is_saved_but_by_hand(job: Job) -> None:
    run, model = job.rank(), nn.Linear(1, 1)
    for step, _ in run.steps(loader(), {"model": model}):
        job.step()
        if step == 4:
            assert run.save({"model": model})
    settle(run)
    assert job.saved() == [5]


def test_at_the_agents_request(job: Job) -> None:
    run, model = job.rank(), nn.Linear(1, 1)
    for step, _ in run.steps(loader(), {"model": model}):
        job.step()
        if step == 2:
            job.control._take(({"op": "checkpoint"}, b"", ()))
    settle(run)
    assert job.saved() == [3]


def test_by_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("workbench.training.keeping.time.monotonic", lambda: now[0])
    run, model = job.rank(checkpoint_seconds=60.0), nn.Linear(1, 1)
    for _ in run.steps(loader(), {"model": model}):
        job.step()
        now[0] += 25.0
        settle(run) if run._keeping else None
    assert job.saved() == [3, 6, 9, 10]


def test_goes_on_where_it_was_with_the_true_step_and_order(job: Job) -> None:
    torch.manual_seed(5)
    run, seen = job.rank(checkpoint_every=3), []
    model = nn.Linear(1, 1)
    steps = run.steps(loader(), {"model": model}, epochs=2)
    for step, (batch,) in steps:
        job.step()
        seen.append((step, batch.tolist(), float(torch.rand(1))))
        with torch.no_grad():
            model.weight.fill_(step)
        settle(run) if run._keeping else None
        if step == 13:
            break
    steps.close()  # type: ignore[attr-defined]
    settle(run)
    torch.manual_seed(99)
    again, model = job.rank(checkpoint_every=3), nn.Linear(1, 1)
    went_on = []
    for step, (batch,) in again.steps(loader(), {"model": model}, epochs=2):
        if not went_on:
            assert float(model.weight.detach()) == 11.0 and job.observer.step == 12
        job.step()
        went_on.append((step, batch.tolist(), float(torch.rand(1))))
    assert went_on[:2] == seen[12:] and [step for step, *_ in went_on] == list(range(12, 20))
    (resumed,) = job.facts("RunResumed")
    assert (resumed["step"], resumed["tier"]) == (12, "disk")
    box = blackbox.read_header(job.observer.box._buffer)
    assert box.step == 20 and box.progress == (20, 20)


def test_a_finished_run_has_nothing_left_to_do(job: Job) -> None:
    for generation in range(2):
        run = job.rank(checkpoint_every=100)
        done = [step for step, _ in run.steps(loader(), {"model": nn.Linear(1, 1)}, epochs=1) if not job.step()]
        assert done == ([] if generation else list(range(10)))


def test_accumulated_gradients_are_not_lost(job: Job) -> None:
    """Four batches a step of the optimizer: a save waits for it, and its number is that of the black box."""
    run = job.rank(checkpoint_every=5)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, _ in run.steps(loader(12), {"model": model, "optimizer": optimizer}):
        job.observer.owner = lambda: optimizer
        job.observer.samples += 2
        if step % 4 == 3:
            job.step()
        settle(run) if run._keeping else None
    assert job.saved() == [2, 3]  # after batches 8 (due at 5) and 12 (due at 10)


def test_a_loop_of_ones_own(job: Job) -> None:
    run, model = job.rank(), nn.Linear(1, 1)
    assert run.load({"model": model}) == 0
    for _ in range(7):
        job.step()
    assert run.save({"model": model})
    settle(run)
    again, fresh = job.rank(), nn.Linear(1, 1)
    assert again.load({"model": fresh}) == 7 == job.observer.step
    assert torch.equal(fresh.weight, model.weight)


def test_the_loader_itself_may_stand_in_the_state(job: Job) -> None:
    run, data = job.rank(checkpoint_every=5), loader()
    list(run.steps(data, {"model": nn.Linear(1, 1), "loader": data}))  # type: ignore[dict-item]
    assert job.saved()[-1] == 10 and not job.facts("CheckpointFailed")


def test_a_chosen_checkpoint(job: Job) -> None:
    run = job.rank(checkpoint_every=2)
    for _ in run.steps(loader(), {"model": nn.Linear(1, 1)}):
        job.step()
        settle(run) if run._keeping else None
    chosen = next(found for found in catalogue.scan(job.folder) if found.step == 8)
    again = job.rank(resume=str(chosen.path))
    assert next(iter(again.steps(loader(), {"model": nn.Linear(1, 1)})))[0] == 8


def test_from_the_start_though_there_are_checkpoints(job: Job) -> None:
    run = job.rank(checkpoint_every=2)
    list(run.steps(loader(), {"model": nn.Linear(1, 1)}))
    settle(run)
    again = job.rank(from_the_start=True, checkpoint_every=4)
    for step, _ in again.steps(loader(), {"model": nn.Linear(1, 1)}):
        job.step()
        if step == 4:
            break
    assert not job.facts("RunResumed")
    settle(again)
    assert all(found.is_abandoned is (found.step != 4) for found in catalogue.scan(job.folder))
    last = job.rank()
    assert last.load({"model": nn.Linear(1, 1)}) == 4, "the newest is one of the new run, however small its step"


def test_waiting_for_a_save_is_a_checkpoints_time_and_waiting_for_rank_0_is_not(job: Job) -> None:
    """Else a rank that never comes is taken for one that saves, and a long last save for a hang."""
    run, seen = job.rank(checkpoint_every=4), {}
    steps = run.steps(loader(4), {"model": nn.Linear(1, 1)})
    next(steps)
    assert run._keeping is not None
    keeper = run._keeping._checkpointer
    job.observer.thread = threading.get_ident()
    decide, join, copy = keeper.team.decide, threading.Thread.join, keeper._copy

    def spy(name: str, call: Any) -> Any:
        def spied(*args: Any, **kwargs: Any) -> Any:
            if name not in seen and threading.current_thread() is threading.main_thread():
                seen[name] = job.observer.activity
            return call(*args, **kwargs)

        return spied

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper.team, "decide", spy("decide", decide))
        patch.setattr(threading.Thread, "join", spy("join", join))
        patch.setattr(keeper, "_copy", spy("copy", copy))
        list(steps)
    checkpoint = blackbox.Activity.CHECKPOINT
    assert (seen["decide"] == checkpoint, seen["copy"], seen["join"]) == (False, checkpoint, checkpoint)


def test_ranks_without_a_group_are_told(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = job.rank(checkpoint_every=1)
    assert len(list(run.steps(loader(), {"model": nn.Linear(1, 1)}))) == 10
    assert "call torch.distributed.init_process_group before" in capsys.readouterr().err


def test_outside_a_job_nothing_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Control, "current", None)
    run, state = Run(), {"model": nn.Linear(1, 1)}
    assert len(list(run.steps(loader(), state))) == 10
    assert run.load(state) == 10 and not run.save(state)

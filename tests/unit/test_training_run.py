"""`Run`: the same results in a job and outside; in a job what is said lands in the record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from workbench import blackbox
from workbench.blackbox import SIZE, Activity, StepRecord, Writer, iter_steps, read_header, read_steps
from workbench.training import Run
from workbench.training.observe import COMM, Observer


class Sampler:
    """Notes what it is told, as `DistributedSampler` would."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Loader:
    def __init__(self, batches: int) -> None:
        self.sampler = Sampler()
        self._batches = batches

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[str]:
        return (f"batch {number}" for number in range(self._batches))


class Rank:
    """A watched run without torch's probes: its steps are taken by hand."""

    def __init__(self) -> None:
        self.buffer = bytearray(SIZE)
        blackbox.format_box(self.buffer)
        self.observer = Observer(Writer(self.buffer), 0.0)
        self.run = Run(self.observer)

    def step(self) -> None:
        self.observer.finish(self.observer.clock())

    def begin_next(self) -> None:
        self.observer.begin_forward()

    def records(self) -> list[StepRecord]:
        return list(iter_steps(read_steps(self.buffer, 0)[0]))


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture(params=["outside", "inside"])
def run(request: pytest.FixtureRequest) -> Run:
    return Run() if request.param == "outside" else Rank().run


def test_current_is_one_and_outside_a_job_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_current", None)
    monkeypatch.setattr(Observer, "current", None)
    assert Run.current() is Run.current()
    assert not Run.current().is_watched


def test_current_of_a_rank_is_watched(monkeypatch: pytest.MonkeyPatch, rank: Rank) -> None:
    monkeypatch.setattr(Run, "_current", None)
    monkeypatch.setattr(Observer, "current", rank.observer)
    Run.current().progress(1, 2)
    assert Run.current().is_watched and read_header(rank.buffer).progress == (1, 2)


def test_steps_are_counted_over_all_calls_and_epochs_told(run: Run) -> None:
    loader = Loader(2)
    assert list(run.steps(loader, epochs=2)) == [(0, "batch 0"), (1, "batch 1"), (2, "batch 0"), (3, "batch 1")]
    assert loader.sampler.epochs == [0, 1]
    assert next(iter(run.steps(loader))) == (4, "batch 0")


def test_without_epochs_the_samplers_epoch_is_left_alone(run: Run) -> None:
    loader = Loader(1)
    assert list(run.steps(loader)) == [(0, "batch 0")]
    assert loader.sampler.epochs == []


def test_a_step_that_is_left_early_does_not_count_twice(run: Run) -> None:
    for _step, _batch in run.steps(Loader(3)):
        break
    assert [step for step, _ in run.steps(Loader(2))] == [0, 1]


def test_loader_without_length_or_sampler(rank: Rank) -> None:
    assert [batch for _, batch in rank.run.steps(iter("ab"))] == ["a", "b"]
    assert read_header(rank.buffer).progress is None


def test_progress_is_written_after_each_step(rank: Rank) -> None:
    seen = [read_header(rank.buffer).progress for _ in rank.run.steps(Loader(2), epochs=2)]
    assert [*seen, read_header(rank.buffer).progress] == [None, (1, 4), (2, 4), (3, 4), (4, 4)]


LOSSES: dict[str, Callable[[], object]] = {
    "float": lambda: 0.5,
    "int": lambda: 2,
    "scalar tensor": lambda: torch.tensor(0.5),
    "one element": lambda: torch.tensor([0.5]),
    "half": lambda: torch.tensor(0.5, dtype=torch.bfloat16),
    "with a graph": lambda: torch.tensor(1.0, requires_grad=True) * 0.5,
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.filterwarnings("error")
def test_a_loss_of_any_kind_lands_in_the_record(rank: Rank, kind: str) -> None:
    loss = LOSSES[kind]()
    rank.run.report(loss=loss)
    rank.step()
    assert rank.records()[0].loss == float(loss.detach() if isinstance(loss, torch.Tensor) else loss)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", LOSSES)
def test_outside_a_job_a_report_does_nothing(kind: str) -> None:
    Run().report(loss=LOSSES[kind](), samples=1, tokens=2)
    Run().progress(1, 2)


def test_a_report_before_the_step_belongs_to_it_and_amounts_add_up(rank: Rank) -> None:
    rank.run.report(loss=3.0, samples=8, tokens=100)
    rank.run.report(loss=2.0, samples=8, tokens=50)
    rank.step()
    rank.begin_next()
    rank.step()
    first, second = rank.records()
    assert (first.samples, first.tokens, first.loss) == (16, 150, 2.0)
    assert (second.samples, second.tokens) == (0, 0) and math.isnan(second.loss)


def test_a_report_right_after_the_step_belongs_to_the_one_finished(rank: Rank) -> None:
    rank.step()
    rank.run.report(loss=1.0, tokens=7)
    rank.begin_next()
    rank.run.report(loss=0.5)
    rank.step()
    first, second = rank.records()
    assert (first.loss, first.tokens) == (1.0, 7) and second.loss == 0.5


def test_a_second_report_after_a_step_is_for_the_next(rank: Rank) -> None:
    rank.step()
    rank.run.report(loss=1.0)
    rank.run.report(loss=0.5)
    rank.step()
    assert [record.loss for record in rank.records()] == [1.0, 0.5]


def test_reports_before_any_step_are_kept_for_the_first(rank: Rank) -> None:
    rank.run.report(samples=4)
    frame = rank.observer.enter(COMM)
    rank.observer.leave(frame)
    rank.step()
    assert rank.records()[0].samples == 4
    assert read_header(rank.buffer).activity is Activity.RUNNING


class DeviceLoss:
    """A loss that lies on a GPU: reading it waits."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.readings = 0

    def detach(self) -> DeviceLoss:
        return self

    def __float__(self) -> float:
        self.readings += 1
        return 0.25


def test_a_loss_on_a_device_is_read_now_and_then(rank: Rank) -> None:
    loss = DeviceLoss()
    for _ in range(5):
        rank.run.report(loss=loss)
        rank.step()
    assert loss.readings == 1
    assert rank.records()[0].loss == 0.25 and math.isnan(rank.records()[1].loss)


@pytest.mark.parametrize("loss", ["high", [1.0, 2.0], torch.ones(2)])
def test_a_loss_that_is_no_number_is_the_callers_error_everywhere(rank: Rank, loss: object) -> None:
    for run in (rank.run, Run()):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            run.report(loss=loss)
    rank.step()
    assert math.isnan(rank.records()[0].loss)

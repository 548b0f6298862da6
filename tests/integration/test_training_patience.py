"""What a program says of pauses to come, by its model's mode or `run.expect`, is in the box until the step is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from workbench import blackbox
from workbench.blackbox import SIZE, Snapshot, Writer, read_header
from workbench.training import Run, observe
from workbench.training.observe import Observer


class Rank:
    def __init__(self) -> None:
        self.buffer = bytearray(SIZE)
        blackbox.format_box(self.buffer)
        self.observer = observe.install(Writer(self.buffer), offset=0.0)
        self.run = Run(self.observer)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()

    @property
    def box(self) -> Snapshot:
        return read_header(self.buffer)


@pytest.fixture
def rank() -> Iterator[Rank]:
    assert Observer.current is None
    made = Rank()
    yield made
    made.observer.uninstall()


def test_an_evaluation_is_from_eval_to_train(rank: Rank) -> None:
    rank.step()
    assert not rank.box.is_evaluating
    assert rank.model.eval() is rank.model
    assert rank.box.is_evaluating
    assert not any(module.training for module in rank.model.modules())
    rank.model.train()
    assert not rank.box.is_evaluating
    assert all(module.training for module in rank.model.modules())


def test_a_step_ends_an_evaluation_as_well(rank: Rank) -> None:
    rank.step()
    rank.model[1].eval()  # frozen for good
    rank.step()
    assert not rank.box.is_evaluating


def test_a_model_that_keeps_a_part_frozen_while_it_trains_is_not_evaluated(rank: Rank) -> None:
    class Frozen(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.inner.eval()
            return self

    outer = nn.Sequential(Frozen(nn.Dropout()))
    outer.train()
    assert not rank.box.is_evaluating
    assert not outer[0].inner.training


def test_a_loop_in_another_thread_says_nothing_of_the_rank(rank: Rank) -> None:
    import threading

    other = threading.Thread(target=rank.model.eval)
    other.start()
    other.join()
    assert not rank.box.is_evaluating


def test_what_is_expected_holds_until_the_step_is_over(rank: Rank) -> None:
    rank.run.expect(40)
    assert rank.box.expected == 40.0
    rank.step()
    assert rank.box.expected == 0.0


def test_also_among_short_steps_that_are_not_watched_whole(rank: Rank) -> None:
    for _ in range(40):
        rank.step()
    for say in (lambda: rank.run.expect(40), rank.model.eval):
        say()
        assert rank.box.is_evaluating or rank.box.expected
        rank.step()
        assert not (rank.box.is_evaluating or rank.box.expected)
        rank.step()


def test_what_is_expected_in_a_block_ends_with_it(rank: Rank) -> None:
    with rank.run.expect(40):
        assert rank.box.expected == 40.0
    assert rank.box.expected == 0.0
    rank.model.eval()
    with rank.run.expect(2.5):
        pass
    assert rank.box.is_evaluating


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_what_cannot_be_expected(rank: Rank, seconds: float) -> None:
    with pytest.raises(ValueError, match="give seconds above 0"):
        rank.run.expect(seconds)


def test_outside_a_job_nobody_listens() -> None:
    with Run().expect(5):
        Run().expect(3)

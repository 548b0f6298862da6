"""A job that is to end after so many steps: a loop over `Run.steps` ends as its data would, others leave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from workbench.training import limit
from workbench.training.limit import StepLimit
from workbench.training.run import Run


class Counter:
    """An observer as far as the limit looks at it."""

    step = 0

    def attend_late(self) -> None: ...


@pytest.fixture
def counter() -> Iterator[Counter]:
    counted = Counter()
    StepLimit.current = StepLimit(3, counted)  # type: ignore[arg-type]
    yield counted
    StepLimit.current = None


def test_without_a_limit_nothing_ends() -> None:
    assert not limit.is_reached()
    assert len(list(Run().steps(range(5)))) == 5


def test_a_loop_over_steps_ends_after_that_one(counter: Counter) -> None:
    run, seen = Run(), []
    for step, _ in run.steps(range(10), epochs=2):
        seen.append(step)
        counter.step += 1
        assert StepLimit.current is not None
        StepLimit.current.after_step(None, (), {})  # the hook leaves a loop that knows the limit alone
    assert seen == [0, 1, 2]
    assert list(run.steps(range(10))) == []  # of a program that reads its epochs one by one


def test_any_other_program_leaves_with_exit_code_0(counter: Counter) -> None:
    assert StepLimit.current is not None
    counter.step = 2
    StepLimit.current.after_step(None, (), {})
    counter.step = 3
    with pytest.raises(SystemExit) as leaving:
        StepLimit.current.after_step(None, (), {})
    assert leaving.value.code == 0

"""From which checkpoint a job goes on, which are known, and that going back is no progress: in a pretended pool."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from workbench.commands import StartRanks
from workbench.controller import transition
from workbench.errors import JobError
from workbench.events import CheckpointRefused, CheckpointSaved, Event, NonFiniteFound, RecoveryStarted, RunResumed
from workbench.session import error_of
from workbench.spec import JobSpec, NanPolicy
from workbench.state import THE_START, Checkpoint, CheckpointTier, JobPhase, JobState
from workbench.testing import FakePool

JOB = "train-1a2b"


class Story:
    """A job of 2 ranks that runs; `options` are its spec's."""

    def __init__(self, **options: object) -> None:
        self.pool = FakePool({"a": 2}, start=1000.0)
        self.pool.launch(JobSpec(entrypoint="train.py", nproc_per_node=2, **options), JOB)
        self.pool.run()

    @property
    def state(self) -> JobState:
        return self.pool.states[JOB]

    @property
    def starts(self) -> list[str]:
        """What each generation was told to go on from."""
        return [command.resume for command in self.pool.commands if isinstance(command, StartRanks)]

    @property
    def known(self) -> list[int]:
        return [checkpoint.step for checkpoint in self.state.checkpoints]

    def tell(self, kind: type[Event], **fields: object) -> None:
        self.pool.feed(JOB, kind(time=self.pool.now, restart_count=self.state.restart_count, **fields))

    def save(self, *steps: int) -> None:
        for step in steps:
            self.tell(CheckpointSaved, checkpoint=point(step))

    def go_on_from(self, step: int) -> None:
        self.tell(RunResumed, step=step, tier=CheckpointTier.DISK, path=f"/c/{step}")

    def nan(self, step: int) -> None:
        self.tell(NonFiniteFound, rank=1, step=step, what="loss")
        self.pool.run()

    def die(self) -> None:
        self.pool.kill(JOB, 1)
        self.pool.run()


def point(step: int) -> Checkpoint:
    return Checkpoint(step=step, path=f"/c/{step}", world_size=2, saved_at=1.0)


def test_a_failure_is_past_from_the_restart_on_and_no_reason_for_an_end_that_comes_later() -> None:
    story = Story(max_restarts=2)
    story.die()
    states: list[JobState] = []
    for event in story.pool.record[JOB]:
        states.append(transition(states[-1] if states else None, event)[0])
    of_phase = {(state.phase, state.has_recovered) for state in states if state.failure is not None}
    assert of_phase >= {(JobPhase.RECOVERING, False), (JobPhase.LAUNCHING, False), (JobPhase.HEALTHY, True)}
    assert not of_phase & {(JobPhase.RECOVERING, True), (JobPhase.LAUNCHING, True)}
    assert not any(state.has_recovered for state in states if not state.restart_count)
    story.pool.cancel(JOB)
    story.pool.run()
    assert story.state.phase is JobPhase.STOPPED and story.state.has_recovered
    error = error_of(story.state)
    assert type(error) is JobError and "cancelled" in str(error) and not error.story


@pytest.mark.parametrize(
    ("options", "saved", "where"),
    [
        ({}, (), ""),
        ({}, (5,), " from the newest checkpoint"),
        ({"resume_from": "/c/2"}, (), " from the newest checkpoint"),
    ],
)
def test_a_resume_tells_from_where_if_that_is_known(
    options: dict[str, str], saved: tuple[int, ...], where: str
) -> None:
    story = Story(**options)
    story.save(*saved)
    story.die()
    story.pool.resume(JOB)
    told = [event.reason for event in story.pool.record[JOB] if isinstance(event, RecoveryStarted)]
    assert told == [f"resumed{where}"]


def test_nan_before_every_checkpoint_takes_the_job_to_its_start_and_not_to_the_newest() -> None:
    story = Story(on_nan=NanPolicy.ROLLBACK, max_restarts=3)
    story.save(20, 40)
    story.nan(step=10)
    assert story.starts == ["", THE_START]
    assert story.known == [] and story.state.resumed_step == 0
    started = next(event for event in story.pool.record[JOB] if type(event).__name__ == "RecoveryStarted")
    assert started.reason.endswith("loss is not finite at step 10; back to the start, before it")
    story.die()
    assert story.starts[2] == THE_START, "nothing was saved since"
    story.save(5)
    story.die()
    assert story.starts[3] == "", "the newest is one of the new run"


def test_a_job_may_begin_from_a_checkpoint_of_another() -> None:
    """That is its start: it goes back there while it has none of its own, and never to nothing."""
    story = Story(on_nan=NanPolicy.ROLLBACK, max_restarts=9, resume_from="/other/40")
    story.die()
    story.go_on_from(40)
    story.save(50)
    story.die()
    assert story.starts == ["/other/40", "/other/40", ""]
    story.nan(step=45)
    assert story.starts[3] == "/other/40" and story.known == []
    story.pool.cancel(JOB)
    story.pool.run()
    story.pool.resume(JOB)
    story.pool.run()
    assert story.starts[4] == "/other/40"
    story.pool.cancel(JOB)
    story.pool.run()
    story.pool.resume(JOB, step=0, path=THE_START)
    story.pool.run()
    assert story.starts[5] == THE_START


def test_what_is_saved_again_after_going_back_is_no_progress() -> None:
    """Else a job that always fails at the same step goes round for ever."""
    story = Story(max_restarts=5, checkpoint_keep=5)
    story.save(25, 50, 75, 100)
    for _ in range(20):
        story.die()
        if story.state.phase.is_terminal:
            break
        step = int(story.starts[-1].rpartition("/")[2] or max(story.known))
        story.go_on_from(step)
        story.save(*range(step + 25, 101, 25))
    assert story.state.phase is JobPhase.FAILED
    assert story.state.reason.endswith("no restart left of 5")
    assert len(story.starts) == 6


def test_nan_that_comes_again_is_answered_by_going_further_back() -> None:
    story = Story(on_nan=NanPolicy.ROLLBACK, max_restarts=5, checkpoint_keep=5)
    story.save(25, 50, 75)
    for _ in range(4):
        story.nan(step=80)
        story.go_on_from(int(story.starts[-1].rpartition("/")[2]))
    assert story.starts == ["", "/c/75", "/c/75", "/c/50", "/c/25"]


def test_a_restart_that_got_further_does_not_count() -> None:
    story = Story(max_restarts=1)
    for step in (10, 20, 30):
        story.save(step)
        story.die()
        story.go_on_from(step)
    assert story.state.restart_count == 3 and story.state.phase is JobPhase.HEALTHY
    story.die()
    assert story.state.phase is JobPhase.FAILED


def test_a_chosen_checkpoint_leaves_the_newer_ones_behind() -> None:
    story = Story(on_nan=NanPolicy.ROLLBACK, max_restarts=3)
    story.save(10, 20, 30)
    story.pool.cancel(JOB)
    story.pool.run()
    story.pool.resume(JOB, step=10, path="/c/10")
    story.pool.run()
    story.go_on_from(10)
    story.nan(step=35)
    assert story.starts[-2:] == ["/c/10", "/c/10"]


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({}, [80, 90, 100]),
        ({"checkpoint_keep": 1}, [100]),
        ({"checkpoint_keep": 9}, [20, 30, 40, 50, 60, 70, 80, 90, 100]),
        ({"checkpoint_keep": 2, "checkpoint_keep_every": 40}, [40, 80, 90, 100]),
    ],
)
def test_those_that_are_known_are_those_that_are_still_there(options: dict[str, int], known: list[int]) -> None:
    story = Story(**options)
    story.save(*range(10, 101, 10))
    assert story.known == known


def test_the_newest_in_which_ranks_agreed_is_there_however_many_came_after_it() -> None:
    story = Story()
    for step, agreed in ((10, None), (20, True), (30, False), (40, False), (50, False), (60, False)):
        story.tell(CheckpointSaved, checkpoint=replace(point(step), agreed=agreed))
    assert story.known == [20, 40, 50, 60]


def test_one_that_was_refused_is_not_gone_back_to() -> None:
    story = Story(on_nan=NanPolicy.ROLLBACK, max_restarts=3)
    story.save(10, 20, 30)
    story.tell(CheckpointRefused, checkpoint=point(20))
    story.nan(step=25)
    assert story.starts[-1] == "/c/10"

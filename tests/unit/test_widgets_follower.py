"""One job followed for all pages, over fake jobs: no pool, no network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from test_views_job import state, update
from workbench_widgets.actions import perform
from workbench_widgets.follower import Follower, Followers
from workbench_widgets.source import Filter

from workbench import WorkbenchError
from workbench.feed import Cursor, Update
from workbench.state import JobPhase
from workbench.telemetry import OutputWritten
from workbench.views.acts import Act, why_not
from workbench.views.job import JobView, ViewBuilder

PATIENCE = 5.0


class FakeJob:
    """Answers `follow` from a list; an exception in it is raised; when it is used up `follow` waits."""

    job_id, is_saved = "digits-12ab", False

    def __init__(self, *answers: Update | Exception) -> None:
        self.answers, self.asked, self.calls = list(answers), [], []
        self.more = threading.Event()

    def follow(self, cursor: Cursor | None, timeout: float) -> Update:
        self.asked.append(cursor)
        if not self.answers:
            self.more.wait(0.02)
            return replace(LAST, cursor=cursor or Cursor())
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self, by: str = "") -> JobPhase:
        self.calls.append(("cancel", by))
        return JobPhase.STOPPING

    def interrupt(self) -> None:
        raise WorkbenchError("the ranks are gone", hint="look at the job")

    def stacks(self) -> dict[int, str]:
        return {1: "Thread 2\n", 0: "Thread 1\n"}


LAST = update()


def numbered(number: int, **changes: Any) -> Update:
    return update(cursor=Cursor(event=number), **changes)


def printed(text: str) -> OutputWritten:
    return OutputWritten(job_id="digits-12ab", rank=0, stream="stdout", text=text, time=1.0)


class Watch:
    """Waits until the picture is as wanted, woken by each change."""

    def __init__(self, follower: Follower) -> None:
        self.follower, self._changed = follower, threading.Event()
        self.end = follower.subscribe(self._changed.set)

    def until(self, condition: Callable[[], object]) -> None:
        for _ in range(200):
            if condition():
                return
            self._changed.wait(PATIENCE / 200)
            self._changed.clear()
        raise AssertionError(f"never came: {self.follower.picture}")


@pytest.fixture
def follow() -> Iterator[Callable[..., Watch]]:
    made: list[Watch] = []

    def start(find: Callable[[str], Any], lost: Callable[[Any], None] = lambda job: None, linger: float = 30) -> Watch:
        made.append(Watch(Follower("digits-12ab", find, lost=lost, linger=linger, retry=(0.0,))))
        return made[-1]

    yield start
    for watch in made:
        watch.follower.stop()
        watch.follower._thread.join(PATIENCE)
        assert not watch.follower.is_alive


def test_updates_become_pictures_and_log_lines(follow: Callable[..., Watch]) -> None:
    job = FakeJob(numbered(1, output=(printed("one\ntwo\n"),)), numbered(2, output=(printed("three\n"),)))
    watch = follow(lambda _: job)
    watch.until(lambda: len(watch.follower.log(Filter(), 10).lines) == 3)
    assert watch.follower.picture.view is not None and watch.follower.picture.notice == ""
    assert [line.text for line in watch.follower.log(Filter(), 2).lines] == ["two", "three"]
    assert [line.text for line in watch.follower.log(Filter(text="one"), 10).lines] == ["one"]
    assert job.asked[:2] == [None, Cursor(event=1)]


def test_a_lost_pool_leaves_the_picture_and_a_notice_until_it_is_back(follow: Callable[..., Watch]) -> None:
    first, second, lost = FakeJob(numbered(1), WorkbenchError("the pool does not answer")), FakeJob(numbered(7)), []
    jobs = [first, second]
    seen: list[tuple[bool, str]] = []
    watch = follow(lambda _: jobs.pop(0), lost.append)
    watch.follower.subscribe(
        lambda: seen.append((watch.follower.picture.view is not None, watch.follower.picture.notice))
    )
    watch.until(lambda: second.asked)
    watch.until(lambda: watch.follower.picture.notice == "")
    assert (True, "the pool does not answer") in seen
    assert lost == [first]
    assert second.asked[0] is None  # read anew: another scheduler counts anew


def test_a_job_that_is_not_there_is_told(follow: Callable[..., Watch]) -> None:
    def find(job_id: str) -> Any:
        raise WorkbenchError(f"no job {job_id!r}", hint="list them")

    watch = follow(find)
    watch.until(lambda: watch.follower.picture.notice == "no job 'digits-12ab' (list them)")


def test_a_fault_of_ours_is_told_and_tried_again(
    follow: Callable[..., Watch], caplog: pytest.LogCaptureFixture
) -> None:
    watch = follow(lambda _: 1 / 0)
    watch.until(lambda: "has a fault: ZeroDivisionError" in watch.follower.picture.notice)


def test_it_ends_a_while_after_the_last_page(follow: Callable[..., Watch]) -> None:
    watch = follow(lambda _: FakeJob(numbered(1)), linger=0.05)
    watch.until(lambda: watch.follower.picture.view)
    assert watch.follower.is_alive
    watch.end()
    watch.follower._thread.join(PATIENCE)
    assert not watch.follower.is_alive


def test_pages_of_one_job_share_a_follower() -> None:
    followers = Followers(lambda _: FakeJob(numbered(1)), lost=lambda _: None)
    assert followers.get("a") is followers.get("a") is not followers.get("b")
    assert len(followers) == 2
    followers.close()
    again = followers.get("a")
    assert again.is_wanted  # a new one: the old was told to end
    followers.close()


# --- actions ---


def view(**changes: Any) -> JobView:
    builder = ViewBuilder()
    builder.add(update(state=state(**changes)))
    return builder.view()


def test_acts_say_what_they_did() -> None:
    job: Any = FakeJob()
    assert perform(Act("cancel"), job, view(), by="me") == "Cancel was asked for; the job is STOPPING now."
    assert job.calls == [("cancel", "me")]
    assert perform(Act("stacks"), job, view(), by="") == "Stacks of ranks 0, 1:\n\nrank 0\nThread 1\n\nrank 1\nThread 2"


def test_acts_say_why_they_could_not() -> None:
    job: Any = FakeJob()
    nobody = replace(view(phase=JobPhase.INIT), rows=())
    assert "no rank runs now" in perform(Act("stacks"), job, nobody, by="")
    assert "only a cell on an interactive job" in perform(Act("interrupt"), job, view(), by="")
    assert "the job has ended: FAILED" in perform(Act("cancel"), job, view(phase=JobPhase.FAILED), by="")
    assert "the pool does not answer" in perform(Act("cancel"), None, view(), by="")
    assert "not known yet" in why_not(Act("cancel"), None)
    interactive = replace(view(), is_interactive=True)
    assert perform(Act("interrupt"), job, interactive, by="") == "It did not work: the ranks are gone (look at the job)"

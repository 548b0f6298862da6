"""Who holds which slots, and what stays in memory of a job."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from workbench.blackbox import StepRecord, pack_step
from workbench.commands import RequestSlots
from workbench.events import LaunchRequested
from workbench.feed import Cursor
from workbench.policy.placement import Granted, Refused, Waiting
from workbench.pool.messages import PROTOCOL, Hello
from workbench.runner.live import LiveJob, Ring
from workbench.runner.slots import SlotTable
from workbench.spec import JobSpec
from workbench.store.jobfile import JobFile
from workbench.telemetry import OutputWritten, StepsTaken

SPECS = {"a": JobSpec(entrypoint="t.py", nproc_per_node=3), "b": JobSpec(entrypoint="t.py", nproc_per_node=2)}


def _table(slots: int = 4) -> SlotTable:
    table = SlotTable()
    assert table.join("w1", Hello(protocol=PROTOCOL, host="h", pid=1, slots=slots))
    return table


def _dispatch(table: SlotTable) -> dict[str, object]:
    return dict(table.dispatch(lambda job_id: SPECS[job_id]))


def test_a_waiting_job_says_why_once_and_gets_what_is_released() -> None:
    table = _table()
    table.enqueue(RequestSlots(job_id="a"))
    table.enqueue(RequestSlots(job_id="b"))
    decisions = _dispatch(table)
    assert isinstance(decisions["a"], Granted)
    assert decisions["b"] == Waiting("waiting: needs 2 slots, 1 free")
    assert _dispatch(table) == {}
    assert table.waiting() == (("b", "waiting: needs 2 slots, 1 free"),)
    table.release("a")
    assert isinstance(_dispatch(table)["b"], Granted)
    assert [worker.free for worker in table.status()] == [2]


def test_a_restarting_job_goes_first() -> None:
    table = _table(3)
    table.enqueue(RequestSlots(job_id="a"))
    _dispatch(table)
    table.enqueue(RequestSlots(job_id="b"))
    table.enqueue(RequestSlots(job_id="a"))
    decisions = _dispatch(table)
    assert isinstance(decisions["a"], Granted)
    assert isinstance(decisions["b"], Waiting)


def test_a_worker_that_says_the_same_again_is_no_news_and_one_that_left_has_no_slots() -> None:
    table = _table()
    assert not table.join("w1", Hello(protocol=PROTOCOL, host="h", pid=1, slots=4))
    table.leave("w1")
    assert table.free() == ()
    table.enqueue(RequestSlots(job_id="a"))
    assert isinstance(_dispatch(table)["a"], Waiting)


def test_a_running_job_is_offered_slots_where_ranks_start_at_once() -> None:
    table = _table(2)
    table.enqueue(RequestSlots(job_id="b"))
    assert isinstance(_dispatch(table)["b"], Granted)
    cold = Hello(protocol=PROTOCOL, host="h", pid=2, slots=1, is_warm=False)
    assert table.join("w2", cold)
    assert table.could_have("b", SPECS["a"]) == 0
    assert table.join("w2", replace(cold, is_warm=True)), "this is news"
    assert table.could_have("b", SPECS["a"]) == 3


def test_no_slot_is_granted_on_a_host_that_may_be_cut_off_until_it_is_heard_of_again() -> None:
    silent = {"w1"}
    table = SlotTable(silent.__contains__)
    hello = Hello(protocol=PROTOCOL, host="h", pid=1, slots=4)
    table.join("w1", hello)
    table.enqueue(RequestSlots(job_id="a"))
    assert isinstance(_dispatch(table)["a"], Waiting)
    silent.clear()
    assert table.join("w1", hello), "this is news"
    assert isinstance(_dispatch(table)["a"], Granted)
    assert not table.join("w1", hello)


def test_files_of_a_worker_that_is_gone_are_asked_for_on_its_host_first() -> None:
    table = SlotTable()
    assert table.near("w3", "g") is None
    for worker, host in (("w1", "h"), ("w2", "g"), ("w3", "g")):
        table.join(worker, Hello(protocol=PROTOCOL, host=host, pid=1, slots=1))
    assert table.near("w3", "g") == "w3"
    table.leave("w3")
    assert table.near("w3", "g") == "w2"
    assert table.near("w9", "elsewhere") == "w1"


def test_what_can_never_run_leaves_the_queue() -> None:
    table = _table(2)
    table.enqueue(RequestSlots(job_id="a"))
    assert isinstance(_dispatch(table)["a"], Refused)
    assert table.waiting() == ()


def test_a_ring_is_bounded_by_bytes_and_counts_what_fell_out() -> None:
    ring = Ring[str](10, len)
    for word in ("aaaa", "bbbb", "cccc"):
        ring.add(word)
    assert (ring.last, ring.lost) == (3, 4)
    assert list(ring.since(0)) == ["bbbb", "cccc"]
    assert list(ring.since(2)) == ["cccc"]
    assert list(ring.since(3)) == []
    ring.add("d" * 50)
    assert list(ring.since(0)) == ["d" * 50], "the newest stays, however large"


def test_many_ranks_have_a_past_that_is_coarse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is opened late shows ranks over time from the job's beginning."""
    ranks, seconds, start = 20, 200, 1_790_000_400.0
    with JobFile.create(tmp_path / "job.sqlite", "a-1") as file:
        live = LiveJob("a-1", file)
        live.apply(LaunchRequested(time=start, job_id="a-1", spec=JobSpec(entrypoint="t.py", nproc_per_node=ranks)))
        for second in range(seconds):
            block = pack_step(StepRecord(second, start + second + 0.5, 1.0, *[0.1] * 6, 8.0, 0.0, 0.5))
            for rank in range(ranks):
                file.add_steps(StepsTaken(job_id="a-1", restart_count=0, rank=rank, block=block))
        file.flush(start + seconds + 0.7)

        def widths(at: float) -> set[float]:
            first = live.update(Cursor(), start + at)
            for rank in (0, ranks - 1):
                mine = sorted((b.start, b.start + b.width, b.steps) for b in first.buckets if b.rank == rank)
                assert sum(steps for *_, steps in mine) == seconds and mine[0][0] == start, "each step once"
                assert all(one[1] <= next_[0] for one, next_ in pairwise(mine))
            assert live.update(first.cursor, start + at + 1).buckets == ()
            return {bucket.width for bucket in first.buckets}

        assert widths(seconds + 0.7) == {1.0}
        monkeypatch.setattr("workbench.runner.live.PAST", 500)
        assert widths(seconds + 0.7) == {1.0, 10.0}
        assert widths(seconds + 5.3) == {1.0, 5.0, 10.0}, "what is left of the last ten seconds"


def test_who_followed_a_job_follows_it_where_it_is_now(tmp_path: Path) -> None:
    """What is on record is not told again; what is counted in memory begins anew, and is told from there."""
    path, spec = tmp_path / "job.sqlite", JobSpec(entrypoint="t.py", nproc_per_node=1)

    def written(text: str) -> OutputWritten:
        return OutputWritten(job_id="a", rank=0, time=1.0, text=text, stream="stdout")

    with JobFile.create(path, "a") as file:
        live = LiveJob("a", file)
        live.apply(LaunchRequested(time=1.0, job_id="a", spec=spec))
        for text in ("one", "two", "three"):
            live.report(written(text))
        cursor = live.update(Cursor(), 2.0).cursor
    with JobFile.open(path) as file:
        again = LiveJob("a", file)
        again.restore()
        again.report(written("four"))
        update = again.update(cursor, 3.0)
        assert update.events == ()
        assert [chunk.text for chunk in update.output] == ["four"]
        assert again.update(update.cursor, 4.0).output == ()

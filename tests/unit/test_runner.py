"""Who holds which slots, and what stays in memory of a job."""

from __future__ import annotations

from msgspec.structs import replace

from workbench.commands import RequestSlots
from workbench.policy.placement import Granted, Refused, Waiting
from workbench.pool.messages import PROTOCOL, Hello
from workbench.runner.live import Ring
from workbench.runner.slots import SlotTable
from workbench.spec import JobSpec

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

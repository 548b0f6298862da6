"""Whom the evidence blames, in which words; and whom it does not."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.evidence import ChildEvidence, Entered, GroupEvidence, RankEvidence
from workbench.policy.diagnosis import Verdict, as_stall, diagnose
from workbench.policy.stacks import WHOLE, fold
from workbench.state import StallKind

AR, BC = ("all_reduce", 8, "float32"), ("broadcast", 8, "float32")


def group(*entered: tuple[Any, ...], done: int | None = None, name: str = "0", ranks: Any = (0, 1)) -> GroupEvidence:
    """A group in which these collectives were entered, from number 1 on; `done` of them are over."""
    last = tuple(Entered(seq, *one) for seq, one in enumerate(entered, 1))
    completed = len(last) - 1 if done is None else done
    return GroupEvidence(name=name, ranks=ranks, entered=len(last), completed=completed, last=last)


def rank(number: int, *groups: GroupEvidence, **fields: Any) -> RankEvidence:
    base = {"step": 7, "age": 2.0, "state": "S", "activity": "RUNNING", "answered": True, "pid": 100 + number}
    return RankEvidence(rank=number, groups=groups, **{**base, "where": f"train.py:4{number} in main", **fields})


def found(*ranks: RankEvidence, **options: Any) -> Verdict:
    verdict = diagnose(ranks, limit=1.5, **options)
    assert verdict is not None
    return verdict


def test_a_stopped_rank() -> None:
    verdict = found(rank(0, group(AR, AR)), rank(1, state="T", answered=None))
    assert (verdict.kind, verdict.culprits) == (StallKind.STOPPED, (1,))
    assert verdict.reason == (
        "rank 1 stopped by a signal (SIGSTOP) at step 7; rank 0 waits in all_reduce[8 float32] (collective 2)"
    )


@pytest.mark.parametrize(
    ("fields", "kind", "word"),
    [
        ({}, StallKind.ABSENT, "it stands at train.py:41 in main"),
        ({"activity": "DATA"}, StallKind.DATA, "its data loader"),
        (
            {"stack": 'Thread 1 (idle): "MainThread"\n    x (torch/utils/data/dataloader.py:1)'},
            StallKind.DATA,
            "loader",
        ),
        ({"answered": False, "state": "R"}, StallKind.BUSY, "lets no other thread run"),
        ({"state": "R", "cpu": 98.0}, StallKind.BUSY, "computes without getting on"),
        ({"state": "D"}, StallKind.ABSENT, "disk"),
        ({"activity": "EXITING"}, StallKind.RETURNED, "its program has ended"),
        ({"activity": "IDLE"}, StallKind.RETURNED, "its cell has ended"),
    ],
)
def test_a_rank_that_did_not_enter_is_blamed_for_what_it_does_instead(
    fields: dict[str, Any], kind: StallKind, word: str
) -> None:
    verdict = found(rank(0, group(AR, AR)), rank(1, group(AR, done=1), **fields))
    assert (verdict.kind, verdict.culprits) == (kind, (1,))
    assert "rank 1 did not enter all_reduce[8 float32] (collective 2) at step 7" in verdict.reason
    assert word in verdict.reason
    assert (verdict.collective, verdict.seq) == ("all_reduce[8 float32]", 2)
    stall = as_stall(verdict, [rank(1)], since=5.0)
    assert (stall.where, stall.step, stall.since) == ("train.py:41 in main", 7, 5.0)


def test_a_rank_that_cannot_answer_is_told_from_the_others_of_its_group() -> None:
    members = (0, 1, 2)
    first, second = (rank(n, group(AR, AR, AR, ranks=members)) for n in (0, 1))
    assert found(first, second, rank(2, answered=False, state="R")).culprits == (2,)


def test_the_loaders_worker_is_where_to_look() -> None:
    child = ChildEvidence(pid=9, state="T", where="data.py:3 in __getitem__")
    verdict = found(rank(0, group(AR, AR)), rank(1, group(AR, done=1), activity="DATA", children=(child,)))
    assert (verdict.kind, verdict.culprits) == (StallKind.DATA, (1,))
    assert "worker process 9 is stopped" in verdict.reason
    assert (
        as_stall(verdict, [rank(1, activity="DATA", children=(child,))], since=0.0).where == "data.py:3 in __getitem__"
    )


def test_the_majority_is_right() -> None:
    members = (0, 1, 2)
    odd = rank(1, group(AR, BC, ranks=members))
    verdict = found(rank(0, group(AR, AR, ranks=members)), odd, rank(2, group(AR, AR, ranks=members)))
    assert (verdict.kind, verdict.culprits) == (StallKind.MISMATCH, (1,))
    assert verdict.reason == (
        "rank 1 entered broadcast[8 float32], the others entered all_reduce[8 float32] (collective 2), "
        "train.py:41 in main"
    )
    assert "rank 1 gave broadcast[8 float32] as collective 2, train.py:41 in main" in verdict.evidence


def test_of_two_that_disagree_neither_is_blamed() -> None:
    verdict = found(rank(0, group(AR, AR)), rank(1, group(AR, ("all_reduce", 9, "float32"))))
    assert (verdict.kind, verdict.culprits, verdict.suspects) == (StallKind.MISMATCH, (), (0, 1))
    assert "all_reduce[8 float32] by rank 0 and all_reduce[9 float32] by rank 1" in verdict.reason
    assert "cannot be told which of the two" in verdict.reason
    assert len(verdict.evidence) == 2


def test_a_mismatch_is_told_by_black_boxes_where_ranks_do_not_answer() -> None:
    boxes = {"activity": "COLLECTIVE", "collective_seq": 4}
    ranks = [rank(n, collective="all_reduce[8 float32]", **boxes) for n in (0, 2)]
    verdict = found(*ranks, rank(1, collective="barrier", **boxes))
    assert (verdict.kind, verdict.culprits, verdict.seq) == (StallKind.MISMATCH, (1,), 4)


def test_one_that_skipped_a_collective_is_told_from_one_that_entered_another() -> None:
    members, rest = (0, 1, 2), (BC, AR, AR)
    right = [rank(n, group(AR, *rest, done=1, ranks=members)) for n in (0, 2)]
    verdict = found(*right, rank(1, group(*rest, done=0, ranks=members)))
    assert (verdict.kind, verdict.culprits) == (StallKind.ABSENT, (1,))
    assert "rank 1 skipped all_reduce[8 float32]" in verdict.reason


def test_what_may_differ_between_ranks_is_no_mismatch() -> None:
    uneven = [rank(n, group(AR, ("all_to_all", 8 + n, "float32"))) for n in (0, 1)]
    assert found(*uneven).kind is StallKind.UNKNOWN


def test_before_the_process_group() -> None:
    joining = rank(0, activity="COLLECTIVE", collective="init_process_group", collective_seq=1)
    verdict = found(joining, rank(1))
    assert (verdict.kind, verdict.culprits) == (StallKind.NOT_STARTED, (1,))
    assert verdict.reason == (
        "rank 1 did not join the process group at train.py:41 in main, rank 0 waits in init_process_group"
    )


def test_one_that_ended_while_the_others_go_on() -> None:
    verdict = found(rank(0, group(AR, AR)), finished=(1,))
    assert (verdict.kind, verdict.culprits) == (StallKind.RETURNED, (1,))
    assert verdict.reason.startswith("rank 1 ended while the others go on")


def test_two_groups_that_wait_for_each_other() -> None:
    ranks = [
        rank(0, group(AR, name="1"), group(name="2", done=0)),
        rank(1, group(name="1", done=0), group(AR, name="2")),
    ]
    verdict = found(*ranks)
    assert (verdict.kind, verdict.culprits) == (StallKind.DEADLOCK, (0, 1))
    assert "each waits for the other" in verdict.reason


def test_who_is_compared_already_has_skipped_a_collective_of_those_who_still_reduce() -> None:
    checking = "main\n    agree (workbench/training/consistency/room.py:9)\n    main (train.py:4)"
    ranks = [
        rank(0, group(AR, AR, name="1"), group(name="2", done=0)),
        rank(1, group(AR, name="1", done=1), group(AR, name="2"), stack=checking),
    ]
    verdict = found(*ranks)
    assert (verdict.kind, verdict.culprits) == (StallKind.ABSENT, (1,))
    assert verdict.reason.startswith("rank 1 skipped a collective since replicas were last compared")
    assert "rank 0 waits in all_reduce[8 float32] (collective 2 of" in verdict.reason and verdict.seq == 2
    both = [ranks[0], rank(1, group(AR, name="1", done=1), group(AR, name="2"))]
    assert found(*both).kind is StallKind.DEADLOCK, "of the program's own groups"


def test_alone() -> None:
    verdict = found(rank(0, activity="DATA"))
    assert (verdict.kind, verdict.culprits) == (StallKind.DATA, (0,))
    assert found(rank(0)).kind is StallKind.UNKNOWN
    assert found(rank(0), rank(1, age=0.1)).culprits == (0,), "ranks that do not wait for each other"


def test_point_to_point() -> None:
    receiving = rank(0, activity="COLLECTIVE", collective="recv[4 float32]")
    verdict = found(receiving, rank(1))
    assert (verdict.kind, verdict.culprits, verdict.collective) == (StallKind.ABSENT, (1,), "recv[4 float32]")
    assert "rank 0 waits in recv[4 float32]" in verdict.reason
    verdict = found(receiving, rank(1, activity="COLLECTIVE", collective="send[4 float32]"))
    assert (verdict.kind, verdict.culprits) == (StallKind.DEADLOCK, (0, 1)), "no number, so no mismatch"


def test_all_inside_the_same() -> None:
    verdict = found(rank(0, group(AR, AR)), rank(1, group(AR, AR)))
    assert (verdict.kind, verdict.culprits) == (StallKind.UNKNOWN, ())
    assert "all ranks are in all_reduce[8 float32] (collective 2)" in verdict.reason


def test_a_host_that_does_not_answer_is_said_to() -> None:
    verdict = found(rank(0, group(AR, AR)), RankEvidence(rank=1, missing="worker w did not answer within 1 s"))
    assert verdict.culprits == (1,)
    assert "did not answer" in verdict.reason


def test_whoever_gets_on_or_may_take_long_is_waited_for() -> None:
    waiting = rank(0, group(AR, AR))
    assert diagnose([waiting, rank(1, group(AR, done=1), age=0.2)], limit=1.5) is None
    assert diagnose([rank(0, group(AR, AR), age=40.0), rank(1, group(AR, done=1), age=0.2)], limit=1.5) is not None
    compiling = rank(1, group(AR, done=1), stack='Thread 1 (active): "MainThread"\n    f (torch/_inductor/x.py:1)')
    assert diagnose([waiting, compiling], limit=1.5) is None
    assert diagnose([rank(0, age=0.5)], limit=1.5) is None
    assert diagnose([rank(0)], limit=1.5, blamed_only=True) is not None
    assert diagnose([rank(0, group(AR, AR)), rank(1, group(AR, AR))], limit=1.5, blamed_only=True) is None


def test_equal_stacks_are_told_once_the_culprits_first_and_within_bounds() -> None:
    same = 'Thread {} (idle): "MainThread"\n    wait (torch/x.py:1)'
    ranks = [rank(n, stack=same.format(n)) for n in range(8)]
    ranks[5] = rank(5, stack='Thread 5 (idle): "MainThread"\n    load (train.py:4)')
    groups = fold(ranks, (5,))
    assert [one.ranks for one in groups] == [(5,), (0, 1, 2, 3, 4, 6, 7)]
    many = fold([rank(n, stack=f"{n}" * 9000) for n in range(100)], ())
    assert sum(len(one.text) for one in many) <= WHOLE

"""Labels and bounds of ranks' output."""

from __future__ import annotations

from workbench.verbs.lines import PATIENCE, Bound, Labeller, joined, name_ranks


def test_words_of_two_ranks_never_run_together() -> None:
    labeller = Labeller()
    assert labeller.add(0, "step 1", 0.0) == []
    assert labeller.add(1, "step 1\nst", 0.0) == [(False, "[rank 1] step 1\n")]
    assert labeller.add(0, " loss 2\n", 0.0) == [(False, "[rank 0] step 1 loss 2\n")]
    assert labeller.add(1, "ep 2\n\n", 0.0) == [(False, "[rank 1] step 2\n"), (False, "[rank 1] \n")]
    assert labeller.overdue(9.0) == []


def test_stdout_and_stderr_are_apart() -> None:
    labeller = Labeller()
    labeller.add(0, "out", 0.0)
    assert labeller.add(0, "err\n", 0.0, is_error=True) == [(True, "[rank 0] err\n")]
    assert labeller.overdue(0.0, patience=0.0) == [(False, "[rank 0] out\n")]


def test_an_unfinished_line_is_held_back_for_a_while() -> None:
    labeller = Labeller()
    labeller.add(0, "waiting", 5.0)
    labeller.add(0, ".", 5.5)
    assert labeller.overdue(5.0 + PATIENCE / 2) == []
    assert labeller.overdue(5.0 + PATIENCE) == [(False, "[rank 0] waiting.\n")]
    assert labeller.overdue(99.0) == []


def test_a_progress_bar_is_its_last_state() -> None:
    labeller = Labeller()
    for percent in range(100):
        assert labeller.add(0, f"\r{percent} %", 0.0) == []
    assert len(labeller.open[(0, False)].text) < 10
    assert labeller.add(0, "\r100 %\r\n", 0.0) == [(False, "[rank 0] 100 %\n")]


def test_a_carriage_return_at_the_end_of_a_chunk_may_be_half_a_line_end() -> None:
    labeller = Labeller()
    assert labeller.add(0, "one\r", 0.0) == []
    assert labeller.add(0, "\ntwo\r\n", 0.0) == [(False, "[rank 0] one\n"), (False, "[rank 0] two\n")]


def test_head_passes_and_tail_is_kept() -> None:
    bound = Bound(head=50, tail=30)
    lines = [(False, f"line {k:04}\n") for k in range(100)]
    through = [line for part in lines for line in bound.let([part])]
    assert through == lines[:5]
    kept = bound.rest()
    assert kept == lines[-3:]
    assert sum(len(text) for _, text in through + kept) + bound.left_out == 1000
    assert bound.rest() == []


def test_one_endless_line_is_bounded_too() -> None:
    bound = Bound(head=0, tail=10)
    bound.let([(False, "x" * 1000)])
    assert bound.rest() == [(False, "x" * 10)]
    assert bound.left_out == 990
    first = Bound(head=10, tail=10)
    (shown,) = first.let([(False, "y" * 9999)])
    assert shown == (False, "y" * 4096 + "…\n")
    assert first.is_full
    assert first.rest() == [(False, "y" * 10)]
    assert first.left_out == 9999 - 4096 - 10


def test_neighbours_are_written_at_once() -> None:
    assert joined([(False, "a"), (False, "b"), (True, "c"), (False, "d")]) == [(False, "ab"), (True, "c"), (False, "d")]


def test_ranks_are_named_shortly() -> None:
    assert name_ranks([1]) == "rank 1"
    assert name_ranks([0, 1]) == "ranks 0–1"
    assert name_ranks([7, *range(3)]) == "ranks 0–2, 7"
    assert name_ranks([0, 1, 5, 7]) == "ranks 0, 1, 5, 7"

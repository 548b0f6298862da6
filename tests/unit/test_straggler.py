"""Who is named as keeping the others waiting, and who is not."""

from __future__ import annotations

import random

from workbench.policy.straggler import HELD, Marks, advance

ONE = dict.fromkeys(range(8), "a")


def run(windows: list[dict[int, float]], hosts: dict[int, str] = ONE, step: float = 0.1) -> tuple[list, list, Marks]:  # type: ignore[type-arg]
    marks, told, back = Marks(), [], []
    for own in windows:
        marks, named, gone = advance(marks, own, step, hosts)
        told += named
        back += gone
    return told, back, marks


def test_a_rank_that_stays_three_times_slower_is_named_once_and_taken_back() -> None:
    slow, fine = {0: 0.02, 1: 0.07}, {0: 0.02, 1: 0.021}
    told, back, _ = run([slow] * (HELD - 1))
    assert not told
    told, back, _ = run([slow] * 20)
    assert [(one.rank, round(one.score, 1)) for one in told] == [(1, 3.5)]
    assert told[0].reason == "rank 1 takes 3.5 times as long as the others for its own part of a step"
    told, back, marks = run([slow] * 20 + [fine] * HELD)
    assert (len(told), back, marks.named) == (1, [1], ())


def test_a_moments_noise_names_nobody() -> None:
    rng = random.Random(3)
    noisy = [{rank: 0.02 * (4 if rng.random() < 0.3 else 1) for rank in range(4)} for _ in range(500)]
    assert not run(noisy)[0]
    assert not run([{0: 0.02, 1: 0.04}] * 50)[0], "half a core is not a third"
    assert not run([{0: 0.0002, 1: 0.0015}] * 50, step=0.002)[0], "differences of a scheduler's size"


def test_all_ranks_of_a_host_are_named_and_the_host_is() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    told, _, _ = run([{0: 0.02, 1: 0.02, 2: 0.08, 3: 0.08}] * 10, hosts)
    assert [one.rank for one in told] == [2, 3]
    assert "so do all ranks of host b" in told[0].reason

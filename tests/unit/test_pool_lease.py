"""Silence is counted only while somebody could have been heard."""

from __future__ import annotations

from workbench.pool.lease import LEASE, LOOK_EVERY, LOST_AFTER, Silence


def test_who_is_not_heard_of_is_named_and_who_is_heard_again_is_not() -> None:
    silence = Silence[str](100.0)
    silence.heard("a")
    silence.heard("b")
    for second in range(1, 8):
        silence.heard("b")
        assert silence.look(100.0 + second, 7.0) == []
    assert silence.look(108.0, 7.0) == ["a"]
    silence.heard("a")
    assert silence.look(109.0, 7.0) == []
    silence.forget("a")
    assert all(silence.look(110.0 + second, 7.0) == [] for second in range(4))
    assert silence.look(114.0, 7.0) == ["b"]


def test_a_machine_that_slept_an_hour_gives_nobody_up() -> None:
    silence = Silence[str](0.0)
    silence.heard("a")
    assert silence.look(3600.0, LEASE) == []
    assert silence.look(3599.0, LEASE) == [], "a clock that goes back adds nothing"


def test_a_cut_off_host_ends_its_ranks_before_they_are_started_elsewhere() -> None:
    assert LEASE + 2 * LOOK_EVERY < LOST_AFTER

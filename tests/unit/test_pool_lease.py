"""Silence is counted only while somebody could have been heard, and of two sides the worker's is over first."""

from __future__ import annotations

import itertools

from workbench.pool.lease import HELLO_EVERY, LEASE, LOOK_EVERY, LOST_AFTER, Lease, Silence


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


def _advance(lease: Lease, start: float, seconds: float) -> float:
    """Look as often as a worker does, until the lease runs out or the time is over; returns when that was."""
    for count in itertools.count(1):
        now = start + count * LOOK_EVERY
        lease.look(now)
        if lease.is_ending or now >= start + seconds:
            return now
    raise AssertionError


def test_a_cut_off_host_ends_its_ranks_before_they_are_started_elsewhere() -> None:
    """Whichever way packets vanish: only what the scheduler is known to have heard counts."""
    for heard, lag in itertools.product((0.0, 0.3, HELLO_EVERY), (0.0, 0.9)):
        lease = Lease(0.0)
        lease.look(heard)
        lease.answered(0, lease.stamp)
        # The scheduler heard this hello `lag` s later; its answers to others may have been lost, or may yet come.
        over = _advance(lease, heard, 60.0)
        assert lease.is_over
        assert over + 2 * LOOK_EVERY < heard + lag + LOST_AFTER


def test_a_host_without_a_scheduler_elsewhere_has_no_lease() -> None:
    lease = Lease(0.0)
    _advance(lease, 0.0, 100.0)
    assert not lease.is_over


def test_only_a_hello_of_the_next_epoch_renews_a_lease() -> None:
    lease = Lease(0.0)
    lease.answered(0, lease.stamp)
    now = _advance(lease, 0.0, 100.0)
    lease.answered(0, lease.stamp)
    assert lease.is_ending, "its ranks may still be there"
    lease.ended()
    lease.answered(0, lease.stamp)
    assert (lease.is_ending, lease.is_over, lease.epoch) == (False, True, 1)
    lease.answered(1, lease.stamp)
    assert not lease.is_over
    _advance(lease, now, LEASE - 1.0)
    assert not lease.is_over


def test_a_host_that_was_given_up_and_does_not_know_is_told_so_once() -> None:
    lease = Lease(0.0)
    lease.answered(0, lease.stamp)
    lease.given_up(0)
    lease.look(0.1)
    assert lease.is_ending
    lease.ended()
    lease.given_up(0)  # said again, before the next hello had come
    lease.answered(1, lease.stamp)
    lease.look(0.2)
    assert not lease.is_over

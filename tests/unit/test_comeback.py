"""When a pool comes back, and what its jobs are told of it."""

from __future__ import annotations

from workbench.policy.comeback import MOST, WITHIN, Comeback, died_again, loss_text


def test_only_deaths_of_late_count() -> None:
    deaths: tuple[float, ...] = ()
    for time in (1000.0, 1010.0, 1020.0):
        deaths = died_again(deaths, time)
    assert deaths == (1000.0, 1010.0, 1020.0)
    assert died_again(deaths, 1005.0 + WITHIN) == (1010.0, 1020.0, 1005.0 + WITHIN)


def test_it_goes_on_some_times_and_then_no_more() -> None:
    assert not Comeback().goes_on and not Comeback().is_given_up, "somebody has started it"
    for count in range(1, MOST + 1):
        assert Comeback(deaths=(1.0,) * count).goes_on
    last = Comeback(deaths=(1.0,) * (MOST + 1))
    assert last.is_given_up and not last.goes_on


def test_jobs_are_told_how_often_and_what_is_done() -> None:
    went = "the pool's scheduler went away at step 7; the ranks ended with it"
    assert loss_text(None, 7) == loss_text(Comeback(), 7) == went
    assert loss_text(Comeback(deaths=(1.0,)), 0) == "the pool's scheduler died; the ranks ended with it"
    assert loss_text(Comeback(deaths=(1.0, 2.0)), 7) == (
        "the pool's scheduler died after step 7, for the 2nd time within 5 minutes; the ranks ended with it"
    )
    assert loss_text(Comeback(deaths=(1.0,) * 4), 7) == (
        "the pool's scheduler died after step 7, for the 4th time within 5 minutes, and is not started again; "
        "the ranks ended with it"
    )

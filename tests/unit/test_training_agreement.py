"""Which copy in memory is gone on from, and how copies are kept: plain values, and the words for it."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.training.agreement import Choice, Copy, Need, Place, choose, plan
from workbench.training.pace import Pace, every
from workbench.training.slot import Kind

ONE_HOST = Place(hosts=(0, 0), can_send=True)
TWO_HOSTS = Place(hosts=(0, 1), can_send=True)


def pair(step: int, generation: int = 0, **fields: Any) -> list[Copy]:
    """What two ranks on one host leave: the first has the state."""
    first = Copy(generation, step, step, 0, 2, Kind.WHOLE, 0)
    return [first._replace(**fields), first._replace(**{"rank": 1, "kind": Kind.EXTRAS} | fields)]


def parts(step: int, hosts: tuple[int, ...] = (0, 0)) -> list[Copy]:
    return [Copy(0, step, step, rank, len(hosts), Kind.OWN, host) for rank, host in enumerate(hosts)]


def test_the_newest_step_that_all_have() -> None:
    copies = pair(40) + pair(41)[:1] + pair(39)[1:]
    choice, reason = choose(copies, ONE_HOST)
    assert choice == Choice(0, 40, 40, 2, Kind.WHOLE, (0,))
    assert reason == (
        "every rank has its copy of step 40; step 41 cannot be taken from memory: rank 1 left no whole copy of it"
    )


def test_copies_of_ranks_that_differed_are_not_gone_on_from() -> None:
    def marked(step: int, *marks: int) -> list[Copy]:
        return [copy._replace(mark=mark) for copy, mark in zip(pair(step), marks, strict=True)]

    choice, reason = choose([*marked(40, 7, 7), *marked(41, 7, 8)], ONE_HOST)
    assert choice is not None and choice.step == 40
    assert "step 41 cannot be taken from memory: the ranks' parameters were no longer the same" in reason
    choice, _ = choose([*marked(40, 7, 7), *marked(41, 7, 0)], ONE_HOST)
    assert choice is not None and choice.step == 41, "one of them does not know"


@pytest.mark.parametrize(("disk", "is_memory"), [(-1, True), (39, True), (40, True), (41, False)])
def test_the_newer_of_memory_and_disk(disk: int, is_memory: bool) -> None:
    choice, reason = choose(pair(40), ONE_HOST, disk)
    assert (choice is not None) is is_memory
    if not is_memory:
        assert reason == "step 40, in memory, is older than step 41 on disk"


def test_generations_are_not_mixed() -> None:
    choice, reason = choose([pair(41, 0)[0], pair(41, 1)[1]], ONE_HOST)
    assert choice is None
    assert reason == (
        "step 41 cannot be taken from memory: rank 0 left no whole copy of it; "
        "step 41 cannot be taken from memory: rank 1 left no whole copy of it"
    )


def test_a_later_generation_counts_more_than_a_later_step() -> None:
    """It had been resumed from an older checkpoint, by choice."""
    choice, _ = choose(pair(500, 0) + pair(101, 1), ONE_HOST)
    assert choice is not None
    assert (choice.generation, choice.step) == (1, 101)


def test_an_earlier_generation_serves_until_the_later_one_has_a_whole_copy() -> None:
    choice, _ = choose(pair(40, 0) + pair(41, 1)[:1], ONE_HOST)
    assert choice is not None
    assert (choice.generation, choice.step) == (0, 40)


def test_nothing_is_left() -> None:
    assert choose([], ONE_HOST) == (None, "no copy in memory is left")


def test_a_host_that_is_new_gets_it_from_one_that_has_it() -> None:
    choice, _ = choose(pair(40), TWO_HOSTS)
    assert choice is not None
    assert choice.hosts == (0,)
    choice, reason = choose(pair(40), TWO_HOSTS._replace(can_send=False))
    assert choice is None
    assert "the host of rank 1 has none, and there is no process group to send it over" in reason


def test_the_state_of_a_host_that_is_gone_is_on_the_other() -> None:
    both = [Copy(0, 40, 40, rank, 2, Kind.WHOLE, rank) for rank in range(2)]
    assert choose(both, TWO_HOSTS)[0] == Choice(0, 40, 40, 2, Kind.WHOLE, (0, 1))
    _, reason = choose(both[1:], Place((1, 1), can_send=True))
    assert reason == "step 40 cannot be taken from memory: rank 0 left no whole copy of it"


def shares(step: int, hosts: tuple[int, ...], parts: int = 2) -> list[Copy]:
    """What ranks leave that copy a state in parts, as many on each host."""
    return [Copy(0, step, step, n, len(hosts), Kind.WHOLE, host, n % parts, parts) for n, host in enumerate(hosts)]


def test_a_host_has_a_state_when_it_has_all_parts_of_it() -> None:
    choice, _ = choose(shares(40, (0, 0)), ONE_HOST)
    assert choice == Choice(0, 40, 40, 2, Kind.WHOLE, (0,))
    four = Place((0, 0, 2, 2), can_send=True)
    choice, _ = choose(shares(40, (0, 0, 2, 2)), four)
    assert choice is not None
    assert choice.hosts == (0, 2)
    apart = shares(41, (0, 0, 0, 2))  # the host of rank 2 has part 1 only
    choice, _ = choose(apart + shares(40, (0, 0, 2, 2)), four)
    assert choice is not None
    assert (choice.step, choice.hosts) == (41, (0,))


def test_a_part_that_is_missing_or_of_another_division_leaves_the_older_step() -> None:
    choice, reason = choose(shares(41, (0, 0))[:1] + shares(40, (0, 0)), ONE_HOST)
    assert choice is not None
    assert choice.step == 40
    assert "step 41 cannot be taken from memory: rank 1 left no whole copy of it" in reason
    first, second = shares(41, (0, 0))
    choice, reason = choose([first, second._replace(part=0), *shares(40, (0, 0))], ONE_HOST)
    assert choice is not None
    assert choice.step == 40
    assert "no host that has the state is left" in reason


def test_own_things_without_the_state_are_not_enough() -> None:
    _, reason = choose(pair(40, kind=Kind.EXTRAS), ONE_HOST)
    assert "no host that has the state is left" in reason


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        (ONE_HOST, ""),
        (Place((0,), can_send=True), "it is in 2 parts, one a rank, and there are 1 ranks now"),
        (TWO_HOSTS, "the part of rank 1 is on another host"),
    ],
)
def test_parts_go_back_to_their_ranks(place: Place, fault: str) -> None:
    choice, reason = choose(parts(40), place)
    assert (choice is None) is bool(fault)
    assert fault in reason


def test_what_is_the_same_everywhere_serves_any_world() -> None:
    for hosts in [(0,), (0, 0, 0), (0, 0, 0, 0)]:
        choice, _ = choose(pair(40), Place(hosts, can_send=True))
        assert choice is not None
        assert choice.world_size == 2


# --- how they are kept ------------------------------------------------------------------------------------------------


def need(host: int = 0, **fields: Any) -> Need:
    return Need(host, 100 * 2**20, 50 * 2**20, 1000 * 2**20, "same", is_replicated=True)._replace(**fields)


def test_replicas_are_kept_in_parts() -> None:
    assert plan([need()] * 10, 0.5)[:2] == (Kind.WHOLE, "")
    assert plan([need()] * 11, 0.5).fault


@pytest.mark.parametrize("odd", [{"layout": "other"}, {"is_replicated": False}])
def test_ranks_that_may_differ_keep_their_own(odd: dict[str, Any]) -> None:
    assert plan([need(), need(**odd)], 0.5)[:2] == (Kind.OWN, "")


def test_one_rank_has_everything() -> None:
    assert plan([need(is_replicated=False)], 0.5).kind is Kind.WHOLE


def test_copies_leave_half_of_the_free_memory() -> None:
    own = need(is_replicated=False)
    assert plan([own] * 5, 0.5).fault == ""
    assert plan([own] * 6, 0.5).fault == (
        "they would take 600 MiB on the host of rank 0, where 1000 MiB are free; at most 50% of that is used"
    )
    assert "rank 2" in plan([need(0), need(0), need(2, free=80 * 2**20)], 0.5).fault


# --- how often --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "step", "found"), [(0.003, 0.1, 1), (0.0031, 0.1, 2), (0.03, 0.1, 10), (0.0, 0.1, 1), (1.0, 0.0, 1)]
)
def test_a_copy_stays_within_its_share(cost: float, step: float, found: int) -> None:
    assert every(cost, step) == found


def test_the_pace_forgets_first_times() -> None:
    pace = Pace()
    assert pace.every() == 1
    for cost, step in [(5.0, 30.0), (0.009, 0.1), (0.009, 0.1)]:
        pace.took(cost)
        pace.stepped(step)
    assert pace.every() == 3

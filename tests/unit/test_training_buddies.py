"""Who keeps whose own things: always another host's rank, and nobody many more than others."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from workbench.training.buddies import FIRST, buddy, place
from workbench.training.slots import MOST


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_a_buddy_is_on_another_host(numbers: list[int]) -> None:
    hosts = [numbers.index(number) for number in numbers]  # a host is named by its lowest rank
    found = [buddy(rank, hosts) for rank in range(len(hosts))]
    if len(set(hosts)) == 1:
        assert found == list(range(len(hosts)))
        return
    assert all(hosts[one] != hosts[rank] for rank, one in enumerate(found))
    most = max(Counter(hosts).values())
    for one, wards in Counter(found).items():
        assert wards <= -(-most // hosts.count(hosts[one]))


def test_pairs_of_hosts_keep_each_others() -> None:
    assert [buddy(rank, (0, 0, 2, 2)) for rank in range(4)] == [2, 3, 0, 1]
    assert [buddy(rank, (0, 1, 2)) for rank in range(3)] == [1, 2, 0]


def test_the_number_of_a_slot_tells_whose_it_is() -> None:
    assert [place(number) for number in range(MOST)] == [None] * MOST
    numbers = [FIRST + MOST * ward + number for ward in range(3) for number in range(MOST)]
    assert [place(number) for number in numbers] == [(ward, number) for ward in range(3) for number in range(MOST)]

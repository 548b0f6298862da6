"""Which rows answer a question: choices over keys alone."""

from __future__ import annotations

import pytest

from workbench.store.coverage import TIERS, Key, Plan, choose, plan


def rows(width: float, start: float, stop: float, ranks: int = 1) -> list[Key]:
    return [Key(start + k * width, width, ranks) for k in range(round((stop - start) / width))]


def keys(*groups: list[Key]) -> list[Key]:
    return sorted(key for group in groups for key in group)


def covered(chosen: list[Key]) -> list[tuple[float, float]]:
    """Spans of time, neighbours joined; fails when two overlap."""
    spans: list[tuple[float, float]] = []
    for key in chosen:
        if spans and key.start < spans[-1][1]:
            raise AssertionError(f"{key} overlaps {spans[-1]}")
        if spans and spans[-1][1] == key.start:
            spans[-1] = (spans[-1][0], key.start + key.width)
        else:
            spans.append((key.start, key.start + key.width))
    return spans


WHOLE = keys(rows(1, 0, 185), rows(10, 0, 180), rows(60, 0, 180))


@pytest.mark.parametrize(("width", "count"), [(1, 185), (10, 18 + 5), (60, 3 + 5), (3600, 3 + 5)])
def test_the_widest_rows_up_to_what_is_asked_then_finer_ones(width: float, count: int) -> None:
    chosen = choose(WHOLE, width)
    assert len(chosen) == count and covered(chosen) == [(0, 185)]


def test_a_beginning_within_a_wide_row_takes_finer_ones_first() -> None:
    later = [key for key in WHOLE if key.start >= 47]
    chosen = choose(later, 60)
    assert covered(chosen) == [(47, 185)] and [key.width for key in chosen[:5]] == [1, 1, 1, 10, 60]


def test_where_fine_rows_are_gone_wider_ones_come() -> None:
    thinned = [key for key in WHOLE if key.width != 1 or key.start >= 120]
    chosen = choose(thinned, 1)
    assert covered(chosen) == [(0, 185)] and {key.width for key in chosen if key.start < 120} == {10}


def test_a_job_that_began_within_a_row_is_not_hidden_by_it() -> None:
    assert covered(choose(keys(rows(1, 3, 25), rows(10, 0, 20)), 1)) == [(3, 25)]
    assert covered(choose(keys(rows(1, 3, 25), rows(10, 0, 20)), 10)) == [(0, 25)]


def test_a_plan_keeps_to_its_number_and_the_newest_seconds_fine() -> None:
    many = [Key(key.start, key.width, 8) for key in WHOLE]
    found = plan(many, ranks=None, most=200)
    recent = [key for key in found.keys if key.start >= found.fine_from]
    older = {key.start // found.width for key in found.keys if key.start < found.fine_from}
    assert (found.fine_from, len(recent)) == (175, 10)
    assert (len(recent) + len(older)) * 8 <= 200 and covered(found.keys) == [(0, 185)]
    assert plan(many, ranks=1, most=200).width == 1.0


def test_one_of_many_ranks_does_not_cost_reading_all_of_them() -> None:
    hour = keys(rows(1, 0, 3600, 1024), rows(10, 0, 3600, 1024), rows(60, 0, 3600, 1024))
    found = plan(hour, ranks=1, most=5000)
    assert found.width == 10.0 and len(found.keys) * 1024 < 500_000 and covered(found.keys) == [(0, 3600)]


def test_a_plan_of_nothing_and_of_too_many_ranks() -> None:
    assert plan([], ranks=None, most=5).keys == []
    one: Plan = plan([Key(key.start, key.width, 1000) for key in WHOLE], ranks=None, most=10)
    assert one.width > TIERS[-1] and covered(one.keys) == [(0, 185)]

"""What the rows of all ranks say of what they read, and what it comes of."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from workbench.policy.data import RULES, DataCause, explain_data
from workbench.state import DataAbout, DataDoubt
from workbench.training.consistency.rows import NEVER, SKETCH, Row, Rows, numbers, oddities, row_of

RANKS = (0, 1, 2, 3)


def rows(**fields: list[Any]) -> list[Row]:
    """Of four ranks; a field's values by rank."""
    return [Row(**{name: values[rank] for name, values in fields.items()}) for rank in RANKS]


def abouts(some: list[Row]) -> dict[str, list[int]]:
    return {found["about"]: found["ranks"] for found, _ in oddities(some, RANKS)}


def marks(*values: int) -> tuple[int, ...]:
    return (*values, *[NEVER] * (SKETCH - len(values)))


@pytest.mark.parametrize(
    ("some", "told"),
    [
        (rows(content=[1, 2, 3, 4]), {}),
        (rows(content=[1, 2, 1, 4]), {"batch": [0, 2]}),
        (rows(content=[0, 0, 0, 0]), {}),
        (rows(content=[1] * 4, is_still=[1] * 4), {}),
        (rows(places=[4] * 4, place=[0, 1, 2, 3]), {}),
        (rows(places=[4] * 4, place=[0, 1, 1, 3]), {"places": [1, 2]}),
        (rows(places=[8] * 4, place=[0, 1, 2, 3]), {"places": [0]}),
        (rows(places=[-1] * 4), {}),
        (rows(is_dealt=[1] * 4, number=[1] * 4, first=[5, 6, 7, 8], before=[5, 6, 7, 8]), {"order": [0, 1, 2, 3]}),
        (rows(is_dealt=[0] * 4, number=[1] * 4, first=[5, 6, 7, 8], before=[5, 6, 7, 8]), {}),
        (rows(is_dealt=[1] * 4, number=[1] * 4, first=[5, 6, 7, 8], before=[1, 2, 3, 4]), {}),
        (rows(is_dealt=[1] * 4, epoch=[3, 3, 2, 3]), {"epochs": [2]}),
        (rows(is_dealt=[1] * 4, epoch=[3] * 4), {}),
        (rows(size=[8, 8, 8, 4]), {"sizes": [3]}),
        (rows(size=[30, 31, 31, 31]), {}),
        (rows(size=[0, 8, 8, 4]), {}),
        (rows(random=[9] * 4, drawn=[1] * 4), {"random": [0, 1, 2, 3]}),
        (rows(random=[9] * 4, drawn=[0] * 4), {}),
        (rows(random=[9, 8, 7, 6], drawn=[1] * 4), {}),
        (rows(seed=[5, 5, 6, 7]), {"random": [0, 1]}),
        (rows(taken=[99] * 4, sketch=[marks(*range(n, 64, 4)) for n in RANKS]), {}),
        (rows(taken=[99] * 4, sketch=[marks(*range(n * 4, n * 4 + 8)) for n in RANKS]), {"overlap": [0, 1, 2, 3]}),
        (rows(taken=[9] * 4, sketch=[marks(1, 2, 3)] * 4), {}),  # too few to say
    ],
)  # fmt: skip
def test_what_is_odd(some: list[Row], told: dict[str, list[int]]) -> None:
    assert abouts(some) == told


def test_who_reads_the_same_has_the_rest_in_common() -> None:
    some = rows(content=[1] * 4, random=[9] * 4, drawn=[1] * 4, places=[4] * 4, place=[0] * 4)
    assert list(abouts(some)) == ["batch"]


def test_each_kind_is_told_once_and_what_may_be_chance_when_it_is_seen_again() -> None:
    known, some = Rows(), rows(size=[8, 8, 8, 4])
    assert known.look(some, RANKS) == []
    assert [one["about"] for one in known.look(some, RANKS)] == ["sizes"]
    assert known.look(some, RANKS) == []
    other = Rows()
    assert other.look(some, RANKS) == []
    assert other.look(rows(size=[8] * 4), RANKS) == []
    assert other.look(some, RANKS) == []  # not twice in a row


def test_a_row_is_as_long_for_everybody_and_comes_back_as_it_was() -> None:
    full = Row(content=-5, size=3, is_dealt=True, sketch=marks(1, 2))
    assert len(numbers(full)) == len(numbers(Row()))
    assert row_of(numbers(full)) == full


def test_every_rule_can_decide() -> None:
    """None is hidden by the ones before it; every sentence has its words."""
    doubts = [
        DataDoubt(about=DataAbout.BATCH, is_drawn=True, ranks=(0, 1), of=2, sampler=1),
        DataDoubt(about=DataAbout.BATCH, ranks=(0, 1), of=2),
        DataDoubt(about=DataAbout.PLACES, ranks=(0,), of=2, places=4),
        DataDoubt(about=DataAbout.PLACES, ranks=(0, 1), of=2, places=2, place=0),
        DataDoubt(about=DataAbout.ORDER, ranks=(0, 1), of=2, number=1, epoch=0, is_same_epoch=True),
        DataDoubt(about=DataAbout.ORDER, ranks=(0, 1), of=2, number=1),
        DataDoubt(about=DataAbout.EPOCHS, ranks=(1,), of=2, epochs=(0, 1)),
        DataDoubt(about=DataAbout.OVERLAP, ranks=(0, 1), of=2, sampler=2, share=0.5),
        DataDoubt(about=DataAbout.OVERLAP, ranks=(0, 1), of=2, share=0.5),
        DataDoubt(about=DataAbout.SIZES, ranks=(1,), of=2, sizes=(4, 12)),
        DataDoubt(about=DataAbout.RANDOM, ranks=(0, 1), of=2, is_forward=True),
        DataDoubt(about=DataAbout.RANDOM, ranks=(0, 1), of=2),
    ]
    found = [explain_data(doubt, 3) for doubt in doubts]
    assert [rule.cause for rule in RULES] == list(DataCause)
    assert [one.cause for one in found] == [cause.value for cause in DataCause]
    assert all("{" not in one.symptom + one.advice + "".join(one.evidence) and one.evidence for one in found)


def test_what_a_rank_tells_is_what_the_record_takes() -> None:
    for some in (rows(content=[1, 1, 3, 4], first=[7, 7, 8, 9]), rows(size=[8, 8, 8, 4]), rows(seed=[5] * 4)):
        for found, _ in oddities(some, RANKS):
            assert msgspec.convert(found, DataDoubt).ranks

"""Ranks step together, copy, and are killed anywhere in that: what is gone on from is whole, one, and the newest."""

from __future__ import annotations

from typing import Final, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.training.agreement import Copy, Place, choose
from workbench.training.slot import Kind

RANKS: Final = st.integers(1, 5)


class Slots(NamedTuple):
    """The steps in one rank's two slots, as `(generation, step)`; None is torn, or was never written."""

    old: tuple[int, int] | None = None
    new: tuple[int, int] | None = None

    def taken(self, time: tuple[int, int]) -> Slots:
        return Slots(self.new, time)

    def torn(self) -> Slots:
        return Slots(None, self.new) if self.new else Slots()


def copies(ranks: list[Slots], kind: Kind) -> list[Copy]:
    size = len(ranks)
    return [
        Copy(*time, time[1], rank, size, kind if kind is Kind.OWN or rank == 0 else Kind.EXTRAS, 0)
        for rank, slots in enumerate(ranks)
        for time in slots
        if time is not None
    ]


def crash(ranks: list[Slots], time: tuple[int, int], progress: list[int]) -> list[Slots]:
    """While this copy was to be taken: 0 not begun, 1 torn, 2 whole, by rank."""
    acts = {0: lambda slots: slots, 1: Slots.torn, 2: lambda slots: slots.taken(time)}
    return [acts[done](slots) for slots, done in zip(ranks, progress, strict=True)]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), size=RANKS, kind=st.sampled_from([Kind.WHOLE, Kind.OWN]))
def test_generation_after_generation_at_most_one_copy_is_lost(data: st.DataObject, size: int, kind: Kind) -> None:
    ranks, step = [Slots()] * size, 0
    place = Place((0,) * size, can_send=False)
    for generation in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 3))):
            step += 1
            ranks = [slots.taken((generation, step)) for slots in ranks]
        progress = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
        ranks = crash(ranks, (generation, step + 1), progress)
        choice, reason = choose(copies(ranks, kind), place)
        if all(done == 2 for done in progress):
            step += 1
        assert (choice.step if choice else 0) == step, reason
        # the next generation goes on from it, in the same memory: all else is no copy any more
        chosen = (choice.generation, choice.step) if choice else None
        ranks = [Slots(None, chosen)] * size if chosen else [Slots()] * size


@settings(max_examples=300, deadline=None)
@given(
    found=st.lists(
        st.builds(
            Copy,
            generation=st.integers(0, 2),
            step=st.integers(0, 4),
            number=st.just(0),
            rank=st.integers(0, 2),
            world_size=st.just(3),
            kind=st.sampled_from(Kind),
            host=st.integers(0, 2),
            part=st.just(0),  # Hypothesis would make up the defaults of a named tuple, up to billions of parts
            parts=st.just(1),
        ).map(lambda copy: copy._replace(number=copy.step))
    ),
    hosts=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    can_send=st.booleans(),
    disk=st.integers(-1, 5),
)
def test_whatever_is_left_the_choice_can_be_carried_out(
    found: list[Copy], hosts: list[int], can_send: bool, disk: int
) -> None:
    place = Place(tuple(hosts), can_send)
    choice, reason = choose(found, place, disk)
    assert reason
    times = {(copy.generation, copy.step) for copy in found}
    if choice is None:
        return
    assert choice.step >= disk
    group = [copy for copy in found if (copy.generation, copy.step) == (choice.generation, choice.step)]
    assert {copy.rank for copy in group} == {0, 1, 2}, "every old rank's own things are there"
    if choice.kind is Kind.OWN:
        assert all((rank, host) in {(copy.rank, copy.host) for copy in group} for rank, host in enumerate(hosts))
    else:
        assert choice.hosts
        assert can_send or set(hosts) <= set(choice.hosts)
    for time in times:  # nothing newer was whole for all
        if time > (choice.generation, choice.step):
            newer = [copy for copy in found if (copy.generation, copy.step) == time]
            again, _ = choose(newer, place)
            assert again is None

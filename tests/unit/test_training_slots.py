"""A rank's slots: what is read is always a whole copy, the memory is used again, nothing keeps a descriptor."""

from __future__ import annotations

import collections
import gc
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench.training import descriptors, memory, packing, slot
from workbench.training.slot import Header, Kind
from workbench.training.slots import MOST, Slot, Slots, Who

WHO = Who(generation=0, rank=0, world_size=2)
WORDS = Header(Kind.WHOLE, 7, 1, 40, 41, 0, 2, slot.SIZE, 4, 0, 0x3B8BA7C7, 12.5)  # of the text b"text"


class Keeper:
    """Holds the descriptors that slots hand on, as an agent does."""

    def __init__(self) -> None:
        self.fds: dict[int, int] = {}

    def keep(self, number: int, fd: int) -> None:
        if (old := self.fds.get(number)) is not None:
            os.close(old)
        self.fds[number] = os.dup(fd)

    def copies(self) -> dict[int, Slot]:
        """What the next generation would find."""
        return {number: Slot.of(fd) for number, fd in self.fds.items()}


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    yield made
    for fd in made.fds.values():
        os.close(fd)


@pytest.fixture
def slots(keeper: Keeper) -> Slots:
    return Slots(WHO, keeper.keep, lambda: 2**30)


def state(number: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((3, 5), number), "bias": torch.full((5,), -number)}, "lr": number}


def written(slots: Slots, step: int, value: Any = None) -> Slot:
    made = slots.write(step, state(step) if value is None else value, Kind.WHOLE)
    assert made is not None
    return made


# --- the header -------------------------------------------------------------------------------------------------------


def test_a_header_is_read_as_it_was_written() -> None:
    buffer = memoryview(bytearray(slot.SIZE) + b"text")
    assert slot.read(buffer) is None
    WORDS.commit(buffer)
    assert slot.read(buffer) == WORDS


@pytest.mark.parametrize("old", [bytes(slot.SIZE), WORDS._replace(sequence=5, step=38).pack()])
def test_a_copy_cut_off_at_any_byte_of_its_header_is_none(old: bytes) -> None:
    """`commit` writes the header from its third word on, then the first word, then `complete`."""
    new = WORDS.pack()
    order = [*range(16, slot.SIZE), *range(8)]
    for done in range(len(order) + 1):
        buffer = bytearray(old + b"text")
        slot.begin(memoryview(buffer))
        for at in order[:done]:
            buffer[at] = new[at]
        assert slot.read(memoryview(buffer)) is None
    assert (new[8], new[9:16]) == (7, bytes(7))  # `complete` of a small number: one byte makes it
    buffer[8:16] = new[8:16]
    assert slot.read(memoryview(buffer)) == WORDS


@pytest.mark.parametrize("at", range(slot.SIZE + 4))
def test_no_changed_byte_of_header_or_text_goes_unseen(at: int) -> None:
    buffer = bytearray(slot.SIZE) + b"text"
    WORDS.commit(memoryview(buffer))
    buffer[at] ^= 0x10
    assert slot.read(memoryview(buffer)) is None


@pytest.mark.parametrize("size", [0, 8, slot.SIZE - 1, slot.SIZE, slot.SIZE + 3])
def test_memory_that_was_cut_short_holds_no_copy(size: int) -> None:
    buffer = bytearray(slot.SIZE) + b"text"
    WORDS.commit(memoryview(buffer))
    assert slot.read(memoryview(buffer[:size])) is None


def test_begin_takes_the_copy_away_at_once() -> None:
    buffer = memoryview(bytearray(slot.SIZE) + b"text")
    WORDS.commit(buffer)
    slot.begin(buffer)
    assert slot.read(buffer) is None


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_a_state_comes_back_as_it_was(slots: Slots, keeper: Keeper) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    value = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": torch.randn(3).to(torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "none": torch.empty(0, 4),
        "one": torch.tensor(3),
        "sparse": torch.eye(3).to_sparse(),
        "odd": (1, [math.inf, None], {3: "x"}, b"bytes"),
        "numpy": np.random.get_state(),
    }
    written(slots, 1, value)
    (copy,) = keeper.copies().values()
    found = copy.value({})
    assert type(found["model"]) is collections.OrderedDict
    assert_same(found, value)


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found.to_dense() if found.is_sparse else found, wanted.to_dense())
    elif isinstance(wanted, np.ndarray):
        np.testing.assert_array_equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, item in wanted.items():
            assert_same(found[key], item)
    elif isinstance(wanted, list | tuple):
        assert type(found) is type(wanted)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


def test_tensors_lie_in_the_slot_each_at_a_multiple_of_64(slots: Slots) -> None:
    copy = written(slots, 1)
    start, end = copy.memory.data_ptr(), copy.memory.data_ptr() + len(copy.memory)
    for tensor in copy.value()["model"].values():
        assert start <= tensor.data_ptr() < end
        assert (tensor.data_ptr() - start) % slot.ALIGNMENT == 0


def test_a_parameter_that_is_used_twice_is_still_one(slots: Slots) -> None:
    weight = torch.ones(3)
    found = written(slots, 1, {"in": weight, "out": weight}).value()
    assert found["in"].data_ptr() == found["out"].data_ptr()


def test_tensors_are_changed_wherever_they_are_and_nothing_else_is() -> None:
    value = {"a": [torch.ones(2), 3], "b": (torch.ones(1), "x"), "c": collections.OrderedDict(d=torch.ones(1))}
    doubled = packing.map_tensors(value, lambda tensor: tensor * 2)
    assert_same(
        doubled,
        {"a": [torch.full((2,), 2.0), 3], "b": (torch.full((1,), 2.0), "x"), "c": {"d": torch.full((1,), 2.0)}},
    )
    assert type(doubled["c"]) is collections.OrderedDict
    assert_same(value["a"][0], torch.ones(2))


def test_what_cannot_be_pickled_says_so_and_leaves_the_copies(slots: Slots, keeper: Keeper) -> None:
    written(slots, 1)
    with pytest.raises(Exception, match="pickle"):
        slots.write(2, {"loader": lambda: 3}, Kind.WHOLE)
    assert [copy.header.step for copy in keeper.copies().values() if copy.header] == [1]


# --- which is written -------------------------------------------------------------------------------------------------


def steps(keeper: Keeper) -> list[int]:
    return sorted(copy.header.step for copy in keeper.copies().values() if copy.header)


def test_two_slots_hold_the_last_two_steps(slots: Slots, keeper: Keeper) -> None:
    for step in range(1, 6):
        written(slots, step)
        assert steps(keeper) == ([step - 1, step] if step > 1 else [1])
    newest = slots.newest()
    assert newest is not None
    assert_same(newest.value(), state(5))


def test_the_copy_that_is_sure_stays_in_place_of_the_newest(slots: Slots, keeper: Keeper) -> None:
    first = written(slots, 1)
    written(slots, 2)
    for step in (3, 4, 5):
        slots.write(step, state(step), Kind.WHOLE, sure=first, mark=9)
        assert steps(keeper) == [1, step]
    newest = slots.newest()
    assert newest is not None and newest.header is not None and newest.header.mark == 9
    of_others = written(Slots(WHO, lambda number, fd: None, lambda: 2**30), 9)
    slots.write(6, state(6), Kind.WHOLE, sure=of_others)
    assert steps(keeper) == [5, 6], "what is no slot of these is nothing to keep"


def test_a_crash_in_the_middle_of_a_copy_keeps_the_one_before(slots: Slots, keeper: Keeper) -> None:
    for step in (1, 2):
        written(slots, step)
    oldest = min(slots.slots.values(), key=lambda one: one.header.step if one.header else 0)
    slot.begin(oldest.bytes)  # and no more: the rank is gone
    assert steps(keeper) == [2]


def test_a_held_copy_is_not_written_and_costs_a_third_slot(slots: Slots, keeper: Keeper) -> None:
    written(slots, 1)
    held = written(slots, 2)
    held.holders += 1
    for step in range(3, 7):
        written(slots, step)
        assert 2 in steps(keeper)
        assert_same(held.value(), state(2))
    assert len(slots.slots) == MOST
    held.holders -= 1
    written(slots, 7)
    assert steps(keeper) == [5, 6, 7]


def test_nothing_is_written_while_every_slot_is_held(slots: Slots, keeper: Keeper) -> None:
    for step in (1, 2, 3):
        written(slots, step).holders += 1
    assert slots.write(4, state(4), Kind.WHOLE) is None
    assert steps(keeper) == [1, 2, 3]


def test_the_same_tensors_are_copied_in_place(slots: Slots, keeper: Keeper) -> None:
    for step in (1, 2):
        written(slots, step)
    before = {number: one.memory.data_ptr() for number, one in slots.slots.items()}
    handed = dict(keeper.fds)
    for step in (3, 4, 5):
        written(slots, step, state(step) | {"note": "x" * 1000 * step})
    assert {number: one.memory.data_ptr() for number, one in slots.slots.items()} == before
    assert keeper.fds == handed


def test_a_state_that_has_grown_gets_other_memory(slots: Slots, keeper: Keeper) -> None:
    for step in (1, 2):
        written(slots, step)
    for step in (3, 4):
        written(slots, step, {"big": torch.full((100_000,), float(step))})
    assert steps(keeper) == [3, 4]


def test_no_more_memory_is_taken_than_may_be(keeper: Keeper) -> None:
    slots = Slots(WHO, keeper.keep, lambda: 2**20)
    for step in (1, 2):
        written(slots, step)
    with pytest.raises(MemoryError, match="4 MiB more are needed and 1 MiB may be used"):
        slots.write(3, {"big": torch.zeros(1_000_000)}, Kind.WHOLE)
    assert steps(keeper) == [1, 2]


def test_a_third_slot_is_gone_without_where_there_is_no_room(keeper: Keeper) -> None:
    room = 2**30
    slots = Slots(WHO, keeper.keep, lambda: room)
    for step in (1, 2):
        written(slots, step).holders += 1
    room = 0
    assert slots.write(3, state(3), Kind.WHOLE) is None
    assert steps(keeper) == [1, 2]


def test_the_next_generation_goes_on_in_the_same_memory(slots: Slots, keeper: Keeper) -> None:
    for step in (1, 2, 3):
        written(slots, step)
    later = Slots(WHO._replace(generation=1), keeper.keep, lambda: 2**30)
    for number, copy in keeper.copies().items():
        later.adopt(number, copy)
    assert later.find(3) is None  # it is not of this generation
    written(later, 4)
    assert steps(keeper) == [3, 4]
    found = later.find(4)
    assert found is not None
    assert found.header is not None
    assert (found.header.generation, found.header.sequence) == (1, 4)


# --- the memory -------------------------------------------------------------------------------------------------------


def test_no_descriptor_stays_open_and_none_is_low(slots: Slots) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    fd = memory.create(4096)
    assert fd >= descriptors.LOWEST
    assert os.get_inheritable(fd) is False
    tensor = memory.map_bytes(fd)
    os.close(fd)
    tensor[4095] = 3
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_mapping_lives_as_long_as_a_view_of_it() -> None:
    gc.collect()  # of other tests, whose failures' tracebacks hold slots
    before = maps()
    fd = memory.create(2**20)
    view = memory.map_bytes(fd)[4096:8192].view(torch.float32)
    view.fill_(2.5)
    assert os.pread(fd, 4, 4096) == np.float32(2.5).tobytes()
    assert maps() == before + 1
    del view
    assert maps() == before
    os.close(fd)


def test_slots_hold_no_memory_that_nobody_uses(slots: Slots, keeper: Keeper) -> None:
    for step in (1, 2):
        written(slots, step)
    gc.collect()
    before = maps()
    found = [copy.value({}) for copy in keeper.copies().values()]
    assert maps() == before + 2
    del found
    assert maps() == before  # without waiting for the garbage collector: it may be gigabytes


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("dtrain-snapshot")


def test_free_memory_is_the_machines_or_the_containers(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert memory._machine(tmp_path / "meminfo") == 2**21
    assert memory._machine(tmp_path / "none") == memory._container(tmp_path) == memory.NO_LIMIT
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert memory._container(tmp_path) == memory.NO_LIMIT
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory._container(tmp_path) == 900
    assert 0 < memory.free_bytes() < memory.NO_LIMIT

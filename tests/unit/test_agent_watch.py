"""A rank's age: counted in looks, whatever the clocks do in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from workbench import blackbox
from workbench.agent.watch import TICK, Pulse
from workbench.blackbox import Activity, Writer


@pytest.fixture
def box() -> bytearray:
    buffer = bytearray(blackbox.SIZE)
    blackbox.format_box(buffer)
    return buffer


def look(pulse: Pulse, box: bytearray, now: float) -> None:
    pulse.look(blackbox.fingerprint(box), blackbox.read_header(box), now)


def test_an_age_grows_while_nothing_changes_and_a_long_one_that_ended_is_told(box: bytearray) -> None:
    pulse, writer = Pulse(), Writer(box)
    for tick in range(11):
        look(pulse, box, tick * 0.1)
    assert pulse.age == pytest.approx(1.0)
    writer.now(1, Activity.DATA, 5.0)
    look(pulse, box, 1.1)
    assert pulse.age == 0.0
    assert (pytest.approx(1.1), "STARTING") == (pulse.gap, pulse.gap_in)
    writer.patience(1, 0.0)
    look(pulse, box, 1.2)
    assert pulse.gap == pytest.approx(1.1), "the longest is kept"
    for tick in range(20):
        look(pulse, box, 1.3 + tick * 0.1)
    writer.patience(0, 0.0)
    look(pulse, box, 3.3)
    assert pulse.gap_in == "EVALUATION"


def test_what_the_first_step_takes_is_told_from_what_later_ones_take(box: bytearray) -> None:
    pulse, writer = Pulse(), Writer(box)
    writer.now(0, Activity.BACKWARD, 1.0)
    for tick in range(5):
        look(pulse, box, tick * 0.1)
    writer.record(1, *[1.0] * 11)
    writer.now(1, Activity.BACKWARD, 1.0)
    look(pulse, box, 0.5)
    assert pulse.gap_in == "STARTING"
    pulse.gap = 0.0
    for tick in range(5):
        look(pulse, box, 0.6 + tick * 0.1)
    writer.record(2, *[1.0] * 11)
    look(pulse, box, 1.1)
    assert pulse.gap_in == "BACKWARD"


def test_a_suspended_machine_adds_one_look(box: bytearray) -> None:
    pulse = Pulse()
    look(pulse, box, 0.0)
    look(pulse, box, 0.1)
    look(pulse, box, 3600.0)
    assert pulse.age == pytest.approx(0.1 + TICK)


@pytest.mark.parametrize(
    "change",
    [
        lambda writer: writer.now(0, Activity.FORWARD, 1.0),
        lambda writer: writer.collective(3, "barrier"),
        lambda writer: writer.progress(1, 5),
        lambda writer: writer.patience(0, 9.0),
        lambda writer: writer.record(1, *[1.0] * 11),
    ],
)
def test_all_that_a_rank_says_counts_as_getting_on(box: bytearray, change: Callable[[Writer], None]) -> None:
    pulse, writer = Pulse(), Writer(box)
    look(pulse, box, 0.0)
    look(pulse, box, 0.2)
    change(writer)
    look(pulse, box, 0.4)
    assert pulse.age == 0.0

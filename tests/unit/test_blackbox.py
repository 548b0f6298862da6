"""The black box: a rank's last words, in memory that its agent also holds."""

from __future__ import annotations

import math
import mmap
import struct

import pytest

from workbench import blackbox
from workbench.blackbox import HEADER_SIZE, NO_LOSS, SIZE, STEP, Activity, StepRecord, Writer

RING = 16  # in place of the real capacity, so that each test writes few records


@pytest.fixture(autouse=True)
def _small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blackbox, "CAPACITY", RING)


@pytest.fixture
def box() -> bytearray:
    buffer = bytearray(SIZE)
    blackbox.format_box(buffer)
    return buffer


def step(number: int) -> StepRecord:
    return StepRecord(number, 1000.0 + number, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1, 0.0, 32.0, 0.0, 1.0 / (number + 1))


def filled(buffer: bytearray, count: int) -> Writer:
    writer = Writer(buffer)
    for number in range(count):
        writer.record(*step(number))
    return writer


def steps_in(block: bytes) -> list[int]:
    return [record.step for record in blackbox.iter_steps(block)]


def test_a_new_box_says_that_its_rank_is_starting(box: bytearray) -> None:
    seen = blackbox.read_header(box)
    assert seen == blackbox.Snapshot(0, 0, Activity.STARTING, 0.0, "", 0, None)
    assert blackbox.read_steps(box, 0) == (b"", 0, 0)


def test_formatting_again_forgets_what_was_there(box: bytearray) -> None:
    writer = filled(box, 3)
    writer.now(3, Activity.CELL, 5.0)
    blackbox.format_box(box)
    assert blackbox.read_header(box).head == 0
    assert blackbox.read_steps(box, 0) == (b"", 0, 0)


def test_the_header_is_the_last_word(box: bytearray) -> None:
    writer = Writer(box)
    writer.now(7, Activity.COLLECTIVE, 12.25)
    writer.collective(41, "all_reduce")
    writer.progress(7, 100)
    assert blackbox.read_header(box) == blackbox.Snapshot(0, 7, Activity.COLLECTIVE, 12.25, "all_reduce", 41, (7, 100))
    writer.collective(42, "barrier")
    assert blackbox.read_header(box).collective == "barrier"  # nothing of the longer name is left


@pytest.mark.parametrize("total", [0, 10])
def test_progress_of_unknown_length_is_none(box: bytearray, total: int) -> None:
    Writer(box).progress(4, total)
    assert blackbox.read_header(box).progress == ((4, total) if total else None)


@pytest.mark.parametrize(
    ("name", "kept"), [("x" * 64, "x" * 64), ("x" * 100, "x" * 64), ("é" * 40, "é" * 32), ("x" + "é" * 32, None)]
)
def test_a_long_name_is_cut(box: bytearray, name: str, kept: str | None) -> None:
    Writer(box).collective(1, name)
    seen = blackbox.read_header(box).collective
    assert seen == kept or (kept is None and seen.startswith("xé") and len(seen.encode()) <= 70)
    assert blackbox.read_header(box).progress is None  # nothing ran over into the next field


@pytest.mark.parametrize("activity", [*Activity])
def test_every_activity_comes_back(box: bytearray, activity: Activity) -> None:
    Writer(box).now(1, activity, 2.0)
    assert blackbox.read_header(box).activity is activity


def test_records_come_back_as_they_were_written(box: bytearray) -> None:
    records = [step(0), step(1)._replace(loss=2.5, tokens=1e9)]
    writer = Writer(box)
    for record in records:
        writer.record(*record)
    block, cursor, lost = blackbox.read_steps(box, 0)
    assert (list(blackbox.iter_steps(block)), cursor, lost) == (records, 2, 0)
    assert block == b"".join(map(blackbox.pack_step, records))


def test_a_step_says_also_what_comes_after_it(box: bytearray) -> None:
    Writer(box).record(*step(7), Activity.CELL)
    seen = blackbox.read_header(box)
    assert (seen.head, seen.step, seen.activity, seen.since) == (1, 7, Activity.CELL, step(7).end)


def test_a_loss_that_was_not_reported_is_not_a_number(box: bytearray) -> None:
    Writer(box).record(*step(0)._replace(loss=NO_LOSS))
    (record,) = blackbox.iter_steps(blackbox.read_steps(box, 0)[0])
    assert math.isnan(record.loss)


def test_a_cursor_reads_what_is_new_only(box: bytearray) -> None:
    writer = filled(box, 5)
    _, cursor, _ = blackbox.read_steps(box, 0)
    assert blackbox.read_steps(box, cursor) == (b"", 5, 0)
    writer.record(*step(5))
    block, cursor, lost = blackbox.read_steps(box, cursor)
    assert (steps_in(block), cursor, lost) == ([5], 6, 0)


@pytest.mark.parametrize(
    ("written", "cursor", "first", "lost"),
    [
        (RING - 1, 0, 0, 0),
        (RING, 0, 1, 1),  # the slot after the newest may be half written: it counts as lost
        (RING, 1, 1, 0),
        (RING + 10, 5, 11, 6),
        (RING + 10, 11, 11, 0),
        (RING + 10, RING - 2, RING - 2, 0),
        (RING + 10, RING, RING, 0),
        (3 * RING + 7, 0, 2 * RING + 8, 2 * RING + 8),
    ],
)
def test_the_ring_tells_what_it_overwrote(box: bytearray, written: int, cursor: int, first: int, lost: int) -> None:
    # Only the newest ring's worth is written: what lies before it would be overwritten anyhow.
    writer = Writer(box)
    skipped = max(0, written - RING)
    blackbox._HEAD.pack_into(box, blackbox._HEAD_AT, skipped)
    for number in range(skipped, written):
        writer.record(*step(number))
    block, new_cursor, overwritten = blackbox.read_steps(box, cursor)
    assert new_cursor == written
    assert steps_in(block) == list(range(first, written))
    assert overwritten == lost


def test_every_step_is_read_or_counted_as_lost_once(box: bytearray) -> None:
    writer, cursor, read, lost = Writer(box), 0, 0, 0
    for burst in (1, 5, RING - 1, 8, RING, 3):
        for _ in range(burst):
            writer.record(*step(blackbox.read_header(box).head))
        block, cursor, overwritten = blackbox.read_steps(box, cursor)
        read, lost = read + len(block) // STEP.size, lost + overwritten
    assert read + lost == cursor == blackbox.read_header(box).head
    assert lost == 1


class RacingBuffer(bytearray):
    """A writer that goes on for `ahead` steps while the reader copies."""

    ahead = 0

    def __getitem__(self, key: object) -> object:
        if self.ahead and isinstance(key, slice):
            writer, self.ahead, count = Writer(self), 0, self.ahead
            for _ in range(count):
                writer.record(*step(blackbox.read_header(self).head))
        return super().__getitem__(key)


@pytest.mark.parametrize("ahead", [1, 5, 9, RING, 3 * RING])
def test_steps_overwritten_while_they_are_read_are_left_out(ahead: int) -> None:
    box = RacingBuffer(SIZE)
    blackbox.format_box(box)
    filled(box, 30)
    box.ahead = ahead
    block, cursor, lost = blackbox.read_steps(box, 20)
    assert cursor == 30
    first_whole = 30 + ahead - RING + 1
    assert lost == min(max(0, first_whole - 20), 10)
    assert steps_in(block) == list(range(20 + lost, 30))


def test_a_rank_that_opens_a_box_again_goes_on_where_it_was(box: bytearray) -> None:
    filled(box, 3)
    Writer(box).record(*step(3))
    assert steps_in(blackbox.read_steps(box, 0)[0]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("at", "data"), [(0, b"notabox!"), (8, struct.pack("<I", 99)), (12, struct.pack("<I", RING * 2))]
)
def test_what_is_no_black_box_is_refused(box: bytearray, at: int, data: bytes) -> None:
    box[at : at + len(data)] = data
    for attempt in (Writer, blackbox.check_box):
        with pytest.raises(ValueError, match="not a black box of version"):
            attempt(box)


def test_it_lives_in_shared_memory_too() -> None:
    with mmap.mmap(-1, SIZE) as shared:
        blackbox.format_box(shared)
        Writer(shared).record(*step(9))
        assert steps_in(blackbox.read_steps(shared, 0)[0]) == [9]


def test_words_are_aligned_so_that_no_store_is_torn() -> None:
    offsets = (blackbox._HEAD_AT, blackbox._NOW_AT, blackbox._COLLECTIVE_AT, blackbox._PROGRESS_AT, HEADER_SIZE)
    assert all(offset % 8 == 0 for offset in (*offsets, STEP.size))
    assert blackbox._NOW_AT + blackbox._NOW.size <= blackbox._COLLECTIVE_AT
    assert blackbox._COLLECTIVE_AT + blackbox._COLLECTIVE.size <= blackbox._PROGRESS_AT
    assert blackbox._PROGRESS_AT + blackbox._PROGRESS.size <= HEADER_SIZE


# --- gauges and counters ---


def test_gauges_are_not_known_until_they_are_written() -> None:
    box = bytearray(SIZE)
    blackbox.format_box(box)
    seen = blackbox.read_header(box)
    assert (seen.learning_rate, seen.hidden, seen.traffic) == (None, None, ())
    writer = Writer(box)
    writer.learning_rate(0.0)
    writer.hidden(0.75)
    seen = blackbox.read_header(box)
    assert (seen.learning_rate, seen.hidden) == (0.0, 0.75) and blackbox.read_learning_rate(box) == 0.0


def test_calls_are_counted_by_name_and_what_has_no_room_together() -> None:
    box = bytearray(SIZE)
    blackbox.format_box(box)
    writer, before = Writer(box), blackbox.fingerprint(box)
    for number in range(blackbox.KINDS + 3):
        writer.counter(f"call{number}")(1, 10)
    writer.counter("call1")(2, 5)
    seen = {name: (calls, size) for name, calls, size in blackbox.read_header(box).traffic}
    assert len(seen) == blackbox.KINDS and seen["call1"] == (3, 15) and seen["others"] == (4, 40)
    assert blackbox.fingerprint(box) != before and blackbox.HEADER_SIZE >= blackbox._END


# --- brief records ---


def brief(writer: Writer, end: float, data: float = 0.0, samples: float = 0.0) -> None:
    """As a rank ends a step of which nothing else is known."""
    head, at, _ = writer.brief_slots(1)
    writer.times[at + 1], writer.times[at + 2], writer.times[at] = data, samples, end
    writer.times[blackbox.HEAD_WORD] = head + 1


def test_a_brief_record_is_divided_as_the_last_whole_one(box: bytearray) -> None:
    writer = Writer(box)
    writer.offset(900.0)
    writer.record(*step(7)._replace(duration=1.0, data=0.5, forward=0.1, backward=0.2, comm=0.1, optimizer=0.05))
    brief(writer, 108.5, data=0.5, samples=16.0)
    whole, made = blackbox.iter_steps(blackbox.read_steps(box, 0)[0])
    assert made[:9] == pytest.approx((8, 1008.5, 1.5, 0.5, 0.2, 0.4, 0.2, 0.1, 0.0))
    assert made.samples == 16.0 and made.tokens == 0.0 and math.isnan(made.loss)
    assert next(iter(blackbox.iter_steps(blackbox.read_steps(box, 1)[0])))[:10] == made[:10]  # whole is not read again
    seen = blackbox.read_header(box)
    assert (seen.head, seen.step, seen.since) == (2, 8, 1008.5) and whole.step == 7


def test_what_the_rank_says_after_a_brief_record_holds(box: bytearray) -> None:
    writer = filled(box, 1)
    brief(writer, 1001.0)
    writer.now(1, Activity.CHECKPOINT, 1002.0)
    seen = blackbox.read_header(box)
    assert (seen.step, seen.activity, seen.since) == (1, Activity.CHECKPOINT, 1002.0)


def test_brief_records_without_a_whole_one_before_them_count_as_lost(box: bytearray) -> None:
    writer = filled(box, 3)
    for number in range(3, 3 + RING + 2):
        brief(writer, 1000.0 + number)
    assert blackbox.read_steps(box, 3) == (b"", 3 + RING + 2, RING + 2)
    writer.record(*step(50))
    block, cursor, lost = blackbox.read_steps(box, 3)
    assert (steps_in(block), cursor, lost) == ([50], 3 + RING + 3, RING + 2)


def test_a_whole_record_takes_the_place_of_a_brief_one(box: bytearray) -> None:
    writer = filled(box, 1)
    brief(writer, 1001.0)
    for number in range(2, RING + 2):
        writer.record(*step(number))
    assert steps_in(blackbox.read_steps(box, 3)[0]) == list(range(3, RING + 2))


def test_a_brief_record_is_amended_by_making_it_whole(box: bytearray) -> None:
    writer = filled(box, 1)
    brief(writer, 1001.5, samples=8.0)
    writer.amend("loss", 0.25)
    writer.amend("tokens", 512.0)
    record = next(iter(blackbox.iter_steps(blackbox.read_steps(box, 1)[0])))
    assert (record.step, record.duration, record.samples, record.loss, record.tokens) == (1, 1.5, 8.0, 0.25, 512.0)


@pytest.mark.parametrize(("head", "most", "count"), [(0, 5, 5), (RING - 2, 5, 2), (RING - 1, 5, 1), (RING, 99, RING)])
def test_slots_end_where_the_ring_does(box: bytearray, head: int, most: int, count: int) -> None:
    blackbox._HEAD.pack_into(box, blackbox._HEAD_AT, head)
    found, first, end = Writer(box).brief_slots(most)
    assert (found, (end - first) // blackbox.BRIEF_WORDS) == (head, count)


@pytest.mark.parametrize("ahead", [1, 5, RING, 3 * RING])
def test_brief_records_overwritten_while_they_are_read_are_left_out(ahead: int) -> None:
    box = RacingBuffer(SIZE)
    blackbox.format_box(box)
    writer = filled(box, 20)
    for number in range(20, 26):
        brief(writer, 1000.0 + number)
    box.ahead = ahead
    block, cursor, lost = blackbox.read_steps(box, 22)
    assert cursor == 26 and lost + len(steps_in(block)) == 4
    assert steps_in(block) == list(range(22 + lost, 26))

"""What of a rank's output is shown, and when."""

from __future__ import annotations

import itertools

from workbench.agent.output import GATHER, MOST, PACE, Output, Piece


def shown(output: Output, now: float, *, everything: bool = False) -> list[tuple[str, str]]:
    return [(piece.stream, piece.text) for piece in output.take(now, everything=everything)]


def test_nothing_is_due_while_nothing_was_written() -> None:
    output = Output()
    assert output.due() is None
    assert output.take(5.0) == []


def test_a_first_line_is_due_at_once_and_the_next_at_the_pace() -> None:
    output = Output()
    output.add("stdout", b"a\n", 10.0)
    assert output.due() == 10.0 + GATHER
    assert output.take(10.1) == [Piece("stdout", "a\n", 0, 0)]
    output.add("stdout", b"b\n", 10.15)
    assert output.due() == 10.1 + PACE
    assert output.take(10.3) == [Piece("stdout", "b\n", 2, 0)]


def test_an_unfinished_line_is_held_back_for_a_moment() -> None:
    output = Output()
    output.add("stdout", b"whole\nhalf", 10.0)
    assert shown(output, 10.01) == [("stdout", "whole\n")]
    assert output.due() == 10.01 + PACE
    assert output.take(10.22) == [Piece("stdout", "half", 6, 0)]


def test_an_unfinished_line_is_shown_with_its_end() -> None:
    output = Output()
    output.add("stdout", b"ha", 10.0)
    output.add("stdout", b"lf\n", 10.1)
    assert shown(output, 10.11) == [("stdout", "half\n")]


def test_a_steady_flow_without_newlines_is_shown_all_the_same() -> None:
    output, text = Output(), ""
    for number in range(100):
        output.add("stdout", b".", number * 0.01)
        due = output.due()
        if due is not None and due <= number * 0.01:
            text += "".join(piece.text for piece in output.take(number * 0.01))
    assert len(text) > 60


def test_carriage_returns_end_lines_too() -> None:
    output = Output()
    output.add("stderr", b"10%\r20%\r3", 10.0)
    assert shown(output, 10.01) == [("stderr", "10%\r20%\r")]


def test_streams_keep_their_order() -> None:
    output = Output()
    for stream, data in (("stdout", b"a\n"), ("stderr", b"b\n"), ("stdout", b"c\n"), ("stdout", b"d\n")):
        output.add(stream, data, 10.0)
    assert shown(output, 10.1) == [("stdout", "a\n"), ("stderr", "b\n"), ("stdout", "c\nd\n")]


def test_streams_that_alternate_much_are_put_together() -> None:
    output = Output()
    for number in range(50):
        output.add(("stdout", "stderr")[number % 2], b"x\n", 10.0)
    assert sorted(shown(output, 10.1)) == [("stderr", "x\n" * 25), ("stdout", "x\n" * 25)]


def test_of_too_much_the_newest_is_shown_and_the_rest_counted() -> None:
    output = Output(offset=100)
    for number in range(300):
        output.add("stdout", b"%06d\n" % number * 100, 10.0)
    (piece,) = output.take(10.1)
    assert len(piece.text) == MOST
    assert piece.dropped == 300 * 700 - MOST
    assert piece.offset == 100 + piece.dropped
    assert piece.text.endswith("000299\n")
    output.add("stdout", b"later\n", 10.5)
    assert output.take(10.6) == [Piece("stdout", "later\n", 100 + 300 * 700, 0)]


def test_one_piece_that_is_too_much_is_cut_as_well() -> None:
    output = Output()
    output.add("stdout", b"before\n", 10.0)
    output.add("stdout", b"x" * (MOST + 5), 10.0)
    (piece,) = output.take(10.1, everything=True)
    assert (len(piece.text), piece.dropped, piece.offset) == (MOST, 12, 12)


def test_characters_that_arrive_in_halves_are_shown_whole() -> None:
    data, output, text = "é世🙂".encode(), Output(), ""
    for number, byte in enumerate(data):
        output.add("stdout", bytes([byte]), number)
        text += "".join(piece.text for piece in output.take(number + 0.5))
    assert text == "é世🙂"


def test_a_cut_through_a_character_leaves_no_debris() -> None:
    output = Output()
    output.add("stdout", "世".encode() * (MOST // 3 + 1), 10.0)
    (piece,) = output.take(10.1, everything=True)
    assert set(piece.text) == {"世"}
    assert piece.offset == piece.dropped
    assert piece.dropped + len(piece.text.encode()) == output.offset


def test_bytes_that_are_no_text_are_replaced() -> None:
    output = Output()
    output.add("stdout", b"caf\xe9\n", 10.0)
    assert shown(output, 10.1) == [("stdout", "caf�\n")]


def test_pieces_and_gaps_cover_everything() -> None:
    output, pieces, now = Output(), [], 0.0
    for number in range(200):
        now += 0.03
        output.add(("stdout", "stderr")[number % 3 == 0], b"line %d\n" % number * (number % 400), now)
        if (due := output.due()) is not None and due <= now:
            pieces += output.take(now)
    pieces += output.take(now + 1, everything=True)
    assert sum(len(piece.text) + piece.dropped for piece in pieces) == output.offset
    for stream in ("stdout", "stderr"):
        own = [piece for piece in pieces if piece.stream == stream]
        assert all(a.offset + len(a.text) <= b.offset for a, b in itertools.pairwise(own))

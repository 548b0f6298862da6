"""A rank's log file and the pages of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from workbench.agent import logs
from workbench.agent.logfile import LogFile, older_half
from workbench.agent.logs import read_page


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank0.log"


def write(path: Path, data: bytes, limit: int = 2**20) -> LogFile:
    log = LogFile(path, limit)
    assert log.write(data, 0.0) == ""
    log.close()
    return log


def settle(path: Path) -> None:
    """As if nothing had been written for long."""
    os.utime(path, (0, 0))


def test_a_log_that_is_not_there_is_an_empty_page(path: Path) -> None:
    page = read_page(path, tail=5)
    assert (page.text, page.next, page.truncated) == ("", 0, False)


def test_the_last_lines(path: Path) -> None:
    write(path, b"one\ntwo\nthree\n")
    page = read_page(path, tail=2)
    assert (page.text, page.start, page.next, page.truncated) == ("two\nthree\n", 4, 14, False)
    assert read_page(path, tail=9).text == "one\ntwo\nthree\n"
    assert read_page(path, tail=0).text == ""


def test_an_unfinished_last_line_counts(path: Path) -> None:
    write(path, b"one\ntwo\nthr")
    assert read_page(path, tail=2).text == "two\nthr"


@pytest.mark.parametrize("block", [1, 2, 3, 5, 64])
def test_lines_are_found_whatever_the_blocks(path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(logs, "BLOCK", block)
    lines = ["", "a", "bcdefgh", "", "ij", "loss 1", "k"]
    write(path, "".join(f"{line}\n" for line in lines).encode())
    settle(path)
    for tail in range(1, 8):
        assert read_page(path, tail=tail).text == "".join(f"{line}\n" for line in lines[-tail:])
    assert read_page(path, tail=3, grep="b").text == "bcdefgh\n"
    if block > 8:  # a line that is longer than a block is looked at in parts, but never so short a block is used
        assert read_page(path, grep="loss").text == "loss 1\n"


def test_grep_is_plain_text(path: Path) -> None:
    write(path, b"loss=0.5 (a.b)\nlossx0.5\n[x]\n")
    assert read_page(path, tail=9, grep="=0.5 (a.b)").text == "loss=0.5 (a.b)\n"
    assert read_page(path, tail=9, grep="[x]").text == "[x]\n"
    assert read_page(path, tail=9, grep="none").text == ""


def test_following_misses_nothing_and_repeats_nothing(path: Path) -> None:
    log = LogFile(path, 2**20)
    position, seen = 0, ""
    for number in range(20):
        log.write(f"line {number}\npart".encode(), 0.0)
        page = read_page(path, since=position)
        seen, position = seen + page.text, page.next
    log.close()
    assert seen == "".join(f"line {number}\npart" for number in range(20))


def test_following_with_grep_waits_for_whole_lines(path: Path) -> None:
    log = LogFile(path, 2**20)
    log.write(b"loss 1\nother\nlo", 0.0)
    page = read_page(path, since=0, grep="loss")
    assert page.text == "loss 1\n"
    log.write(b"ss 2\n", 0.0)
    assert read_page(path, since=page.next, grep="loss").text == "loss 2\n"
    log.write(b"last loss", 0.0)
    log.close()
    settle(path)  # nothing more will come: an unfinished line is one
    assert read_page(path, since=18, grep="loss").text == "last loss"


def test_a_character_is_not_cut_in_two(path: Path) -> None:
    data = "世".encode()
    log = LogFile(path, 2**20)
    log.write(b"a" + data[:2], 0.0)
    page = read_page(path)
    assert (page.text, page.next) == ("a", 1)
    log.write(data[2:], 0.0)
    log.close()
    assert read_page(path, since=page.next).text == "世"


def test_a_page_has_a_size(path: Path) -> None:
    write(path, b"x" * 99 + b"\n" + b"y" * 99 + b"\n")
    page = read_page(path, limit=100)
    assert (len(page.text), page.next) == (100, 100)
    assert read_page(path, tail=5, limit=150).text == "y" * 99 + "\n"
    assert read_page(path, tail=1, limit=50).text == "y" * 49 + "\n"
    assert read_page(path, tail=1, limit=50).truncated


def test_a_position_past_the_end_is_the_end(path: Path) -> None:
    write(path, b"abc\n")
    page = read_page(path, since=99)
    assert (page.text, page.next) == ("", 4)


def test_two_halves_are_read_as_one_with_the_positions_of_all_output(path: Path) -> None:
    log = LogFile(path, 40)
    for number in range(10):
        log.write(b"line %03d\n" % number, 0.0)
    log.close()
    assert path.stat().st_size + older_half(path).stat().st_size <= 40
    assert log.position == 90
    page = read_page(path, tail=3)
    assert (page.text, page.next) == ("line 007\nline 008\nline 009\n", 90)
    whole = read_page(path)
    assert whole.truncated
    assert whole.start == 90 - len(whole.text)
    assert read_page(path, tail=99).truncated
    assert LogFile(path, 40).position == 90  # the next generation goes on counting


def test_a_later_writer_appends(path: Path) -> None:
    write(path, b"one\n")
    assert write(path, b"two\n").position == 8
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_disk_without_space_is_told_once_and_its_return_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogFile(path, 2**20)
    log.write(b"kept\n", 0.0)

    def no_space(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        told = [log.write(b"lost\n", 1.0 + number / 10) for number in range(30)]
    assert "No space left on device" in told[0]
    assert set(told[1:]) == {""}
    assert log.write(b"again\n", 9.0) == "the log is written again; 150 bytes are not in it"
    assert log.write(b"more\n", 9.1) == ""
    log.close()
    assert path.read_bytes() == b"kept\nagain\nmore\n"

"""Frames over a socket: whole ones, however they arrive, with the descriptors that came with them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from workbench.agent.wire import Channel, Connection, Frame, FrameReader, close_all, pack


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_are_put_together_from_any_pieces(size: int) -> None:
    sent = [({"op": "a", "n": 1}, b""), ({"op": "é"}, b"\0" * 20), ({}, b"tail")]
    data = b"".join(pack(header, payload) for header, payload in sent)
    reader = FrameReader()
    found = [frame for at in range(0, len(data), size) for frame in reader.feed(data[at : at + size])]
    assert [(frame.header, frame.payload) for frame in found] == sent


def test_descriptors_go_to_the_frames_that_announce_them() -> None:
    data = pack({"n": 1, "fds": 1}) + pack({"n": 2}) + pack({"n": 3, "fds": 2})
    assert [frame.fds for frame in FrameReader().feed(data, [7, 8, 9])] == [(7,), (), (8, 9)]


def test_a_connection_carries_frames_and_descriptors_until_it_is_closed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sender, receiver = Connection(pair[0]), Connection(pair[1])
    reading, writing = os.pipe()
    sender.send({"op": "take"}, b"x", fds=(writing,))
    sender.send({"op": "next"})
    os.close(writing)
    pair[0].close()
    first, second = receiver.receive(), receiver.receive()
    assert first is not None
    assert second == Frame({"op": "next"})
    assert not os.get_inheritable(first.fds[0])
    os.write(first.fds[0], b"through")
    assert os.read(reading, 10) == b"through"
    assert receiver.receive() is None
    close_all([reading, *first.fds])


def test_a_channel_never_waits_and_delivers_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    channel, far = Channel(pair[0]), Channel(pair[1])
    big = os.urandom(3_000_000)
    reading, writing = os.pipe()
    channel.send({"n": 1}, big)
    channel.send({"n": 2}, fds=(writing,))
    assert channel.wants_write
    found: list[Frame] = []
    while channel.wants_write or len(found) < 2:
        found += far.read()[0]
        channel.flush()
    assert [frame.header["n"] for frame in found] == [1, 2]
    assert found[0].payload == big
    close_all(found[1].fds)
    assert os.read(reading, 1) == b""  # the channel has closed its own copy
    os.close(reading)


def test_what_is_sent_to_a_closed_channel_is_dropped(pair: tuple[socket.socket, socket.socket]) -> None:
    channel = Channel(pair[0])
    pair[1].close()
    channel.send({"n": 1})
    assert not channel.wants_write
    assert channel.read() == ([], False)


def test_closing_a_channel_closes_what_it_had_still_to_pass_on(pair: tuple[socket.socket, socket.socket]) -> None:
    channel = Channel(pair[0])
    reading, writing = os.pipe()
    channel.send({}, b"x" * 3_000_000)
    channel.send({}, fds=(writing,))
    channel.close()
    assert os.read(reading, 1) == b""  # nobody can write any more
    os.close(reading)

"""Frames between agent, zygote and ranks: lengths, a JSON header, a binary tail. Standard library only.

Over Unix stream sockets; file descriptors may travel with a frame.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

Header = dict[str, Any]
_LENGTHS: Final = struct.Struct(">II")
MAX_FDS: Final = 16


def pack(header: Header, payload: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


def send(sock: socket.socket, header: Header, payload: bytes = b"", fds: Sequence[int] = ()) -> None:
    """Send one frame on a blocking socket."""
    data = pack(header, payload)
    sent = socket.send_fds(sock, [data], list(fds)) if fds else 0
    sock.sendall(memoryview(data)[sent:])


class Reader:
    """Puts frames together again from whatever pieces arrive."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> None:
        self._data += data
        self._fds += fds

    def frames(self) -> Iterator[tuple[Header, bytes, list[int]]]:
        """The whole frames there are; descriptors go to the first frame that says how many it brought."""
        while len(self._data) >= _LENGTHS.size:
            head, tail = _LENGTHS.unpack_from(self._data)
            end = _LENGTHS.size + head + tail
            if len(self._data) < end:
                return
            header = json.loads(self._data[_LENGTHS.size : _LENGTHS.size + head])
            payload = bytes(self._data[_LENGTHS.size + head : end])
            del self._data[:end]
            count = int(header.get("fds", 0))
            fds, self._fds = self._fds[:count], self._fds[count:]
            yield header, payload, fds


def receive(sock: socket.socket, reader: Reader, size: int = 2**16) -> bool:
    """Read once from the socket into the reader; False at the end of the stream."""
    data, fds, _, _ = socket.recv_fds(sock, size, MAX_FDS)
    reader.feed(data, fds)
    return bool(data)

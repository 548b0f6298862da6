"""Frames between an agent, its zygotes and its ranks: a JSON header with a binary tail, over a stream socket.

A frame is `struct(">II", len(json), len(binary))`, the JSON, the binary. One whose header has `"fds": n` carries n file
descriptors (SCM_RIGHTS) with its first byte. Standard library only: ranks under another interpreter import this.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import struct
import threading
from collections import deque
from typing import Any, Final, NamedTuple, TypeAlias

Header: TypeAlias = dict[str, Any]

SIZES: Final = struct.Struct(">II")
CHUNK: Final = 2**18
MAX_FDS: Final = 16  # a frame carries at most this many descriptors
_NOT_NOW: Final = (errno.EAGAIN, errno.ETOOMANYREFS)  # the second: too many descriptors in flight


class Frame(NamedTuple):
    """One message as it arrived; the receiver owns the descriptors."""

    header: Header
    payload: bytes = b""
    fds: tuple[int, ...] = ()


def pack(header: Header, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return SIZES.pack(len(text), len(payload)) + text + payload


class FrameReader:
    """Puts frames together from whatever arrives."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: list[int] | tuple[int, ...] = ()) -> list[Frame]:
        """Take what arrived; return the frames it completes."""
        self._data += data
        self._fds.extend(fds)
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        if len(self._data) < SIZES.size:
            return None
        text, tail = SIZES.unpack_from(self._data)
        end = SIZES.size + text + tail
        if len(self._data) < end:
            return None
        header: Header = json.loads(self._data[SIZES.size : SIZES.size + text])
        payload = bytes(memoryview(self._data)[SIZES.size + text : end])
        del self._data[:end]
        return Frame(header, payload, tuple(self._fds.popleft() for _ in range(header.get("fds", 0))))


class Connection:
    """The blocking side: a rank, or a zygote. Sending is safe from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = FrameReader()
        self._frames: deque[Frame] = deque()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, header: Header, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Send one frame; raises `OSError` when the other side is gone."""
        data = pack({**header, "fds": len(fds)} if fds else header, payload)
        with self._lock:
            self.sock.sendall(data[_send_some(self.sock, data, fds) :])

    def receive(self) -> Frame | None:
        """The next frame; None once the other side has closed."""
        while not self._frames:
            if (frames := self.read()) is None:
                return None
            self._frames.extend(frames)
        return self._frames.popleft()

    def read(self) -> list[Frame] | None:
        """The frames that one read completes, perhaps none; None once the other side has closed."""
        try:
            data, fds = receive_some(self.sock)
        except ConnectionResetError:
            return None
        return self._reader.feed(data, fds) if data else None


class Channel:
    """The agent's side: never blocks; what cannot be sent now waits for `flush`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._reader = FrameReader()
        self._waiting: deque[tuple[memoryview, tuple[int, ...]]] = deque()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._waiting)

    def send(self, header: Header, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Queue one frame and send what can be sent. The channel closes `fds` once they are on their way."""
        data = pack({**header, "fds": len(fds)} if fds else header, payload)
        self._waiting.append((memoryview(data), fds))
        self.flush()

    def flush(self) -> None:
        """Send what can be sent; what goes to a closed socket is dropped."""
        while self._waiting:
            data, fds = self._waiting.popleft()
            try:
                sent = _send_some(self.sock, data, fds)
            except OSError as error:
                if error.errno in _NOT_NOW:
                    self._waiting.appendleft((data, fds))
                    return
                sent = len(data)
            close_all(fds)
            if sent < len(data):
                self._waiting.appendleft((data[sent:], ()))

    def read(self) -> tuple[list[Frame], bool]:
        """What has arrived, and whether the other side may have more to say."""
        frames: list[Frame] = []
        while True:
            try:
                data, fds = receive_some(self.sock)
            except BlockingIOError:
                return frames, True
            except OSError:
                return frames, False
            if not data:
                return frames, False
            frames += self._reader.feed(data, fds)

    def close(self) -> None:
        while self._waiting:
            close_all(self._waiting.popleft()[1])
        self.sock.close()


def close_all(fds: tuple[int, ...] | list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _send_some(sock: socket.socket, data: bytes | memoryview, fds: tuple[int, ...]) -> int:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def receive_some(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One read: bytes (none: closed) and the descriptors that came with them, close-on-exec."""
    # Not `socket.recv_fds`: it drops its flags, and the descriptors would be inherited by whatever is executed next.
    rights = array.array("i")
    space = socket.CMSG_SPACE(MAX_FDS * rights.itemsize)
    data, ancillary, _, _ = sock.recvmsg(CHUNK, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            rights.frombytes(content[: len(content) - len(content) % rights.itemsize])
    return data, rights.tolist()

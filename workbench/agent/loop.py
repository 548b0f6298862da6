"""One thread's loop: descriptors, channels, timers, and calls from other threads. Nothing in it may block."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from workbench.agent.wire import Channel, Frame, Header

Callback: TypeAlias = Callable[[], object]
logger = logging.getLogger(__name__)


class Loop:
    """All methods belong to the loop's thread, but `post`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._readers: dict[int, Callback] = {}
        self._channels: dict[int, Channel] = {}
        self._timers: list[tuple[float, int, Callback]] = []
        self._order = itertools.count()
        self._posted: deque[Callback] = deque()
        self._is_running = True
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.add(self._wake_reader, self._drain_wake)

    def now(self) -> float:
        """Seconds of the clock that timers use."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch, for events."""
        return time.time()

    def post(self, call: Callback) -> None:
        """Have the loop's thread call this; from any thread. Calls run in order."""
        self._posted.append(call)
        with suppress(BlockingIOError, OSError):  # full: it is awake; closed: nobody will
            os.write(self._wake_writer, b"x")

    def call_at(self, when: float, call: Callback) -> None:
        heapq.heappush(self._timers, (when, next(self._order), call))

    def add(self, fd: int, call: Callback) -> None:
        """Call this whenever the descriptor is readable, until it is removed."""
        self._readers[fd] = call
        self._selector.register(fd, selectors.EVENT_READ)

    def remove(self, fd: int) -> None:
        """Forget the descriptor, which is still open; nothing happens when it is not known."""
        if self._readers.pop(fd, None) is not None:
            self._selector.unregister(fd)
            self._channels.pop(fd, None)

    def add_channel(self, channel: Channel, on_frames: Callable[[list[Frame]], None], on_close: Callback) -> None:
        """Read frames from the channel; `on_close` is called once, after the last of them."""

        def read() -> None:
            frames, is_open = channel.read()
            if not is_open:
                self.remove(channel.fileno())
            on_frames(frames)
            if not is_open:
                on_close()

        self._channels[channel.fileno()] = channel
        self.add(channel.fileno(), read)

    def send(self, channel: Channel, header: Header, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Send a frame; what cannot go now goes when it can."""
        channel.send(header, payload, fds)
        self._update(channel)

    def _update(self, channel: Channel) -> None:
        if channel.fileno() in self._channels:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.wants_write else 0)
            self._selector.modify(channel.fileno(), events)

    def run(self) -> None:
        """Until `stop`."""
        while self._is_running:
            for key, mask in self._selector.select(self._patience()):
                self._serve(key.fd, mask)
            self._run_timers()
            for _ in range(len(self._posted)):
                guarded(self._posted.popleft())

    def stop(self) -> None:
        self._is_running = False

    def close(self) -> None:
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _patience(self) -> float | None:
        if self._posted:
            return 0.0
        return max(0.0, self._timers[0][0] - self.now()) if self._timers else None

    def _serve(self, fd: int, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and (channel := self._channels.get(fd)):
            channel.flush()
            self._update(channel)
        if mask & selectors.EVENT_READ and (call := self._readers.get(fd)):
            guarded(call)

    def _run_timers(self) -> None:
        now = self.now()
        while self._timers and self._timers[0][0] <= now:
            guarded(heapq.heappop(self._timers)[2])

    def _drain_wake(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._wake_reader, 4096):
                pass


def guarded(call: Callback) -> None:
    """One thing that goes wrong is told, and does not end the watching of everything else."""
    try:
        call()
    except Exception:
        logger.exception("the agent goes on after an error of its own")

"""The line between a rank and its agent: one thread listens, any thread may say something.

What the agent asks arrives in that thread, also while the program computes or waits in a collective; a handler must be
short, and leaves what belongs to the main thread to the next step. Outside a job there is no line: `Control.current`
is None.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeAlias

Header: TypeAlias = dict[str, Any]
CELL: Final = "cell"
Frame: TypeAlias = tuple[Header, bytes, tuple[int, ...]]  # header, payload, descriptors that the receiver owns
Handler: TypeAlias = Callable[[Header, bytes, tuple[int, ...]], object]
Send: TypeAlias = Callable[..., object]  # (header, payload=b"", fds=())


class Control:
    """`receive` waits for a frame and raises `EOFError` when the agent has hung up; `send` may be called by any thread.

    `settings` is what the job's spec asks of the rank, by the spec's names, and where its things lie.
    """

    current: ClassVar[Control | None] = None

    def __init__(self, receive: Callable[[], Frame], send: Send, settings: Mapping[str, Any]) -> None:
        self._receive, self.send, self.settings = receive, send, settings
        self._handlers: dict[str, Handler] = {}
        self._early: list[Frame] = []  # frames that nobody has asked for yet
        self._opening: list[Callable[[], object]] = []
        self._closing: list[Callable[[], object]] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to listen, in a thread that `threading` does not count: the program is to find its process its own."""
        _thread.start_new_thread(self._listen, ())

    def on(self, op: str, handler: Handler) -> None:
        """Have frames of that kind handled, those as well that came before anybody wanted them.

        `CELL`: every frame that asks for an answer by its `cell_id`, of whatever kind.
        """
        with self._lock:
            self._handlers[op] = handler
            early = [frame for frame in self._early if _kind(frame) == op]
            self._early = [frame for frame in self._early if _kind(frame) != op]
        for frame in early:
            handler(*frame)

    def on_open(self, call: Callable[[], object]) -> None:
        """Before `start`: have this called first, in the thread that listens."""
        self._opening.append(call)

    def on_close(self, call: Callable[[], object]) -> None:
        """Have this called once the agent has hung up."""
        with self._lock:
            self._closing.append(call)
            is_closed = self._is_closed
        if is_closed:
            call()

    def fact(self, event: str, **fields: Any) -> None:
        """Put an event into the job's record: its name, and its fields but for time and generation.

        Never raises: when the agent is gone the rank soon will be.
        """
        with contextlib.suppress(OSError):
            self.send({"op": "fact", "event": event, "fields": fields})

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
        for call in self._opening:
            guarded(call, "a word of welcome")
        while True:
            try:
                frame = self._receive()
            except (EOFError, OSError):
                break
            self._take(frame)
        with self._lock:
            self._is_closed = True
            closing = tuple(self._closing)
        for call in closing:
            call()

    def _take(self, frame: Frame) -> None:
        with self._lock:
            handler = self._handlers.get(_kind(frame))
            if handler is None:
                self._early.append(frame)
                return
        guarded(lambda: handler(*frame), frame[0]["op"])


def _kind(frame: Frame) -> str:
    header = frame[0]
    return CELL if "cell_id" in header else str(header["op"])


def guarded(call: Callable[[], object], what: str) -> None:
    """The line must stay open whatever one question leads to."""
    try:
        call()
    except Exception as error:
        os.write(2, f"dtrain: {what} failed: {type(error).__name__}: {error}\n".encode())


def settings() -> Mapping[str, Any]:
    """The job's settings for this rank; empty outside a job."""
    return Control.current.settings if Control.current is not None else {}

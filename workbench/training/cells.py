"""The main loop of an interactive rank: cells come in, run in its `__main__`, and each is answered, in order.

They come by the rank's line, whose thread hears an interrupt while a cell runs; cells run in the main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import queue
import sys
import time
from typing import Any, Final, TypeAlias

from workbench.blackbox import Activity, Writer
from workbench.training.control import CELL, Control, Header, Send
from workbench.training.display import bundle
from workbench.training.guard import Guard
from workbench.training.interrupts import Interrupts
from workbench.training.observe import Observer
from workbench.training.program import Program, explain

Frame: TypeAlias = tuple[Header, bytes]
END: Final = ({"op": "end"}, b"")


def serve_cells(control: Control, namespace: dict[str, Any], box: Writer) -> None:
    """Serve until the agent hangs up. To be called in the main thread.

    Frames in: `execute` (source), `push` (name; cloudpickled payload), `pull` (name: an expression), each with a
    `cell_id`, and `interrupt`. Frames out: `cell` (cell_id, ok, data, error, traceback, seconds; payload of a pull).
    """
    observer = Observer.current or Observer(box, time.time() - time.monotonic())
    if Guard.current is not None:
        Guard.current.always_meet = True
    cells = Cells(control.send, Program(namespace), Interrupts(observer), observer)
    cells.interrupts.install()
    control.on(CELL, cells.arrive)
    control.on("interrupt", lambda *frame: cells.interrupts.interrupt())
    control.on_close(lambda: cells.arrive(*END, ()))
    cells.serve()


class Cells:
    """The cells that wait, and how one is run."""

    def __init__(self, send: Send, program: Program, interrupts: Interrupts, observer: Observer) -> None:
        self._send, self._program, self._observer = send, program, observer
        self.interrupts = interrupts
        self._waiting: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._flush_c = ctypes.CDLL(None).fflush

    def arrive(self, header: Header, payload: bytes, fds: tuple[int, ...]) -> None:
        """In the line's thread: a request, or the end."""
        if header["op"] != "end":
            self.interrupts.arrive()
        self._waiting.put((header, payload))

    def serve(self) -> None:
        while True:
            self._observer.rest(Activity.IDLE)
            header, payload = self._waiting.get()
            if header["op"] == "end":
                self._program.close()
                return
            if Guard.current is not None:
                Guard.current.release(collect=False)
            self._observer.rest(Activity.CELL)
            self._send(*self._answer(header, payload))

    def _answer(self, header: Header, payload: bytes) -> Frame:
        start = time.monotonic()
        answer: Header = {"op": "cell", "cell_id": header["cell_id"], "ok": True, "data": {}}
        result = b""
        try:
            with self.interrupts.allowed():
                self.interrupts.check()
                answer["data"], result = self._run(header, payload)
        except BaseException as error:
            answer.update(ok=False, **explain(self._cause(error)))
        self._flush()
        answer["seconds"] = time.monotonic() - start
        return answer, result

    def _run(self, header: Header, payload: bytes) -> tuple[dict[str, str], bytes]:
        match header["op"]:
            case "execute":
                return self._execute(header["source"], f"<{header['cell_id'].replace('-', ' ')}>"), b""
            case "push":
                self._program.namespace[_checked(header["name"])] = pickle.loads(payload)
                return {}, b""
            case "pull":
                return {}, self._pull(header["name"])
        raise ValueError(f"a rank does not know the request {header['op']!r}")

    def _execute(self, source: str, name: str) -> dict[str, str]:
        if "destroy_process_group" in source:
            self.interrupts.broken = ""
        elif told := self.interrupts.tell():
            sys.stderr.write(f"dtrain: {told}\n")
        value = self._program.run(source, name)
        return {} if value is None else bundle(value)

    def _pull(self, expression: str) -> bytes:
        value = self._program.value(expression)
        try:
            return _dumps(value)
        except Exception as error:
            raise TypeError(f"{expression!r}, a {type(value).__name__}, cannot be sent: {error}") from None

    def _cause(self, error: BaseException) -> BaseException:
        """Whatever torch raised when its sockets were shut, the reason was the interrupt."""
        if not self.interrupts.was_freed or isinstance(error, KeyboardInterrupt):
            return error
        return KeyboardInterrupt().with_traceback(error.__traceback__)

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # it may be of the user's own making
                stream.flush()
        self._flush_c(None)


def _checked(name: str) -> str:
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not a name that a value could have")
    return name


def _dumps(value: Any) -> bytes:
    try:
        import cloudpickle
    except ModuleNotFoundError:  # another interpreter's: what it can do without
        return pickle.dumps(value)
    data: bytes = cloudpickle.dumps(value)
    return data

"""Faults done on purpose by the rank itself: `inject` comes by its line, the program's own thread does what it says.

Nothing of torch is touched before the first fault is asked for, nor once none is wanted any more. A fault waits for the
next call of its kind (`points`); one that may happen anywhere is, when no such call comes within `PATIENCE`, done
between two lines of the program. That it happens is told just before, as there may be no afterwards.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from workbench.training.control import Control, Header
from workbench.training.deeds import DEEDS, LATE, PARTS, Deed
from workbench.training.patching import Patches
from workbench.training.points import BETWEEN, WRITE, Call, watch_points

PATIENCE: Final = 1.0  # s
LOOK: Final = 0.05  # s between two looks whether the main thread is in the program
OURS: Final = str(Path(__file__).parents[1]) + os.sep
KNOWN: Final = {**DEEDS, **PARTS}


class Faults:
    """What is wanted of this rank, and has not happened yet."""

    def __init__(self, control: Control) -> None:
        self._control, self._pid = control, os.getpid()
        self._lock = threading.Lock()
        self._wanted: dict[str, Header] = {}  # in the order asked
        self._told: set[str] = set()  # of those that stay
        self._patches: Patches | None = None
        self._kept: Any = None  # what the interpreter is to call
        self.is_released = False  # what sleeps is to wake
        self.at_work_since = 0.0  # monotonic s since when the main thread has waited for nothing
        self.size = 0  # bytes that `exhaust` is to use
        self.put_off: Call | None = None

    # --- in the line's thread ---

    def ask(self, header: Header, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        deed = KNOWN.get(header["fault"])
        if header["fault"] == "continue":
            self.end()
        elif deed is None:
            self._tell(header, problem="this rank knows no such fault")
        elif not deed.points:
            self._do_now(header, deed)
        else:
            self.is_released = False
            self.size = header.get("size", 0)
            self.want(header)
            if BETWEEN in deed.points:
                _thread.start_new_thread(self._insist, (header["fault"],))

    def end(self) -> None:
        """Nothing is wanted any more, and what sleeps wakes."""
        with self._lock:
            self.is_released = True
            self._wanted.clear()
            self._told.clear()
            self._rest()

    def want(self, header: Header) -> None:
        with self._lock:
            self._wanted[header["fault"]] = header
            if self._patches is None:
                self.at_work_since = time.monotonic()
                self._patches = Patches()
                watch_points(self._patches, self.meet)

    def _rest(self) -> None:
        """Take the wrappers off when nothing is wanted."""
        if not self._wanted and self._patches is not None:
            self._patches.undo()
            self._patches = None

    def _do_now(self, header: Header, deed: Deed) -> None:
        try:
            self._tell(header, detail=deed.act(self, nothing("")))
        except (LookupError, OSError) as error:
            self._tell(header, problem=str(error))

    def _tell(self, header: Header, detail: str = "", problem: str = "") -> None:
        name = header.get("name", header["fault"])
        if name != LATE:
            self._control.fact("FaultHappened", time=time.time(), fault=name, detail=detail, problem=problem)

    def _insist(self, name: str) -> None:
        """No call may ever come: have the main thread do it as soon as it is in the program's own lines, or torch's."""
        time.sleep(PATIENCE)
        main, raised = threading.main_thread().ident or 0, queue.SimpleQueue[BaseException]()
        if not self._await_program(main, lambda: name in self._wanted):
            return

        def act(_: object) -> int:
            try:
                self.meet(nothing(BETWEEN))
            except BaseException as error:  # C called us, and C cannot raise it
                raised.put(error)
            return 0

        pending = self._kept = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(act)
        ctypes.pythonapi.Py_AddPendingCall(pending, None)
        kind = self._kept = _like(raised.get())  # for ever, where it raises nothing
        if self._await_program(main, lambda: True):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(kind))

    def _await_program(self, main: int, wanted: Callable[[], bool]) -> bool:
        """Wait until the main thread is in no line of ours; False when it is not wanted any more."""
        while wanted():
            frame = sys._current_frames().get(main)
            if frame is None or not frame.f_code.co_filename.startswith(OURS):
                return True
            del frame
            time.sleep(LOOK)
        return False

    # --- in the program's thread ---

    def meet(self, call: Call) -> Any:
        """Make the call; if a fault is wanted here, in its way."""
        taken = self._take(call) if self._is_here(call) else None
        if taken is None:
            return call.run()
        header, deed = taken
        if header["fault"] not in self._told:
            self._tell(header, detail=call.name)
        if deed.stays:
            self._told.add(header["fault"])
        return deed.act(self, call)

    def _is_here(self, call: Call) -> bool:
        """In the rank itself, not in a process that it forked; in its main thread, but that others save as well."""
        is_main = threading.get_ident() == threading.main_thread().ident
        return os.getpid() == self._pid and (is_main or call.point == WRITE)

    def _take(self, call: Call) -> tuple[Header, Deed] | None:
        """The first fault that fits. Those that happen once are wanted no more, and come before those that stay."""
        with self._lock:
            fitting = [name for name in self._wanted if call.point in KNOWN[name].points and KNOWN[name].fits(call)]
            if not fitting:
                return None
            name = min(fitting, key=lambda name: KNOWN[name].stays)
            header = self._wanted[name] if KNOWN[name].stays else self._wanted.pop(name)
            self._rest()
            return header, KNOWN[name]


def nothing(point: str) -> Call:
    """A call where there is none."""
    return Call(point, "", lambda: None, (), {})


def _like(error: BaseException) -> type[BaseException]:
    """A class whose instances, made without arguments, say the same; under the same name."""
    kind = type(error)

    def __init__(self: BaseException) -> None:
        kind.__init__(self, *error.args)

    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})


def install(control: Control) -> None:
    """Have what the agent injects done."""
    control.on("inject", Faults(control).ask)

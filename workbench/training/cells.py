"""The main loop of an interactive rank: cells come in, run in `__main__`, and each is answered.

A watcher thread reads the control socket, so that an interrupt arrives also while the main thread is in a collective.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import ctypes
import linecache
import os
import queue
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from workbench.blackbox import Activity, Writer

PATIENCE: Final = 0.05  # s that Python has to raise an interrupt before sockets are shut under a collective
RICH: Final = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_latex_": "text/latex",
}
MOST: Final = 2**20
Frame = tuple[dict[str, Any], bytes]


class Cells:
    def __init__(
        self, receive: Callable[[], Frame], send: Callable[..., None], space: dict[str, Any], box: Writer
    ) -> None:
        self.receive, self.send, self.space, self.box = receive, send, space, box
        self.todo: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.running = False
        self.was_interrupted = False
        self.broken = ""
        self.serial = 0
        self.offset = time.time() - time.monotonic()
        self.mine = frozenset(_connections())

    def watch(self) -> None:
        """In a thread: queue cells, and see to it that an interrupt gets through."""
        while True:
            try:
                header, payload = self.receive()
            except (EOFError, OSError):
                self.todo.put(None)
                return
            if header["op"] == "interrupt":
                self.interrupt(self.serial)
            else:
                self.todo.put((header, payload))

    def interrupt(self, serial: int) -> None:
        """Free the main thread: Python's own way first, then the ground is taken from under a collective that waits."""
        if not self.running:
            return
        self.was_interrupted = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if self._has_left(serial):
            return
        if _shut(lambda port: port != _store_port(), self.mine):
            self.broken = "the process group was interrupted inside a collective"
        if not self._has_left(serial):
            _shut(lambda port: port == _store_port(), self.mine)  # it waits for a peer to arrive

    def _has_left(self, serial: int) -> bool:
        """Whether the cell ends within `PATIENCE`."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if not self.running or self.serial != serial:
                return True
            time.sleep(0.005)
        return False

    def loop(self) -> None:
        while True:
            self.say(Activity.IDLE)
            frame = self.todo.get()
            if frame is None:
                return
            self.one(*frame)

    def on_sigint(self, *_: object) -> None:
        """An interrupt ends the cell that runs; between two cells it must not cost the next one its answer."""
        if self.running:
            raise KeyboardInterrupt

    def say(self, activity: Activity) -> None:
        self.box.now(0, int(activity), time.monotonic() + self.offset)

    def one(self, header: dict[str, Any], payload: bytes) -> None:
        start = time.monotonic()
        self.serial += 1
        self.was_interrupted = False
        answer: dict[str, Any] = {"op": "cell", "cell_id": header["cell_id"], "ok": True}
        result = b""
        try:
            self.running = True
            try:
                self.say(Activity.CELL)
                if header["op"] == "execute":
                    answer["data"] = self.execute(header["source"], header["cell_id"])
                elif header["op"] == "push":
                    self.space[header["name"]] = _loads(payload)
                else:
                    result = _dumps(eval(header["name"], self.space))
            finally:
                self.running = False
        except BaseException as error:
            answer.update(ok=False, **self.explain(error))
        answer["seconds"] = time.monotonic() - start
        _flush()
        self.send(answer, result)

    def execute(self, source: str, cell_id: str) -> dict[str, str]:
        name = f"<{cell_id.replace('-', ' ')}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        if self.broken:
            sys.stderr.write(
                f"{self.broken}; destroy_process_group() and init_process_group() again before the next collective\n"
            )
            self.broken = ""
        tree = ast.parse(source, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, name, "exec", dont_inherit=True), self.space)
        if not isinstance(last, ast.Expr):
            return {}
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), self.space)
        if value is None or source.rstrip().endswith(";"):
            return {}
        self.space["_"] = value
        return bundle(value)

    def explain(self, error: BaseException) -> dict[str, str]:
        tb = error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
            tb = tb.tb_next
        if self.was_interrupted and not isinstance(error, KeyboardInterrupt):
            error = KeyboardInterrupt().with_traceback(tb)
        text = "".join(traceback.format_exception(type(error), error, tb, chain=not self.was_interrupted))
        return {"error": traceback.format_exception_only(type(error), error)[-1].strip(), "traceback": text}


def serve_cells(receive: Callable[[], Frame], send: Callable[..., None], space: dict[str, Any], box: Writer) -> None:
    """Serve until the agent hangs up."""
    cells = Cells(receive, send, space, box)
    signal.signal(signal.SIGINT, cells.on_sigint)
    threading.Thread(target=cells.watch, name="dtrain-cells", daemon=True).start()
    cells.loop()


def bundle(value: Any) -> dict[str, str]:
    """The value by MIME type, text/plain always; what is larger than 1 MB is left out."""
    found = {"text/plain": repr(value)}
    with contextlib.suppress(Exception):
        made = value._repr_mimebundle_()
        found.update({k: v for k, v in (made[0] if isinstance(made, tuple) else made).items() if isinstance(v, str)})
    for method, mime in RICH.items():
        with contextlib.suppress(Exception):
            data = getattr(value, method)()
            if data is not None:
                found[mime] = base64.b64encode(data).decode() if isinstance(data, bytes) else data
    found["text/plain"] = found["text/plain"][:MOST]
    return {mime: text for mime, text in found.items() if len(text) <= MOST}


def _connections() -> dict[tuple[int, int], int]:
    """Port of the peer by (descriptor, inode), of every TCP connection of this process. Listeners are none."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fd = int(entry.name)
            inode = os.fstat(fd)
            if stat.S_ISSOCK(inode.st_mode):
                with socket.socket(fileno=os.dup(fd)) as near:
                    if near.family in (socket.AF_INET, socket.AF_INET6):
                        found[fd, inode.st_ino] = int(near.getpeername()[1])
    return found


def _store_port() -> int:
    return int(os.environ.get("MASTER_PORT", "0"))


def _shut(wanted: Callable[[int], bool], spared: Collection[tuple[int, int]]) -> int:
    """End connections whose peer's port is wanted: a collective over them raises at once.

    `abort` and `destroy_process_group` would let a hung gloo collective wait for its timeout. Only connections: gloo
    aborts the process when its listener is shut.
    """
    count = 0
    for (fd, inode), port in _connections().items():
        if (fd, inode) not in spared and wanted(port):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as near:
                near.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _loads(data: bytes) -> Any:
    import cloudpickle

    return cloudpickle.loads(data)


def _dumps(value: Any) -> bytes:
    import cloudpickle

    data: bytes = cloudpickle.dumps(value)
    return data


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)

"""The process that serves the live pages of a home: `python -m workbench_widgets.server --home HOME`.

It listens on a unix socket that is its user's alone, and on no port. A browser comes through Jupyter (`proxy`), which
has checked login and origin; so any origin is taken here. Pages may be framed by pages of the same origin only, and
may load and connect to nothing else. Jupyter's cookies and headers, which the proxy passes on, are not kept.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from workbench_widgets.address import UnsafeDirectoryError, home_dir, socket_path

CHECK_EVERY: Final = 5.0  # s between looks whether the socket is still ours
FORGET_AFTER: Final = 5_000  # ms after which a closed page's session goes
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' blob:; frame-ancestors 'self'; "
        "base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; 0 also when another process serves this home already."""
    parser = argparse.ArgumentParser(prog="workbench_widgets.server", description=main.__doc__)
    parser.add_argument("--home", type=Path, default=None, help="the dtrain home whose jobs are shown")
    home = parser.parse_args(argv).home or home_dir()
    os.environ["DTRAIN_HOME"] = str(home)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("bokeh.server.util").setLevel(logging.ERROR)  # warns of any origin; see above
    try:
        path = socket_path(home)
    except UnsafeDirectoryError as error:
        logger.error("the live pages cannot be served: %s", error)
        return 1
    with _alone(path) as is_alone:
        if is_alone:
            serve(home, path)
    return 0


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether no other process serves at `path`; none will while this lasts. The lock goes with the process."""
    lock = path.with_suffix(".lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _inode(lock) != os.fstat(descriptor).st_ino:
            raise BlockingIOError  # its last holder removed it, and somebody else may have made a new one
    except BlockingIOError:
        yield False
    else:
        try:
            yield True
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def serve(home: Path, path: Path) -> None:
    """Listen at `path` until told to end; then remove it."""
    from tornado.ioloop import IOLoop, PeriodicCallback

    from workbench_widgets.pages import Pages

    pages, loop = Pages(home), IOLoop.current()
    for number in (signal.SIGTERM, signal.SIGINT):  # before there is a socket to leave behind
        signal.signal(number, lambda *_: loop.add_callback_from_signal(loop.stop))
    server = make_server(pages, path)
    inode = path.stat().st_ino
    stop_when_taken = functools.partial(_check_socket, path, inode, loop.stop)
    PeriodicCallback(stop_when_taken, CHECK_EVERY * 1000).start()
    server.start()
    try:
        loop.start()
    finally:
        if _inode(path) == inode:
            path.unlink(missing_ok=True)
        pages.close()
        server.stop(wait=False)


def _check_socket(path: Path, inode: int, stop: Callable[[], None]) -> None:
    """A socket that was removed (a runtime directory goes with the last login) can reach nobody any more."""
    if _inode(path) != inode:
        logger.warning("the socket was removed: ending")
        stop()


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def make_server(pages: Any, path: Path) -> Any:
    """The Bokeh server with the two pages and `/healthz`, bound but not started."""
    from panel.io.server import Server
    from tornado.web import OutputTransform, RequestHandler

    class SafeHeaders(OutputTransform):
        def transform_first_chunk(self, status: int, headers: Any, chunk: bytes, finishing: bool) -> Any:
            for name, value in HEADERS.items():
                headers[name] = value
            return status, headers, chunk

    class Health(RequestHandler):
        def get(self) -> None:
            self.set_header("Cache-Control", "no-store")
            self.write(pages.health())

    server = Server(  # type: ignore[no-untyped-call]
        {"/job": pages.job_app(), "/": pages.list_app()},
        unix_socket=str(path),
        allow_websocket_origin=["*"],
        extra_patterns=[("/healthz", Health)],
        include_headers=[],
        include_cookies=[],
        unused_session_lifetime_milliseconds=FORGET_AFTER,
        check_unused_sessions_milliseconds=FORGET_AFTER,
    )
    server._tornado.add_transform(SafeHeaders)
    pages.count_sessions = lambda: len(server.get_sessions())
    return server


if __name__ == "__main__":
    sys.exit(main())

"""The process that serves the live pages of a home: `python -m workbench_widgets.server --home HOME`.

It listens on a unix socket that is its user's alone. A browser comes through Jupyter (`proxy`), which has checked login
and origin; so any origin is taken here. It listens on a port only when `dtrain dashboard` asks for it, and what comes
by a port has passed the `gate`. Pages may be framed by pages of the same origin only, and may load and connect to
nothing else. Cookies and headers are not kept, but for the one that says whether a page may act: it is in the page's
signed token, so that nobody can make it say otherwise. No token gets into the log.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import logging
import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from workbench_widgets.address import UnsafeDirectoryError, home_dir, socket_path

CHECK_EVERY: Final = 5.0  # s between looks whether the socket is still ours
FORGET_AFTER: Final = 5_000  # ms after which a closed page's session goes
SECRET: Final = re.compile(r"\b(token=)[^&\s'\"]+")
logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; 0 also when another process serves this home already."""
    parser = argparse.ArgumentParser(prog="workbench_widgets.server", description=main.__doc__)
    parser.add_argument("--home", type=Path, default=None, help="the dtrain home whose jobs are shown")
    parser.add_argument("--guests", action="store_true", help="end once no process that showed a file here is left")
    options = parser.parse_args(argv)
    home = options.home or home_dir()
    os.environ["DTRAIN_HOME"] = str(home)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(without_secrets)
    logging.getLogger("bokeh.server.util").setLevel(logging.ERROR)  # warns of any origin; see above
    try:
        path = socket_path(home)
    except UnsafeDirectoryError as error:
        logger.error("the live pages cannot be served: %s", error)
        return 1
    with _alone(path) as is_alone:
        if is_alone:
            serve(home, path, is_guests=options.guests)
    return 0


def without_secrets(record: logging.LogRecord) -> bool:
    """An address that is logged may hold a token, of ours or of Jupyter: it is left out."""
    record.msg, record.args = SECRET.sub(r"\1…", record.getMessage()), ()
    return True


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


def serve(home: Path, path: Path, *, is_guests: bool = False) -> None:
    """Listen at `path` until told to end, then remove it. `is_guests`: end by itself when nobody needs it."""
    from tornado.ioloop import IOLoop, PeriodicCallback

    from workbench_widgets.pages import Pages
    from workbench_widgets.pools import Pools

    pages, loop = Pages(Pools(home)), IOLoop.current()
    for number in (signal.SIGTERM, signal.SIGINT):  # before there is a socket to leave behind
        signal.signal(number, lambda *_: loop.add_callback_from_signal(loop.stop))
    server, keeper = make_server(pages, path, home / "dashboard")
    inode = _inode(path) or -1  # it may be gone already
    stop_when_taken = functools.partial(_check_socket, path, inode, loop.stop)
    PeriodicCallback(stop_when_taken, CHECK_EVERY * 1000).start()
    if is_guests:
        PeriodicCallback(functools.partial(_end_with_guests, pages, loop), CHECK_EVERY * 1000).start()
    server.start()
    keeper.restore()
    try:
        loop.start()
    finally:
        if _inode(path) == inode:
            path.unlink(missing_ok=True)
        keeper.close()
        pages.close()
        server.stop(wait=False)


async def _end_with_guests(pages: Any, loop: Any) -> None:
    if not await loop.run_in_executor(None, pages.is_needed):
        loop.stop()


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


def make_server(pages: Any, path: Path, directory: Path) -> tuple[Any, Any]:
    """The Bokeh server with the pages and `/healthz`, bound but not started; and who opens ports for it."""
    from panel.io.server import Server

    from workbench_widgets.gate import RIGHTS
    from workbench_widgets.gatekeeper import Gatekeeper, Open
    from workbench_widgets.handlers import HEADERS, Health, Link, SafeHeaders
    from workbench_widgets.saved import Show

    keepers: list[Gatekeeper] = []
    server = Server(  # type: ignore[no-untyped-call]
        {"/job": pages.job_app(), "/compare": pages.compare_app(), "/": pages.list_app()},
        unix_socket=str(path),
        allow_websocket_origin=["*"],
        extra_patterns=[
            ("/healthz", Health, {"health": pages.health, "knows": lambda key: pages.shelf.get(key) is not None}),
            ("/gate", Open, {"keepers": keepers}),
            ("/saved", Show, {"shelf": pages.shelf, "guests": pages.guests}),
            (r"/job/([^/]+)", Link),
        ],
        include_headers=[RIGHTS],
        include_cookies=[],
        sign_sessions=True,
        secret_key=secrets.token_bytes(32),
        unused_session_lifetime_milliseconds=FORGET_AFTER,
        check_unused_sessions_milliseconds=FORGET_AFTER,
    )
    server._tornado.add_transform(SafeHeaders)
    pages.count_sessions = lambda: len(server.get_sessions())
    keepers.append(Gatekeeper(server._tornado, directory, HEADERS))
    return server, keepers[0]


if __name__ == "__main__":
    sys.exit(main())

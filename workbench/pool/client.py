"""A client's side: ask the runner, wait for its answer, on the caller's thread and interruptible.

One Dask connection pool on an event loop in a thread of its own; no `dask.distributed.Client`, which would go on trying
to reconnect, and say so in whichever cell runs. Waiting never holds the GIL, so Ctrl-C or the notebook's interrupt ends
a wait within milliseconds and leaves the connection usable.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import socket
import threading
import weakref
from pathlib import Path
from typing import Any, TypeVar

from distributed import Client
from distributed.core import ConnectionPool
from distributed.security import Security

from workbench import __version__
from workbench.errors import PoolLostError, PoolUnavailableError
from workbench.pool.local import Mark, pool_dir
from workbench.pool.messages import Fault, decode, encode, from_fault
from workbench.pool.process import security_in
from workbench.pool.scheduler import PLUGIN as RUNNER_PLUGIN
from workbench.pool.scheduler import RunnerPlugin
from workbench.pool.worker import AgentPlugin

T = TypeVar("T")


class PoolClient:
    """Requests to one pool. `is_local`: its processes are this machine's and see this process' files."""

    def __init__(self, address: str, security: Security, *, is_local: bool) -> None:
        self.address, self.is_local = address, is_local
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dtrain-client", daemon=True)
        self._thread.start()
        self._rpc = asyncio.run_coroutine_threadsafe(_connections(security), self._loop).result(10.0)
        # One that is forgotten hangs up too: Dask would complain of its connections in whichever cell runs.
        self._hang_up = weakref.finalize(self, _hang_up, self._loop, self._thread, self._rpc)

    @classmethod
    def connect_local(cls, name: str, mark: Mark) -> PoolClient:
        """Join a pool of this machine, found by its mark; another version's is refused."""
        if mark.version != __version__:
            raise PoolUnavailableError(
                f"pool {name} runs version {mark.version}, this is {__version__}",
                hint=f"stop it with: dtrain pool stop --name {name}",
            )
        return cls(mark.address, security_in(pool_dir(name)), is_local=True)

    @classmethod
    def connect(cls, target: str | Client, make_service: Any, jobs_dir: Path, timeout: float) -> PoolClient:
        """Join a cluster that the user runs: an address, a scheduler file, or a `Client`; our plugins go there."""
        client = _dial(target, timeout) if isinstance(target, str) else target
        try:
            # In this order: a scheduler drops a worker that says what it has no handler for.
            client.register_plugin(RunnerPlugin(make_service), name=RUNNER_PLUGIN)
            client.register_plugin(AgentPlugin(str(jobs_dir)))
            return cls(client.scheduler.address, client.security, is_local=False)
        finally:
            if client is not target:
                client.close(timeout=2)

    def ask(self, name: str, body: object, kind: type[T], timeout: float = 30.0) -> T:
        """One request; raises what the runner raised, or `PoolLostError` when nothing answers any more."""
        future = self.begin(name, body, timeout)
        try:
            return decode(future.result(timeout + 5.0), kind)
        except (OSError, concurrent.futures.CancelledError) as error:  # OSError: closed, refused, timed out
            raise self._lost() from error
        finally:
            future.cancel()

    def begin(self, name: str, body: object, timeout: float = 30.0) -> concurrent.futures.Future[bytes]:
        """Send a request and do not wait for its answer."""
        if self._loop.is_closed():
            raise self._lost()
        return asyncio.run_coroutine_threadsafe(self._call(name, encode(body), timeout), self._loop)

    async def _call(self, name: str, body: bytes, timeout: float) -> bytes:
        call = self._rpc(self.address).dtrain(request=name, body=body)
        answer = await asyncio.wait_for(call, timeout)
        if answer["ok"]:
            return bytes(answer["body"])
        raise from_fault(decode(bytes(answer["body"]), Fault))

    def _lost(self) -> PoolLostError:
        return PoolLostError(f"the pool at {self.address} does not answer", hint="start it again with: %dtrain up")

    def close(self) -> None:
        """Hang up; a second call does nothing."""
        self._hang_up()


def _hang_up(loop: asyncio.AbstractEventLoop, thread: threading.Thread, rpc: ConnectionPool) -> None:
    with contextlib.suppress(Exception):
        asyncio.run_coroutine_threadsafe(rpc.close(), loop).result(2.0)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(2.0)
    if not thread.is_alive():
        loop.close()


async def _connections(security: Security) -> ConnectionPool:
    rpc = ConnectionPool(
        limit=32,
        connection_args=security.get_connection_args("client"),
        timeout=5.0,
        server=None,
    )
    await rpc.start()
    return rpc


def _dial(target: str, timeout: float) -> Client:
    """A client for an address, or for the scheduler that a file names."""
    try:
        address = json.loads(Path(target).read_text())["address"] if Path(target).is_file() else target
        _knock(address, timeout)
        return Client(address, timeout=timeout, set_as_default=False, name="dtrain")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PoolUnavailableError(
            f"nothing answers at {target}: {error}", hint="is the scheduler running, and is the address right?"
        ) from error


def _knock(address: str, timeout: float) -> None:
    """Raise at once where nothing listens; Dask would try again until its timeout."""
    protocol, _, place = address.rpartition("://")
    if protocol in ("", "tcp", "tls"):
        host, _, port = place.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout):
            pass

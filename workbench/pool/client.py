"""A client's side: ask the runner, wait for its answer, on the caller's thread and interruptible.

The connection is Dask's `Client`. Waiting never holds the GIL or the loop, so Ctrl-C and the notebook's interrupt end a
wait within milliseconds and leave the connection usable.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from pathlib import Path
from typing import Any, TypeVar

from distributed import Client

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

    def __init__(self, client: Client, *, owns: bool, is_local: bool) -> None:
        self._client, self._owns, self.is_local = client, owns, is_local

    @classmethod
    def connect_local(cls, name: str, mark: Mark, timeout: float) -> PoolClient:
        """Join a pool of this machine, found by its mark; another version's is refused."""
        if mark.version != __version__:
            raise PoolUnavailableError(
                f"pool {name} runs version {mark.version}, this is {__version__}",
                hint=f"stop it with: dtrain pool stop --pool {name}",
            )
        return cls(_dial(mark.address, timeout, security=security_in(pool_dir(name))), owns=True, is_local=True)

    @classmethod
    def connect(cls, target: str | Client, make_service: Any, jobs_dir: Path, timeout: float) -> PoolClient:
        """Join a cluster that the user runs: an address, a scheduler file, or a `Client`; our plugins go there."""
        if isinstance(target, str):
            is_file = target.endswith(".json") or Path(target).is_file()
            client = _dial(None if is_file else target, timeout, scheduler_file=target if is_file else None)
        else:
            client = target
        try:
            client.register_plugin(AgentPlugin(str(jobs_dir)))
            client.register_plugin(RunnerPlugin(make_service), name=RUNNER_PLUGIN)
        except Exception:
            if client is not target:
                client.close(timeout=2)
            raise
        return cls(client, owns=client is not target, is_local=False)

    @property
    def address(self) -> str:
        return str(self._client.scheduler.address) if self._client.scheduler is not None else ""

    def ask(self, name: str, body: object, kind: type[T], timeout: float = 30.0) -> T:
        """One request; raises what the runner raised, or `PoolLostError` when nothing answers any more."""
        return self.finish(self.begin(name, body, timeout), kind, timeout)

    def begin(self, name: str, body: object, timeout: float = 30.0) -> concurrent.futures.Future[bytes]:
        """Send a request and do not wait."""
        call = self._call(name, encode(body), timeout)
        try:
            return asyncio.run_coroutine_threadsafe(call, self._client.loop.asyncio_loop)
        except RuntimeError as error:
            call.close()
            raise self._lost() from error

    def finish(self, future: concurrent.futures.Future[bytes], kind: type[T], timeout: float = 30.0) -> T:
        """Wait for what `begin` began."""
        try:
            return decode(future.result(timeout + 5.0), kind)
        except (OSError, concurrent.futures.CancelledError, TimeoutError) as error:
            raise self._lost() from error
        except BaseException:
            future.cancel()
            raise

    async def _call(self, name: str, body: bytes, timeout: float) -> bytes:
        scheduler = self._client.scheduler
        if scheduler is None or self._client.status not in ("running", "connecting"):
            raise self._lost()
        answer = await asyncio.wait_for(scheduler.dtrain(request=name, body=body), timeout)
        if answer["ok"]:
            return bytes(answer["body"])
        raise from_fault(decode(answer["body"], Fault))

    def _lost(self) -> PoolLostError:
        return PoolLostError(
            f"the pool at {self.address or 'its old address'} does not answer", hint="start it again with: %dtrain up"
        )

    def close(self) -> None:
        if self._owns:
            with contextlib.suppress(Exception):
                self._client.close(timeout=2)


def _dial(address: str | None, timeout: float, **options: Any) -> Client:
    where = address or options.get("scheduler_file")
    try:
        return Client(address, timeout=timeout, set_as_default=False, name="dtrain", **options)
    except (OSError, ValueError, TimeoutError) as error:
        raise PoolUnavailableError(
            f"nothing answers at {where}: {error}", hint="is the scheduler running, and is the address right?"
        ) from error

"""The scheduler's side: a plugin that hands Dask's messages to a service (the runner) and the service's to the agents.

Everything runs on the scheduler's event loop; nothing here decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from distributed import Scheduler
from distributed.comm import get_address_host
from distributed.diagnostics.plugin import SchedulerPlugin

from workbench.commands import AgentCommand
from workbench.errors import PoolError, PoolLostError
from workbench.policy.comeback import Comeback
from workbench.pool.clocks import HostClock, by_our_clock
from workbench.pool.lease import LEASE, LOOK_EVERY, LOST_AFTER, UNHEARD, Silence
from workbench.pool.messages import Hello, Message, decode, decode_batch, encode, to_fault

PLUGIN: Final = "dtrain-runner"
logger = logging.getLogger(__name__)


class Service(Protocol):
    """What the plugin talks to."""

    def kept(self, worker: str, environments: Mapping[str, Mapping[str, str]]) -> None: ...
    def worker_joined(self, worker: str, hello: Hello) -> None: ...
    def worker_lost(self, worker: str, reason: str) -> None: ...
    def received(self, worker: str, batch: Sequence[Message]) -> None: ...
    async def request(self, name: str, body: bytes) -> bytes: ...
    def close(self) -> None: ...


class SchedulerLink:
    """What a service may do with the pool: send, ask, wait. Valid while the scheduler lives."""

    def __init__(self, scheduler: Scheduler, silence: Silence[str], comeback: Comeback | None) -> None:
        """`comeback`: of a pool of ours; None for a cluster that somebody else runs."""
        self._scheduler, self._silence, self.comeback = scheduler, silence, comeback

    @property
    def address(self) -> str:
        return str(self._scheduler.address)

    def now(self) -> float:
        """Seconds since the epoch, on the scheduler's host."""
        return time.time()

    def call_later(self, delay: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Run `call` on the loop after `delay` seconds; the handle cancels it."""
        return asyncio.get_running_loop().call_later(max(0.0, delay), call)

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Run a coroutine beside; its failure is logged."""
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        task.add_done_callback(_log_failure)
        return task

    def may_be_cut_off(self, worker: str) -> bool:
        """Whether nothing has been heard of the worker's host for a while; whether it is lost will soon be known."""
        return self._silence.of(worker) > UNHEARD

    def send(self, worker: str, command: AgentCommand) -> bool:
        """Post a command to a worker's agent; False when that worker is not connected any more."""
        stream = self._scheduler.stream_comms.get(worker)
        if stream is None or stream.closed():
            return False
        stream.send({"op": "dtrain-command", "data": encode(command)})
        return True

    async def ask(self, worker: str, name: str, body: bytes, timeout: float = 30.0) -> bytes:
        """Ask a worker's agent and wait for its answer; `PoolError` when it does not give one."""
        call = self._scheduler.rpc(worker).dtrain_agent(request=name, body=body)
        try:
            answer = await asyncio.wait_for(call, timeout)
        except (TimeoutError, OSError) as error:
            raise PoolError(f"worker {worker} does not answer", hint="try again, or look at %dtrain pool") from error
        return bytes(answer)

    def close_pool(self) -> None:
        """End workers and scheduler, once the current request has been answered."""
        asyncio.get_running_loop().call_later(
            0.05, lambda: self.spawn(self._scheduler.close(reason="dtrain pool stop"))
        )


class RunnerPlugin(SchedulerPlugin):  # type: ignore[misc]
    """Puts a service on a scheduler, in this process or (pickled) in a cluster the user already runs."""

    name = PLUGIN
    idempotent = True

    def __init__(self, make_service: Callable[[SchedulerLink], Service], comeback: Comeback | None = None) -> None:
        self._make_service, self._comeback = make_service, comeback
        self._service: Service | None = None
        self._known: dict[str, int] = {}  # workers that are there, and their epochs: see `lease`
        self._given_up: dict[str, int] = {}  # workers that are not heard of, and their epochs then
        self._clocks: dict[str, HostClock] = {}  # of those on other hosts, also while they are cut off

    async def start(self, scheduler: Scheduler) -> None:
        self._silence = Silence[str](time.monotonic())
        self._service = self._make_service(SchedulerLink(scheduler, self._silence, self._comeback))
        self._scheduler = scheduler
        self._watch = asyncio.ensure_future(self._watch_hosts())
        scheduler.stream_handlers["dtrain-report"] = self._on_report
        scheduler.stream_handlers["dtrain-hello"] = self._on_hello
        scheduler.stream_handlers["dtrain-kept"] = self._on_kept
        scheduler.handlers["dtrain"] = self._on_request

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        self._clocks.pop(worker, None)
        self._given_up.pop(worker, None)
        self._lose(worker, "its connection closed")

    def _lose(self, worker: str, reason: str) -> None:
        self._silence.forget(worker)
        if worker in self._known and self._service is not None:
            del self._known[worker]
            self._service.worker_lost(worker, reason)

    async def _watch_hosts(self) -> None:
        """Give up workers of other hosts that are not heard of."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            for worker in self._silence.look(time.monotonic(), LOST_AFTER):
                self._given_up[worker] = self._known[worker]
                self._lose(worker, f"its host is cut off: nothing heard of it for {LOST_AFTER:g} s")

    async def close(self) -> None:
        self._watch.cancel()
        if self._service is not None:
            self._service.close()
            self._service = None

    def _on_hello(self, worker: str, data: bytes, clock: float, stamp: float) -> None:
        hello = decode(data, Hello)
        if self._service is None:
            return
        if self._given_up.get(worker) == hello.epoch:
            self._tell(worker, {"op": "dtrain-given-up", "epoch": hello.epoch})
            return
        self._given_up.pop(worker, None)
        if self._known.get(worker, hello.epoch) != hello.epoch:  # back before it was given up
            self._lose(worker, f"its host was cut off for {LEASE:g} s, and its ranks ended")
        self._known[worker] = hello.epoch
        if get_address_host(worker) != get_address_host(self._scheduler.address):
            self._clocks.setdefault(worker, HostClock()).heard(clock, time.time())
            self._silence.heard(worker)
            self._tell(worker, {"op": "dtrain-alive", "epoch": hello.epoch, "stamp": stamp})
        self._service.worker_joined(worker, hello)

    def _on_kept(self, worker: str, data: bytes, clock: float) -> None:
        if self._service is not None:
            self._service.kept(worker, decode(data, dict[str, dict[str, str]]))

    def _tell(self, worker: str, message: dict[str, Any]) -> None:
        stream = self._scheduler.stream_comms.get(worker)
        if stream is not None and not stream.closed():
            stream.send(message)

    def _on_report(self, worker: str, data: bytes, clock: float) -> None:
        if self._service is None:
            return
        batch = decode_batch(data)
        if (known := self._clocks.get(worker)) is not None:
            known.heard(clock, time.time())
            batch = [by_our_clock(message, known.ahead) for message in batch]
        self._service.received(worker, batch)

    async def _on_request(self, request: str, body: bytes) -> dict[str, Any]:
        fault: Exception = PoolLostError("the pool has been stopped", hint="start it again with: %dtrain up")
        if (service := self._service) is not None:
            try:
                return {"ok": True, "body": await service.request(request, body)}
            except Exception as error:  # the client raises it again
                logger.debug("request %s failed", request, exc_info=True)
                if self._service is not None:  # else it failed of that: its records are closed
                    fault = error
        return {"ok": False, "body": encode(to_fault(fault))}


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("background work failed", exc_info=task.exception())

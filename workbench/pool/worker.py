"""A worker's side: a plugin that runs one agent in a Dask worker and carries its words to the scheduler.

The agent lives in a thread of its own, so a Dask task that holds the event loop does not stop it from watching.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final

import msgspec
from distributed import Worker
from distributed.comm import get_address_host
from distributed.diagnostics.plugin import WorkerPlugin

from workbench.agent.agent import Agent
from workbench.commands import StartRanks, StartStore
from workbench.events import EVENT_TYPES, Event
from workbench.pool.lease import HELLO_EVERY, LEASE, LOOK_EVERY, Lease
from workbench.pool.messages import PROTOCOL, Hello, Message, decode, decode_command, encode
from workbench.requests import AskEvidence, ListCheckpoints, ReadLog
from workbench.telemetry import Report

PLUGIN: Final = "dtrain-agent"


class AgentPlugin(WorkerPlugin):  # type: ignore[misc]
    """`slots` 0: one a GPU where there are GPUs, else one a thread of the worker.

    `outlives`: this one will be given to another worker of this process when its own has lost its scheduler. The agent
    stays until `end`, with its warm zygotes and what it keeps for jobs, and without a rank.
    """

    name = PLUGIN
    idempotent = True

    def __init__(self, jobs_dir: str, slots: int = 0, preload: tuple[str, ...] = (), *, outlives: bool = False) -> None:
        self._jobs_dir, self._slots, self._preload, self._outlives = jobs_dir, slots, preload, outlives
        self._kept: Agent | None = None
        self._outbox: deque[Message] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._will_flush = False

    async def setup(self, worker: Worker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        gpus = find_gpus()
        slots = self._slots or len(gpus) or worker.state.nthreads
        self._lease = Lease(time.monotonic())
        if self._kept is None:
            self._agent = self._make_agent(worker.address, gpus)
            self._agent.start()
            self._agent.call_every(LOOK_EVERY, self._look_at_lease)
            self._kept = self._agent if self._outlives else None
        else:
            self._kept.serve(worker.address)
        self._hello = Hello(
            protocol=PROTOCOL,
            host=get_address_host(worker.address),
            pid=os.getpid(),
            slots=slots,
            accelerator="GPU" if gpus else "CPU",
        )
        worker.stream_handlers["dtrain-command"] = self._on_command
        worker.stream_handlers["dtrain-alive"] = self._lease.answered
        worker.stream_handlers["dtrain-given-up"] = self._lease.given_up
        worker.handlers["dtrain_agent"] = self._on_request
        self._tasks = [asyncio.create_task(self._say_hello())]

    def _make_agent(self, address: str, gpus: tuple[str, ...]) -> Agent:
        return Agent(
            worker=address,
            jobs_dir=Path(self._jobs_dir),
            emit=self._emit,
            python=sys.executable,
            preload=self._preload,
            gpus=gpus,
        )

    async def teardown(self, worker: Worker) -> None:
        for task in self._tasks:
            task.cancel()
        if self._kept is None:
            await asyncio.to_thread(self._agent.stop)
        else:
            await asyncio.to_thread(self._kept.rest, "the pool's scheduler is gone")

    def end(self) -> None:
        """End what outlived the worker; nothing is left then."""
        if self._kept is not None:
            self._kept.stop()

    async def _say_hello(self) -> None:
        delay, is_known = 0.05, self._kept is None
        while True:
            if self._kept is not None and not is_known:  # before anything can be granted here
                is_known = self._post("dtrain-kept", encode(self._kept.environments()))
                self._flush()
            self._hail()
            await asyncio.sleep(delay)
            delay = min(delay * 2, HELLO_EVERY)

    def _hail(self) -> None:
        hello = msgspec.structs.replace(self._hello, epoch=self._lease.epoch, is_warm=self._agent.is_warm)
        self._post("dtrain-hello", encode(hello), stamp=self._lease.stamp)

    def _look_at_lease(self) -> None:
        """In the agent's thread, which goes on while a task holds up the worker's loop."""
        self._lease.look(time.monotonic())
        if self._lease.is_ending:  # again and again: what was under way then may have started something
            self._agent.end_ranks(f"its host was cut off from the scheduler for {LEASE:g} s")
            if self._agent.is_idle:
                self._loop.call_soon_threadsafe(self._begin_epoch)

    def _begin_epoch(self) -> None:
        """First that all has ended, and only then how: the scheduler must not begin anew here in between."""
        if self._lease.is_ending:
            self._lease.ended()
            self._hail()
            self._flush()

    def _post(self, op: str, data: bytes, **more: float) -> bool:
        stream = self._worker.batched_stream
        if stream is None or stream.comm is None or stream.closed():
            return False
        stream.send({"op": op, "data": data, "clock": time.time(), **more})
        return True

    def _emit(self, job_id: str, news: Event | Report) -> None:
        """From the agent's thread: queue, and wake the loop only when it has not been woken yet."""
        is_event = isinstance(news, EVENT_TYPES)
        self._outbox.append(Message(job_id, news, None) if is_event else Message(job_id, None, news))  # type: ignore[arg-type]
        if not self._will_flush:
            self._will_flush = True
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the loop has closed: nobody is left to tell
                self._outbox.clear()

    def _flush(self) -> None:
        if self._lease.is_ending:
            return
        self._will_flush = False  # before the queue is read: what comes from now on wakes the loop again
        batch = [self._outbox.popleft() for _ in range(len(self._outbox))]
        if batch and not self._post("dtrain-report", encode(batch)) and self._kept is not None:
            self._outbox.extendleft(reversed(batch))  # the last words of ranks, for the scheduler that comes

    def _on_command(self, data: bytes) -> None:
        command = decode_command(data)
        # What was sent before a cut and arrives after it: the scheduler has given that generation up, or soon will.
        if not (self._lease.is_over and isinstance(command, StartStore | StartRanks)):
            self._agent.submit(command)

    async def _on_request(self, request: str, body: bytes) -> bytes:
        match request:
            case "log":
                ask = decode(body, ReadLog)
                page = await asyncio.to_thread(
                    self._agent.read_log, ask.job_id, ask.rank, tail=ask.tail, grep=ask.grep, since=ask.since
                )
                return encode(page)
            case "evidence":
                wish = decode(body, AskEvidence)
                return encode(
                    await asyncio.to_thread(
                        self._agent.evidence,
                        wish.job_id,
                        wish.restart_count,
                        deep=wish.deep,
                        timeout=wish.timeout,
                    )
                )
            case "checkpoints":
                question = decode(body, ListCheckpoints)
                return encode(await asyncio.to_thread(self._agent.list_checkpoints, question))
            case "stacks":
                return encode(await asyncio.to_thread(self._agent.stacks, decode(body, str)))
        raise ValueError(f"an agent knows no request {request!r}")


def find_gpus() -> tuple[str, ...]:
    """The CUDA devices of this process, as CUDA_VISIBLE_DEVICES would name them; no CUDA call is made."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
    root = Path("/proc/driver/nvidia/gpus")
    return tuple(map(str, range(len(list(root.iterdir()))))) if root.is_dir() else ()

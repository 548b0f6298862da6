"""What the scheduler's plugin makes of hellos and reports: whom it answers, whom it loses, whose times it puts right.

Dask's scheduler is stood in for by the few things of it that the plugin touches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.events import RankStarted
from workbench.pool import scheduler as module
from workbench.pool.messages import PROTOCOL, Fault, Hello, Message, decode, encode
from workbench.pool.scheduler import RunnerPlugin, SchedulerLink

FAR, NEAR = "tcp://10.0.0.2:1", "tcp://10.0.0.1:2"


class Stream:
    """One worker's, with what was sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def closed(self) -> bool:
        return False

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


class Story:
    """A service that writes down what it is told."""

    def __init__(self, link: SchedulerLink) -> None:
        self.link = link
        self.told: list[Any] = []

    def kept(self, worker: str, environments: Mapping[str, Mapping[str, str]]) -> None:
        self.told.append(("kept", worker, environments))

    def worker_joined(self, worker: str, hello: Hello) -> None:
        self.told.append(("joined", worker, hello.epoch))

    def worker_lost(self, worker: str, reason: str) -> None:
        self.told.append(("lost", worker, reason))

    def received(self, worker: str, batch: Sequence[Message]) -> None:
        self.told += [message.event for message in batch]

    async def request(self, name: str, body: bytes) -> bytes:
        return body

    def close(self) -> None:
        self.told.append("closed")


class Pool:
    def __init__(self) -> None:
        self.streams = {FAR: Stream(), NEAR: Stream()}
        self.dask = SimpleNamespace(
            address="tcp://10.0.0.1:8786", stream_comms=self.streams, stream_handlers={}, handlers={}
        )
        self.plugin = RunnerPlugin(self._make)

    def _make(self, link: SchedulerLink) -> Story:
        self.story = Story(link)
        return self.story

    def hello(self, worker: str, epoch: int = 0, ahead: float = 0.0, stamp: float = 5.0) -> None:
        hello = Hello(protocol=PROTOCOL, host=worker[6:14], pid=1, slots=1, epoch=epoch)
        self.dask.stream_handlers["dtrain-hello"](
            worker=worker, data=encode(hello), clock=time.time() + ahead, stamp=stamp
        )


def with_pool(act: Callable[[Pool], Awaitable[None]]) -> None:
    async def main() -> None:
        pool = Pool()
        await pool.plugin.start(pool.dask)
        await act(pool)
        await pool.plugin.close()

    asyncio.run(main())


def test_a_worker_of_another_host_is_answered_with_its_own_stamp_and_one_of_this_is_not() -> None:
    async def act(pool: Pool) -> None:
        pool.hello(FAR, stamp=7.5)
        pool.hello(NEAR)
        assert pool.streams[FAR].sent == [{"op": "dtrain-alive", "epoch": 0, "stamp": 7.5}]
        assert pool.streams[NEAR].sent == []

    with_pool(act)


def test_a_worker_in_its_next_epoch_was_lost_in_between() -> None:
    async def act(pool: Pool) -> None:
        pool.hello(FAR)
        pool.hello(FAR, epoch=1)
        first, lost, again = pool.story.told
        assert (first, again) == (("joined", FAR, 0), ("joined", FAR, 1))
        assert lost[:2] == ("lost", FAR)
        assert "was cut off for 7 s, and its ranks ended" in lost[2]

    with_pool(act)


def test_who_is_given_up_is_told_so_until_it_comes_in_its_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY", 0.001)
    monkeypatch.setattr(module, "LOST_AFTER", 0.01)

    async def act(pool: Pool) -> None:
        pool.hello(NEAR)
        pool.hello(FAR)
        async with asyncio.timeout(5.0):
            while len(pool.story.told) < 3:
                await asyncio.sleep(0.001)
        assert pool.story.told[-1][:2] == ("lost", FAR), "only of other hosts silence tells anything"
        pool.hello(FAR)
        assert pool.streams[FAR].sent[-1] == {"op": "dtrain-given-up", "epoch": 0}
        assert len(pool.story.told) == 3
        pool.hello(FAR, epoch=1)
        assert pool.story.told[3:] == [("joined", FAR, 1)]

    with_pool(act)


def test_what_a_wrong_clock_tells_is_put_right_on_arrival() -> None:
    async def act(pool: Pool) -> None:
        pool.hello(FAR, ahead=3600.0)
        now = time.time()
        batch = [Message("job", RankStarted(time=now + 3600.0, restart_count=0, rank=0, pid=1))]
        pool.dask.stream_handlers["dtrain-report"](worker=FAR, data=encode(batch), clock=now + 3600.0)
        event = pool.story.told[-1]
        assert isinstance(event, RankStarted)
        assert abs(event.time - now) < 1.0

    with_pool(act)


def test_a_closed_connection_is_a_loss_once() -> None:
    async def act(pool: Pool) -> None:
        pool.hello(FAR)
        pool.plugin.remove_worker(pool.dask, FAR)  # type: ignore[arg-type]
        pool.plugin.remove_worker(pool.dask, FAR)  # type: ignore[arg-type]
        assert pool.story.told == [("joined", FAR, 0), ("lost", FAR, "its connection closed")]

    with_pool(act)


def test_what_is_asked_of_a_pool_that_is_being_stopped_is_not_answered_with_what_failed_of_that() -> None:
    async def act(pool: Pool) -> None:
        async def wait(name: str, body: bytes) -> bytes:
            await asyncio.sleep(0)
            raise ValueError("the record is closed")

        pool.story.request = wait  # type: ignore[method-assign]
        ask = pool.dask.handlers["dtrain"]
        answer = await ask(request="follow", body=b"")
        assert decode(answer["body"], Fault).kind == "ValueError"
        waiting = asyncio.ensure_future(ask(request="follow", body=b""))
        await asyncio.sleep(0)
        await pool.plugin.close()
        for answer in (await waiting, await ask(request="follow", body=b"")):
            assert decode(answer["body"], Fault).kind == "PoolLostError"

    with_pool(act)

"""The processes of a local pool: `python -m workbench.pool.process scheduler|worker --pool NAME --dir DIR …`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import dask
import msgspec
from distributed import Scheduler, Worker
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.security import Security

from workbench import __version__
from workbench.errors import PoolError
from workbench.policy.comeback import Comeback
from workbench.pool.local import (
    START_TIMEOUT,
    Mark,
    command,
    find_pool,
    put_mark,
    read_marks,
    running,
    spawn,
    write_mark,
)
from workbench.pool.scheduler import RunnerPlugin, SchedulerLink, Service
from workbench.pool.worker import AgentPlugin
from workbench.store.home import jobs_dir

LOOPBACK: Final = "127.0.0.1"
AGAIN_AFTER: Final = 0.1  # s between a worker's death and the next one's start
# Dask's own pages would be open to every user of the machine; ours are served elsewhere, behind a login.
CONFIG: Final = {
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.scheduler.work-stealing": False,
    "distributed.worker.profile.enabled": False,
    "distributed.scheduler.worker-ttl": None,
    # Fifty wakes a second to notice that the loop was held up, and figures for the pages that are off: an idle pool
    # is to cost next to nothing.
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.admin.system-monitor.gil.enabled": False,
}


def security_in(directory: Path) -> Security:
    """TLS with the pool's own certificate, for every role."""
    cert, key = str(directory / "tls" / "cert.pem"), str(directory / "tls" / "key.pem")
    roles = {
        f"tls_{role}_{what}": path
        for role in ("scheduler", "worker", "client")
        for what, path in (("cert", cert), ("key", key))
    }
    return Security(tls_ca_file=cert, require_encryption=True, **roles)


async def run_scheduler(options: argparse.Namespace) -> None:
    directory = Path(options.dir)
    before = read_marks(directory).get("scheduler")
    comeback = Comeback(deaths=before.deaths if before else ())
    service: Callable[[SchedulerLink], Service] = partial(_find(options.service), options.pool)
    scheduler = Scheduler(
        protocol="tls",
        host=LOOPBACK,
        port=0,
        security=security_in(directory),
        dashboard=False,
        dashboard_address=f"{LOOPBACK}:0",
    )
    async with scheduler:
        await scheduler.register_scheduler_plugin(RunnerPlugin(service, comeback), idempotent=True)
        if comeback.is_given_up:
            return
        argv = command("scheduler", directory, options.pool, options.slots, options.preload, options.service)
        mark = write_mark(directory, "scheduler", scheduler.address, argv=argv, deaths=comeback.deaths)
        if options.lock is not None:
            os.close(options.lock)
        await scheduler.register_scheduler_plugin(Farewell(directory, mark), idempotent=True)
        _close_on_sigterm(scheduler)
        keeper = asyncio.create_task(_keep_worker(scheduler, directory, options))
        await scheduler.finished()
        keeper.cancel()


class Farewell(SchedulerPlugin):  # type: ignore[misc]
    """Leaves word that the scheduler ends because it is to: its worker does not bring it back then."""

    name = "dtrain-farewell"

    def __init__(self, directory: Path, mark: Mark) -> None:
        self._directory, self._mark = directory, mark

    async def before_close(self) -> None:
        put_mark(self._directory, msgspec.structs.replace(self._mark, is_closing=True))


async def _keep_worker(scheduler: Scheduler, directory: Path, options: argparse.Namespace) -> None:
    """Whoever started the pool started its worker; from then on one that dies is replaced."""
    argv = command("worker", directory, options.pool, options.slots, options.preload, options.service)
    while True:
        if mark := running(directory, "worker"):
            await _gone(mark.pid)
        await asyncio.sleep(AGAIN_AFTER)  # one that cannot live must not take the machine
        if scheduler.status is not Status.running:
            return
        if not running(directory, "worker"):
            logging.warning("the worker is gone: another one is started")
            worker = spawn(argv, directory / "worker.log")
            write_mark(directory, "worker", pid=worker.pid)
            await _gone(worker.pid)
            worker.poll()


async def _gone(pid: int) -> None:
    """Return once the process has ended; it need not be a child."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        loop.add_reader(descriptor, gone.set)
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def run_worker(options: argparse.Namespace) -> None:
    """One Dask worker after the other, as schedulers come and go; the agent, its zygotes and what it keeps stay."""
    directory = Path(options.dir)
    preload = tuple(filter(None, options.preload.split(",")))
    plugin = AgentPlugin(str(jobs_dir()), options.slots, preload, outlives=True)
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    try:
        mark = await _find_scheduler(directory, options.pool)
        while mark is not None and mark.version == __version__:
            await _work_for(mark, plugin, directory)
            was_killed = not mark.is_alive and not _is_closing(directory)
            mark = await _find_scheduler(directory, options.pool) if was_killed else None
    except asyncio.CancelledError:  # SIGTERM
        pass
    finally:
        await asyncio.to_thread(plugin.end)
        shutil.rmtree(directory / "scratch", ignore_errors=True)


async def _work_for(mark: Mark, plugin: AgentPlugin, directory: Path) -> None:
    """Until that scheduler is gone, whose process tells it at once, or has sent us away."""
    worker = Worker(
        mark.address,
        host=LOOPBACK,
        nthreads=1,
        memory_limit=0,
        security=security_in(directory),
        dashboard=False,
        dashboard_address=f"{LOOPBACK}:0",
        local_directory=str(directory / "scratch"),
        death_timeout=START_TIMEOUT,
        plugins=[plugin],
    )
    working, gone = asyncio.create_task(_run(worker)), asyncio.create_task(_gone(mark.pid))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.wait({working, gone})


async def _run(worker: Worker) -> None:
    try:
        await worker
        await worker.finished()
    finally:
        await worker.close()


def _is_closing(directory: Path) -> bool:
    """Whether the scheduler was told to end, or all of the pool has been swept away."""
    mark = read_marks(directory).get("scheduler")
    return mark is None or mark.is_closing


async def _find_scheduler(directory: Path, pool: str) -> Mark | None:
    """The pool's scheduler, brought back if it was killed; None when there is to be none any more."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        try:
            return running(directory) or await asyncio.to_thread(find_pool, pool, patience=0.0)
        except BlockingIOError:  # another process is at it
            await asyncio.sleep(0.02)
        except PoolError as error:
            logging.warning("%s", error)
    return None


def _close_on_sigterm(server: Any) -> None:
    closing: list[asyncio.Task[Any]] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: closing.append(asyncio.ensure_future(server.close())))


def _find(dotted: str) -> Callable[..., Service]:
    module, _, name = dotted.partition(":")
    found: Callable[..., Service] = getattr(importlib.import_module(module), name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="workbench.pool.process", description=__doc__)
    parser.add_argument("role", choices=["scheduler", "worker"])
    parser.add_argument("--pool", required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--service", default="")
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--preload", default="")
    parser.add_argument("--lock", type=int, help="the pool's lock, held until the scheduler has left its mark")
    options = parser.parse_args()
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    dask.config.set(CONFIG)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run_scheduler(options) if options.role == "scheduler" else run_worker(options))


if __name__ == "__main__":
    main()

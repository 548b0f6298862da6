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
from distributed import Scheduler, Worker
from distributed.core import Status
from distributed.security import Security

from workbench.errors import PoolUnavailableError
from workbench.pool.local import START_TIMEOUT, command, running, spawn, write_mark
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
    make_service = _find(options.service)
    scheduler = Scheduler(
        protocol="tls",
        host=LOOPBACK,
        port=0,
        security=security_in(directory),
        dashboard=False,
        dashboard_address=f"{LOOPBACK}:0",
    )
    async with scheduler:
        service: Callable[[SchedulerLink], Service] = partial(make_service, options.pool)
        await scheduler.register_scheduler_plugin(RunnerPlugin(service), idempotent=True)
        write_mark(directory, "scheduler", scheduler.address)
        _close_on_sigterm(scheduler)
        keeper = asyncio.create_task(_keep_worker(scheduler, directory, options))
        await scheduler.finished()
        keeper.cancel()


async def _keep_worker(scheduler: Scheduler, directory: Path, options: argparse.Namespace) -> None:
    """Whoever started the pool started its worker; from then on one that dies is replaced."""
    argv = command("worker", directory, options.pool, options.slots, options.preload)
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
    directory = Path(options.dir)
    address = await scheduler_address(directory)
    scratch = directory / "scratch"
    plugin = AgentPlugin(str(jobs_dir()), options.slots, tuple(filter(None, options.preload.split(","))))
    worker = Worker(
        address,
        host=LOOPBACK,
        nthreads=1,
        memory_limit=0,
        security=security_in(directory),
        dashboard=False,
        dashboard_address=f"{LOOPBACK}:0",
        local_directory=str(scratch),
        death_timeout=START_TIMEOUT,
        plugins=[plugin],
    )
    try:
        async with worker:
            _close_on_sigterm(worker)
            await worker.finished()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


async def scheduler_address(directory: Path) -> str:
    """Where the pool in `directory` has its scheduler, once it has one."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if mark := running(directory):
            return mark.address
        await asyncio.sleep(0.02)
    raise PoolUnavailableError(f"no scheduler in {directory} within {START_TIMEOUT:.0f} s")


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
    options = parser.parse_args()
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    dask.config.set(CONFIG)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run_scheduler(options) if options.role == "scheduler" else run_worker(options))


if __name__ == "__main__":
    main()

"""A Dask cluster as a user's own would be, over simulated hosts: a scheduler in host 0, workers in each.

The hosts share one folder (`shared`), but keep jobs' logs to themselves, as machines do. Every worker is started by
`dask worker`, without a nanny: one that has died is started again by whoever wants that.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.chaos.netlab import Network
from tests.waiting import until
from workbench.session import Session
from workbench.store.home import jobs_dir

DASK_CONFIG: Final = {
    "DASK_DISTRIBUTED__ADMIN__TICK__LIMIT": "1h",  # a loaded machine is not what is tested here
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
}
# Each host has its own disk: what lies in the last argument but those after it is another folder there.
OWN_DISK: Final = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'


class Hosts:
    """Addresses are `net.address(host)`; every worker has one slot. `clocks`: s by which a host's clocks are wrong."""

    def __init__(self, net: Network, shared: Path, clocks: Mapping[int, int]) -> None:
        self.net, self.shared, self._clocks = net, shared, clocks
        self._env = {**os.environ, **DASK_CONFIG}
        self._processes: list[subprocess.Popen[bytes]] = []
        jobs_dir().mkdir(parents=True, exist_ok=True)
        self._scheduler_file = shared / "scheduler.json"

    def start_scheduler(self) -> str:
        """Its address, once it can be reached."""
        where = ["--host", self.net.address(0), "--port", "0", "--scheduler-file", str(self._scheduler_file)]
        self._start(0, ["-m", "distributed.cli.dask_scheduler", *where, "--no-dashboard", "--no-show"], "scheduler")
        until(self._scheduler_file.exists, "scheduler", 60)
        return str(json.loads(self._scheduler_file.read_text())["address"])

    def start_worker(self, host: int) -> subprocess.Popen[bytes]:
        """One more worker on that host; it joins when it is ready."""
        own = self.shared / f"disk{host}"
        own.mkdir(exist_ok=True)
        scheduler = ["--scheduler-file", str(self._scheduler_file)]
        where = ["--host", self.net.address(host), "--local-directory", str(own / "scratch")]
        options = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--memory-limit", "0"]
        disk = ["sh", "-c", OWN_DISK, "sh", str(own), str(jobs_dir())]
        command = ["-m", "distributed.cli.dask_worker", *scheduler, *where, *options]
        return self._start(host, command, f"worker{host}", disk)

    def _start(
        self, host: int, command: Sequence[str], name: str, before: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        env, argv = self._env, [*before, sys.executable, *command]
        if shift := self._clocks.get(host):
            argv = ["unshare", "-T", "--monotonic", str(shift), "--boottime", str(shift), *argv]
            env = {**env, "PYTHONPATH": str(_wrong_clock(self.shared / f"clock{host}", shift))}
        process = self.net.popen(host, argv, env, self.shared / f"{name}.log")
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End all of it."""
        for host in range(self.net.hosts):
            self.net.kill(host)
        for process in self._processes:
            process.wait(10)

    def kill(self, host: int) -> None:
        self.net.kill(host)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Every process of every host stands still meanwhile; they stop and wake in no particular order."""
        pids = [pid for host in range(self.net.hosts) for pid in self.net.pids(host)]
        random.shuffle(pids)
        try:
            for pid in pids:
                _send(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                _send(pid, signal.SIGCONT)


def _wrong_clock(folder: Path, shift: int) -> Path:
    """A folder for PYTHONPATH which sets the time of day wrong for every Python process that has it there."""
    folder.mkdir(exist_ok=True)
    text = f"""
import time
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + {shift}
time.time_ns = lambda: _time_ns() + {shift} * 10**9
"""
    (folder / "sitecustomize.py").write_text(text)
    return folder


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.contextmanager
def cluster(hosts: int, shared: Path, clocks: Mapping[int, int]) -> Iterator[tuple[Hosts, Session]]:
    """A worker on each of the hosts, all of them joined, and a session from host 0, on whose network this thread is."""
    with Network(hosts) as net, net.inside(0):
        made = Hosts(net, shared, clocks)
        try:
            address = made.start_scheduler()
            for host in range(hosts):
                made.start_worker(host)
            with Session(address, timeout=60) as session:
                until(lambda: session.pool_status().slots == hosts, "worker on each host", 60)
                yield made, session
        finally:
            made.close()

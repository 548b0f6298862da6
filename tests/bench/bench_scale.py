"""1,024 simulated ranks × 10 steps/s through worker → scheduler → record: does it keep up, and how fast is attach?

The ranks are simulated, the rest is real: a worker process whose agent is replaced by one that answers and emits
what 1,024 ranks would, Dask's connections, the runner, the record on disk. Keeping up means that the steps are in the
record within a second or two of being taken, from the first to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RANKS = 1024
SLOW_HOST = 77  # of 8 ranks each
RATE = 10.0  # steps/s of each rank
SECONDS = float(os.environ.get("BENCH_SECONDS", "60"))


class SimulatedAgent:
    """Answers as an agent would, and emits what `RANKS` ranks would; no process is started."""

    def __init__(self, emit: Any) -> None:
        self._emit, self._stop = emit, threading.Event()

    is_warm, is_idle = True, False

    def start(self) -> None: ...

    def call_every(self, seconds: float, call: Any) -> None: ...  # the lease is of hosts that can be cut off

    def evidence(self, *asked: Any, **how: Any) -> list[Any]:
        return []

    def stop(self) -> None:
        self._stop.set()

    def submit(self, command: Any) -> None:
        from workbench.commands import StartRanks, StartStore, StopRanks
        from workbench.events import RankExited, RankStarted, StoreStarted

        job, count = command.job_id, getattr(command, "restart_count", 0)
        match command:
            case StartStore():
                self._emit(job, StoreStarted(time=time.time(), restart_count=count, host="127.0.0.1", port=1))
            case StartRanks():
                for place in command.placements:
                    self._emit(job, RankStarted(time=time.time(), restart_count=count, rank=place.rank, pid=1))
                threading.Thread(target=self._run, args=(job,), daemon=True).start()
            case StopRanks():
                self._stop.set()
                for rank in range(RANKS):
                    self._emit(
                        job, RankExited(time=time.time(), restart_count=count, rank=rank, signal=15, stop_signal=15)
                    )

    def _run(self, job: str) -> None:
        from workbench.blackbox import StepRecord, Traffic, pack_step
        from workbench.telemetry import RankBeat, StepsTaken

        step, due = 0, time.monotonic()
        while not self._stop.is_set():
            step, now = step + 1, time.time()
            loss = 0.4 + 2.0 * math.exp(-step / 200)
            # All take as long; those of the slow host work for most of it, the others wait.
            blocks = [
                pack_step(StepRecord(step, now, 0.1, 0.01, own * 0.4, own * 0.6, 0.08 - own, 0.01, 0, 32, 0, loss))
                for own in (0.045, 0.075)
            ]
            rate = 1e-3 * min(1.0, step / 100)
            for rank in range(RANKS):
                block = blocks[rank // 8 == SLOW_HOST]
                self._emit(job, StepsTaken(job_id=job, restart_count=0, rank=rank, block=block, learning_rate=rate))
                if (rank + step) % 5 == 0:
                    beat = RankBeat(
                        job_id=job, restart_count=0, rank=rank, time=now, step=step, activity="FORWARD", since=0.0,
                        rss=2 * 10**9, cpu=100.0, collective="all_reduce", collective_seq=step, counted=step,
                        hidden=0.8, traffic=(Traffic("all_reduce (DDP)", 4 * step, step * 10**8),),
                    )  # fmt: skip
                    self._emit(job, beat)
            due += 1 / RATE
            self._stop.wait(max(0.0, due - time.monotonic()))


def serve_worker(options: argparse.Namespace) -> None:
    import dask
    from distributed import Worker

    from workbench.pool.process import CONFIG, LOOPBACK, running, security_in
    from workbench.pool.worker import AgentPlugin

    class Plugin(AgentPlugin):
        def _make_agent(self, address: str, gpus: tuple[str, ...]) -> Any:
            return SimulatedAgent(self._emit)

    async def run() -> None:
        directory = Path(options.dir)
        while (mark := running(directory)) is None:
            await asyncio.sleep(0.02)
        worker = Worker(
            mark.address, host=LOOPBACK, nthreads=1, memory_limit=0, security=security_in(directory), dashboard=False,
            dashboard_address=f"{LOOPBACK}:0", local_directory=str(directory / "scratch"),
            plugins=[Plugin(str(directory), RANKS)],
        )  # fmt: skip
        async with worker:
            await worker.finished()

    dask.config.set(CONFIG)
    asyncio.run(run())


def main() -> list[tuple[str, str, str]]:
    """Rows of (what, measured, bar)."""
    import psutil

    from workbench.pool.local import pool_dir, read_marks

    with tempfile.TemporaryDirectory() as folder:
        os.environ["DTRAIN_HOME"] = f"{folder}/home"
        with simulated_pool() as session:
            return _measure(session, psutil.Process(read_marks(pool_dir("default"))["scheduler"].pid))


@contextmanager
def simulated_pool() -> Iterator[Any]:
    """A session with a pool in DTRAIN_HOME whose one worker simulates; its processes end with it."""
    from workbench.pool.local import make_certificates, pool_dir, private_dir, read_marks, spawn, sweep, write_mark
    from workbench.session import SERVICE, Session

    directory = private_dir(pool_dir("default"))
    make_certificates(directory)
    base = [sys.executable, "-m", "workbench.pool.process", "scheduler", "--pool", "default", "--dir"]
    spawn([*base, str(directory), "--service", SERVICE], directory / "scheduler.log")
    worker = subprocess.Popen([sys.executable, __file__, "--worker", "--dir", str(directory)])
    write_mark(directory, "worker", pid=worker.pid)
    try:
        while "scheduler" not in read_marks(directory):
            time.sleep(0.05)
        yield Session(start=False, timeout=60)
    finally:
        sweep(directory)
        worker.wait(10)


def _measure(session: Any, scheduler: Any) -> list[tuple[str, str, str]]:
    from workbench.session import Session

    job = session.launch(source="simulated", nproc_per_node=RANKS)
    cpu, lags = sum(scheduler.cpu_times()[:2]), []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(2.0)
        update = job.follow(timeout=0.0)
        newest = max((bucket.start + bucket.width for bucket in update.buckets), default=0.0)
        lags.append(update.now - newest)
    cpu = sum(scheduler.cpu_times()[:2]) - cpu
    start = time.perf_counter()
    with Session(start=False) as other:
        view = other.attach(job.job_id).view()
    attach = time.perf_counter() - start
    steps = view.step
    job.cancel(force=True)
    job.exception(30)
    return [
        (
            f"{RANKS} ranks × {RATE:g} steps/s for {SECONDS:g} s, steps a rank in the record",
            f"{steps}",
            f"≈ {SECONDS * RATE:.0f}",
        ),
        (
            "newest closed second behind the clock, median / worst",
            f"{sorted(lags)[len(lags) // 2]:.1f} / {max(lags[2:], default=0):.1f} s",
            "not growing",
        ),
        ("scheduler CPU", f"{cpu / SECONDS * 100:.0f} % of a core", "< 100 %"),
        ("a new session attaches and draws the history", f"{attach:.2f} s", "< 1 s"),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--dir", default="")
    chosen = parser.parse_args()
    if chosen.worker:
        serve_worker(chosen)
    else:
        for row in main():
            print("  ".join(row))

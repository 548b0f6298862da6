"""What the store costs: 1,024 simulated ranks × 10 steps/s for 60 s, pushed as fast as it goes, then read back.

Run: python tests/bench/bench_store.py [--ranks 1024] [--rate 10] [--seconds 60]; an hour: --rate 1 --seconds 3600
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from workbench.blackbox import STEP
from workbench.store.jobfile import JobFile
from workbench.telemetry import StepsTaken

LIMIT = 0.3  # CPU s that a simulated second may cost
EPOCH = 1_790_000_000.0


def make_reports(ranks: int, rate: int, second: int) -> list[StepsTaken]:
    """One second of a job: every rank reports `rate` times, a step each."""
    noise = random.Random(second)
    reports = []
    for turn in range(rate):
        step, end = second * rate + turn, EPOCH + second + (turn + 0.5) / rate
        for rank in range(ranks):
            parts = [noise.uniform(0.001, 0.03) for _ in range(5)]
            block = STEP.pack(step, end, 1 / rate, *parts, 0.0, 32.0, 0.0, noise.random())
            reports.append(StepsTaken(job_id="bench", restart_count=0, rank=rank, block=block))
    return reports


def push(file: JobFile, ranks: int, rate: int, seconds: int) -> tuple[float, float]:
    """CPU and wall time of taking in and flushing; making the reports is not counted."""
    cpu = wall = 0.0
    for second in range(seconds):
        reports = make_reports(ranks, rate, second)
        cpu_before, wall_before = time.process_time(), time.perf_counter()
        for report in reports:
            file.add_steps(report)
        file.flush(EPOCH + second + 1.6)
        cpu += time.process_time() - cpu_before
        wall += time.perf_counter() - wall_before
    return cpu, wall


def timed(what: Callable[[], list[object]]) -> str:
    before = time.perf_counter()
    found = what()
    return f"{(time.perf_counter() - before) * 1000:8.1f} ms  {len(found):6d} rows"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rate", type=int, default=10, help="steps/s of a rank")
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "bench" / "job.sqlite"
        with JobFile.create(path, "bench") as file:
            cpu, wall = push(file, options.ranks, options.rate, options.seconds)
            steps = options.ranks * options.seconds * options.rate
            size = sum(p.stat().st_size for p in path.parent.iterdir())
            print(f"{options.ranks} ranks x {options.rate} steps/s x {options.seconds} s: {steps} steps")
            print(f"  dropped                   {file.dropped:10d} steps")
            print(f"  taken in                  {steps / wall:10.0f} steps/s")
            each = cpu / options.seconds
            print(f"  CPU a simulated second    {each:10.3f} s   (limit {LIMIT})")
            print(f"  file                      {size / 2**20:10.1f} MiB")
        with JobFile.open(path, read_only=True) as file:
            print(f"  totals()                {timed(lambda: [*file.totals()])}")
            print(f"  buckets()               {timed(lambda: [*file.buckets()])}")
            print(f"  buckets(last second)    {timed(lambda: [*file.buckets(since=EPOCH + options.seconds - 1)])}")
            print(f"  buckets(width=10)       {timed(lambda: [*file.buckets(width=10)])}")
            print(f"  buckets(ranks=[7])      {timed(lambda: [*file.buckets(ranks=[7])])}")
            print(f"  steps(rank 7)           {timed(lambda: [*file.steps(7)])}")
    if each > LIMIT:
        raise SystemExit(f"{each:.3f} s of CPU a simulated second, more than {LIMIT}")


if __name__ == "__main__":
    main()

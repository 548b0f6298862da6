"""Launches in a row: what grows? Processes, descriptors of scheduler and worker, /dev/shm, the scheduler's memory."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import psutil

LAUNCHES = int(os.environ.get("BENCH_LAUNCHES", "500"))
SOURCE = "import os; print('rank', os.environ['RANK'])"


def main() -> list[tuple[str, str, str]]:
    """Rows of (what, measured, bar)."""
    from workbench.pool.local import pool_dir, read_marks
    from workbench.session import Session, stop_pool

    with tempfile.TemporaryDirectory() as folder:
        os.environ["DTRAIN_HOME"] = f"{folder}/home"
        session = Session(slots=2)
        try:
            for _ in range(70):  # fills what is bounded on purpose: 64 ended jobs stay in memory
                session.launch(source=SOURCE, nproc_per_node=2).wait(60)
            marks = read_marks(pool_dir("default"))
            before = _measure(marks["scheduler"].pid, marks["worker"].pid)
            start = time.perf_counter()
            for _ in range(LAUNCHES):
                session.launch(source=SOURCE, nproc_per_node=2).wait(60)
            seconds = time.perf_counter() - start
            time.sleep(1.0)
            after = _measure(marks["scheduler"].pid, marks["worker"].pid)
        finally:
            session.close()
            stop_pool()
    rows = [("launch → both ranks ended, mean", f"{seconds / LAUNCHES * 1e3:.0f} ms", "")]
    bars = {"scheduler memory, MB": "≤ +10", "processes": "+0", "descriptors": "+0", "/dev/shm files": "+0"}
    return rows + [
        (f"{name} after {LAUNCHES} launches", f"{before[name]:g} → {after[name]:g}", bar) for name, bar in bars.items()
    ]


def _measure(scheduler: int, worker: int) -> dict[str, float]:
    processes = [psutil.Process(scheduler), psutil.Process(worker)]
    family = [child for process in processes for child in process.children(recursive=True)] + processes
    return {
        "scheduler memory, MB": round(processes[0].memory_full_info().uss / 2**20, 1),
        "processes": len(family),
        "descriptors": sum(process.num_fds() for process in family),
        "/dev/shm files": len(list(Path("/dev/shm").iterdir())),
    }


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))

"""How long until a waiting client is told that a rank died, with rank, cause and log path, and in how many bytes.

And how far the timeline is from who did the fault, and from what the ranks themselves noted of their first step after.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench_recovery import PROGRAM, await_generation

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "10"))
FAULTS = (
    "kill", "segfault", "exit", "exception", "abort", "stop", "hang", "gil", "skip", "loader", "kill-zygote",
)  # fmt: skip
WAITING = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
"""
RAISING = """
import os, time, pathlib
time.sleep(0.2)
if os.environ["RANK"] == "1":
    pathlib.Path(os.environ["STAMP"]).write_text(repr(time.time()))
    raise ValueError("bad batch")
time.sleep(60)
"""


def main() -> list[tuple[str, str, str]]:
    """Rows of (what, measured, bar)."""
    from workbench.session import Session, stop_pool
    from workbench.state import JobPhase

    killed, raised, sizes = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DTRAIN_HOME"] = f"{folder}/home"
        session = Session(slots=2)
        try:
            for number in range(ROUNDS):
                job = session.launch(source=WAITING, nproc_per_node=2)
                while job.phase is not JobPhase.HEALTHY:
                    time.sleep(0.02)
                time.sleep(0.5)
                start = time.perf_counter()
                job.inject("kill", rank=1)
                error = job.exception(30)
                killed.append(time.perf_counter() - start)
                assert "rank 1 killed by SIGKILL" in str(error)
                assert str(job.log_path(1)) in str(error)
                sizes.append(len("\n".join(error._render_traceback_()).encode()))
                stamp = f"{folder}/stamp{number}"
                job = session.launch(source=RAISING, nproc_per_node=2, env={"STAMP": stamp})
                error = job.exception(30)
                raised.append(time.time() - float(Path(stamp).read_text()))
                assert "rank 1 raised ValueError: bad batch" in str(error)
            happened, back = zip(*[_apart(session, Path(folder), fault) for fault in FAULTS], strict=True)
        finally:
            session.close()
            stop_pool()
    return [
        ("SIGKILL of a rank → told, median / worst", _figures(killed), "≤ 0.5 s"),
        ("exception in a rank → told, median / worst", _figures(raised), "≤ 0.5 s"),
        ("what is told, largest", f"{max(sizes)} bytes", "< 2 kB"),
        (f"timeline − who injected, {len(FAULTS)} faults, median / worst", _figures(happened), "≤ 0.1 s"),
        ("timeline − ranks' own notes of being back, median / worst", _figures(back), "≤ 0.1 s"),
    ]


def _apart(session: Any, home: Path, fault: str) -> tuple[float, float]:
    """Seconds by which the timeline tells the fault, and the recovery, at another time than who saw them."""
    folder = home / fault
    folder.mkdir()
    job = session.launch(PROGRAM, args=[folder, 10_000, 0.005], nproc_per_node=2, max_restarts=1)
    assert await_generation(folder, 0, 40, 60.0) is not None, job.reason
    asked = time.time()
    job.inject(fault, 1)
    noted = await_generation(folder, 1, 3, 60.0)
    assert noted is not None, f"{fault}: {job.reason}"
    while (attempt := job.timeline.attempts[0]).recovered_at is None:
        time.sleep(0.02)
    job.cancel(force=True)
    job.exception(20)
    return abs(attempt.fault_at - asked), abs(attempt.recovered_at - noted)


def _figures(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} / {max(seconds):.3f} s"


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))

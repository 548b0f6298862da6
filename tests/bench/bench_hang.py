"""Hangs of twelve kinds and more: from injection to told, and to the next generation's steps; named right or not.

How often it is told of pauses that are none. And what it costs a step that a mismatched collective can be named: a bare
all-reduce of 100 kB, which is all of this step, with and without by turns, beside torch's own way
(TORCH_DISTRIBUTED_DEBUG=DETAIL).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROGRAM = HERE.parent / "chaos" / "programs" / "hangs.py"
PAUSES = HERE / "programs" / "pauses.py"
ALL_REDUCE = HERE / "programs" / "all_reduce.py"
STEP = "all_reduce[20 float32]"
# fault, ranks, who is to be blamed, the function that is to be named, the collective
KINDS = (
    ("regular_expression", 2, (1,), "regular_expression", STEP),
    ("live_lock", 2, (1,), "live_lock", STEP),
    ("polling", 2, (1,), "polling", STEP),
    ("dead_mutex", 2, (1,), "dead_mutex", STEP),
    ("sleeping_loader", 2, (1,), "sleeping", STEP),
    ("looping_loader", 2, (1,), "live_lock", STEP),
    ("looping_worker", 2, (1,), "live_lock", STEP),
    ("returned", 2, (1,), "_shutdown", STEP),
    ("two_groups", 2, (0, 1), "two_groups", "all_reduce[16 float32]"),
    ("skipped", 3, (1,), "skipped", "all_reduce[64 float32]"),
    ("other_order", 3, (1,), "other_order", "all_reduce[64 float32]"),
    ("stop", 2, (1,), "", STEP),
    ("other_shape", 3, (1,), "", "all_reduce[4096 float32]"),
)
BAR = 1.5  # s, or 5 median steps


def main() -> list[tuple[str, str, str]]:
    """Rows of (what, measured, bar)."""
    from workbench.session import Session, stop_pool

    rows, right, late = [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DTRAIN_HOME"] = f"{folder}/home"
        session = Session(slots=3)
        try:
            for kind in KINDS:
                told, recovered, is_right = _hang(session, *kind)
                right, late = right + is_right, late + (told > BAR)
                words = "named right" if is_right else "NAMED WRONG"
                rows.append(
                    (
                        kind[0],
                        f"told after {told:.2f} s, steps again {recovered:.2f} s later, {words}",
                        "≤ 1.5 s, ≤ 1 s",
                    )
                )
            rows.append(("named right", f"{right} of {len(KINDS)}", "11 of 12"))
            rows.append((f"told later than {BAR} s", f"{late} of {len(KINDS)}", "0"))
            rows.append(_pauses(session))
            rows += _cost(session, folder)
        finally:
            session.close()
            stop_pool()
    return rows


def _hang(
    session: Any, fault: str, ranks: int, culprits: tuple[int, ...], function: str, collective: str
) -> tuple[float, float, bool]:
    """Seconds from injection to told, from told to the next generation's first steps, and whether all was right."""
    from workbench.events import FailureDetected, StallDetected, StepsBegan

    argument = "none" if fault == "stop" else fault
    job = session.launch(str(PROGRAM), args=[argument], nproc_per_node=ranks, max_restarts=1, stop_grace=1.0)
    injected = 0.0
    if fault == "stop":
        while "READY" not in job.logs(rank=1):
            time.sleep(0.02)
        injected = time.time()
        job.inject("stop", rank=1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        events = job.events()
        failed = [event for event in events if isinstance(event, FailureDetected) and event.restart_count == 0]
        stalls = [event for event in events if isinstance(event, StallDetected)]
        began = [event for event in events if isinstance(event, StepsBegan) and event.restart_count == 1]
        if failed and began:
            break
        time.sleep(0.05)
    else:
        raise AssertionError(f"{fault}: {job.reason}")
    lines = [line.split() for line in job.logs(rank=1, tail=1000).splitlines() if line.startswith("INJECTED")]
    failure = failed[-1].failure
    stall, told = failure.stall, min(event.time for event in (*failed, *stalls))
    is_right = stall is not None and stall.ranks == culprits and stall.collective == collective
    is_right = is_right and f" in {function}" in f" in {stall.where.rpartition(' in ')[2]}"
    if not is_right:
        print(f"{fault}: {failure.reason} [{stall and stall.where}]")
    job.cancel(force=True)
    job.exception(20)
    return told - (injected or float(lines[0][1])), began[0].time - told, is_right


def _pauses(session: Any) -> tuple[str, str, str]:
    """False alarms in 10,000 steps, with one core stolen."""
    from workbench.events import StallDetected

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as thief:
        try:
            job = session.launch(str(PAUSES), args=["10"], nproc_per_node=2)
            job.wait(600)
        finally:
            thief.kill()
    alarms = [event.stall.reason for event in job.events() if isinstance(event, StallDetected)]
    for alarm in alarms:
        print(f"false alarm: {alarm}")
    what = "false alarms in 10,000 steps: first step 10 s, evaluation 20 s, checkpoint 15 s, a core stolen"
    return (what, str(len(alarms)), "0")


def _cost(session: Any, folder: str) -> list[tuple[str, str, str]]:
    found = {}
    for name, what, env in (
        ("naming", "naming", {}),
        ("watching", "watching", {}),
        ("DETAIL", "watching", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    ):
        path = f"{folder}/{name}"
        job = session.launch(str(ALL_REDUCE), args=[path, what], nproc_per_node=2, env=env)
        job.wait(240)
        found[name] = tuple(map(float, Path(path).read_text().split()))
    plain, naming = found["watching"][0], found["naming"][1]
    watching, detail = found["watching"][1], found["DETAIL"][0] - plain
    return [
        ("all-reduce of 100 kB, not watched", f"{plain * 1e6:.0f} µs", ""),
        ("naming it in the black box costs", f"{naming * 1e6:.1f} µs, {naming / plain:.1%}", "≤ 2 % of a step"),
        ("all that is watched of it costs", f"{watching * 1e6:.1f} µs, {watching / plain:.1%}", ""),
        ("torch's DETAIL mode costs", f"{detail * 1e6:.0f} µs, {detail / plain:.0%}", ""),
    ]


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))

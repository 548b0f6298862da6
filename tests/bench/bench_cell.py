"""What a cell on a warm interactive job of 2 ranks costs beyond what it computes: from `execute` to the last answer."""

from __future__ import annotations

import os
import statistics
import tempfile
import time

CELLS = int(os.environ.get("BENCH_CELLS", "100"))


def main() -> list[tuple[str, str, str]]:
    """Rows of (what, measured, bar)."""
    from workbench.session import Session, stop_pool
    from workbench.state import JobPhase

    with tempfile.TemporaryDirectory() as folder:
        os.environ["DTRAIN_HOME"] = f"{folder}/home"
        session = Session(slots=2)
        try:
            job = session.launch(interactive=True, nproc_per_node=2)
            while job.phase is not JobPhase.HEALTHY:
                time.sleep(0.05)
            seconds = []
            for number in range(CELLS):
                start = time.perf_counter()
                answers = job.execute(f"{number} + 1").answers_or_raise()
                seconds.append(time.perf_counter() - start)
                assert {answer.data["text/plain"] for answer in answers.values()} == {str(number + 1)}
            printed = []
            for _ in range(CELLS // 4):
                start = time.perf_counter()
                job.execute("print('x')").answers_or_raise()
                printed.append(time.perf_counter() - start)
        finally:
            session.close()
            stop_pool()
    seconds.sort()
    return [
        ("an empty cell on 2 ranks, median", f"{statistics.median(seconds) * 1e3:.1f} ms", "≤ 30 ms"),
        ("the same, 95th percentile", f"{seconds[int(len(seconds) * 0.95)] * 1e3:.1f} ms", ""),
        ("a cell that prints, median", f"{statistics.median(printed) * 1e3:.1f} ms", "≤ 30 ms"),
    ]


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))

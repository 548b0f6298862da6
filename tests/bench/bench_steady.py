"""Steady steps/s of an instrumented job against the same script under torchrun, 1 ms steps, in pairs.

The order within a pair alternates. The bar: median of the pairs' ratios ≥ 0.99.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "steady.py"
PAIRS = int(os.environ.get("BENCH_ROUNDS", "8"))
SECONDS = "3"


def main() -> list[tuple[str, str, str]]:
    """Rows of (what, measured, bar)."""
    from workbench.session import Session, stop_pool

    ratios, rates = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DTRAIN_HOME"] = f"{folder}/home"
        target = Path(folder) / "rate"
        session = Session(slots=1)

        def ours() -> float:
            session.launch(PROGRAM, args=[target, SECONDS], nproc_per_node=1).wait(60)
            return float(target.read_text())

        def torchrun() -> float:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
            subprocess.run([*command, str(PROGRAM), str(target), SECONDS], check=True, capture_output=True, timeout=120)
            return float(target.read_text())

        try:
            for number in range(PAIRS):
                if number % 2:
                    plain, watched = torchrun(), ours()
                else:
                    watched, plain = ours(), torchrun()
                ratios.append(watched / plain)
                rates.append(watched)
        finally:
            session.close()
            stop_pool()
    return [
        ("steps/s, watched", f"{statistics.median(rates):.0f}", "about 1 ms a step"),
        (
            "watched / torchrun, median of pairs",
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})",
            "≥ 0.99",
        ),
    ]


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))

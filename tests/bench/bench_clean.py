"""False alarms of checks and looks: steps of many kinds in which ranks agree, each of which is checked.

BENCH_ROUNDS: steps of each kind.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bench_consistency import launch
from programs.clean import KINDS

PROGRAM = Path(__file__).parent / "programs" / "clean.py"
STEPS = int(os.environ.get("BENCH_ROUNDS", "10000"))

Row = tuple[str, str, str]


def main() -> list[Row]:
    """Rows of (what, measured, bar)."""
    return [row_of(kind) for kind in KINDS]


def row_of(kind: str) -> Row:
    told = launch(PROGRAM, [kind, str(STEPS)], 2)
    alarms = "; ".join(told["alarms"])
    skipped = f", {told['skipped']:,} skipped" if told["skipped"] else ""
    text = f"{len(told['alarms'])} alarms, {told['checked']:,} checks, {told['looks']:,} looks{skipped}"
    return f"{kind}, 2 ranks: {STEPS:,} steps", f"{text}{': ' + alarms if alarms else ''}{told['off']}", "0 alarms"


if __name__ == "__main__":
    for kind in sys.argv[1:] or KINDS:
        print("  ".join(row_of(kind)), flush=True)

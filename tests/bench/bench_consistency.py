"""What proving that replicas agree costs, beside hashing all weights; and which faults are found, where and on whom.

Costs are CPU time of the check over CPU time of a plain step, in one process by turns: the wall clock lies on machines
that others use. Faults are done to one rank after the reduce, to its parameters and to its optimizer state, as many of
each kind.

BENCH_ROUNDS: faults in all, of 3 x 6 kinds; 18,000 are 1,000 of each.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "programs" / "replicas.py"
SMALL, LARGE = "784,512,512,512,10", "784," + ",".join(["2048"] * 12) + ",10"
TRIALS = int(os.environ.get("BENCH_ROUNDS", "900"))
LIMIT = max(600.0, 0.3 * TRIALS)  # s a job

Row = tuple[str, str, str]


def main() -> list[Row]:
    """Rows of (what, measured, bar)."""
    small, large = run(SMALL, 2, 20, TRIALS), run(LARGE, 2, 3, max(18, TRIALS // 100))
    four = run(SMALL, 4, 0, TRIALS)
    rows = [row for name, told in (("1M", small), ("50M", large)) for row in costs(name, told["costs"])]
    return rows + [
        row for name, told in (("1M, 2", small), ("1M, 4", four), ("50M, 2", large)) for row in rates(name, told)
    ]


def costs(name: str, found: Mapping[str, float]) -> list[Row]:
    digests = "≤ 7 %" if name == "1M" else "≤ 2.5 %"
    cadence = f"every {found['cadence']:.0f} steps, in {found['parts']:.0f} parts, looks each {found['looks']:.0f}"
    return [
        (f"{name}, 2 ranks: plain step, CPU", f"{1e3 * found['step']:.1f} ms", ""),
        (f"{name}: checks with the default budget", f"{found['budget']:.2%} ({cadence})", "≤ 2 %"),
        (f"{name}: digest of the gradients at every step", f"{found['gradients']:.1%}", digests),
        (
            f"{name}: gradients, parameters and state, and the exchange, at every step",
            f"{found['every']:.1%}",
            "stated",
        ),
        (f"{name}: a look at what gradients are like, at one step", f"{found['look']:.1%}", "stated"),
        (f"{name}: digest of all weights", f"{found['weights']:.1%}", ""),
        (f"{name}: torch.hash_tensor of all weights", f"{found['hash_tensor']:.1%}", "dearer than ours"),
        (f"{name}: SHA-1 of all weights", f"{found['sha1']:.1%}", "dearer than ours"),
    ]


def rates(name: str, told: Mapping[str, Any]) -> list[Row]:
    """By site, with how many of each kind of fault were found."""
    rows = []
    for site in ("gradients", "parameters", "optimizer state"):
        mine = {key: counts for key, counts in told["found"].items() if key.startswith(site)}
        done, found, tensor, rank = (sum(counts[place] for counts in mine.values()) for place in range(4))
        each = ", ".join(f"{key.partition(': ')[2]} {counts[1]}/{counts[0]}" for key, counts in mine.items())
        right = f"{tensor} tensors right, {rank} ranks right or none where none can be told"
        text = f"{found}/{done} found, {right}; {each}"
        rows.append((f"{name} ranks: {site} spoilt", text, "all"))
    return rows


def run(layers: str, ranks: int, blocks: int, trials: int) -> dict[str, Any]:
    return launch(PROGRAM, [layers, str(blocks), str(trials)], ranks)


def launch(program: Path, args: Sequence[str], ranks: int) -> dict[str, Any]:
    """Run it in so many ranks; what rank 0 prints at its end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, str(program), *args]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command, env={**os.environ, **shared, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for rank in range(ranks)
    ]
    try:
        output, _ = processes[0].communicate(timeout=LIMIT)
        for process in processes:
            process.wait(timeout=30)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    if processes[0].returncode:
        raise RuntimeError(f"a rank ended with {processes[0].returncode}")
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    return told


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))

"""From the launch to the first finished DDP step on 2 ranks: a warm pool against torchrun and a bare fork.

The three take turns in one run, so that a noisy machine disturbs all alike. The bars: ≥ 30× faster than torchrun,
≤ 2× a bare fork-and-init loop.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "first_step.py"
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))


def ours(session: object, stamp: Path, program: Path = PROGRAM) -> float:
    start = time.time()
    job = session.launch(program, args=[stamp], nproc_per_node=2)  # type: ignore[attr-defined]
    seconds = _await(stamp) - start
    job.wait(30)
    return seconds


def torchrun(stamp: Path) -> float:
    start = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, str(PROGRAM), str(stamp)], check=True, capture_output=True, timeout=120)
    return float(stamp.read_text()) - start


def bare_fork(stamp: Path) -> float:
    """Fork two ranks from a process that has torch, with nothing of ours: the floor."""
    code = f"""
import os, sys, time, runpy
import torch, torch._dynamo, torch.distributed
sys.argv = [{str(PROGRAM)!r}, {str(stamp)!r}]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{_free_port()}", WORLD_SIZE="2", OMP_NUM_THREADS="1")
torch.set_num_threads(1)
start = time.time()
children = []
for rank in range(2):
    pid = os.fork()
    if pid == 0:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        runpy.run_path(sys.argv[0], run_name="__main__")
        os._exit(0)
    children.append(pid)
for pid in children: os.waitpid(pid, 0)
print(start)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120, text=True)
    return float(stamp.read_text()) - float(done.stdout)


def _await(stamp: Path, timeout: float = 120.0) -> float:
    deadline = time.monotonic() + timeout
    while not stamp.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(stamp)
        time.sleep(0.001)
    return float(stamp.read_text())


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> list[tuple[str, str, str]]:
    """Rows of (what, measured, bar)."""
    from workbench.session import Session, stop_pool

    seconds: dict[str, list[float]] = {"ours": [], "torchrun": [], "fork": [], "edited": []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DTRAIN_HOME"] = f"{folder}/home"
        session = Session(slots=2)
        try:
            ours(session, Path(folder) / "warm")  # the zygote is warm once it has served
            for number in range(ROUNDS):
                seconds["ours"].append(ours(session, Path(folder) / f"ours{number}"))
                edited = Path(folder) / "edited.py"
                edited.write_text(PROGRAM.read_text() + f"# edit {number}\n")
                seconds["edited"].append(ours(session, Path(folder) / f"edited{number}", edited))
                seconds["torchrun"].append(torchrun(Path(folder) / f"torchrun{number}"))
                seconds["fork"].append(bare_fork(Path(folder) / f"fork{number}"))
        finally:
            session.close()
            stop_pool()
    middle = {name: statistics.median(values) for name, values in seconds.items() if values}
    spread = {name: f"{min(v):.3f}–{max(v):.3f}" for name, v in seconds.items() if v}
    return [
        ("launch → first step, warm pool", f"{middle['ours']:.3f} s ({spread['ours']})", ""),
        ("the same, after an edit of the script", f"{middle['edited']:.3f} s ({spread['edited']})", "the same"),
        ("the same, torchrun", f"{middle['torchrun']:.3f} s ({spread['torchrun']})", ""),
        ("the same, bare fork and init", f"{middle['fork']:.3f} s ({spread['fork']})", ""),
        ("torchrun / warm pool", f"{middle['torchrun'] / middle['ours']:.1f}×", "≥ 30×"),
        ("warm pool / bare fork", f"{middle['ours'] / middle['fork']:.2f}×", "≤ 2×"),
    ]


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))

"""From the death of a rank to the first new step of the full world on 2 ranks: beside torchrun in one run.

torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its own restart mostly fails on gloo. The bar:
a tenth of its time; at most 1 step lost with the memory tier. Where torchft is installed, half of what its survivor
waits too, with the heartbeat's timeout at 1 s; its step is then one of the ranks that are left.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PROGRAM = Path(__file__).parent / "programs" / "recover.py"
SURVIVOR = PROGRAM.with_name("survive.py")
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
EPOCHS, PAUSE = 1000, 0.02
FAULTS: dict[str, tuple[tuple[int, ...], int]] = {
    "SIGKILL of rank 1": ((1,), signal.SIGKILL),
    "SIGKILL of rank 0": ((0,), signal.SIGKILL),
    "segmentation fault": ((1,), signal.SIGSEGV),
    "SIGKILL of both at once": ((0, 1), signal.SIGKILL),
}


class Note(NamedTuple):
    """One finished step as a rank noted it."""

    time: float
    step: int
    restart: int
    pid: int
    data: str  # of which batch it was


def notes(folder: Path, rank: int) -> list[Note]:
    path = folder / f"rank{rank}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    whole = (line.split() for line in lines if len(line.split()) == 5)
    return [Note(float(w), int(step), int(count), int(pid), data) for w, step, count, pid, data in whole]


def await_generation(folder: Path, restart: int, steps: int, limit: float) -> float | None:
    """When both ranks had finished the first step of that generation, once they have so many; None: not in time."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        of_ranks = [[n for n in notes(folder, rank) if n.restart >= restart] for rank in (0, 1)]
        if all(len(found) >= steps for found in of_ranks):
            return max(found[0].time for found in of_ranks)
        time.sleep(0.01)
    return None


class Outcome(NamedTuple):
    """`seconds` None: it did not come back in time."""

    seconds: float | None
    lost: int


def strike(folder: Path, restart: int, ranks: tuple[int, ...], number: int, limit: float) -> Outcome:
    """Kill ranks of generation `restart`, and see when both are back."""
    assert await_generation(folder, restart, 15, limit) is not None, "the generation before did not get on"
    last = {rank: notes(folder, rank)[-1] for rank in (0, 1)}
    begun = time.time()
    for rank in ranks:
        os.kill(last[rank].pid, number)
    back = await_generation(folder, restart + 1, 1, limit)
    if back is None:
        return Outcome(None, 0)
    of_rank = notes(folder, 0)
    before = max(n.step for n in of_rank if n.restart <= restart)
    again = min(n.step for n in of_rank if n.restart > restart)
    return Outcome(back - begun, max(0, before + 1 - again))


def ours(folder: Path, ranks: tuple[int, ...], number: int) -> list[Outcome]:
    from workbench.session import Session

    with Session(slots=2) as session:
        job = session.launch(
            PROGRAM, args=[folder, EPOCHS, PAUSE], nproc_per_node=2, max_restarts=ROUNDS + 1, snapshot_every=1
        )
        try:
            return [strike(folder, restart, ranks, number, 30.0) for restart in range(ROUNDS)]
        finally:
            job.cancel(force=True)
            job.exception(20)


def torchrun_command(folder: Path, epochs: int, pause: float, restarts: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*command, "--max-restarts", str(restarts), str(PROGRAM), str(folder), str(epochs), str(pause)]


def torchrun(folder: Path, ranks: tuple[int, ...], number: int) -> list[Outcome]:
    command = torchrun_command(folder, EPOCHS, PAUSE, restarts=9)
    environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            return [strike(folder, restart, ranks, number, 90.0) for restart in range(max(1, ROUNDS // 2))]
        finally:
            process.terminate()
            process.wait(60)


def torchft(folder: Path) -> list[tuple[float | None, float | None]]:
    """Of each kill of rank 1: until the survivor's next step, and until both take one together."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200, quorum_tick_ms=100, heartbeat_timeout_ms=1000
    )
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), "OMP_NUM_THREADS": "1"}

    def start(rank: int, restart: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(SURVIVOR), str(folder), str(rank), str(restart), str(PAUSE)]
        return subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    processes, found = [start(0, 0), start(1, 0)], []
    try:
        for number in range(ROUNDS):
            if _await_together(folder, time.time(), 60.0) is None:
                break
            begun = time.time()
            processes[1].kill()
            processes[1].wait()
            processes[1] = start(1, number + 1)
            full = _await_together(folder, begun + 0.5, 60.0)  # a step that was under way counts for nothing
            after = [note.time for note in notes(folder, 0) if note.time > begun and note.data == "1"]
            found.append((after[0] - begun if after else None, full - begun if full else None))
    finally:
        for process in processes:
            process.kill()
            process.wait()
        lighthouse.shutdown()
    return found


def _await_together(folder: Path, since: float, limit: float) -> float | None:
    """When rank 0 finished the first step after `since` that two ranks took part in."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if together := [note.time for note in notes(folder, 0) if note.time > since and note.data == "2"]:
            return together[0]
        time.sleep(0.01)
    return None


def beside_torchft(folder: Path, ours_: list[Outcome]) -> list[tuple[str, str, str]]:
    if importlib.util.find_spec("torchft") is None:
        return [("torchft", "not installed: pip install torchft==0.2.0 to have it beside", "")]
    found = torchft(folder)
    pauses = [pause for pause, _ in found if pause is not None]
    full = [both for _, both in found if both is not None]
    if not pauses or not full:
        return [("torchft", f"did not come back in {ROUNDS} kills", "")]
    pause, mine = statistics.median(pauses), _middle(ours_)
    told = f"pause {pause:.2f} s, full world {statistics.median(full):.2f} s ({len(pauses)} of {ROUNDS} kills)"
    return [
        ("SIGKILL of rank 1: torchft", told, ""),
        ("SIGKILL of rank 1: ours, full world / its pause", f"{mine / pause:.2f}" if mine else "–", "≤ 0.5"),
    ]


def main() -> list[tuple[str, str, str]]:
    """Rows of (what, measured, bar)."""
    from workbench.session import Session, stop_pool

    rows = []
    with tempfile.TemporaryDirectory() as root:
        os.environ["DTRAIN_HOME"] = f"{root}/home"
        Session(slots=2).close()
        try:
            for what, (ranks, number) in FAULTS.items():
                found = {}
                for runner in (ours, torchrun):
                    folder = Path(root) / f"{runner.__name__}-{what.replace(' ', '-')}"
                    folder.mkdir()
                    found[runner.__name__] = runner(folder, ranks, number)
                rows += table(what, found)
                if what == "SIGKILL of rank 1":
                    folder = Path(root) / "torchft"
                    folder.mkdir()
                    rows += beside_torchft(folder, found["ours"])
        finally:
            stop_pool()
    return rows


def table(what: str, found: dict[str, list[Outcome]]) -> list[tuple[str, str, str]]:
    ours_, theirs = found["ours"], found["torchrun"]
    ratio = "–" if _middle(theirs) is None or not _middle(ours_) else f"{_middle(theirs) / _middle(ours_):.1f}×"  # type: ignore[operator]
    return [
        (f"{what} → new step", f"{_figures(ours_)}; torchrun {_figures(theirs)}", ""),
        (f"{what}: torchrun / ours", ratio, "≥ 10×"),
        (f"{what}: steps lost, most", f"{max(o.lost for o in ours_)}; torchrun {max(o.lost for o in theirs)}", "≤ 1"),
    ]


def _middle(outcomes: list[Outcome]) -> float | None:
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    return statistics.median(seconds) if seconds else None


def _figures(outcomes: list[Outcome]) -> str:
    middle, failed = _middle(outcomes), sum(outcome.seconds is None for outcome in outcomes)
    text = "never" if middle is None else f"{middle:.2f} s"
    return f"{text} ({failed} of {len(outcomes)} did not come back)" if failed else text


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))

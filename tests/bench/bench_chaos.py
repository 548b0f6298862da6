"""A job that something happens to every few seconds: does it come back each time, and what does it lose?

1. Kills of random ranks, one or two at once, some while it recovers: each has to be recovered from at once.
2. Mixed faults: the effective training time ratio, as the timeline tells it and as the ranks' own notes do; final
   weights and every batch as in a run that nothing happened to.
3. The same under torchrun, at the same times, with signals alone: what it cannot tell from slow work it waits for.
4. Bits flipped in weights, gradients and momentum of one rank, rolled back: final weights as in the undisturbed run.

CHAOS_KILLS (50), CHAOS_FAULTS (20) and CHAOS_EVERY (15 s) make it shorter.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench_recovery import PROGRAM, Note, await_generation, notes, torchrun_command

KILLS = int(os.environ.get("CHAOS_KILLS", "50"))
COUNT = int(os.environ.get("CHAOS_FAULTS", "20"))
EVERY = float(os.environ.get("CHAOS_EVERY", "15"))
FAULTS = (
    "kill", "segfault", "exit", "exception", "stop", "hang", "abort", "gil", "kill-zygote", "skip", "loader", "both",
)  # fmt: skip
FLIPS = ("flip", "flip-gradient", "flip-momentum")
# What a script under torchrun would meet in place of each: one rank that ends, or one that stands still.
SIGNALS = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "exit": signal.SIGTERM, "exception": signal.SIGTERM,
           "abort": signal.SIGABRT, "both": signal.SIGKILL}  # fmt: skip
PAUSE = 0.02
Row = tuple[str, str, str]


def kill(ranks: tuple[int, ...], folder: Path) -> None:
    for rank in ranks:
        os.kill(notes(folder, rank)[-1].pid, signal.SIGKILL)


def kills(session: Any, folder: Path) -> list[Row]:
    """One after the other; each as soon as the job has taken some steps, every fifth while it still recovers."""
    job = session.launch(PROGRAM, args=[folder, 10_000, 0.005], nproc_per_node=2, max_restarts=3)
    seconds, wanted, dice = [], 0, random.Random(1)
    try:
        for number in range(KILLS):
            if await_generation(folder, wanted, 1 if number % 5 == 4 else 12, 30.0) is None:
                break
            begun, before = time.time(), job.state.restart_count
            kill(dice.choice([(0,), (1,), (0, 1)]), folder)
            back = await_generation(folder, before + 1, 1, 30.0)
            if back is None:
                break
            wanted = job.state.restart_count
            seconds.append(back - begun)
    finally:
        job.cancel(force=True)
        job.exception(30)
    restarts = job.state.restart_count
    return [
        ("random kills recovered", f"{len(seconds)} of {KILLS}, with {restarts} restarts", f"{KILLS} of {KILLS}"),
        ("… kill → first new step", f"{statistics.median(seconds):.2f} s, worst {max(seconds):.2f}", ""),
    ]


def chaos(session: Any, folder: Path) -> list[Row]:
    epochs = epochs_of(COUNT)
    calm = undisturbed(session, folder.with_name("calm"), epochs)
    job = session.launch(PROGRAM, args=[folder, epochs, PAUSE], nproc_per_node=2, max_restarts=3)
    done = disturb(job, folder, FAULTS, COUNT)
    phase = job.wait(600)
    timeline = job.timeline
    ours, raw = timeline.goodput.ettr, raw_ettr(folder, timeline.start, timeline.end)
    theirs = torchrun_ettr(folder.with_name("torchrun"), epochs)
    return [
        (f"{len(done)} mixed faults", f"{phase.value} after {job.state.restart_count} restarts", "SUCCEEDED"),
        ("ETTR as the timeline has it", f"{ours:.3f}", "≥ 0.90"),
        ("ETTR from the ranks' own notes", f"{raw:.3f} ({100 * (ours / raw - 1):+.2f} %)", "within 1 %"),
        ("ETTR under torchrun, of as many faults", f"{theirs:.3f}; ours / torchrun {raw / theirs:.1f}×", "≥ 1.5×"),
        ("final weights of an undisturbed run", same_weights(folder, calm[0]), "the same"),
        ("batches of an undisturbed run", batches(folder, calm[1]), "all, once"),
        ("steps done again", str(timeline.lost_steps), f"≤ {len(done)} and those after a skipped collective"),
    ]


def flips(session: Any, folder: Path) -> list[Row]:
    epochs = epochs_of(len(FLIPS))
    weights, taken = undisturbed(session, folder.with_name("calm-flips"), epochs)
    options = {"max_restarts": 3, "on_mismatch": "rollback", "checkpoint_every": 50}
    job = session.launch(PROGRAM, args=[folder, epochs, PAUSE], nproc_per_node=2, **options)
    done = disturb(job, folder, FLIPS, len(FLIPS))
    phase = job.wait(600)
    return [
        (f"{len(done)} flipped bits, rolled back", f"{phase.value}, back {job.state.restart_count} times", "SUCCEEDED"),
        ("… final weights", same_weights(folder, weights), "the same"),
        ("… batches", batches(folder, taken), "all, once"),
    ]


def epochs_of(faults: int) -> int:
    """So many that the job lasts as long as the faults do."""
    return max(2, round(faults * EVERY / (PAUSE + 0.006)) // 100)


def disturb(job: Any, folder: Path, faults: tuple[str, ...], count: int) -> list[str]:
    """One after the other on random ranks; those that were done before the job's end."""
    dice, done = random.Random(2), []
    for number in range(count):
        time.sleep(EVERY / 2 if number == 0 else EVERY)
        if job.phase.is_terminal:
            break
        fault = faults[number % len(faults)]
        done.append(fault)
        if fault == "both":
            kill((0, 1), folder)
        else:
            job.inject(fault, dice.choice((0, 1)))
    return done


def torchrun_ettr(folder: Path, epochs: int) -> float:
    """Until the time in which ours has met them all. A rank that stands still is left to its collective's timeout."""
    folder.mkdir()
    dice, begun = random.Random(2), time.time()
    environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    argv = torchrun_command(folder, epochs, PAUSE, restarts=1000)
    with subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for number in range(COUNT):
                time.sleep(EVERY / 2 if number == 0 else EVERY)
                fault = FAULTS[number % len(FAULTS)]
                rank = dice.choice((0, 1))
                for victim in (0, 1) if fault == "both" else (rank,):
                    strike(folder, victim, SIGNALS.get(fault, signal.SIGSTOP))
            time.sleep(EVERY / 2)
            return raw_ettr(folder, begun, time.time())
        finally:
            for rank in (0, 1):
                strike(folder, rank, signal.SIGCONT)
            process.terminate()
            process.wait(90)


def strike(folder: Path, rank: int, number: int) -> None:
    of_rank = notes(folder, rank)
    with contextlib.suppress(ProcessLookupError):
        if of_rank:
            os.kill(of_rank[-1].pid, number)


def same_weights(folder: Path, wanted: list[str]) -> str:
    same = [(folder / f"final{rank}.txt").read_text() == wanted[rank] for rank in (0, 1)]
    return "the same" if all(same) else "others"


def undisturbed(session: Any, folder: Path, epochs: int) -> tuple[list[str], dict[tuple[int, int], str]]:
    """Final weights by rank, and the batch of each rank and step."""
    folder.mkdir()
    session.launch(PROGRAM, args=[folder, epochs, 0.0], nproc_per_node=2).wait(600)
    taken = {(rank, note.step): note.data for rank in (0, 1) for note in notes(folder, rank)}
    return [(folder / f"final{rank}.txt").read_text() for rank in (0, 1)], taken


def counted(of_rank: list[Note]) -> dict[int, Note]:
    """The steps that count: of those done again the last."""
    return {note.step: note for note in of_rank}


def raw_ettr(folder: Path, start: float, end: float) -> float:
    """Time in steps that count over all time, mean of the ranks; a generation's first step is taken for a usual one."""
    shares = []
    for rank in (0, 1):
        of_rank = notes(folder, rank)
        useful = {id(note) for note in counted(of_rank).values()}
        pairs = list(itertools.pairwise(of_rank))
        lengths = {id(b): b.time - a.time for a, b in pairs if a.restart == b.restart}
        usual = statistics.median(lengths.values())
        shares.append(sum(lengths.get(id(note), usual) for note in of_rank if id(note) in useful) / (end - start))
    return statistics.mean(shares)


def batches(folder: Path, calm: dict[tuple[int, int], str]) -> str:
    taken = {(rank, step): note.data for rank in (0, 1) for step, note in counted(notes(folder, rank)).items()}
    wrong = sum(taken.get(key) != data for key, data in calm.items()) + len(taken.keys() - calm.keys())
    return "all, once" if not wrong else f"{wrong} of {len(calm)} are others"


def main() -> list[Row]:
    """Rows of (what, measured, bar)."""
    from workbench.session import Session, stop_pool

    with tempfile.TemporaryDirectory() as root:
        os.environ["DTRAIN_HOME"] = f"{root}/home"
        session = Session(slots=2)
        try:
            rows = []
            for part in (kills, chaos, flips):
                folder = Path(root) / part.__name__
                folder.mkdir()
                rows += part(session, folder)
            return rows
        finally:
            session.close()
            stop_pool()


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))

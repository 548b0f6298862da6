"""What `make demo` runs: digits_reported.py on 2 ranks in a pool of its own, watched in the terminal.

On the way one rank is killed and another frozen; the job recovers from both by itself, and its timeline tells how.
Everything is kept under .demo in the working tree. The pool ends with the demo, however that ends.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from workbench import Job, JobPhase, Session

TREE = Path(__file__).resolve().parent.parent
HOME = TREE / ".demo"
DTRAIN = (sys.executable, "-m", "workbench")


def dtrain(*words: str) -> int:
    """The command as one types it; its exit code."""
    return subprocess.call([*DTRAIN, *words], cwd=TREE)


TROUBLE = ((600, "kill", 1), (1400, "stop", 0))  # from which step on, what, to which rank
PATIENCE = 120.0  # s for any of it


def make_trouble(job: Job, watcher: subprocess.Popen[bytes]) -> None:
    """Do each fault once the job has got that far."""
    for step, fault, rank in TROUBLE:
        deadline = time.monotonic() + PATIENCE
        while job.view().step < step or job.phase is not JobPhase.HEALTHY:
            if job.phase.is_terminal or watcher.poll() is not None or time.monotonic() > deadline:
                return
            time.sleep(0.1)
        job.inject(fault, rank)


def newest(session: Session, watcher: subprocess.Popen[bytes]) -> Job | None:
    """The job that was launched just now."""
    while watcher.poll() is None:
        if running := session.pool_status().running:
            return session.attach(running[0])
        time.sleep(0.05)
    return None


def show(job: Job) -> bool:
    """Print what came of the job; whether that is a trained network."""
    found = re.search(r"accuracy (.+)", job.logs(rank=0))
    view = job.view()
    print(f"\naccuracy    {found[1] if found else 'none: the job did not get that far'}")
    print(f"throughput  {view.throughput:,.0f} samples/s on {view.world_size} ranks, {view.step} steps")
    print(f"record      {HOME / 'jobs' / job.job_id}")
    return view.phase is JobPhase.SUCCEEDED and found is not None


def main() -> int:
    os.environ["DTRAIN_HOME"] = str(HOME)
    if dtrain("up", "--slots", "2"):
        return 1
    # scikit-learn takes seconds to import: once, in the process that ranks are forked from, also when they restart.
    words = ("launch", "notebooks/digits_reported.py", "--nproc-per-node", "2", "--max-restarts", "3")
    words += ("--preload", "sklearn.datasets,sklearn.model_selection", "--wait")
    print(f"\n$ dtrain {' '.join(words)}", flush=True)
    with Session(start=False) as session, subprocess.Popen([*DTRAIN, *words], cwd=TREE) as watcher:
        job = newest(session, watcher)
        if job is None:
            return watcher.wait() or 1
        make_trouble(job, watcher)
        code = watcher.wait()
        succeeded = show(job)
    print(f"\n$ dtrain timeline {job.job_id}", flush=True)
    return code or dtrain("timeline", job.job_id) or int(not succeeded)


def clean_up() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the pool is taken down whole
    dtrain("down", "--quiet")


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        clean_up()

"""What `make demo` runs: a pool of its own, digits_reported.py on 2 ranks watched in the terminal, and what came of it.

Everything is kept under .demo in the working tree. The pool ends with the demo, however that ends.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from workbench import Job, JobPhase, Session

TREE = Path(__file__).resolve().parent.parent
HOME = TREE / ".demo"
DTRAIN = (sys.executable, "-m", "workbench")


def dtrain(*words: str) -> int:
    """The command as one types it; its exit code."""
    return subprocess.call([*DTRAIN, *words], cwd=TREE)


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
    print("\n$ dtrain launch notebooks/digits_reported.py --nproc-per-node 2 --wait", flush=True)
    code = dtrain("launch", "notebooks/digits_reported.py", "--nproc-per-node", "2", "--wait")
    with Session(start=False) as session:
        succeeded = show(session.attach(session.job_ids(limit=1)[0]))
    return code or int(not succeeded)


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

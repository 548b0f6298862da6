"""The faults that can be done to a rank on purpose: names, words and where each acts. Data only.

What is done is said where it is done: `workbench.agent.faults` from outside, `workbench.training.faults` inside, and
`workbench.runner.rankdesk` for what the runner does to itself.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class Place(enum.Enum):
    """Who does it, and when."""

    POOL = "at once, by the pool"
    AGENT = "at once, from outside"
    LINE = "at once, in a thread of the rank"
    STEP = "in the rank's main thread, at what it does next"
    BATCH = "when the rank's DataLoader is next asked for a batch"
    BACKWARD = "at the rank's next backward"
    COLLECTIVE = "at the rank's next collective"
    CHECKPOINT = "when the rank next writes a checkpoint"


class Fault(NamedTuple):
    help: str
    place: Place


FAULTS: Final[dict[str, Fault]] = {
    "kill": Fault("SIGKILL", Place.AGENT),
    "stop": Fault("SIGSTOP: it stands still until continue", Place.AGENT),
    "continue": Fault("SIGCONT, which ends stop, slow, hang and loader, and what has not happened yet", Place.AGENT),
    "exception": Fault("an exception", Place.STEP),
    "exit": Fault("sys.exit(1)", Place.STEP),
    "segfault": Fault("reads address 0: SIGSEGV", Place.STEP),
    "abort": Fault("os.abort(): SIGABRT", Place.STEP),
    "oom": Fault("memory runs out: MemoryError, under a limit of the rank's own", Place.STEP),
    "oom-kill": Fault("the kernel kills it for want of memory, in a small memory cgroup (needs root)", Place.AGENT),
    "slow": Fault("a straggler: its own part of a step takes 3 times as long, until continue", Place.STEP),
    "hang": Fault("sleeps until continue", Place.STEP),
    "gil": Fault("a regular expression that never ends and keeps the GIL", Place.STEP),
    "loader": Fault("the DataLoader's next batch does not come until continue", Place.BATCH),
    "kill-loader": Fault("SIGKILL to one of its DataLoader's workers", Place.LINE),
    "nan": Fault("loss and gradients of the next backward are NaN", Place.BACKWARD),
    "flip": Fault("flips one bit of one parameter, and trains on with it", Place.BACKWARD),
    "flip-gradient": Fault("flips one bit of one gradient, after the all-reduce", Place.BACKWARD),
    "flip-momentum": Fault("flips one bit of the optimizer's state", Place.BACKWARD),
    "skip": Fault("leaves out the next collective, or DDP's of one step", Place.COLLECTIVE),
    "mismatch": Fault("the next all_reduce, or one before DDP's, has another shape", Place.COLLECTIVE),
    "reorder": Fault("the next two collectives change places", Place.COLLECTIVE),
    "full-disk": Fault("the next write of a checkpoint fails: no space left on device", Place.CHECKPOINT),
    "corrupt": Fault("flips a bit in the job's newest checkpoint", Place.AGENT),
    "truncate": Fault("cuts the largest file of the job's newest checkpoint in half", Place.AGENT),
    "kill-zygote": Fault("SIGKILL to the zygote that it was forked from", Place.AGENT),
    "kill-worker": Fault("SIGKILL to the Dask worker that holds it", Place.AGENT),
    "kill-scheduler": Fault("SIGKILL to the pool's scheduler, of a pool of this machine", Place.POOL),
}  # fmt: skip
ON_CHECKPOINT: Final = ("corrupt", "truncate")  # done to a checkpoint, of whichever rank

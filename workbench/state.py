"""Where a job stands: frozen values that only the controller makes anew.

No clock, no process, no path is looked up here. Times are seconds since the epoch, taken from events.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from workbench.spec import JobSpec

THE_START: Final = "start"  # in place of a checkpoint's path: go on from none


class JobPhase(enum.Enum):
    """The phases of a job; the last three are terminal."""

    INIT = "INIT"  # known, waiting for slots
    LAUNCHING = "LAUNCHING"  # slots granted, ranks being started
    HEALTHY = "HEALTHY"  # every rank runs, or has ended well
    RECOVERING = "RECOVERING"  # a generation failed; the next one will start when the old one is gone
    STOPPING = "STOPPING"  # ranks are being ended, nothing will start
    STOPPED = "STOPPED"  # ended because somebody asked
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def is_terminal(self) -> bool:
        return self in (JobPhase.STOPPED, JobPhase.SUCCEEDED, JobPhase.FAILED)


class RankPhase(enum.Enum):
    """torchelastic's `WorkerState` names."""

    INIT = "INIT"
    HEALTHY = "HEALTHY"
    STOPPED = "STOPPED"  # ended because we ended it
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def has_exited(self) -> bool:
        return self in (RankPhase.STOPPED, RankPhase.SUCCEEDED, RankPhase.FAILED)


class FailureKind(enum.IntEnum):
    """What ended a rank; a higher value outranks a lower one when the first cause is sought."""

    COLLECTIVE = 1  # a collective failed because some peer went away
    EXIT = 2  # left with an exit code and no word
    EXCEPTION = 3
    TIMEOUT = 4  # did not start, or stopped getting on, in time
    SIGNAL = 5
    WORKER_LOST = 6  # its whole worker process or host went away
    LAUNCH = 7  # never started
    DIVERGED = 8  # loss, gradient or parameter is not finite, and the job was to end or go back then
    MISMATCH = 9  # replicas differ, and the job was to end or go back then


class StallKind(enum.Enum):
    """How ranks stopped getting on; each value is what a person reads."""

    STOPPED = "stopped by a signal"
    NOT_STARTED = "did not join the process group"
    ABSENT = "did not enter a collective that the others wait in"
    MISMATCH = "entered another collective than the others"
    RETURNED = "ended while the others go on"
    DATA = "waits for its data loader"
    BUSY = "computes without getting on"
    DEADLOCK = "ranks wait for each other"
    UNKNOWN = "does not get on"


class StackGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One Python stack (py-spy's text, innermost frame first) and the ranks that had it."""

    ranks: tuple[int, ...]
    text: str


class Stall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job that stopped getting on: the ranks to blame (none: cannot be told), and what shows it.

    `since`: epoch s when it last got on. `collective` and `collective_seq`: the one that the others wait in. `where`:
    `train.py:41 in load`, of the first culprit. `evidence`: sentences, the strongest first. `patience`: s that the job
    may still take for it, since it has not begun; 0: it has stood still for too long.
    """

    kind: StallKind
    ranks: tuple[int, ...]
    reason: str
    since: float
    step: int | None = None
    collective: str = ""
    collective_seq: int = 0
    where: str = ""
    evidence: tuple[str, ...] = ()
    stacks: tuple[StackGroup, ...] = ()
    patience: float = 0.0


class Compared(enum.Enum):
    """In what replicas, the ranks that hold the same parameters, are compared; in the order in which it explains."""

    STEPS = "steps"  # how many each optimizer has taken
    STRUCTURE = "structure"  # names, order, shapes and types of parameters
    SETTINGS = "settings"  # learning rates and other options
    ABSENT = "absent"  # which gradients are None
    PARAMETERS = "parameters"
    STATE = "state"  # the optimizer's
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    DATA = "data"
    SCALE = "scale"  # a GradScaler's
    REDUCE = "reduce"  # what an all-reduce gave, with what was sent into it
    SHARDS = "shards"  # parameters that fully_shard keeps in parts, before it parts them
    GATHERED = "gathered"  # the same, put together for a forward


class Side(msgspec.Struct, frozen=True, array_like=True):
    """Ranks that agree with each other, and the digest that they have, 16 hexadecimal digits."""

    ranks: tuple[int, ...]
    digest: str = ""


class Mismatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One difference between replicas: who deviates in what, and the evidence for a cause (`policy.consistency`).

    `ranks`: who deviates; empty: it cannot be told. `told_by`: "majority", or "own digest": what the rank has is not
    what it had itself after its last step. `also`: what else differed at the same check.
    """

    compared: Compared
    ranks: tuple[int, ...] = ()
    told_by: str = ""
    sides: tuple[Side, ...] = ()  # the largest first; at most 16
    also: tuple[Compared, ...] = ()
    tensors: tuple[str, ...] = ()  # names of the first few that differ; of an option: `lr`
    count: int = 0  # tensors that differ
    of: int = 0  # tensors in all
    element: int | None = None  # flat index of the first that differs, in the first tensor
    elements: int = 0  # that differ there
    size: int = 0  # elements that it has
    bits: tuple[int, ...] = ()  # that differ in the first one; 0 is the lowest
    deviation: float = 0.0  # the largest absolute difference there
    relative: float = 0.0  # the same, over the tensor's root mean square
    ratio: float = 0.0  # all of it is so many times what the others have; 0: it is not
    measured_on: int | None = None  # the rank whose element, bits, deviation and ratio these are
    compared_with: int | None = None  # and the one that it was held against
    unsynced: tuple[int, ...] = ()  # whose last backward before the step was under no_sync
    synced: tuple[int, ...] = ()  # who had an earlier one that was not
    bypassed: tuple[int, ...] = ()  # where the wrapper's forward was not called for this step
    changed: tuple[int, ...] = ()  # whose own digest has changed since their last step
    lacking: tuple[int, ...] = ()  # who has none of it, where others have
    broken: tuple[int, ...] = ()  # where it is not finite
    is_first: bool = False  # at the first check: nothing has agreed yet
    is_wrapped: bool = True  # by DDP; else the program reduces by itself
    broadcasts: bool = True  # buffers: DDP was to send rank 0's
    late: int = 0  # steps after the one that is meant
    stage: str = ""  # of a reduce: when it went wrong: "in" it or on the way there, "after" it, or only a "checksum"
    attempts: int = 0  # of a reduce: how often it was done again
    is_lasting: bool = False  # of a reduce: it went wrong each time
    values: tuple[str, ...] = ()  # of what is no tensor: what each side has, in their order
    detail: str = ""


class DataAbout(enum.Enum):
    """What is odd about the data that ranks read; in the order in which it explains."""

    BATCH = "batch"  # the same on several ranks
    PLACES = "places"  # what samplers deal to whom
    ORDER = "order"  # of an epoch is that of the one before
    EPOCHS = "epochs"  # differ between ranks
    OVERLAP = "overlap"  # of shards
    SIZES = "sizes"  # of batches differ
    RANDOM = "random"  # numbers are the same


class DataDoubt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One oddity of what ranks read, and the evidence for a cause (`policy.data`). `ranks`: at most 64, who are meant.

    `sampler`: which class, a place in `policy.data.SAMPLERS`. `number`: of a sampler's pass, from 0; `epoch`: that it
    was told. `place`, `places`: the rank that samplers deal to, and of how many.
    """

    about: DataAbout
    ranks: tuple[int, ...] = ()
    of: int = 0  # ranks in all
    sampler: int = 0
    is_drawn: bool = False  # the same indices
    is_apart: bool = False  # different indices, but the same batch
    number: int = 0
    epoch: int = -1
    is_same_epoch: bool = False
    epochs: tuple[int, ...] = ()
    place: int = -1
    places: int = -1
    share: float = 0.0
    sizes: tuple[int, ...] = ()  # the smallest and the largest
    is_forward: bool = False  # random numbers are drawn by the model, not by workers


class CheckpointTier(enum.Enum):
    """Where a checkpoint lies."""

    MEMORY = "memory"  # held by the agents, gone with them
    DISK = "disk"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One committed checkpoint. `step`: optimizer steps finished in it; `size` in bytes; `saved_at` epoch s.

    `digest`: of its manifest, hexadecimal. `problem`: why it cannot be used; empty: nothing is known against it.
    """

    step: int
    path: str
    world_size: int
    saved_at: float
    size: int = 0
    digest: str = ""
    tier: CheckpointTier = CheckpointTier.DISK
    problem: str = ""
    agreed: bool | None = None  # whether all ranks held the same parameters and optimizer state; None: not compared


class SlotFaults(msgspec.Struct, frozen=True, array_like=True):
    """How often a slot's rank was the first cause of a generation's end."""

    worker: str
    slot: int
    count: int


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's (or the launch's) failure, with its reason in words."""

    kind: FailureKind
    rank: int | None
    reason: str
    time: float
    traceback: str = ""
    step: int | None = None
    log_path: str = ""
    stall: Stall | None = None  # of ranks that stopped getting on, or of what made a collective fail
    collective: str = ""  # the last numbered one that it had entered
    collective_seq: int = 0
    mismatch: Mismatch | None = None  # of replicas that differ


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank runs where. `worker` is the Dask worker's address, `slot` its slot (the GPU's index there, if any)."""

    rank: int
    local_rank: int
    node_rank: int
    worker: str
    slot: int
    host: str = "127.0.0.1"


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of the current generation."""

    rank: int
    worker: str
    phase: RankPhase = RankPhase.INIT
    pid: int = 0
    exit_code: int | None = None
    signal: int | None = None
    log_path: str = ""
    collective: str = ""  # the last numbered one that it had entered
    collective_seq: int = 0


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its events tell it. `reason` says in words why the phase is what it is."""

    job_id: str
    spec: JobSpec
    phase: JobPhase = JobPhase.INIT
    reason: str = ""
    restart_count: int = 0
    placements: tuple[Placement, ...] = ()
    ranks: tuple[RankState, ...] = ()
    master: tuple[str, int] | None = None
    failures: tuple[Failure, ...] = ()  # of the current generation, in order of arrival
    failure: Failure | None = None  # the first cause, once told; that of the last generation while the next one starts
    stall: Stall | None = None  # the job does not get on, and is left alone: it has no restarts
    ranks_wanted: int = 0  # after a resize or a resume; 0: as the spec says
    fruitless: int = 0  # restarts since the job last got further: these alone count against `max_restarts`
    furthest: int = 0  # the step that it has got to: what is saved again after going back is no progress
    faults: tuple[SlotFaults, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()  # the newest few on disk that may be gone back to, oldest first
    resume: str = ""  # the path of the checkpoint to go on from, or THE_START; empty: the newest
    resumed_step: int = 0  # where the current generation began
    reform: str = ""  # why the job will be started anew on other ranks once a checkpoint is saved
    reform_is_asked: bool = False  # by a person: without a checkpoint as well, after a while
    cancelled: bool = False  # somebody asked for the end, and it will be STOPPED whatever the ranks do now
    submitted_at: float = 0.0
    phase_since: float = 0.0
    ended_at: float | None = None
    deadline: float | None = None  # a `Ticked` is wanted at this time

    @property
    def world_size(self) -> int:
        return len(self.placements) or self.ranks_wanted or self.spec.world_size

    @property
    def restarts(self) -> str:
        """As in "2 of 2 ranks running, restart 1 of 3"; empty before the first."""
        count, limit = self.restart_count, self.spec.max_restarts
        if not count:
            return ""
        if not self.fruitless:
            return f"restart {count}"
        if self.fruitless == count:
            return f"restart {count} of {limit}"
        return f"restart {count}, {self.fruitless} of {limit} without progress"

    @property
    def has_recovered(self) -> bool:
        """Whether its failure is an earlier generation's, after which ranks were started again and did not fail."""
        is_on_its_way = self.phase in (JobPhase.RECOVERING, JobPhase.LAUNCHING, JobPhase.FAILED) or not self.ranks
        return self.failure is not None and self.failure not in self.failures and not is_on_its_way

"""What the controller wants done, imperative. A command returns nothing: how it went comes back as an event."""

from __future__ import annotations

import msgspec

from workbench.events import FailureDetected, RecoveryFinished, RecoveryStarted
from workbench.spec import JobSpec
from workbench.state import Placement


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="command", omit_defaults=True):
    job_id: str


class RequestSlots(_Command, frozen=True, kw_only=True):
    """Queue the job for gang placement; `SlotsGranted`, `SlotsAwaited` or `LaunchRefused` comes back.

    Slots that it holds, of a generation that is gone, are given back first. `ranks`: how many in all (0: as the spec
    says), `at_least`: be content with so many (0: all or none). `avoid`: slots that are used only when there is no
    other way. `is_patient`: what the pool cannot give now it may have again, so wait rather than refuse.
    """

    ranks: int = 0
    at_least: int = 0
    avoid: tuple[tuple[str, int], ...] = ()
    is_patient: bool = False


class ReleaseSlots(_Command, frozen=True, kw_only=True):
    """The job has no rank left: its slots are free."""


class ForgetCopies(_Command, frozen=True, kw_only=True):
    """The job goes back further than to the newest copy in its ranks' memory: no later generation may find one."""


class StartStore(_Command, frozen=True, kw_only=True):
    """Start this generation's rendezvous store on `worker`, outside every rank; `StoreStarted` comes back.

    `patience`: s in which a port that is in use is tried again, after a `StoreAwaited`.
    """

    restart_count: int
    worker: str
    host: str
    port: int = 0
    patience: float = 0.0


class StartRanks(_Command, frozen=True, kw_only=True):
    """Start these ranks on `worker`; a `RankStarted` or a `LaunchFailed` comes back for each."""

    restart_count: int
    worker: str
    spec: JobSpec
    placements: tuple[Placement, ...]  # this worker's
    world_size: int
    nnodes: int
    master: tuple[str, int]
    resume: str = ""  # the path of the checkpoint to go on from, or THE_START; empty: the newest that is whole


class StopRanks(_Command, frozen=True, kw_only=True):
    """End the generation's ranks there, and its store: SIGTERM to each, `grace` s later SIGKILL to its group."""

    restart_count: int
    worker: str
    grace: float


class RequestCheckpoint(_Command, frozen=True, kw_only=True):
    """Have the generation's ranks there save at their next step; `CheckpointSaved` or `CheckpointFailed` comes back."""

    restart_count: int
    worker: str


class ForgetJob(_Command, frozen=True, kw_only=True):
    """Let go of what that agent holds for the job from one generation to the next.

    Sent to every worker by the runner for `ReleaseSlots` and `ForgetCopies`; nothing comes back.
    """

    worker: str


class KeepEnvironment(_Command, frozen=True, kw_only=True):
    """Keep the launcher's environment, in memory alone, for a scheduler that comes after this one; until `ForgetJob`.

    Sent by the runner of a pool that is brought back when its scheduler is killed; nothing comes back.
    """

    worker: str
    env: dict[str, str]


class Announce(_Command, frozen=True, kw_only=True):
    """Record this, for people; the controller does not want it back."""

    event: FailureDetected | RecoveryStarted | RecoveryFinished


# --- sent to agents for a person, not by the controller ---------------------------------------------------------------


class ExecuteCell(_Command, frozen=True, kw_only=True):
    """Run `source` on these ranks of an interactive job; a `CellFinished` comes back for each."""

    worker: str
    cell_id: str
    source: str
    ranks: tuple[int, ...]


class PushValue(_Command, frozen=True, kw_only=True):
    """Bind `name` to the cloudpickled `payload` in these ranks' namespaces; answered as a cell."""

    worker: str
    cell_id: str
    name: str
    payload: bytes
    ranks: tuple[int, ...]


class PullValue(_Command, frozen=True, kw_only=True):
    """Answer with the cloudpickled value of expression `name` (`CellFinished.payload`)."""

    worker: str
    cell_id: str
    name: str
    ranks: tuple[int, ...]


class InterruptRanks(_Command, frozen=True, kw_only=True):
    """KeyboardInterrupt in the ranks' running cell, also inside a collective; never ends a rank."""

    worker: str
    ranks: tuple[int, ...]


class InjectFault(_Command, frozen=True, kw_only=True):
    """Do this fault of `workbench.faults` to the rank, on purpose; `FaultHappened` comes back when it is done.

    `path`: the job's newest checkpoint, for those that are done to one.
    """

    worker: str
    rank: int
    fault: str
    path: str = ""


Command = (
    RequestSlots
    | ReleaseSlots
    | ForgetCopies
    | StartStore
    | StartRanks
    | StopRanks
    | RequestCheckpoint
    | ForgetJob
    | KeepEnvironment
    | Announce
    | ExecuteCell
    | PushValue
    | PullValue
    | InterruptRanks
    | InjectFault
)
AgentCommand = (
    StartStore
    | StartRanks
    | StopRanks
    | RequestCheckpoint
    | ForgetJob
    | KeepEnvironment
    | ExecuteCell
    | PushValue
    | PullValue
    | InterruptRanks
    | InjectFault
)

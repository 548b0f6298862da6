"""Replaying a job for a few steps: three jobs one after another, and the verdict about what their ranks noted.

What is asked of them, and what follows from it, is `policy.replay`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from workbench.errors import JobError, UsageError
from workbench.feed import Cursor, Update
from workbench.policy.replay import Recording, Replay, ReplayReport, compare, read_recording, replay_spec, verdict
from workbench.spec import EntrypointKind, JobSpec
from workbench.state import JobPhase

ANSWER: Final = "replay"  # the cell id under which `training.replay` sends
LATE: Final = 5.0  # s by which notes may come after the end: they go another way


class Replayed(Protocol):
    """What is needed of a job."""

    job_id: str

    def exception(self, timeout: float | None = None) -> JobError | None: ...
    def follow(self, cursor: Cursor | None = None, timeout: float = 10.0) -> Update: ...
    def cancel(self, force: bool = False, by: str = "") -> JobPhase: ...


def replay_check(
    launch: Callable[[JobSpec], Replayed],
    spec: JobSpec,
    *,
    steps: int,
    timeout: float,
    tell: Callable[[str], None] | None = None,
) -> ReplayReport:
    """Replay what `spec` describes; each run may take `timeout` s. `tell` gets a line as each run begins.

    Raises `UsageError` where there is nothing to compare, the error of a run that fails, and `TimeoutError`.
    """
    if spec.kind is EntrypointKind.INTERACTIVE:
        raise UsageError("an interactive job has no program to replay", hint="give a script, a module or a cell's job")
    if steps < 1:
        raise UsageError(f"{steps} steps cannot be compared", hint="give 1 or more")
    runs: dict[Replay, list[Recording]] = {}
    job_ids: list[str] = []
    skipped = ""
    for run in Replay:
        if run is Replay.SWAPPED and (skipped := _why_not_swapped(runs)):
            break
        if tell is not None:
            tell(f"{run.value} of {spec.label}")
        job = launch(replay_spec(spec, steps, run))
        job_ids.append(job.job_id)
        runs[run] = _recordings(job, timeout)
    return verdict(spec.label, runs, job_ids, skipped)


def _why_not_swapped(runs: Mapping[Replay, Sequence[Recording]]) -> str:
    """Empty: it is of use."""
    if len(runs[Replay.FIRST]) == 1:
        return "slots were not swapped: there is one rank"
    if compare(runs[Replay.FIRST], runs[Replay.SECOND], Replay.SECOND) is not None:
        return "slots were not swapped: bits differ without that"
    return ""


def _recordings(job: Replayed, timeout: float) -> list[Recording]:
    """What the ranks noted, once all have ended; whatever happens the job is not left running."""
    try:
        error = job.exception(timeout)
    except BaseException:
        job.cancel(force=True, by="replay-check")
        raise
    if error is not None:
        raise error
    deadline = time.monotonic() + LATE
    while True:
        update = job.follow(timeout=0.0)
        world_size = update.state.world_size
        found = {cell.rank: read_recording(cell.payload) for cell in update.cells if cell.cell_id == ANSWER}
        if len(found) >= world_size or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for rank in range(world_size):
        if rank not in found or not found[rank].steps:
            raise UsageError(
                f"{job.job_id}: rank {rank} took no optimizer step, so there is nothing to compare",
                hint="replay-check looks at programs whose every rank steps an optimizer of torch.optim",
            )
    return [found[rank] for rank in range(world_size)]

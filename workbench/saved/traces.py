"""What of a job is compared, shown in a report or exported: read from a saved one and from a live one alike."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable

import workbench.requests as rq
from workbench.blackbox import StepRecord, iter_steps
from workbench.collect import contents_of
from workbench.errors import WorkbenchError
from workbench.events import FailureDetected
from workbench.feed import StepPage
from workbench.saved.parameters import parameters
from workbench.saved.session import SavedJob, origin_of
from workbench.session import Job
from workbench.views.compare import Trace, printed_numbers

LINES = 200_000


def steps_of(job: Job) -> dict[int, list[StepRecord]]:
    """Single steps by rank, each once and in order: of one that was repeated after a restart, the last."""
    found: dict[int, dict[int, StepRecord]] = {}
    after: int | None = 0
    while after is not None:
        page = job.session.ask("steps", rq.ReadSteps(job_id=job.job_id, after=after), StepPage)
        for rank, block in page.blocks:
            found.setdefault(rank, {}).update((record.step, record) for record in iter_steps(block))
        after = page.next
    return {rank: [records[step] for step in sorted(records)] for rank, records in sorted(found.items())}


def trace_of(job: Job, name: str = "") -> Trace:
    """See `Trace`; `name` is what to call it."""
    state, events = job.state, job.events()
    steps, origin = steps_of(job), origin_of(events)
    program = state.spec.source or next((source.text for source in origin.sources), "")
    return Trace(
        name=name or job.job_id,
        spec=state.spec,
        phase=state.phase,
        reason=state.reason,
        world_size=state.world_size,
        last_step=max((records[-1].step for records in steps.values() if records), default=0),
        losses=_column(steps, "loss"),
        durations=_column(steps, "duration"),
        samples=_column(steps, "samples"),
        printed=printed_numbers(_output(job)),
        states=_states(job),
        failures=tuple(event.failure.reason for event in events if isinstance(event, FailureDetected)),
        packages=origin.packages,
        parameters={name: ast.unparse(value) for name, value in parameters(program).items()},
        code={source.path: source.digest for source in origin.sources},
    )


def _column(steps: dict[int, list[StepRecord]], name: str) -> dict[int, dict[int, float]]:
    """One figure of every step by rank, where it is known."""

    def known(records: Iterable[StepRecord]) -> dict[int, float]:
        pairs = ((record.step, float(getattr(record, name))) for record in records)
        return {step: value for step, value in pairs if not math.isnan(value)}

    columns = {rank: known(records) for rank, records in steps.items()}
    return {rank: column for rank, column in columns.items() if column}


def _output(job: Job) -> str:
    try:
        return job.logs(rank=0, tail=LINES)
    except WorkbenchError:
        return ""


def _states(job: Job) -> dict[int, str]:
    if isinstance(job, SavedJob):
        return dict(job.session.record(job.job_id).entry.contents)
    try:
        return contents_of(job.checkpoints)
    except WorkbenchError:
        return {}

"""What of a job is compared, shown in a report or exported: read from a saved one and from a live one alike."""

from __future__ import annotations

import ast

import workbench.requests as rq
from workbench.blackbox import StepRecord, iter_steps
from workbench.collect import contents_of
from workbench.errors import WorkbenchError
from workbench.feed import StepPage
from workbench.saved.parameters import parameters
from workbench.saved.session import SavedJob
from workbench.session import Job
from workbench.views.compare import Trace
from workbench.views.trace import in_order, origin_of, trace_from

LINES = 200_000


def steps_of(job: Job) -> dict[int, list[StepRecord]]:
    """Single steps by rank, each once and in order: of one that was repeated after a restart, the last."""
    pages: list[StepPage] = []
    after: int | None = 0
    while after is not None:
        pages.append(job.session.ask("steps", rq.ReadSteps(job_id=job.job_id, after=after), StepPage))
        after = pages[-1].next
    return in_order((rank, iter_steps(block)) for page in pages for rank, block in page.blocks)


def trace_of(job: Job, name: str = "") -> Trace:
    """See `Trace`; `name` is what to call it."""
    state, events = job.state, job.events()
    program = state.spec.source or next((source.text for source in origin_of(events).sources), "")
    marked = {name: ast.unparse(value) for name, value in parameters(program).items()}
    return trace_from(
        state,
        events,
        steps_of(job),
        name=name or job.job_id,
        output=_output(job),
        states=_states(job),
        parameters=marked,
    )


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

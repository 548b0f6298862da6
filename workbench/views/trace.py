"""From what is known of a job to its `Trace`, which is compared and drawn. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from workbench.blackbox import StepRecord
from workbench.events import Event, FailureDetected, OriginRecorded
from workbench.origin import Origin
from workbench.state import JobState
from workbench.views.compare import Trace, printed_numbers

Steps = Mapping[int, Sequence[StepRecord]]  # by rank, each step once and in order


def origin_of(events: Iterable[Event]) -> Origin:
    """What the last launch or resume was made of; an empty one for a record without."""
    return next((e.origin for e in reversed(list(events)) if isinstance(e, OriginRecorded)), Origin())


def in_order(blocks: Iterable[tuple[int, Iterable[StepRecord]]]) -> dict[int, list[StepRecord]]:
    """Single steps by rank: of one that was repeated after a restart, the last."""
    found: dict[int, dict[int, StepRecord]] = {}
    for rank, records in blocks:
        found.setdefault(rank, {}).update((record.step, record) for record in records)
    return {rank: [records[step] for step in sorted(records)] for rank, records in sorted(found.items())}


def trace_from(
    state: JobState,
    events: Sequence[Event],
    steps: Steps,
    *,
    name: str = "",
    output: str = "",
    states: Mapping[int, str] | None = None,
    parameters: Mapping[str, str] | None = None,
) -> Trace:
    """`name`: what to call it. `output`: rank 0's. `states`, `parameters`: as in `Trace`."""
    origin = origin_of(events)
    return Trace(
        name=name or state.job_id,
        spec=state.spec,
        phase=state.phase,
        reason=state.reason,
        world_size=state.world_size,
        last_step=max((records[-1].step for records in steps.values() if records), default=0),
        losses=_column(steps, "loss"),
        durations=_column(steps, "duration"),
        samples=_column(steps, "samples"),
        printed=printed_numbers(output),
        states=dict(states or {}),
        failures=tuple(event.failure.reason for event in events if isinstance(event, FailureDetected)),
        packages=origin.packages,
        parameters=dict(parameters or {}),
        code={source.path: source.digest for source in origin.sources},
    )


def _column(steps: Steps, name: str) -> dict[int, dict[int, float]]:
    """One figure of every step by rank, where it is known."""

    def known(records: Iterable[StepRecord]) -> dict[int, float]:
        pairs = ((record.step, float(getattr(record, name))) for record in records)
        return {step: value for step, value in pairs if not math.isnan(value)}

    columns = {rank: known(records) for rank, records in steps.items()}
    return {rank: column for rank, column in columns.items() if column}

"""The exception that a job which did not succeed stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from workbench.errors import (
    GradientMismatchError,
    HangError,
    JobError,
    RankFailedError,
    RendezvousTimeoutError,
    RestartsExhaustedError,
)
from workbench.policy.consistency import explain
from workbench.policy.failure import first_cause
from workbench.state import Failure, FailureKind, JobState
from workbench.views.failure import failure_text

if TYPE_CHECKING:
    pass


def error_of(state: JobState, earlier: Sequence[str] = ()) -> JobError:
    """The exception that a job which did not succeed stands for. `earlier`: of attempts before, a line each."""
    failure = state.failure or (first_cause(state.failures) if state.failures else None)
    has_other_end = state.has_recovered and state.phase.is_terminal  # it was cancelled, long after
    if failure is None or has_other_end:
        return JobError(f"{state.job_id}: {state.reason}", job_id=state.job_id)
    error = _error_of(state, failure)
    error.story = failure_text(msgspec.structs.replace(state, failure=failure), earlier=earlier)
    return error


def _error_of(state: JobState, failure: Failure) -> JobError:
    job_id = state.job_id
    reason = f"{job_id}: {state.reason}"
    match failure.kind:
        case FailureKind.TIMEOUT if failure.stall is not None:
            return HangError(reason, job_id=job_id, rank=failure.rank, hint=failure.stall.where)
        case FailureKind.TIMEOUT:
            return RendezvousTimeoutError(reason, job_id=job_id, rank=failure.rank)
        case FailureKind.MISMATCH if failure.mismatch is not None:
            fix = explain(failure.mismatch, failure.step or 0).advice
            return GradientMismatchError(
                reason, job_id=job_id, rank=failure.rank, hint=fix, step=failure.step, mismatch=failure.mismatch
            )
        case FailureKind.LAUNCH | FailureKind.WORKER_LOST:
            return JobError(reason, job_id=job_id, rank=failure.rank)
    is_spent = 0 < state.spec.max_restarts <= state.fruitless
    kind = RestartsExhaustedError if is_spent else RankFailedError
    return kind(
        reason,
        job_id=job_id,
        rank=failure.rank,
        traceback=failure.traceback,
        log_path=failure.log_path,
    )

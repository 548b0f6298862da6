"""Every exception a caller can meet, grouped by what the caller does next.

    WorkbenchError                 has .hint: the next thing to try, one sentence
      UsageError (ValueError)      fix the request
        SpecError                  a launch option or entrypoint is wrong
        UnknownJobError            no such job
        CheckpointNotFoundError    no such checkpoint
      PoolError                    fix the pool
        PoolUnavailableError       nothing answers, or it is of another version
        NotEnoughSlotsError        more ranks than the pool could ever hold
        PoolLostError              it answered once and no longer does
      JobError                     look at the job (.job_id .rank .reason)
        RankFailedError            remote traceback first
        HangError
        GradientMismatchError
        RendezvousTimeoutError
        RestartsExhaustedError
      CheckpointError              choose another
        CheckpointCorruptError
        CheckpointIncompatibleError
      StoreError                   look at the disk
        JobFileError               a record cannot be read or written
        SavedFileError             a saved session cannot be, or is not what was saved
    InternalError                  a bug here, please report
      InvalidTransitionError       carries its story: the events that led to it

A failing job is an event and a phase, not an exception: only `Job.wait()` and `Job.result()` raise.
"""

from __future__ import annotations

from collections.abc import Sequence


class WorkbenchError(Exception):
    """What went wrong, in one sentence; `.hint` is the next thing to try, in one sentence or empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class UsageError(WorkbenchError, ValueError):
    """The request cannot be carried out as it stands."""


class SpecError(UsageError):
    """A launch option, or the program to launch, is wrong."""


class UnknownJobError(UsageError):
    """No job of that name in this pool."""


class CheckpointNotFoundError(UsageError):
    """The job has no such checkpoint."""


class PoolError(WorkbenchError):
    """The pool, not the request, is at fault."""


class PoolUnavailableError(PoolError):
    """Nothing answers there, or what answers is of another version."""


class NotEnoughSlotsError(PoolError):
    """The job needs more slots than the pool could ever give."""


class PoolLostError(PoolError):
    """The pool answered once and no longer does."""


class JobError(WorkbenchError):
    """A job did not end well. `.story`: all of it in a few lines, for a screen; may be empty."""

    story: str = ""

    def __init__(self, reason: str, *, job_id: str, rank: int | None = None, hint: str = "") -> None:
        super().__init__(reason, hint=hint)
        self.job_id, self.rank, self.reason = job_id, rank, reason

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in place of the local traceback, which would tell of our own code only."""
        told = [self.job_id, *self.story.splitlines()] if self.story else [str(self)]
        return [f"{type(self).__name__}: {told[0]}", *told[1:]]


class RankFailedError(JobError):
    """A rank raised, exited or was killed; `.traceback` is the rank's own, empty when it left none."""

    def __init__(
        self, reason: str, *, job_id: str, rank: int | None = None, traceback: str = "", log_path: str = ""
    ) -> None:
        super().__init__(reason, job_id=job_id, rank=rank, hint=f"log: {log_path}" if log_path else "")
        self.traceback, self.log_path = traceback, log_path

    def _render_traceback_(self) -> list[str]:
        """Without a story it is the rank's traceback and the reason."""
        own = super()._render_traceback_()
        return own if self.story else [*self.traceback.splitlines(), *own]


class HangError(JobError):
    """Ranks stopped getting on."""


class GradientMismatchError(JobError):
    """Ranks disagree about gradients, parameters or what else they should hold alike.

    `.step`: optimizer steps finished then; `.mismatch`: a `state.Mismatch` with tensor, element and size of the
    deviation; `.hint`: what to do about its likely cause.
    """

    def __init__(
        self, reason: str, *, job_id: str, rank: int | None = None, hint: str = "", step: int | None = None,
        mismatch: object = None,
    ) -> None:  # fmt: skip
        super().__init__(reason, job_id=job_id, rank=rank, hint=hint)
        self.step, self.mismatch = step, mismatch


class RendezvousTimeoutError(JobError):
    """Not every rank arrived in time."""


class RestartsExhaustedError(RankFailedError):
    """The job failed again after its last permitted restart."""


class CheckpointError(WorkbenchError):
    """A checkpoint cannot be used."""


class CheckpointCorruptError(CheckpointError):
    """What is on disk is not what was saved."""


class CheckpointIncompatibleError(CheckpointError):
    """The checkpoint does not fit this job."""


class StoreError(WorkbenchError):
    """The record on disk is at fault."""


class JobFileError(StoreError):
    """A job's record cannot be read or written."""


class SavedFileError(StoreError):
    """A saved session cannot be read or written, or is not what was saved."""


class InternalError(Exception):
    """A bug in dtrain workbench; please report it with the text."""


class InvalidTransitionError(InternalError):
    """The controller met an event that cannot be; `.story` holds what led to it."""

    def __init__(self, message: str, story: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.story = tuple(story)

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *map(repr, self.story)])

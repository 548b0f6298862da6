"""A cell that runs on ranks: its output as it comes, its answers, and the first exception of any rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from workbench.errors import (
    RankFailedError,
)
from workbench.feed import CellStarted, Update
from workbench.session.failed import error_of
from workbench.state import JobState
from workbench.telemetry import CellFinished, OutputWritten

if TYPE_CHECKING:
    from workbench.session.job import Job

POLL: Final = 10.0  # s that one request for news may wait


class CellRun:
    """A cell on its way: iterate for output and answers as they come; ends when every rank has answered.

    Raises the job's error when a rank that has not answered is gone.
    """

    def __init__(self, job: Job, started: CellStarted) -> None:
        self.job, self.cell_id, self.ranks = job, started.cell_id, started.ranks
        self.answers: dict[int, CellFinished] = {}
        self.last: Update | None = None
        self._cursor = started.cursor

    def __iter__(self) -> Iterator[OutputWritten | CellFinished]:
        while len(self.answers) < len(self.ranks):
            yield from self.poll(POLL)

    def poll(self, timeout: float) -> list[OutputWritten | CellFinished]:
        """What has come since the last call, waiting at most `timeout` seconds for something."""
        update = self.job.follow(self._cursor, timeout)
        self._cursor, self.last = update.cursor, update
        news: list[OutputWritten | CellFinished] = list(update.output)
        for answer in update.cells:
            if answer.cell_id == self.cell_id:
                self.answers[answer.rank] = answer
                news.append(answer)
        self._check(update.state)
        return news

    @property
    def is_done(self) -> bool:
        return len(self.answers) == len(self.ranks)

    def answers_or_raise(self) -> dict[int, CellFinished]:
        """All answers; the first that is an error is raised."""
        for item in self:
            if isinstance(item, CellFinished) and not item.ok:
                raise RankFailedError(
                    f"rank {item.rank}: {item.error}",
                    job_id=self.job.job_id,
                    rank=item.rank,
                    traceback=item.traceback,
                )
        return self.answers

    def _check(self, state: JobState) -> None:
        """How a rank ended says more than that it did not answer."""
        gone = {rank.rank for rank in state.ranks if rank.phase.has_exited}
        if any(rank not in self.answers or not self.answers[rank].ok for rank in gone.intersection(self.ranks)):
            raise error_of(state)
        if state.phase.is_terminal and not self.is_done:
            raise error_of(state)


def which(ranks: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if ranks is None else tuple(ranks)

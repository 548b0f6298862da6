"""A cell on the ranks of an interactive job: its output live and by rank, its values, its first exception.

Everything is written by the thread that runs the cell. The cell is free as soon as every rank has answered, one has
raised, or somebody interrupts; it never waits for a rank that is stuck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from workbench.errors import JobError, UsageError, WorkbenchError
from workbench.state import JobPhase
from workbench.telemetry import CellFinished, OutputWritten, RankBeat
from workbench.verbs.answers import bounded, doing, ends_quietly, failure_of, show_values
from workbench.verbs.context import Context, WaitInterrupted
from workbench.verbs.lines import Bound, Labeller, joined, name_ranks

if TYPE_CHECKING:
    from workbench.session import CellRun, Job

FLUSH: Final = 0.1  # s between two writes
GRACE: Final = 0.15  # s that a first exception waits for its like from other ranks
LAST_WORDS: Final = 0.4  # s that the answer for a rank that is gone waits for what ended it
POLL: Final = 1.0
BUSY: Final = 0.1  # s by which an activity must be older than the cell
BETWEEN: Final = ("STARTING", "IDLE", "EXITING")  # activities that belong to no cell


def run_cell(context: Context, job: Job, source: str, ranks: Sequence[int] | None, *, is_quiet: bool = False) -> None:
    """Run `source`, show what comes of it. Raises `RankFailedError`, or `WaitInterrupted` when interrupted."""
    show = Show(context)
    asked = ranks
    try:
        run = _send(context, job, source, ranks)
        asked = run.ranks
        failed = _follow(show, run)
    except WaitInterrupted:
        raise
    except KeyboardInterrupt:
        show.finish()
        raise _interrupted(show, job, asked) from None
    except JobError as error:  # a rank is gone, and its answer will not come
        show.finish()
        raise bounded(error) from None
    show.finish()
    if failed:
        raise _death(run) if _all_died(failed) and _is_known(run) else failure_of(job, failed, run)
    if not is_quiet and not ends_quietly(source):
        show_values(context, list(run.answers.values()))


def _send(context: Context, job: Job, source: str, ranks: Sequence[int] | None) -> CellRun:
    """Send it at once; only when that is refused see whether the ranks are still being started."""
    try:
        return job.execute(source, ranks)
    except UsageError:
        wait_until_ready(context, job)
        return job.execute(source, ranks)


def wait_until_ready(context: Context, job: Job) -> None:
    """Wait for ranks that are still being started, saying why."""
    update, shown = job.follow(timeout=0.0), ""
    try:
        while update.state.phase in (JobPhase.INIT, JobPhase.LAUNCHING, JobPhase.RECOVERING):
            if update.state.phase is not JobPhase.LAUNCHING and update.state.reason != shown:
                shown = update.state.reason
                context.screen.update(f"{job.job_id}: {shown}")
            update = job.follow(update.cursor, timeout=POLL)
    except KeyboardInterrupt:
        raise WaitInterrupted(f"stopped waiting; {job.job_id} goes on, and the cell was not sent to it") from None
    finally:
        context.screen.settle()
    if update.state.phase is not JobPhase.HEALTHY:
        raise UsageError(
            f"{job.job_id} is {update.state.phase.value}: {update.state.reason}",
            hint=f"start another with: %dtrain launch --interactive -n {update.state.world_size}",
        )


@dataclass
class Show:
    """What has come of a cell, and what of it is on the screen."""

    context: Context
    labeller: Labeller = field(default_factory=Labeller)
    bound: Bound = field(default_factory=Bound)
    beats: dict[int, tuple[RankBeat, float]] = field(default_factory=dict)  # with the time when each came
    waiting: list[tuple[bool, str]] = field(default_factory=list)
    flushed: float = float("-inf")
    dropped: int = 0
    told_busy: bool = False
    logs: dict[int, str] = field(default_factory=dict)

    def take(self, run: CellRun, news: Sequence[OutputWritten | CellFinished]) -> None:
        """Add what has come; write it when the last writing is long enough ago."""
        now = self.context.clock()
        for item in news:
            if isinstance(item, OutputWritten):
                self.dropped += item.dropped
                is_error = item.stream == "stderr"
                self.waiting += self.labeller.add(item.rank, item.text, now, is_error=is_error)
        self.waiting += self.labeller.overdue(now)
        if run.last is not None:
            self.beats.update({beat.rank: (beat, now) for beat in run.last.beats})
            self.logs = {rank.rank: rank.log_path for rank in run.last.state.ranks}
        if self.waiting and now - self.flushed >= FLUSH:
            self.flush()

    def tell_busy(self, began: float, unanswered: set[int]) -> None:
        """Say, once, which ranks have not begun this cell: what they are at has lasted longer than it."""
        busy = [
            rank
            for rank, (beat, came) in self.beats.items()
            if rank in unanswered and beat.activity not in BETWEEN and beat.since > came - began + BUSY
        ]
        if busy and not self.told_busy:
            self.told_busy = True
            where = name_ranks(busy)
            self.context.screen.write(
                f"[{where} still in an earlier cell; to free: interrupt this one]\n", is_error=True
            )

    def flush(self) -> None:
        was_full = self.bound.is_full
        for is_error, text in joined(self.bound.let(self.waiting)):
            self.context.screen.write(text, is_error=is_error)
        if self.bound.is_full and not was_full:
            self.context.screen.write("[much output: its end is shown when the cell has ended]\n", is_error=True)
        self.waiting.clear()
        self.flushed = self.context.clock()

    def finish(self) -> None:
        """Write all that is left, the kept end included, and say what was left out."""
        self.waiting += self.labeller.overdue(self.context.clock(), patience=0.0)
        self.flush()
        left_out = self.bound.left_out + self.dropped
        if left_out:
            where = next(iter(self.logs.values()), "")
            whole = f"; whole: {where}" if where else ""
            self.context.screen.write(f"[{left_out:,} characters are not shown{whole}]\n", is_error=True)
        for is_error, text in joined(self.bound.rest()):
            self.context.screen.write(text, is_error=is_error)

    @property
    def patience(self) -> float:
        """How long to wait for news: until the next writing when something waits to be written."""
        if not self.waiting:
            return POLL
        return min(max(self.flushed + FLUSH - self.context.clock(), 0.0), POLL)


def _follow(show: Show, run: CellRun) -> list[CellFinished]:
    """Until every rank has answered or one has raised; the answers that are errors, first come first."""
    failed: list[CellFinished] = []
    give_up, streak = float("inf"), 0
    context = show.context
    began_at = context.clock()
    while context.clock() < give_up and not (run.is_done and not (failed and _all_died(failed))):
        began = context.clock()
        news = run.poll(min(show.patience, max(give_up - began, 0.0)))
        failed += [item for item in news if isinstance(item, CellFinished) and not item.ok]
        if failed and give_up == float("inf"):
            give_up = context.clock() + (LAST_WORDS if _all_died(failed) else GRACE)
        show.take(run, news)
        show.tell_busy(began_at, set(run.ranks) - set(run.answers))
        if failed and _all_died(failed) and _is_known(run):
            break
        # A rank that prints without pause has news at each request: ask less often the longer that lasts.
        streak = streak + 1 if context.clock() - began < 0.002 and not run.is_done else 0
        if streak > 2:
            context.sleep(min(0.002 * streak, 0.05))
    return failed


# --- how it ended ---------------------------------------------------------------------------------------------------


def _all_died(failed: Sequence[CellFinished]) -> bool:
    """Whether these answers were given for ranks that are gone: an exception would have a traceback."""
    return not any(answer.traceback for answer in failed)


def _is_known(run: CellRun) -> bool:
    """Whether the pool has said by now why they are gone."""
    return run.last is not None and bool(run.last.state.failure or run.last.state.failures)


def _death(run: CellRun) -> JobError:
    from workbench.session import error_of

    assert run.last is not None
    return bounded(error_of(run.last.state))


def _interrupted(show: Show, job: Job, ranks: Sequence[int] | None) -> WaitInterrupted:
    """Interrupt the ranks' cell, and say what each of them was doing."""
    lines = [f"cell left; {job.job_id} and its ranks live on"]
    try:
        job.interrupt(ranks)
    except (WorkbenchError, KeyboardInterrupt) as error:
        lines = [f"cell left; its ranks could not be interrupted: {error}"]
    wanted = sorted(show.beats) if ranks is None else sorted(ranks)
    now, known = show.context.clock(), [(rank, *show.beats[rank]) for rank in wanted if rank in show.beats]
    lines += [f"  rank {rank} was {doing(beat, now - came)}" for rank, beat, came in known[:16]]
    return WaitInterrupted("\n".join(lines))

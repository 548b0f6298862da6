"""A cell on the ranks of an interactive job: its output live and by rank, its values, its first exception.

Everything is written by the thread that runs the cell. The cell is free as soon as every rank has answered, one has
raised, or somebody interrupts; it never waits for a rank that is stuck.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from workbench.errors import JobError, RankFailedError, UsageError, WorkbenchError
from workbench.state import JobPhase
from workbench.telemetry import CellFinished, OutputWritten, RankBeat
from workbench.verbs.context import Context, WaitInterrupted
from workbench.verbs.lines import Bound, Labeller, joined, name_ranks

if TYPE_CHECKING:
    from workbench.session import CellRun, Job

FLUSH: Final = 0.1  # s between two writes
GRACE: Final = 0.15  # s that a first exception waits for its like from other ranks
LAST_WORDS: Final = 0.4  # s that the answer for a rank that is gone waits for what ended it
POLL: Final = 1.0
TRACEBACKS: Final = 1400  # characters: all that is told of a failure stays under 2 kB
DIFFERENT: Final = 3  # tracebacks shown when ranks failed in different ways
ACTIVITIES: Final = {  # `blackbox.Activity` in a person's words
    "STARTING": "starting",
    "RUNNING": "in the cell",
    "CELL": "in the cell",
    "IDLE": "waiting for a cell",
    "DATA": "waiting for data",
    "FORWARD": "in forward",
    "BACKWARD": "in backward",
    "COLLECTIVE": "in a collective",
    "OPTIMIZER": "in the optimizer",
    "CHECKPOINT": "at a checkpoint",
    "EXITING": "exiting",
}


def run_cell(context: Context, job: Job, source: str, ranks: Sequence[int] | None, *, is_quiet: bool = False) -> None:
    """Run `source`, show what comes of it. Raises `RankFailedError`, or `WaitInterrupted` when interrupted."""
    wait_until_ready(context, job)
    show = Show(context)
    asked = ranks
    try:
        run = job.execute(source, ranks)
        asked = run.ranks
        failed = _follow(show, run)
    except KeyboardInterrupt:
        show.finish()
        raise _interrupted(show, job, asked) from None
    except JobError as error:  # a rank is gone, and its answer will not come
        show.finish()
        raise _bounded(error) from None
    show.finish()
    if failed:
        raise _death(run) if _all_died(failed) and _is_known(run) else _failure(job, failed, run)
    if not is_quiet and not ends_quietly(source):
        show_values(context, list(run.answers.values()))


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
    while context.clock() < give_up and not (run.is_done and not (failed and _all_died(failed))):
        began = context.clock()
        news = run.poll(min(show.patience, max(give_up - began, 0.0)))
        failed += [item for item in news if isinstance(item, CellFinished) and not item.ok]
        if failed and give_up == float("inf"):
            give_up = context.clock() + (LAST_WORDS if _all_died(failed) else GRACE)
        show.take(run, news)
        if failed and _all_died(failed) and _is_known(run):
            break
        # A rank that prints without pause has news at each request: ask less often the longer that lasts.
        streak = streak + 1 if context.clock() - began < 0.002 and not run.is_done else 0
        if streak > 2:
            context.sleep(min(0.002 * streak, 0.05))
    return failed


# --- how it ended -----------------------------------------------------------------------------------------------------


def show_values(context: Context, answers: Sequence[CellFinished]) -> None:
    """The last expression's value by rank; equal ones once. Text goes together, rich values one after another."""
    groups: list[tuple[dict[str, str], list[int]]] = []
    for answer in sorted(answers, key=lambda a: a.rank):
        if answer.data:
            same = next((ranks for data, ranks in groups if data == answer.data), None)
            if same is None:
                groups.append((answer.data, [answer.rank]))
            else:
                same.append(answer.rank)
    plain = [value_text(data, ranks) for data, ranks in groups if set(data) == {"text/plain"}]
    if plain:
        context.screen.display({"text/plain": "\n".join(plain)})
    for data, ranks in groups:
        if set(data) != {"text/plain"}:
            context.screen.display({"text/plain": f"{name_ranks(ranks)}:"})
            context.screen.display(data)


def value_text(data: dict[str, str], ranks: Sequence[int]) -> str:
    text = data["text/plain"]
    return f"{name_ranks(tuple(ranks))}:{chr(10) if chr(10) in text else ' '}{text}"


def ends_quietly(source: str) -> bool:
    """Whether the cell ends in `;`, comments and blank lines apart."""
    last = ""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.INDENT, tokenize.DEDENT)
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in skipped:
                last = token.string
    except (tokenize.TokenError, SyntaxError):
        return False
    return last == ";"


def _all_died(failed: Sequence[CellFinished]) -> bool:
    """Whether these answers were given for ranks that are gone: an exception would have a traceback."""
    return not any(answer.traceback for answer in failed)


def _is_known(run: CellRun) -> bool:
    """Whether the pool has said by now why they are gone."""
    return run.last is not None and bool(run.last.state.failure or run.last.state.failures)


def _death(run: CellRun) -> JobError:
    from workbench.session import error_of

    assert run.last is not None
    return _bounded(error_of(run.last.state))


def _failure(job: Job, failed: Sequence[CellFinished], run: CellRun) -> RankFailedError:
    """One error for all: each different traceback once, under the ranks that raised it."""
    groups: list[tuple[CellFinished, list[int]]] = []
    for answer in failed:
        same = next((ranks for known, ranks in groups if _same(known, answer)), None)
        if same is None:
            groups.append((answer, [answer.rank]))
        else:
            same.append(answer.rank)
    shown = groups[:DIFFERENT]
    room = TRACEBACKS // len(shown)
    parts = [f"{name_ranks(ranks)}:\n{shorten(answer.traceback or answer.error, room)}" for answer, ranks in shown]
    if len(groups) > DIFFERENT:
        parts.append(f"… and {len(groups) - DIFFERENT} more ranks that failed in other ways")
    if unanswered := set(run.ranks) - set(run.answers):
        where = name_ranks(tuple(unanswered))
        parts.append(f"{where} still in the cell; to free: %dtrain interrupt")
    first, ranks = groups[0]
    return RankFailedError(
        f"{name_ranks(ranks)} of {job.job_id}: {shorten(first.error, 300)}",
        job_id=job.job_id,
        rank=ranks[0],
        traceback="\n".join(parts),
    )


def _same(one: CellFinished, other: CellFinished) -> bool:
    return (one.error, one.traceback) == (other.error, other.traceback)


def _bounded(error: JobError) -> JobError:
    if isinstance(error, RankFailedError):
        error.traceback = shorten(error.traceback, TRACEBACKS)
    return error


def shorten(text: str, room: int) -> str:
    """Its beginning and, more of it, its end, by whole lines where that is possible."""
    text = text.rstrip("\n")
    if len(text) <= room:
        return text
    head, tail = text[: room // 4], text[-(room - room // 4 - 20) :]
    head = head[: head.rfind("\n")] if "\n" in head else head
    tail = tail[tail.find("\n") + 1 :] if "\n" in tail[:-1] else tail
    return f"{head}\n  …\n{tail}"


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


def doing(beat: RankBeat, age: float = 0.0) -> str:
    """`in all_reduce for 3.1 s, step 40`; `age` s have passed since the rank said so."""
    what = ACTIVITIES.get(beat.activity, beat.activity.lower())
    if beat.activity == "COLLECTIVE" and beat.collective:
        what = f"in {beat.collective}"
    return f"{what} for {beat.since + age:.1f} s" + (f", step {beat.step}" if beat.step else "")

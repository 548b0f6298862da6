"""The tables that text and HTML both show, as plain cells: which columns, which rows, and how many ranks fold into one.

Up to `FOLD_ABOVE` ranks a row is a rank. Above, ranks in the same state share a row, and the slowest few follow singly.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from workbench.feed import JobSummary, PoolStatus
from workbench.state import Checkpoint, JobPhase
from workbench.views.advice import advise_on
from workbench.views.job import JobView, RankRow
from workbench.views.wording import (
    NOTHING,
    Clock,
    bare_rate,
    count,
    number,
    percent,
    phase_text,
    plural,
    ranks_text,
    seconds,
    size,
    span,
)

FOLD_ABOVE: Final = 32
SINGLY: Final = 5
STANDS_OUT: Final = 1.05  # own work against the median above which a rank is shown singly
NO_WORKER: Final = "no worker has joined yet; start some with: %dtrain up"
WHOLE: Final = "whole, as far as is known"
NO_CHECKPOINT: Final = "no checkpoint; a script has them by Run.steps(loader, state) and --checkpoint-every 100"
NO_JOB: Final = "no job has run here yet; start one with: %dtrain launch train.py"
PHASE_COLUMNS: Final = (
    ("data", "data"),
    ("forward", "forward"),
    ("backward", "backward"),
    ("comm", "comm wait"),
    ("optimizer", "optimizer"),
    ("checkpoint", "checkpoint"),
    ("other", "other"),
)
DOING: Final = {
    "STARTING": "starting",
    "RUNNING": "running",
    "DATA": "waiting for data",
    "FORWARD": "forward",
    "BACKWARD": "backward",
    "COLLECTIVE": "in a collective",
    "OPTIMIZER": "optimizer",
    "CHECKPOINT": "checkpoint",
    "IDLE": "waiting for a cell",
    "CELL": "running a cell",
    "EXITING": "exiting",
}


class Column(NamedTuple):
    """`need` says which columns go first when there is no room: the highest; 0 always stays."""

    title: str
    is_number: bool
    need: int
    cells: tuple[str, ...]


class Table(NamedTuple):
    """Columns of equal length; the first names the row. `marked` are rows to point out."""

    caption: str
    columns: tuple[Column, ...]
    marked: frozenset[int] = frozenset()

    @property
    def length(self) -> int:
        return len(self.columns[0].cells)


class _Line(NamedTuple):
    """One row to be: some ranks, all in the same state."""

    ranks: tuple[RankRow, ...]
    is_single: bool


def rank_table(view: JobView) -> Table:
    """The ranks of a job."""
    lines = _lines(view.rows)
    phases = [pair for pair in PHASE_COLUMNS if any(row.shares.get(pair[0], 0) > 0 for row in view.rows)]
    has_gpu = any(row.gpu is not None or row.gpu_memory is not None for row in view.rows)
    has_tokens = any(row.tokens_per_s for row in view.rows)
    makers: list[tuple[str, bool, int, Callable[[_Line], str]]] = [
        ("rank", False, 0, lambda line: ranks_text(r.rank for r in line.ranks).partition(" ")[2]),
        ("state", False, 0, lambda line: phase_text(line.ranks[0].phase)),
        ("step", True, 0, _step),
        ("samples/s", True, 0, lambda line: _mean_text(line, lambda r: r.samples_per_s or None, bare_rate)),
        ("step time", True, 1, lambda line: _mean_text(line, lambda r: r.step_time, seconds)),
        ("own work", True, 4, lambda line: _mean_text(line, lambda r: r.own_time, seconds)),
        *((title, True, 5, _share_of(name)) for name, title in phases),
        ("loss", True, 3, lambda line: _mean_text(line, lambda r: r.loss, number)),
        ("memory", True, 6, lambda line: _mean_text(line, lambda r: r.rss, size)),
        ("CPU", True, 7, lambda line: _mean_text(line, lambda r: r.cpu, lambda v: f"{v:.0f} %")),
        ("now", False, 2, doing),
    ]
    if has_tokens:
        tokens = ("tokens/s", True, 3, lambda line: _mean_text(line, lambda r: r.tokens_per_s or None, bare_rate))
        makers.insert(4, tokens)
    if has_gpu:
        makers[-1:-1] = [
            ("GPU", True, 3, lambda line: _mean_text(line, lambda r: r.gpu, lambda v: f"{v:.0f} %")),
            ("GPU memory", True, 4, lambda line: _mean_text(line, lambda r: r.gpu_memory, size)),
        ]
    columns = tuple(Column(title, numeric, need, tuple(map(cell, lines))) for title, numeric, need, cell in makers)
    columns = tuple(column for column in columns if column.need == 0 or set(column.cells) - {NOTHING, ""})
    marked = frozenset(k for k, line in enumerate(lines) if line.is_single and line.ranks[0].is_slowest)
    return Table(f"Ranks of job {view.job_id}", columns, marked)


def _lines(rows: Sequence[RankRow]) -> list[_Line]:
    if len(rows) <= FOLD_ABOVE:
        return [_Line((row,), is_single=True) for row in rows]
    groups: dict[tuple[object, ...], list[RankRow]] = {}
    for row in rows:
        groups.setdefault((row.phase, row.exit, row.silent_for > 0), []).append(row)
    typical = statistics.median([row.own_time for row in rows if row.own_time is not None] or [0.0])
    slow = (row for row in rows if row.own_time is not None and row.own_time >= STANDS_OUT * typical)
    slowest = sorted(slow, key=lambda r: (not r.is_slowest, -(r.own_time or 0)))
    folded = [_Line(tuple(group), is_single=len(group) == 1) for group in groups.values()]
    return folded[:FOLD_ABOVE] + [_Line((row,), is_single=True) for row in slowest[:SINGLY]]


def doing(line: _Line) -> str:
    """What the ranks of a row do now, or how they ended."""
    row = line.ranks[0]
    if not line.is_single:
        return row.exit or _common(DOING.get(r.activity, r.activity.lower()) for r in line.ranks)
    parts = [row.exit or DOING.get(row.activity, row.activity.lower())]
    if row.activity == "COLLECTIVE" and row.collective:
        parts[0] = f"in {row.collective}"
    if row.activity and row.since >= 2:
        parts[0] += f" for {span(row.since)}"
    if row.is_slowest:
        parts.insert(0, "◀ slowest")
    if row.silent_for:
        parts.insert(0, f"no data for {span(row.silent_for)}")
    return ", ".join(filter(None, parts))


def _common(words: Iterable[str]) -> str:
    """What most of them do."""
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{n} {word}" for word, n in most[:3] if word] if len(most) > 1 else [most[0][0]]
    return ", ".join(shown)


def _step(line: _Line) -> str:
    low, high = min(r.step for r in line.ranks), max(r.step for r in line.ranks)
    return count(low) if low == high else f"{count(low)}–{count(high)}"


def _mean_text(line: _Line, get: Callable[[RankRow], float | None], text: Callable[[float], str]) -> str:
    values = [value for row in line.ranks if (value := get(row)) is not None]
    return text(statistics.fmean(values)) if values else NOTHING


def _share_of(name: str) -> Callable[[_Line], str]:
    return lambda line: _mean_text(line, lambda r: r.shares.get(name), percent)


def jobs_table(jobs: Sequence[JobSummary], clock: Clock) -> Table:
    """The list of jobs. `clock` says when they were launched."""
    columns = (
        Column("job", False, 0, tuple(job.job_id for job in jobs)),
        Column("state", False, 0, tuple(phase_text(job.phase) for job in jobs)),
        Column("launched", False, 2, tuple(clock(job.submitted_at) for job in jobs)),
        Column("ranks", True, 1, tuple(count(job.world_size) if job.world_size else NOTHING for job in jobs)),
        Column("step", True, 1, tuple(count(job.step) if job.step else NOTHING for job in jobs)),
        Column("progress", True, 2, tuple(_done(job) for job in jobs)),
        Column("samples/s", True, 4, tuple(bare_rate(j.throughput) if j.throughput else NOTHING for j in jobs)),
        Column("took", True, 4, tuple(_took(job) for job in jobs)),
        Column("restarts", True, 5, tuple(str(job.restart_count) for job in jobs)),
        Column("", False, 3, tuple(_why(job) for job in jobs)),
    )
    return Table("Jobs", tuple(c for c in columns if c.title != "progress" or set(c.cells) - {NOTHING}))


def _done(job: JobSummary) -> str:
    return NOTHING if job.progress is None else percent(min(1.0, job.progress[0] / job.progress[1]))


def _took(job: JobSummary) -> str:
    return NOTHING if job.ended_at is None else span(job.ended_at - job.submitted_at)


def _why(job: JobSummary) -> str:
    quiet = job.phase in (JobPhase.HEALTHY, JobPhase.SUCCEEDED)
    return "" if quiet else " ".join(job.reason.split())


def workers_table(pool: PoolStatus, *, with_address: bool = True) -> Table:
    """The workers of a pool."""
    workers = pool.workers
    columns = (
        Column("worker", False, 0, tuple(w.address if with_address else str(k) for k, w in enumerate(workers))),
        Column("host", False, 0, tuple(worker.host for worker in workers)),
        Column("slots", True, 0, tuple(f"{worker.slots} {worker.accelerator}" for worker in workers)),
        Column("free", True, 0, tuple(str(worker.free) for worker in workers)),
        Column("process", True, 1, tuple(str(worker.pid) for worker in workers)),
    )
    return Table(f"Workers of pool {pool.name}", columns)


def checkpoints_table(checkpoints: Iterable[Checkpoint], now: float, *, since: float | None = None) -> Table:
    """One a row, the newest first. When they were saved counts back from `now`, or on from `since` (both epoch s)."""
    rows = list(checkpoints)
    columns = (
        Column("step", True, 0, tuple(count(c.step) for c in rows)),
        Column("saved", False, 0, tuple(_saved(c, now, since) for c in rows)),
        Column("size", True, 1, tuple(size(c.size) if c.size else NOTHING for c in rows)),
        Column("where", False, 1, tuple(c.tier.value for c in rows)),
        Column("ranks", True, 2, tuple(count(c.world_size) if c.world_size else NOTHING for c in rows)),
        Column("state", False, 0, tuple(f"✗ {c.problem}" if c.problem else f"✓ {WHOLE}" for c in rows)),
    )
    return Table("Checkpoints", columns)


def _saved(checkpoint: Checkpoint, now: float, since: float | None) -> str:
    """Without a manifest nobody knows."""
    if not checkpoint.saved_at:
        return NOTHING
    if since is not None:
        return f"{span(max(0.0, checkpoint.saved_at - since))} after the start"
    return f"{span(max(0.0, now - checkpoint.saved_at))} ago"


# --- lines above and below a table ------------------------------------------------------------------------------------


def how_long(view: JobView) -> str:
    """Since it was given slots; before, since it was submitted."""
    waits = view.phase is JobPhase.INIT or (view.is_over and not view.rows)
    doing = ("waited" if waits else "ran") if view.is_over else "waiting for" if waits else "running for"
    return f"{doing} {span(view.running_for)}"


def in_short(view: JobView) -> str:
    """Ranks, time, restarts."""
    none = "no ranks" if view.is_over else "ranks: not decided yet"
    parts = (plural(view.world_size, "rank") if view.world_size else none, how_long(view), view.restarts)
    return " · ".join(filter(None, parts))


def headline(view: JobView) -> str:
    """Job, state, ranks, time: one line."""
    return f"{view.job_id} · {phase_text(view.phase)} · {in_short(view)}"


def progress_line(view: JobView) -> str:
    """Step, throughput, step time, loss; or what would fill them."""
    if not view.step and not view.throughput:
        return nothing_yet(view)
    parts = [f"step {count(view.step)}"]
    if view.progress:
        done, total = view.progress
        share = f"({percent(min(1.0, done / total))})"
        how_far = f"{count(done)} of {count(total)}"
        parts = [f"step {how_far} {share}"] if view.counts_steps else [*parts, f"{how_far} done {share}"]
    if view.left is not None:
        parts.append(f"about {span(view.left)} left")
    if view.throughput:
        parts.append(f"{bare_rate(view.throughput)} samples/s")
    if view.tokens_per_s:
        parts.append(f"{bare_rate(view.tokens_per_s)} tokens/s")
    if view.step_time:
        parts.append(f"{seconds(view.step_time)} a step")
    if view.loss is not None:
        parts.append(f"loss {number(view.loss)}")
    if view.learning_rate is not None:
        parts.append(f"learning rate {number(view.learning_rate)}")
    return " · ".join(parts)


def nothing_yet(view: JobView) -> str:
    """Why there is no step, and what would bring one."""
    if view.is_over and not view.rows:
        return "no step was finished: it was never given slots"
    if view.is_over:
        who = "no cell on the ranks" if view.is_interactive else "the script never"
        return f"no step was finished: {who} called optimizer.step()"
    if view.phase is JobPhase.INIT:
        return view.reason or "waiting for slots"
    if view.phase is not JobPhase.HEALTHY:
        return f"no step yet: {view.reason or view.phase.value}"
    if view.is_interactive:
        return "no step yet: run a cell on the ranks with %%dtrain"
    return "no step yet: the script has not called optimizer.step()"


def notes(view: JobView) -> list[str]:
    """What else a reader should know, one sentence each."""
    found = []
    if view.phase not in (JobPhase.HEALTHY, JobPhase.INIT) and view.reason:
        found.append(" ".join(view.reason.split()))
    found += hints(view)
    found += (one for one in view.trouble if one not in view.reason)
    if view.slowest:
        found.append(f"slowest: {view.slowest}")
    if view.telemetry_dropped:
        found.append(
            f"{plural(view.telemetry_dropped, 'step')} left out here: they came too fast, or could not be kept"
        )
    if view.output_dropped:
        found.append(f"{size(view.output_dropped)} of output left out of display; the log files have it")
    return found


def hints(view: JobView) -> list[str]:
    """What is likely behind a failure that still counts, behind a loss or a difference, and what to do."""
    advice = None if view.has_recovered else advise_on(view)
    told = advice.remedy() if advice else []
    return [*told, *(line for finding in view.findings for line in finding.lines())]


def pool_line(pool: PoolStatus) -> str:
    """The pool in one line."""
    return (
        f"pool {pool.name} · {plural(pool.slots, 'slot')}, {pool.free} free · {plural(len(pool.workers), 'worker')} · "
        f"{plural(len(pool.running), 'job')} unfinished"
    )

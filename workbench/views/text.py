"""Tables for a terminal: aligned columns, no line wider than asked, colour only on top of a mark and a word."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import Final

from workbench.feed import JobSummary, PoolStatus
from workbench.state import Checkpoint
from workbench.views.compare import Line
from workbench.views.gradients import agreement_line, strip
from workbench.views.job import JobView
from workbench.views.statistics import statistics_line
from workbench.views.story import story_lines
from workbench.views.table import (
    NO_CHECKPOINT,
    NO_JOB,
    NO_WORKER,
    Column,
    Table,
    checkpoints_table,
    headline,
    hints,
    jobs_table,
    notes,
    pool_line,
    progress_line,
    rank_table,
    workers_table,
)
from workbench.views.wording import MARKS, Clock, percent

WIDTH: Final = 100
GAP: Final = "  "
LINES: Final = 4  # that one sentence may take
_COLOURS: Final = {
    "HEALTHY": "34",
    "SUCCEEDED": "32",
    "FAILED": "1;31",
    "RECOVERING": "33",
    "LAUNCHING": "36",
}
_STATE: Final = re.compile("|".join(re.escape(f"{mark} {word}") for word, mark in MARKS.items()))
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def render_status(view: JobView, width: int = WIDTH, *, color: bool = False, clock: Clock | None = None) -> str:
    """A job with what became of it so far and its ranks; `clock` tells times of day (None: times from its start)."""
    lines = [headline(view), progress_line(view), *_notes(view, width)]
    story = story_lines(view.timeline, clock) if view.timeline is not None else []
    lines += [part for line in story for part in _broken(line, width)]
    lines += _gradients(view, width)
    if view.rows:
        lines += ["", *table_lines(rank_table(view), width)]
    return finish(lines, width, color=color)


def one_line(view: JobView, width: int = WIDTH) -> str:
    """A job in one line, for a live display in a terminal."""
    why = f" · {view.reason}" if view.phase.is_terminal and view.reason else ""
    return finish([f"{headline(view)} · {progress_line(view)}{why}"], width, color=False)


def bar(done: int, total: int, width: int = 30) -> str:
    """`██████░░░░ 60 %`; empty where the total is not known."""
    if total <= 0:
        return ""
    share = min(done / total, 1.0)
    full = int(share * width)
    return f"{'█' * full}{'░' * (width - full)} {percent(share)}"


def render_jobs(jobs: Sequence[JobSummary], clock: Clock, width: int = WIDTH, *, color: bool = False) -> str:
    """The list of jobs. `clock` says when they were launched."""
    if not jobs:
        return NO_JOB
    return finish(table_lines(jobs_table(jobs, clock), width), width, color=color)


def render_checkpoints(
    checkpoints: Sequence[Checkpoint], now: float, width: int = WIDTH, *, color: bool = False
) -> str:
    """A job's checkpoints; `now` is epoch s."""
    if not checkpoints:
        return NO_CHECKPOINT
    return finish(table_lines(checkpoints_table(checkpoints, now), width), width, color=color)


def render_lines(lines: Sequence[Line], names: tuple[str, str], width: int = WIDTH) -> str:
    """A comparison: a line a thing of both runs; notes that do not fit go on below."""
    table = Table(
        "",
        (
            Column("", False, 0, tuple(line.what for line in lines)),
            Column(names[0][:28], False, 0, tuple(line.before[:40] for line in lines)),
            Column(names[1][:28], False, 0, tuple(line.now[:40] for line in lines)),
            Column("", False, 0, tuple(line.verdict.value for line in lines)),
        ),
    )
    head, *rows = table_lines(table, max(width, 80))
    widest = max(map(cells, [head, *rows]))
    room = width - widest - len(GAP)
    told = [head]
    for line, row in zip(lines, rows, strict=True):
        if line.note and cells(line.note) > room:
            told += [row, *(f"    {part}" for part in textwrap.wrap(line.note, width - 4))]
        else:
            told.append(f"{row}{' ' * (widest - cells(row))}{GAP}{line.note}".rstrip())
    return finish(told, width, color=False)


def render_pool(pool: PoolStatus, width: int = WIDTH, *, color: bool = False) -> str:
    """A pool with its workers and queue."""
    lines = [pool_line(pool), pool.address, ""]
    lines += table_lines(workers_table(pool), width) if pool.workers else [NO_WORKER]
    if pool.waiting:
        lines += ["", *(f"{job_id}  {reason}" for job_id, reason in pool.waiting)]
    return finish(lines, width, color=color)


def _gradients(view: JobView, width: int) -> list[str]:
    """Whether replicas agree and what gradients are like, a line each; by rank and time where they did not agree."""
    line, looked = agreement_line(view.gradients), statistics_line(view.gradients.statistics)
    lines = [*([line] if line else []), *(_wrapped(looked, width, indent="  ") if looked else [])]
    return [*lines, *strip(view.gradients)]


def _notes(view: JobView, width: int) -> list[str]:
    """Advice is of use only whole, and a reason nearly so; all else may be cut short."""
    lines = {**dict.fromkeys(hints(view), 100), **dict.fromkeys([" ".join(view.reason.split()), *view.trouble], LINES)}
    return [line for note in notes(view) for line in (_wrapped(note, width, lines[note]) if note in lines else [note])]


def _wrapped(text: str, width: int, lines: int = LINES, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent=indent, max_lines=lines, placeholder=" …", break_on_hyphens=False
    )


def table_lines(table: Table, width: int) -> list[str]:
    """A table as aligned lines that fit."""
    columns = _fitting(table.columns, width)
    widths = [_width_of(column) for column in columns]
    rows = [[column.title for column in columns], *zip(*(column.cells for column in columns), strict=True)]
    return [
        GAP.join(
            _pad(cell, column_width, right=column.is_number)
            for cell, column, column_width in zip(row, columns, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def _fitting(columns: tuple[Column, ...], width: int) -> tuple[Column, ...]:
    """Without the columns that are needed least, as far as the width demands; the last one may be cut short."""

    def total(kept: tuple[Column, ...]) -> int:
        last = min(_width_of(kept[-1]), 24) if not kept[-1].is_number else _width_of(kept[-1])
        return sum(map(_width_of, kept[:-1])) + last + len(GAP) * (len(kept) - 1)

    while total(columns) > width and (least := max(column.need for column in columns)):
        columns = tuple(column for column in columns if column.need < least)
    return columns


def _width_of(column: Column) -> int:
    return max(cells(text) for text in (column.title, *column.cells))


def cells(text: str) -> int:
    """Columns of a terminal that a text takes: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _broken(line: str, width: int) -> list[str]:
    """A line of a story that is too long goes on below, from an arrow on: its end matters as much as its beginning."""
    first, *rest = line.split(" → ")
    lines = _wrapped(first, width, indent="  ") or [first]
    for part in rest:
        if cells(lines[-1]) + cells(part) + 3 <= width:
            lines[-1] += f" → {part}"
        else:
            lines.append(f"  → {part}")
    return lines


def _pad(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - cells(text))
    return space + text if right else text + space


def finish(lines: Sequence[str], width: int, *, color: bool) -> str:
    """Nothing that moves a cursor, nothing too wide, then colour."""
    shown = [_cut(_CONTROL.sub("", line), width) for line in lines]
    return "\n".join(_STATE.sub(_paint, line) for line in shown) if color else "\n".join(shown)


def _cut(line: str, width: int) -> str:
    if cells(line) <= width:
        return line
    while line and cells(line) > width - 1:
        line = line[:-1]
    return line.rstrip() + "…"


def _paint(match: re.Match[str]) -> str:
    code = _COLOURS.get(match[0].split()[-1])
    return f"\033[{code}m{match[0]}\033[0m" if code else match[0]

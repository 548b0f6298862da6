"""How a cell ended, as a person reads it: values by rank, failures once, what ranks were at. All of it is short."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from workbench.errors import JobError, RankFailedError
from workbench.telemetry import CellFinished, RankBeat
from workbench.verbs.context import Context
from workbench.verbs.lines import name_ranks

if TYPE_CHECKING:
    from workbench.session import CellRun, Job

TRACEBACKS: Final = 1400  # characters: all that is told of a failure stays under 2 kB
VALUES: Final = 64  # different values shown
VALUE: Final = 20_000  # characters of one that is text
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
    plain = [value_text(data, ranks) for data, ranks in groups[:VALUES] if set(data) == {"text/plain"}]
    if len(groups) > VALUES:
        plain.append(f"… and {len(groups) - VALUES} more; to fetch them: %dtrain pull")
    if plain:
        context.screen.display({"text/plain": "\n".join(plain)})
    for data, ranks in groups[:VALUES]:
        if set(data) != {"text/plain"}:
            context.screen.display({"text/plain": f"{name_ranks(ranks)}:"})
            context.screen.display(data)


def value_text(data: dict[str, str], ranks: Sequence[int]) -> str:
    text = shorten(data["text/plain"], VALUE)
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


def failure_of(job: Job, failed: Sequence[CellFinished], run: CellRun) -> RankFailedError:
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


def bounded(error: JobError) -> JobError:
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


def doing(beat: RankBeat, age: float = 0.0) -> str:
    """`in all_reduce for 3.1 s, step 40`; `age` s have passed since the rank said so."""
    what = ACTIVITIES.get(beat.activity, beat.activity.lower())
    if beat.activity == "COLLECTIVE" and beat.collective:
        what = f"in {beat.collective}"
    return f"{what} for {beat.since + age:.1f} s" + (f", step {beat.step}" if beat.step else "")

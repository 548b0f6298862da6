"""A job's life in words: a line for each failure and what became of it, a line of numbers, a table of attempts.

Times of day are the reader's: whoever shows the text brings a `Clock`; without one they are told from the job's start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from workbench.state import JobPhase
from workbench.views.spans import Attempt, MarkKind, Timeline
from workbench.views.table import Column, Table
from workbench.views.wording import NOTHING, Clock, count, percent, plural, span

TOLD: Final = 3  # newest failures in a short story


def since(start: float) -> Clock:
    """Times as they passed from the job's start."""
    return lambda time: f"+{span(time - start)}"


def story_lines(timeline: Timeline, clock: Clock | None = None, most: int = TOLD) -> list[str]:
    """What happened, a line for each of the newest attempts that ended otherwise than well, and one of numbers."""
    clock = clock or since(timeline.start)
    if len(timeline.attempts) < 2 and not timeline.earlier:
        return []
    told = [_line(a, b, clock, timeline) for a, b in pairwise([*timeline.attempts, None]) if a and _is_told(a, b)]
    more = len(told) - most + timeline.earlier
    lines = [f"… {plural(more, 'earlier attempt')}: see timeline"] if more > 0 else []
    return [*lines, *told[-most:], numbers_line(timeline)]


def earlier_lines(timeline: Timeline, most: int = TOLD) -> list[str]:
    """What became of the newest attempts before the last one, a line each."""
    clock = since(timeline.start)
    told = [_line(a, b, clock, timeline) for a, b in pairwise(timeline.attempts) if _is_told(a, b)]
    more = len(told) - most + timeline.earlier
    return [*([f"… {plural(more, 'earlier attempt')}: see timeline"] if more > 0 else []), *told[-most:]]


def numbers_line(timeline: Timeline) -> str:
    """Goodput, ETTR, restarts and lost steps; empty while there is nothing of it."""
    goodput, restarts = timeline.goodput, len(timeline.attempts) - 1 + timeline.earlier
    least = "at least " if timeline.lost_steps and _is_bound(timeline) else ""
    parts = []
    if goodput.goodput is not None:
        parts.append(f"goodput {least}{_share(goodput.goodput)}")
    if goodput.ettr is not None:
        parts.append(f"ETTR {least}{_share(goodput.ettr)}")
    if restarts:
        parts += [plural(restarts, "restart"), _lost(timeline.lost_steps, timeline)]
    return " · ".join(parts)


def _is_bound(timeline: Timeline) -> bool:
    """Whether steps are counted from 0 in each attempt: what a script loads by itself nobody else knows."""
    is_kept = any(mark.kind is MarkKind.SAVED for mark in timeline.marks)
    return not is_kept and all(attempt.resumed_step is None for attempt in timeline.attempts)


def _lost(steps: int, timeline: Timeline) -> str:
    return f"{'up to ' if steps and _is_bound(timeline) else ''}{plural(steps, 'step')} lost"


def _share(share: float) -> str:
    """Above nine tenths a tenth of a percent tells."""
    return f"{share * 100:.1f} %" if 0.9 <= share < 1 else percent(share)


def _is_told(attempt: Attempt, following: Attempt | None) -> bool:
    return attempt.cause is not None or following is not None


def _line(attempt: Attempt, following: Attempt | None, clock: Clock, timeline: Timeline) -> str:
    """`14:02:11 rank 2 killed by SIGKILL at step 410 → restart 1 of 3 → back after 0.2 s, 1 step lost`."""
    when = attempt.fault_at or attempt.end or timeline.end
    if following is None:
        end = attempt.outcome.partition(":")[0] or f"recovering for {span(timeline.end - when)}"
        return f"{clock(when)} {_cause(attempt)} → {end}"
    back = _came_back(attempt, following, timeline)
    if attempt.cause is None:
        return f"{clock(following.start)} {following.decision} → {back}"
    return f"{clock(when)} {_cause(attempt)} → {_decision(attempt, following)} → {back}"


def _cause(attempt: Attempt) -> str:
    reason = attempt.cause.reason if attempt.cause is not None else "it was ended"
    return " ".join(reason.split())


def _decision(attempt: Attempt, following: Attempt) -> str:
    """Without the reason that was told before it."""
    reason = attempt.cause.reason if attempt.cause is not None else ""
    return " ".join(following.decision.replace(f": {reason}", "").split()) or "started again"


def _came_back(attempt: Attempt, following: Attempt, timeline: Timeline) -> str:
    lost = f", {_lost(attempt.lost_steps, timeline)}" if attempt.lost_steps is not None else ""
    if attempt.time_to_recover is not None:
        return f"back after {span(attempt.time_to_recover)}{lost}"
    if following.began_at is not None:
        return f"steps again after {span(following.began_at - following.start)}{lost}"
    if following.end is not None and following.outcome.startswith(JobPhase.SUCCEEDED.value):
        return f"which had nothing left to do{lost}"
    if following.end is not None and _steps(following) != NOTHING:  # not every rank, or not heard of in time
        return f"which got to step {following.last_step:,}{lost}"
    if following.end is not None:
        return "which did not get to a step"
    return f"waiting for its first step for {span(timeline.end - following.start)}"


# --- the table --------------------------------------------------------------------------------------------------------


def attempts_table(timeline: Timeline, clock: Clock | None = None, most: int = 1000) -> Table:
    """The newest attempts, oldest first, each in a row."""
    clock = clock or since(timeline.start)
    attempts = timeline.attempts[-most:]
    made: list[tuple[str, bool, int, Callable[[Attempt], str]]] = [
        ("attempt", True, 0, lambda a: str(a.restart_count)),
        ("began", False, 1, lambda a: clock(a.start)),
        ("lasted", True, 2, lambda a: span((timeline.end if a.end is None else a.end) - a.start)),
        ("ranks", True, 3, lambda a: count(a.world_size) if a.world_size else NOTHING),
        ("from", False, 4, _from),
        ("steps", True, 0, _steps),
        ("lost", True, 1, lambda a: NOTHING if a.lost_steps is None else plural(a.lost_steps, "step")),
        ("detected after", True, 3, lambda a: _seconds(a.time_to_detect)),
        ("back after", True, 2, lambda a: _seconds(a.time_to_recover)),
        ("how it ended", False, 0, lambda a: ended_text(a, timeline)),
    ]
    columns = tuple(Column(title, right, need, tuple(map(cell, attempts))) for title, right, need, cell in made)
    columns = tuple(column for column in columns if column.need == 0 or set(column.cells) - {NOTHING, ""})
    return Table("Attempts", columns)


def ended_text(attempt: Attempt, timeline: Timeline) -> str:
    """How it ended, or that it goes on."""
    if attempt.cause is not None:
        more = f" (+{attempt.consequences} that followed)" if attempt.consequences else ""
        return f"{_cause(attempt)}{more}"
    if attempt.outcome:
        return " ".join(attempt.outcome.split())
    following = _after(timeline.attempts, attempt)
    return " ".join(following.decision.split()) if following else "goes on"


def _after(attempts: Sequence[Attempt], attempt: Attempt) -> Attempt | None:
    return next((b for a, b in pairwise(attempts) if a is attempt), None)


def _from(attempt: Attempt) -> str:
    if attempt.resumed_step is None:
        return NOTHING
    tier = f", {attempt.resumed_tier.value}" if attempt.resumed_tier is not None else ""
    return f"step {attempt.resumed_step:,}{tier}"


def _steps(attempt: Attempt) -> str:
    if attempt.last_step is None or attempt.first_step is None or attempt.last_step < attempt.first_step:
        return NOTHING
    return f"{attempt.first_step:,}–{attempt.last_step:,}"


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value * 1000:.0f} ms" if value < 1 else span(value)

"""A timeline for a terminal: lanes of letters over time, marks below them, a table of attempts, and all in words.

A column shows the worst that happened in it, so that a recovery of a moment is seen in a lane of hours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from workbench.views.lane_rows import ALWAYS_SEEN, SEVERITY, Row, rows_of
from workbench.views.spans import LETTERS, Mark, MarkKind, Span, SpanKind, Timeline
from workbench.views.story import attempts_table, numbers_line, since
from workbench.views.text import WIDTH, cells, finish, table_lines
from workbench.views.wording import Clock, plural, ranks_text, seconds, span

SIGNS: Final[Mapping[SpanKind, str]] = {
    SpanKind.SLOTS: ".",
    SpanKind.LAUNCHING: "l",
    SpanKind.RUNNING: "-",
    SpanKind.STEPPING: "=",
    SpanKind.CHECKPOINTING: "c",
    SpanKind.WAITING: "w",
    SpanKind.STALLED: "S",
    SpanKind.DEAD: "X",
    SpanKind.FINISHED: "_",
    SpanKind.RECOVERING: "r",
    SpanKind.STOPPING: "s",
}
MOST_MARKS: Final = 40
NOTHING_YET: Final = "no rank has had a slot yet; the timeline begins then"
NOTHING_EVER: Final = "no rank ever had a slot; a timeline would have begun then"
_ABOVE: Final = (MarkKind.SAVED,)  # shown in the lane of marks only where nothing else happened


def render_timeline(
    timeline: Timeline, name: str, clock: Clock | None = None, width: int = WIDTH, *, color: bool = False
) -> str:
    """The whole story of the job called `name`."""
    clock = clock or since(timeline.start)
    lasted = f"{'over' if timeline.is_over else 'until now'} {span(timeline.end - timeline.start)}"
    lines = [f"timeline of {name} · {lasted}", *filter(None, [numbers_line(timeline)]), ""]
    lines += lane_lines(timeline, clock, width) or [NOTHING_EVER if timeline.is_over else NOTHING_YET]
    lines += ["", *table_lines(attempts_table(timeline, clock), width)]
    if timeline.earlier:
        lines.append(f"… and {plural(timeline.earlier, 'earlier attempt')}")
    lines += ["", *_mark_lines(timeline, clock)] if timeline.marks else []
    return finish(lines, width, color=color)


def lane_lines(timeline: Timeline, clock: Clock, width: int) -> list[str]:
    """A scale, a lane a row of ranks, a lane of marks, and what the letters mean."""
    rows = rows_of(timeline.spans)
    if not rows:
        return []
    room = max(len("marks"), *(cells(row.label) for row in rows))
    columns = max(10, min(width - room - 2, 400))
    lanes = [(row.label, _lane(row, timeline, columns)) for row in rows]
    marks = _lane_of_marks(timeline, columns)
    head = [f"{'':{room}}  {_scale(timeline, clock, columns)}"]
    body = [f"{label}{' ' * (room - cells(label))}  {lane}" for label, lane in [*lanes, ("marks", marks)]]
    used = {sign for _, lane in lanes for sign in lane}
    legend = "  ".join(f"{sign} {kind.value}" for kind, sign in SIGNS.items() if sign in used)
    letters = "  ".join(f"{letter} {kind.value}" for kind, letter in LETTERS.items() if letter in marks)
    return [*head, *body, *_wrapped(legend, width), *_wrapped(letters, width)]


def _scale(timeline: Timeline, clock: Clock, columns: int) -> str:
    """The time at the beginning, the middle and the end, as far as there is room."""
    first, middle, last = (clock(timeline.start + share * (timeline.end - timeline.start)) for share in (0, 0.5, 1))
    if columns < len(first) + len(middle) + len(last) + 4:
        return f"{first:<{max(1, columns - len(last))}}{last}"
    left = f"{first:<{columns // 2 - len(middle) // 2}}{middle}"
    return f"{left:<{columns - len(last)}}{last}"


def _lane(row: Row, timeline: Timeline, columns: int) -> str:
    scale = columns / (timeline.end - timeline.start or 1.0)
    held: list[dict[SpanKind, float]] = [{} for _ in range(columns)]
    for one in row.spans:
        first, last = (one.start - timeline.start) * scale, (one.end - timeline.start) * scale
        for kind in {one.kind, *(part.kind for part in one.parts if part.kind in ALWAYS_SEEN)}:
            for column in range(int(first), min(columns, int(last) + 1)):
                share = min(last, column + 1) - max(first, column)
                if share > 0:
                    held[column][kind] = held[column].get(kind, 0.0) + share
    return "".join(map(_sign, held))


def _sign(held: Mapping[SpanKind, float]) -> str:
    if not held:
        return " "
    worst = max(held, key=SEVERITY.index)
    return SIGNS[worst if worst in ALWAYS_SEEN else max(held, key=lambda kind: held[kind])]


def _lane_of_marks(timeline: Timeline, columns: int) -> str:
    scale = (columns - 1) / (timeline.end - timeline.start or 1.0)
    lane = [" "] * columns
    order = list(MarkKind)
    for mark in sorted(timeline.marks, key=lambda m: (m.kind not in _ABOVE, -order.index(m.kind))):
        column = int((mark.time - timeline.start) * scale)
        if 0 <= column < columns:
            lane[column] = LETTERS[mark.kind]
    return "".join(lane).rstrip()


def _mark_lines(timeline: Timeline, clock: Clock) -> list[str]:
    """The newest marks, a line each; saved checkpoints only where they are few."""
    marks = [m for m in timeline.marks if m.kind is not MarkKind.SAVED]
    saved = [m for m in timeline.marks if m.kind is MarkKind.SAVED]
    told = sorted([*marks, *saved[-3:]], key=lambda m: m.time)
    left = sum(m.count for m in timeline.marks) - sum(m.count for m in told[-MOST_MARKS:])
    lines = [f"… {plural(left, 'earlier mark')}"] if left else []
    shown = told[-MOST_MARKS:]
    room = max((len(clock(mark.time)) for mark in shown), default=0)
    return [*lines, *(f"{clock(m.time):{room}}  {LETTERS[m.kind]}  {mark_text(m)}" for m in shown)]


def mark_text(mark: Mark) -> str:
    """What happened, and how often where it was folded."""
    title = " ".join(mark.title.split())
    return title if mark.count == 1 else f"{title} (and {mark.count - 1:,} more within {span(mark.until - mark.time)})"


def span_text(one: Span) -> str:
    """A span in words, for hovering and for tables."""
    who = ranks_text((rank for first, last in one.ranks for rank in range(first, last + 1)), most=3)
    cause = f" ({' '.join(one.cause.split())})" if one.cause and one.cause not in one.title else ""
    lasted = one.end - one.start
    took = seconds(lasted) if lasted < 1 else span(lasted)
    return f"{who} {one.kind.value} for {took}: {' '.join(one.title.split())}{cause}"


def _wrapped(text: str, width: int) -> Sequence[str]:
    lines: list[str] = []
    for item in text.split("  "):
        if lines and len(lines[-1]) + len(item) + 2 <= width:
            lines[-1] += f"  {item}"
        elif item:
            lines.append(item)
    return lines

"""Charts as SVG for a page that loads nothing: a curve's picture, what it says in a sentence, and its values as text.

Pure. Colours are CSS variables of the page; a line is told by its dash and its label as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final, NamedTuple

from workbench.views.lane_rows import Row, rows_of
from workbench.views.spans import LETTERS, Mark, MarkKind, SpanKind, Timeline
from workbench.views.wording import count, number, span

WIDTH: Final = 640
HEIGHT: Final = 190
LEFT: Final = 70
POINTS: Final = 400  # of a line
ROWS: Final = 12  # of its values as text
DASHES: Final = ("", "7 4", "2 3", "9 3 2 3")
LANE: Final = 16  # px
MANY: Final = 60  # marks


class Series(NamedTuple):
    """One line: `(x, y)` in order of x."""

    label: str
    points: Sequence[tuple[float, float]]


def chart(title: str, unit: str, series: Sequence[Series], x_text: Callable[[float], str]) -> str:
    """A figure: heading, picture, the same in a sentence and in a table; '' where there is nothing to draw."""
    lines = [Series(label, thin(_finite(points))) for label, points in series]
    lines = [line for line in lines if len(line.points) > 1]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    low, high = min(0.0, *ys), max(ys) or 1.0
    left, right = min(xs), max(*xs, min(xs) + 1e-9)

    def place(x: float, y: float) -> str:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - 10)
        return f"{across:.1f},{HEIGHT - 24 - (y - low) / ((high - low) or 1.0) * (HEIGHT - 40):.1f}"

    drawn = "".join(
        f'<polyline {_pen(k)} points="{" ".join(place(x, y) for x, y in line.points)}"/>'
        for k, line in enumerate(lines)
    )
    told = "; ".join(f"{line.label}: {_told(line, unit)}" for line in lines)
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(f"{title}. {told}")}">'
        f"{_axes(low, high, unit)}{drawn}"
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{_text(x_text(left))}</text>'
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 6}" text-anchor="end">{_text(x_text(right))}</text></svg>'
    )
    return (
        f"<figure><figcaption>{_text(title)}</figcaption>{svg}{_legend(lines)}{_values(lines, unit, x_text)}</figure>"
    )


def thin(points: Sequence[tuple[float, float]], most: int = POINTS) -> list[tuple[float, float]]:
    """At most so many: of each stretch the least and the greatest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    found: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        found += sorted(ends)
    return found


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _told(line: Series, unit: str) -> str:
    values = [y for _, y in line.points]
    low, high = number(min(values)), number(max(values))
    return f"from {number(values[0])} to {number(values[-1])}{unit}, between {low} and {high}"


def _pen(index: int) -> str:
    return f'class="s{index % 4}" stroke-dasharray="{DASHES[index % 4]}"'


def _axes(low: float, high: float, unit: str) -> str:
    top, bottom = 16, HEIGHT - 24
    return (
        f'<path class="axis" d="M{LEFT} {top}V{bottom}H{WIDTH - 10}"/>'
        f'<text x="{LEFT - 6}" y="{top + 4}" text-anchor="end">{_text(_short(high))}</text>'
        f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end">{_text(_short(low))}</text>'
        f'<text x="{LEFT - 6}" y="{(top + bottom) // 2}" text-anchor="end">{_text(unit.strip())}</text>'
    )


def _short(value: float) -> str:
    return count(value) if abs(value) >= 1000 else number(value, 3)


def _legend(lines: Sequence[Series]) -> str:
    if len(lines) < 2:
        return ""
    marks = (
        f'<span><svg class="key" viewBox="0 0 28 8" aria-hidden="true"><path {_pen(k)} '
        f'd="M0 4H28"/></svg> {_text(line.label)}</span>'
        for k, line in enumerate(lines)
    )
    return f'<p class="legend">{" ".join(marks)}</p>'


def _values(lines: Sequence[Series], unit: str, x_text: Callable[[float], str]) -> str:
    """A dozen points of each line as a table, for readers who cannot see the picture."""
    rows = []
    for line in lines:
        every = max(1, math.ceil(len(line.points) / ROWS))
        chosen = [*line.points[::every], line.points[-1]]
        rows += [
            f"<tr><th scope=row>{_text(line.label)}</th><td>{_text(x_text(x))}<td class=n>{_text(number(y))}</tr>"
            for x, y in dict(chosen).items()
        ]
    head = f"<tr><th scope=col>line<th scope=col>at<th scope=col class=n>{_text(unit.strip() or 'value')}</tr>"
    return f"<details><summary>values</summary><table>{head}{''.join(rows)}</table></details>"


# --- lanes ------------------------------------------------------------------------------------------------------------


def lanes(timeline: Timeline) -> str:
    """What every rank did when, and marks on it; '' where no rank had a slot."""
    rows = rows_of(timeline.spans)
    if not rows:
        return ""
    seconds = max(timeline.end - timeline.start, 1e-9)
    height = LANE * (len(rows) + 1) + 22

    def across(time: float) -> float:
        return LEFT + 30 + (time - timeline.start) / seconds * (WIDTH - LEFT - 40)

    drawn = "".join(_lane(row, k * LANE, across) for k, row in enumerate(rows))
    marks = "".join(_mark(mark, across(mark.time), len(rows) * LANE + 12) for mark in _few(timeline.marks))
    scale = (
        f'<text x="{LEFT + 30}" y="{height - 4}">0</text>'
        f'<text x="{WIDTH - 10}" y="{height - 4}" text-anchor="end">{_text(span(seconds))}</text>'
    )
    kinds = [kind for kind in SpanKind if any(one.kind is kind for row in rows for one in row.spans)]
    keys = " ".join(f'<span><i class="{kind.name.lower()}"></i> {kind.value}</span>' for kind in kinds)
    letters = ", ".join(f"{LETTERS[kind]} {kind.value}" for kind in dict.fromkeys(mark.kind for mark in timeline.marks))
    label = f"What the ranks did over {span(seconds)}; the table of attempts and the list below say the same"
    return (
        f'<figure><figcaption>What every rank did</figcaption><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{_text(label)}">{drawn}{marks}{scale}</svg><p class="legend">{keys}</p>'
        f'<p class="legend">{_text(letters)}</p></figure>'
    )


def _lane(row: Row, top: int, across: Callable[[float], float]) -> str:
    bars = "".join(
        f'<rect class="{one.kind.name.lower()}" x="{across(one.start):.1f}" y="{top + 2}" height="{LANE - 4}" '
        f'width="{max(across(one.end) - across(one.start), 0.8):.1f}"><title>{_text(one.title)}</title></rect>'
        for one in row.spans
    )
    return f'<text x="0" y="{top + 12}">{_text(row.label)}</text>{bars}'


def _few(marks: Sequence[Mark]) -> list[Mark]:
    """Without checkpoints where there are many: they would hide the rest."""
    return [mark for mark in marks if mark.kind is not MarkKind.SAVED or len(marks) < MANY]


def _mark(mark: Mark, x: float, y: int) -> str:
    title = _text(f"{mark.kind.value}: {mark.title}")
    return f'<text class="mark" x="{x:.1f}" y="{y}">{LETTERS[mark.kind]}<title>{title}</title></text>'


def _text(text: str) -> str:
    return escape(text, quote=True)

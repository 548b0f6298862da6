"""What charts show, as plain numbers for other programs: a sheet a chart, as CSV or JSON. Pure.

Times are seconds since the job was submitted, and a column's name ends with its unit. What is not known is empty (CSV)
or null (JSON). Numbers are those of the chart; every single step is what `dtrain export` writes.
"""

from __future__ import annotations

import csv
import io
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from workbench.views.gradients import WORDS
from workbench.views.heat import METRICS
from workbench.views.job import JobView
from workbench.views.panels import PanelView
from workbench.views.series import RankPoint, SeriesPoint
from workbench.views.sides import By, Measure, Side, curve_of, unit_of
from workbench.views.wording import rank_spans

Cell = str | float | int | None
FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes for one at the beginning of a text


class Sheet(NamedTuple):
    """A table; each row has a cell a column. NaN: not known."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]


def to_csv(sheet: Sheet) -> str:
    """With a line of headings. A text that a spreadsheet would take for a formula gets an apostrophe before it."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(sheet.columns)
    writer.writerows([_csv_cell(cell) for cell in row] for row in sheet.rows)
    return text.getvalue()


def _csv_cell(cell: Cell) -> Cell:
    if isinstance(cell, str):
        return f"'{cell}" if cell.startswith(FORMULA) else cell
    return "" if _is_unknown(cell) else cell


def to_json(sheet: Sheet, **facts: str) -> str:
    """`facts`, `columns`, and `rows` as lists."""
    rows = [[None if _is_unknown(cell) else cell for cell in row] for row in sheet.rows]
    return json.dumps({**facts, "columns": sheet.columns, "rows": rows}, ensure_ascii=False, allow_nan=False)


def _is_unknown(cell: Cell) -> bool:
    return cell is None or (isinstance(cell, float) and not math.isfinite(cell))


# --- the charts of a job ----------------------------------------------------------------------------------------------


def _throughput(view: JobView, more: PanelView) -> Sheet:
    columns = ("rank", "after_s", "width_s", "step", "samples_per_s", "step_time_s")
    return Sheet(
        columns,
        [
            (rank, point.start - view.submitted_at, point.width, point.step, point.samples_per_s, point.step_time)
            for rank, point in _points(view)
        ],
    )


def _loss(view: JobView, more: PanelView) -> Sheet:
    """With the learning rate, which is that of all ranks."""
    rows = [
        (rank, point.start + point.width / 2 - view.submitted_at, point.step, point.loss, rate)
        for rank, point in _points(view)
        for rate in (point.learning_rate if isinstance(point, SeriesPoint) else None,)
        if point.loss is not None or rate is not None
    ]
    return Sheet(("rank", "after_s", "step", "loss", "learning_rate"), rows)


def _points(view: JobView) -> Iterator[tuple[Cell, SeriesPoint | RankPoint]]:
    """All ranks together, then each of which the history is kept."""
    yield from (("all", point) for point in view.series)
    yield from ((rank, point) for rank, points in view.rank_series.items() for point in points)


def _heatmap(view: JobView, more: PanelView) -> Sheet:
    heat = more.heat
    rows: list[tuple[Cell, ...]] = []
    for column in heat.columns:
        cells = [array("f", metric) for metric in column.cells]
        for row in range(heat.rows):
            ranks = (row * heat.fold, min((row + 1) * heat.fold, heat.ranks) - 1)
            rows.append((*ranks, column.start - view.submitted_at, heat.width, *(metric[row] for metric in cells)))
    names = (f"{name.replace(' ', '_')}_s" for name in METRICS)
    return Sheet(("first_rank", "last_rank", "after_s", "width_s", *names), rows)


def _timeline(view: JobView, more: PanelView) -> Sheet:
    """What ranks did and what happened, in order of time."""
    timeline = view.timeline
    columns = ("what", "kind", "ranks", "from_s", "to_s", "attempt", "in_words")
    if timeline is None:
        return Sheet(columns, [])
    start = timeline.start
    spans: list[tuple[Cell, ...]] = [
        ("span", one.kind.value, _ranks(one.ranks), one.start - start, one.end - start, None,
         ": ".join(filter(None, (one.title, one.cause))))
        for one in timeline.spans
    ]  # fmt: skip
    marks: list[tuple[Cell, ...]] = [
        ("event", one.kind.value, _ranks(one.ranks), one.time - start, (one.until or one.time) - start,
         one.restart_count, one.title)
        for one in timeline.marks
    ]  # fmt: skip
    return Sheet(columns, sorted([*spans, *marks], key=lambda row: float(row[3] or 0.0)))


def _ranks(runs: Iterable[tuple[int, int]]) -> str:
    """`0-2 5`."""
    return " ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


_UNITS: Final = {
    "cpu": "cpu_percent_of_a_core",
    "rss": "memory_bytes",
    "gpu": "gpu_percent_of_the_time",
    "gpu_memory": "gpu_memory_bytes",
    "disk_read": "disk_read_bytes_per_s",
    "disk_write": "disk_write_bytes_per_s",
}


def _resources(view: JobView, more: PanelView) -> Sheet:
    rows: list[tuple[Cell, ...]] = [
        (max(0.0, moment.start - view.submitted_at), _UNITS.get(name, name), one.least, one.mean, one.most)
        for moment in more.resources
        for name, one in moment.spreads.items()
    ]
    return Sheet(("after_s", "what", "least", "mean", "most"), rows)


def _gradients(view: JobView, more: PanelView) -> Sheet:
    """Whether replicas agreed: a row a stretch of steps and ranks with one story."""
    found = view.gradients
    columns = ("ranks", "first_step", "last_step", "from_s", "to_s", "checks", "state")
    rows: list[tuple[Cell, ...]] = [
        (_ranks(rank_spans(lane.ranks)), one.first_step, one.last_step, one.start - view.submitted_at,
         one.end - view.submitted_at, one.checked, WORDS[state])
        for lane in found.lanes
        for one, state in zip(found.columns, lane.states, strict=True)
    ]  # fmt: skip
    return Sheet(columns, rows)


SHEETS: Final[Mapping[str, Callable[[JobView, PanelView], Sheet]]] = {
    "throughput": _throughput,
    "loss": _loss,
    "heatmap": _heatmap,
    "timeline": _timeline,
    "resources": _resources,
    "gradients": _gradients,
}


def sides_sheet(sides: Sequence[Side], measure: Measure, by: By) -> Sheet:
    """A chart of jobs laid over each other."""
    unit = unit_of(sides) if measure is Measure.THROUGHPUT else ""
    name = unit.replace("/", "_per_") or measure.value
    rows: list[tuple[Cell, ...]] = []
    for side in sides:
        curve = curve_of(side.view, measure, by, unit)
        rows += [(side.name, *point) for point in zip(curve.step, curve.after, curve.y, strict=True)]
    return Sheet(("job", "step", "after_s", name), [row for row in rows if not _is_unknown(row[3])])

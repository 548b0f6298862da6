"""Jobs beside each other, made of what panels show of each: curves on one axis, what was asked for differently, how
each went, and how fast against the first of them. Pure; bounded as a `JobView` is.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from workbench.spec import JobSpec
from workbench.views.compare import PARTS, TEXTS, UNTOLD, WARM_UP, Speed, env_names, ratio_text, shown_value, speed_of
from workbench.views.job import JobView
from workbench.views.panels import PanelView
from workbench.views.series import SeriesPoint
from workbench.views.table import Column, Table
from workbench.views.wording import NOTHING, bare_rate, count, number, phase_text, plural, seconds, span

MOST: Final = 6  # jobs
LEAST: Final = 1e-6  # of a mean: less is the computer's arithmetic
GAP: Final = 2.5  # widths without a point: the line is broken
ROWS: Final = 20  # of the curves as a table
MANY: Final = 12  # packages that are told


class By(enum.Enum):
    """What the axis counts; the value is its word in an address."""

    STEP = "step"
    TIME = "time"


class Measure(enum.Enum):
    """What a curve shows; the value is what a person reads."""

    LOSS = "loss"
    THROUGHPUT = "throughput"


class Side(NamedTuple):
    """One of the jobs, and what to call it."""

    name: str
    view: JobView
    more: PanelView = PanelView()


class Curve(NamedTuple):
    """Points in order of the axis: its steps, seconds since the job was submitted, values. NaN breaks the line."""

    step: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    y: tuple[float, ...] = ()

    def x(self, by: By) -> tuple[float, ...]:
        return self.step if by is By.STEP else self.after


def unit_of(sides: Sequence[Side]) -> str:
    """Of throughput: samples/s where all of them that have steps tell their samples, else steps/s."""
    told = [_has_samples(side.view) for side in sides if side.view.series]
    return "samples/s" if told and all(told) else "steps/s"


def _has_samples(view: JobView) -> bool:
    return any(point.samples_per_s for point in view.series)


def _rate(point: SeriesPoint, unit: str) -> float:
    if unit == "samples/s":
        return point.samples_per_s
    return 1 / point.step_time if point.step_time else math.nan


def curve_of(view: JobView, measure: Measure, by: By, unit: str = "samples/s") -> Curve:
    """One job's curve; by step, of one that was done again after a restart only the last."""
    rows: list[tuple[float, float, float]] = []
    end = math.inf
    points = view.series if by is By.TIME else _last_of_each(view.series)
    for point in points:
        value = point.loss if measure is Measure.LOSS else _rate(point, unit)
        if value is None:
            continue
        middle = point.start + point.width / 2 - view.submitted_at
        if by is By.TIME and middle - end > GAP * point.width:
            rows.append((float(point.step), end + point.width / 2, math.nan))
        rows.append((float(point.step), middle, float(value) if math.isfinite(value) else math.nan))
        end = middle
    return Curve(*map(tuple, zip(*rows, strict=True))) if rows else Curve()


def _last_of_each(series: Sequence[SeriesPoint]) -> list[SeriesPoint]:
    """Those that no later point went back behind."""
    kept: list[SeriesPoint] = []
    for point in series:
        while kept and kept[-1].step >= point.step:
            kept.pop()
        kept.append(point)
    return kept


def speed_of_side(view: JobView, unit: str) -> Speed | None:
    """Of its time with steps after the warm-up, with the error of that; None of too little of it."""
    points = [point for point in view.series if point.step_time > 0]
    points = points[math.ceil(len(points) * WARM_UP) :]
    size = max(1, len(points) // PARTS)
    parts = [points[at : at + size] for at in range(0, len(points) - size + 1, size)]
    widths = (sum(point.width for point in part) for part in parts)
    return speed_of(
        [sum(_rate(p, unit) * p.width for p in part) / width for part, width in zip(parts, widths, strict=True)]
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def outcome_table(sides: Sequence[Side]) -> Table:
    """A row a quantity, a column a job; rows of which no job has anything are left out."""
    unit = unit_of(sides)
    speeds = [speed_of_side(side.view, unit) for side in sides]
    rows: list[tuple[str, Sequence[str]]] = [(title, [cell(s.view) for s in sides]) for title, cell in _CELLS]
    at = 1 + [title for title, _ in rows].index("lowest loss")
    rows[at:at] = [
        (f"throughput, {unit}", [_speed_text(speed) for speed in speeds]),
        ("throughput against the first", [_against(speeds[0], speed, k) for k, speed in enumerate(speeds)]),
    ]
    return _table("How they went", rows, sides)


def asked_table(sides: Sequence[Side]) -> Table:
    """What was asked for differently, and which packages are not of the same version."""
    specs = [side.more.spec for side in sides]
    known = [spec for spec in specs if spec is not None]
    rows = [(name, [_field(spec, name, known) for spec in specs]) for name in _differing(known)]
    env: list[Mapping[str, str]] = [spec.env if spec is not None else {} for spec in specs]
    rows += [(f"env {name}", _values([one.get(name) for one in env])) for name in env_names(env)]
    rows += _packages([side.more.packages for side in sides])
    return _table("What was asked for differently", rows, sides)


def _table(caption: str, rows: Sequence[tuple[str, Sequence[str]]], sides: Sequence[Side]) -> Table:
    kept = [(title, cells) for title, cells in rows if set(cells) - {NOTHING, ""}]
    first = Column("what", False, 0, tuple(title for title, _ in kept))
    columns = (Column(side.name, False, 0, tuple(cells[k] for _, cells in kept)) for k, side in enumerate(sides))
    return Table(caption, (first, *columns))


def _speed_text(speed: Speed | None) -> str:
    if speed is None:
        return NOTHING
    error = speed.error if speed.error > speed.mean * LEAST else 0.0
    return f"{bare_rate(speed.mean)} ± {bare_rate(error)}"


def _against(first: Speed | None, speed: Speed | None, place: int) -> str:
    return NOTHING if place == 0 or first is None or speed is None else ratio_text(first, speed)


def _losses(view: JobView) -> list[float]:
    return [point.loss for point in view.series if point.loss is not None and math.isfinite(point.loss)]


def _lowest(view: JobView) -> str:
    return number(min(_losses(view), default=None))


def _steps(view: JobView) -> str:
    of = f" of {count(view.progress[1])}" if view.progress and view.counts_steps else ""
    return f"{count(view.step)}{of}" if view.step else NOTHING


def _share(get: Callable[[JobView], float | None]) -> Callable[[JobView], str]:
    return lambda view: NOTHING if (share := get(view)) is None else f"{share * 100:.1f} %"


def _failures(view: JobView) -> str:
    timeline = view.timeline
    if timeline is None:
        return NOTHING
    found = [" ".join(one.cause.reason.split()) for one in timeline.attempts if one.cause is not None]
    more = f"; {plural(timeline.earlier, 'earlier attempt')} not shown" if timeline.earlier else ""
    return f"{len(found)}: {'; '.join(found)[:200]}{more}" if found else f"none{more}"


def _back(view: JobView) -> str:
    times = [t for one in view.timeline.attempts if (t := one.time_to_recover) is not None] if view.timeline else []
    return seconds(sum(times) / len(times)) if times else NOTHING


_CELLS: Final[tuple[tuple[str, Callable[[JobView], str]], ...]] = (
    ("state", lambda view: phase_text(view.phase)),
    ("ran", lambda view: span(view.running_for)),
    ("ranks", lambda view: count(view.world_size) if view.world_size else NOTHING),
    ("steps", _steps),
    ("loss", lambda view: number(view.loss)),
    ("lowest loss", _lowest),
    ("time of a step", lambda view: seconds(view.step_time)),
    ("goodput", _share(lambda view: view.timeline.goodput.goodput if view.timeline else None)),
    ("ETTR", _share(lambda view: view.timeline.goodput.ettr if view.timeline else None)),
    ("failures", _failures),
    ("restarts", lambda view: count(view.restart_count)),
    ("steps lost", lambda view: count(view.timeline.lost_steps) if view.timeline else NOTHING),
    ("back after a failure, mean", _back),
)


def _differing(specs: Sequence[JobSpec]) -> list[str]:
    names = (name for name in JobSpec.__struct_fields__ if name not in UNTOLD)
    return [name for name in names if any(getattr(a, name) != getattr(b, name) for a, b in pairwise(specs))]


def _field(spec: JobSpec | None, name: str, specs: Sequence[JobSpec]) -> str:
    """Of a text only which of the texts it is."""
    if spec is None:
        return NOTHING
    value = getattr(spec, name)
    if name in TEXTS:
        texts = list(dict.fromkeys(getattr(one, name) for one in specs))
        return f"program {chr(ord('A') + texts.index(value))}" if value else NOTHING
    return shown_value(value) or NOTHING


def _values(found: Sequence[str | None]) -> list[str]:
    """Which are the same, and not what they are."""
    known = [value for value in dict.fromkeys(found) if value is not None]
    return [NOTHING if value is None else f"value {chr(ord('A') + known.index(value))}" for value in found]


def _packages(found: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Where they are known of all of them."""
    if not all(found):
        return []
    names = sorted({name for packages in found for name in packages})
    rows = [(f"package {name}", [packages.get(name, NOTHING) for packages in found]) for name in names]
    return [row for row in rows if len(set(row[1])) > 1][:MANY]


def curves_table(curves: Mapping[str, Curve], measure: Measure, by: By, unit: str) -> Table:
    """Values of all curves at places that lie evenly on the axis, each the last that its curve has by then."""
    ends = [curve.x(by)[-1] for curve in curves.values() if curve.y]
    starts = [curve.x(by)[0] for curve in curves.values() if curve.y]
    low, high = min(starts, default=0.0), max(ends, default=0.0)
    places = sorted({low + (high - low) * k / (ROWS - 1) for k in range(ROWS)}) if ends else []
    places = sorted({float(round(x)) for x in places}) if by is By.STEP else places
    text = number if measure is Measure.LOSS else bare_rate
    columns = (
        Column(name, True, 0, tuple(_at(curve, by, x, (high - low) / ROWS, text) for x in places))
        for name, curve in curves.items()
    )
    axis = tuple(count(x) if by is By.STEP else span(x) for x in places)
    return Table(
        f"{measure.value}, {unit}" if unit else measure.value,
        (Column("step" if by is By.STEP else "after", True, 0, axis), *columns),
    )


def _at(curve: Curve, by: By, x: float, near: float, text: Callable[[float], str]) -> str:
    xs = curve.x(by)
    at = bisect_right(xs, x) - 1
    if at < 0 or x - xs[at] > near or math.isnan(curve.y[at]):
        return NOTHING
    return text(curve.y[at])

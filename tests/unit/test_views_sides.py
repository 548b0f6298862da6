"""Jobs beside each other: curves on one axis, what differs, how fast against the first of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace
from test_views_job import NOW, bucket, history, state, update, view_of

from workbench.events import OriginRecorded
from workbench.feed import Update
from workbench.origin import Origin
from workbench.spec import JobSpec
from workbench.state import JobPhase
from workbench.views.html import snapshot_sides_html
from workbench.views.panels import PanelBuilder
from workbench.views.sides import (
    By,
    Curve,
    Measure,
    Side,
    asked_table,
    curve_of,
    curves_table,
    outcome_table,
    speed_of_side,
    unit_of,
)
from workbench.views.table import Table


def side(name: str, *updates: Update) -> Side:
    panels = PanelBuilder()
    for one in updates:
        panels.add(one)
    return Side(name, view_of(*updates), panels.view())


def launched(packages: dict[str, str] | None = None, **spec: Any) -> Update:
    events = () if packages is None else (OriginRecorded(time=NOW, origin=Origin(packages=packages)),)
    return update(state=state(spec=JobSpec(entrypoint="train.py", nproc_per_node=2, **spec)), events=events)


def rows(table: Table) -> dict[str, tuple[str, ...]]:
    first, *rest = table.columns
    return dict(zip(first.cells, zip(*(column.cells for column in rest), strict=True), strict=True))


def test_a_curve_by_step_and_by_time() -> None:
    view = view_of(update())
    curve = curve_of(view, Measure.THROUGHPUT, By.STEP)
    assert curve.step == tuple(range(510, 601, 10)) and list(curve.y) == pytest.approx([640.0] * 10)
    assert curve_of(view, Measure.THROUGHPUT, By.TIME).x(By.TIME)[0] == pytest.approx(1050.5 - 990.0)
    assert curve_of(view, Measure.LOSS, By.STEP).y[0] == 0.5
    assert curve_of(view_of(update(buckets=history(loss=math.nan))), Measure.LOSS, By.STEP) == Curve()


def test_what_was_done_again_is_there_once_by_step_and_twice_by_time() -> None:
    again = tuple(bucket(k, 1080.0 + s, last_step=540 + 10 * s, loss=0.4) for s in range(3) for k in (0, 1))
    view = view_of(update(), update(now=NOW + 40, buckets=again, events=()))
    by_step, by_time = (curve_of(view, Measure.LOSS, by) for by in By)
    assert by_step.step == (510, 520, 530, 540, 550, 560) and by_step.y[-3:] == (0.4, 0.4, 0.4)
    assert len(by_time.y) == 14 and math.isnan(by_time.y[10])  # the line is broken where nothing was done


def test_how_fast_against_the_first_and_whether_that_is_more_than_noise() -> None:
    def run(name: str, duration: float) -> Side:
        whole = tuple(
            bucket(k, NOW - 60 + s, duration=duration * (0.98 + 0.01 * (s * 7 % 5))) for s in range(60) for k in (0, 1)
        )
        return side(name, update(buckets=whole))

    sides = [run("a", 1.0), run("b", 2.0), run("c", 1.001)]
    assert unit_of(sides) == "samples/s"
    speed = speed_of_side(sides[0].view, "samples/s")
    assert speed is not None and speed.mean == pytest.approx(640, rel=0.01) and 0 < speed.error < 8
    told = rows(outcome_table(sides))["throughput against the first"]
    assert told[0] == "–" and told[1].startswith("0.50") and told[1].endswith("slower")
    assert told[2].endswith("no difference beyond the noise")
    assert speed_of_side(view_of(update(buckets=history(seconds=2))), "samples/s") is None


def test_steps_are_counted_where_one_of_them_has_no_samples() -> None:
    bare = side("b", update(buckets=history(samples=0.0)))
    sides = [side("a", update()), bare]
    assert unit_of(sides) == "steps/s"
    assert list(curve_of(sides[0].view, Measure.THROUGHPUT, By.STEP, "steps/s").y) == pytest.approx([10.0] * 10)


def test_how_they_went() -> None:
    ended = state(phase=JobPhase.FAILED, ended_at=NOW, restart_count=2)
    told = rows(outcome_table([side("a", update()), side("b", update(state=ended))]))
    assert told["state"] == ("● HEALTHY", "✗ FAILED") and told["restarts"] == ("0", "2")
    assert told["steps"][0] == "600 of 3,000" and told["loss"] == ("0.5", "0.5")
    assert "goodput" not in told  # nobody knows it of a record without a beginning


def test_what_was_asked_for_differently() -> None:
    a = launched({"torch": "2.13.0", "numpy": "2.4"}, args=("--lr", "0.1"), source="x = 1")
    b = launched({"torch": "2.12.0", "numpy": "2.4"}, args=("--lr", "0.3"), source="x = 2")
    found = rows(asked_table([side("a", a), side("b", b), side("c", a)]))
    assert found == {
        "args": ("--lr 0.1", "--lr 0.3", "--lr 0.1"),
        "source": ("program A", "program B", "program A"),
        "package torch": ("2.13.0", "2.12.0", "2.13.0"),
    }
    assert asked_table([side("a", a), side("b", a)]).length == 0
    unknown = asked_table([side("a", a), side("b", launched(args=("--lr", "0.1"), source="x = 1"))])
    assert unknown.length == 0  # packages that are not known differ from nothing


def test_the_curves_as_a_table_lie_on_one_axis() -> None:
    short = tuple(one for one in history() if one.start < NOW - 5)
    views = {"a": view_of(update()), "b": view_of(update(buckets=short))}
    curves = {name: curve_of(view, Measure.LOSS, By.STEP) for name, view in views.items()}
    table = curves_table(curves, Measure.LOSS, By.STEP, "")
    assert [column.title for column in table.columns] == ["step", "a", "b"]
    assert table.columns[0].cells[0] == "510" and table.columns[0].cells[-1] == "600"
    assert table.columns[1].cells[-1] == "0.5" and table.columns[2].cells[-1] == "–"
    assert curves_table({"a": Curve()}, Measure.LOSS, By.TIME, "").length == 0


def test_a_notebook_keeps_the_tables_and_finds_the_page() -> None:
    sides = [side("a", update()), side("<b>", launched(args=("--lr", "0.3")))]
    page = snapshot_sides_html(sides, ["run.dtrain-0123456789ab:job-a", "job-b"])
    assert 'data-dtrain-page="compare?id=run.dtrain-0123456789ab%3Ajob-a&amp;id=job-b"' in page and "<b>" not in page
    assert "--lr 0.3" in page and "<script>" in page and "<script>" not in snapshot_sides_html(sides)
    assert len(page) < 50_000


def test_a_view_of_nothing() -> None:
    view = replace(view_of(update(beats=(), buckets=())), series=())
    assert curve_of(view, Measure.LOSS, By.TIME) == Curve() and speed_of_side(view, "steps/s") is None

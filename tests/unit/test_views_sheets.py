"""What charts show, as tables for other programs."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from test_views_gradients import report
from test_views_job import NOW, bucket, history, update
from test_views_sides import side
from test_views_story import RECOVERED
from test_widgets_more_panels import panels_of

from workbench.views.job import JobView, ViewBuilder
from workbench.views.sheets import SHEETS, Sheet, sides_sheet, to_csv, to_json
from workbench.views.sides import By, Measure


def view_of_two() -> JobView:
    builder = ViewBuilder()
    builder.add(update())
    return builder.view()


def read(sheet: Sheet) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(sheet))))


def test_the_charts_of_a_job_in_numbers() -> None:
    view, more = view_of_two(), panels_of(update())
    rows = read(SHEETS["throughput"](view, more))
    assert [row["rank"] for row in rows] == ["all"] * 10 + ["0"] * 10 + ["1"] * 10
    assert (rows[0]["after_s"], float(rows[0]["samples_per_s"]), rows[-1]["step"]) == ("60.0", 640.0, "600")
    loss = read(SHEETS["loss"](view, more))
    assert loss[0] == {"rank": "all", "after_s": "60.5", "step": "510", "loss": "0.5", "learning_rate": ""}
    heat = read(SHEETS["heatmap"](view, more))
    assert len(heat) == 20 and (heat[1]["first_rank"], heat[1]["last_rank"]) == ("1", "1")
    assert [round(float(heat[0][name]), 3) for name in ("step_time_s", "own_work_s", "wait_for_others_s")] == [
        0.1, 0.06, 0.04,
    ]  # fmt: skip
    used = read(SHEETS["resources"](view, more))
    assert {row["what"] for row in used} == {"cpu_percent_of_a_core", "memory_bytes"}


def test_a_loss_that_nobody_reports_has_no_row() -> None:
    builder = ViewBuilder()
    builder.add(update(buckets=history(loss=math.nan)))
    assert read(SHEETS["loss"](builder.view(), panels_of())) == []
    builder.add(update(buckets=history(loss=math.nan, learning_rate=0.1)))
    assert {row["learning_rate"] for row in read(SHEETS["loss"](builder.view(), panels_of()))} == {"0.1"}


def test_the_timeline_in_order_of_time() -> None:
    builder = ViewBuilder()
    builder.add(update(events=RECOVERED))
    rows = read(SHEETS["timeline"](builder.view(), panels_of()))
    times = [float(row["from_s"]) for row in rows]
    assert times == sorted(times) and {row["what"] for row in rows} == {"span", "event"}
    assert any("rank" in row["in_words"] for row in rows)
    assert SHEETS["timeline"](view_of_two(), panels_of()).rows == []


def test_whether_ranks_agreed() -> None:
    builder = ViewBuilder()
    builder.add(update(checks=(report(0), report(1, agreed=9, deviating=((1, 1),)))))
    rows = read(SHEETS["gradients"](builder.view(), panels_of()))
    assert [(row["ranks"], row["last_step"], row["state"]) for row in rows[:4]] == [
        ("0", "9", "agrees"), ("0", "19", "agrees"), ("1", "9", "agrees"), ("1", "19", "deviates"),
    ]  # fmt: skip
    assert {row["checks"] for row in rows} == {"10"} and len(rows) == 8
    builder.add(update(checks=(report(2, ranks=1024, unclear=1),)))
    many = read(SHEETS["gradients"](builder.view(), panels_of()))
    assert {row["ranks"] for row in many} == {"0 2-3", "1", "4-1023"}
    assert SHEETS["gradients"](view_of_two(), panels_of()).rows == []


def test_jobs_laid_over_each_other() -> None:
    sides = [side("a", update()), side("b", update(buckets=tuple(bucket(k, NOW - 1) for k in (0, 1))))]
    rows = read(sides_sheet(sides, Measure.THROUGHPUT, By.STEP))
    assert [row["job"] for row in rows] == ["a"] * 10 + ["b"] and float(rows[0]["samples_per_s"]) == 640.0
    assert sides_sheet(sides, Measure.LOSS, By.TIME).columns == ("job", "step", "after_s", "loss")


def test_what_is_not_known_and_what_looks_like_a_formula() -> None:
    sheet = Sheet(("a", "b"), [("=1+1", math.nan), ('say "so", they', None), ("-2", -2.0)])
    assert to_csv(sheet).splitlines() == ["a,b", "'=1+1,", '"say ""so"", they",', "'-2,-2.0"]
    told = json.loads(to_json(sheet, of="train-1"))
    assert told == {
        "of": "train-1",
        "columns": ["a", "b"],
        "rows": [["=1+1", None], ['say "so", they', None], ["-2", -2.0]],
    }


@pytest.mark.parametrize("name", SHEETS)
def test_every_sheet_is_there_before_anything_is_known(name: str) -> None:
    builder = ViewBuilder()
    builder.add(update(beats=(), buckets=(), events=()))
    sheet = SHEETS[name](builder.view(), panels_of())
    assert sheet.rows == [] and to_csv(sheet).strip() == ",".join(sheet.columns)

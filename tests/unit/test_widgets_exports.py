"""The menus under charts: what can be saved, under which name, and what the browser gets."""

from __future__ import annotations

import json

import pytest
from test_views_job import update
from test_widgets_dashboard import Page
from test_widgets_more_panels import panels_of
from workbench_widgets.exports import LONGEST, NAMES, Exports, file_name
from workbench_widgets.source import Picture

from workbench.views.job import ViewBuilder
from workbench.views.sheets import SHEETS, Sheet


@pytest.mark.parametrize(
    ("of", "name"),
    [
        ("train-1f2e", "train-1f2e-loss.csv"),
        ("../../etc/<x> y", "etc-x-y-loss.csv"),
        ("…", "dtrain-loss.csv"),
        ("a" * 500, "a" * LONGEST + "-loss.csv"),
    ],
)
def test_a_file_is_called_after_job_and_panel(of: str, name: str) -> None:
    assert file_name(of, "loss", "csv") == name


def test_a_menu_is_there_once_its_chart_is_and_gives_its_numbers() -> None:
    sent: list[tuple[str, str, str | bytes]] = []
    exports = Exports("<job>", ("loss", "throughput"), lambda *file: sent.append(file))
    assert exports.menus["loss"].markup == ""
    exports.update({"loss": lambda: Sheet(("a",), [(1,)])})
    menu = exports.menus["loss"].markup
    assert exports.menus["throughput"].markup == "" and "<job>" not in menu
    assert menu.count("<button") == 4 and menu.count("aria-label=") >= 5 and 'data-file="job-loss.svg"' in menu
    exports.menus["loss"]._handle_msg({"name": "save", "value": "csv"})
    exports.menus["loss"]._handle_msg({"name": "save", "value": "json"})
    exports.menus["loss"]._handle_msg({"name": "save", "value": "exe"})
    exports.menus["throughput"]._handle_msg({"name": "save", "value": "csv"})
    assert sent[0] == ("job-loss.csv", "text/csv", "a\r\n1\r\n") and len(sent) == 2
    assert json.loads(sent[1][2]) == {"of": "<job>", "chart": "loss", "columns": ["a"], "rows": [[1]]}


def test_a_page_has_a_menu_for_each_chart_that_shows_something() -> None:
    page = Page()
    assert [menu.markup for menu in page.dashboard._exports.menus.values()] == [""] * len(SHEETS)
    builder = ViewBuilder()
    builder.add(update())
    page.source.picture = Picture(builder.view(), more=panels_of(update()))
    page.source.changed[0]()
    page.run(1)
    shown = {name for name, menu in page.dashboard._exports.menus.items() if menu.markup}
    assert shown == {"throughput", "loss", "heatmap", "resources"} and set(SHEETS) <= set(NAMES)

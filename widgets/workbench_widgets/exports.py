"""A menu under each chart: its picture as PNG or SVG, made by the browser, and its numbers as CSV or JSON.

Numbers go to the browser by the page's own connection, so that whoever sees a page, and nobody else, can have them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from workbench.views.sheets import Sheet, to_csv, to_json
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import esc
from workbench_widgets.style import PANEL

Send = Callable[[str, str, "str | bytes"], None]  # a file's name, its type, what is in it
NAMES: Final = {
    "throughput": "throughput",
    "loss": "loss",
    "heatmap": "ranks-over-time",
    "timeline": "timeline",
    "resources": "resources",
    "gradients": "agreement-of-ranks",
}
LONGEST: Final = 100  # characters of a file's name before the panel's
_ODD: Final = re.compile(r"[^A-Za-z0-9._-]+")


class Exports:
    """`of`: whose charts these are, for the files' names; `panels`: those that can have a menu."""

    def __init__(self, of: str, panels: tuple[str, ...], send: Send) -> None:
        self._of, self._send = of, send
        self._sheets: Mapping[str, Callable[[], Sheet]] = {}
        self.menus = {
            name: Live(
                name=f"save_{name}", stylesheets=[PANEL], markup="", css_classes=["saves"],
                on_action=partial(self._pressed, name),
            )
            for name in panels
        }  # fmt: skip

    def update(self, sheets: Mapping[str, Callable[[], Sheet]]) -> None:
        """What can be saved now; a sheet is made when it is asked for."""
        self._sheets = sheets
        for name, menu in self.menus.items():
            menu.markup = menu_html(self._of, name) if name in sheets else ""

    def _pressed(self, panel: str, action: str, value: str) -> None:
        make = self._sheets.get(panel)
        if action != "save" or value not in ("csv", "json") or make is None:
            return
        name = file_name(self._of, NAMES[panel], value)
        if value == "csv":
            self._send(name, "text/csv", to_csv(make()))
        else:
            self._send(name, "application/json", to_json(make(), of=self._of, chart=NAMES[panel]))


def file_name(of: str, what: str, suffix: str) -> str:
    """`train-1f2e-loss.csv`."""
    return f"{plain_name(of)}-{what}.{suffix}"


def plain_name(of: str) -> str:
    """Nothing in it that a disk, or a shell, minds."""
    return _ODD.sub("-", of)[:LONGEST].strip(".-") or "dtrain"


def menu_html(of: str, panel: str) -> str:
    what = NAMES[panel].replace("-", " ")
    pictures = "".join(
        f'<button data-picture="{kind}" data-file="{esc(file_name(of, NAMES[panel], kind))}" '
        f'aria-label="save {what} as {kind.upper()}">{kind.upper()}</button>'
        for kind in ("png", "svg")
    )
    numbers = "".join(
        f'<button data-do="save" value="{kind}" data-once aria-label="save the numbers of {what} as {kind.upper()}">'
        f"{kind.upper()}</button>"
        for kind in ("csv", "json")
    )
    return (
        f'<details class="save"><summary class="muted small" aria-label="save {what}">save</summary>'
        f'<div class="tools" role="group" aria-label="save {what}">{pictures}{numbers}</div></details>'
    )

"""Two buttons: the report of the job, and the job as a saved session; and a line that says what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from workbench_widgets.live import Live
from workbench_widgets.panels.markup import esc
from workbench_widgets.style import PANEL

BUTTONS: Final = {
    "report": ("Report", "save a page about this job that opens without server and network"),
    "save": ("Save session", "save this job to a file that can be looked at anywhere, and run again"),
}


class Keeping:
    """`on_make` begins one of `BUTTONS`. A page that only shows gives no code away: it has the report alone."""

    def __init__(self, on_make: Callable[[str], None], *, may_act: bool = True) -> None:
        self._on_make = on_make
        self._names = tuple(BUTTONS) if may_act else ("report",)
        self.root = Live(name="keeping", stylesheets=[PANEL], markup=keeping_html(self._names), on_action=self._pressed)

    def said(self, text: str) -> None:
        """What came of it."""
        self.root.markup = keeping_html(self._names, text)

    def _pressed(self, name: str, value: str) -> None:
        if name in self._names:
            self.said(f"{BUTTONS[name][0]}: reading the job’s record …")
            self._on_make(name)


def keeping_html(names: tuple[str, ...], said: str = "") -> str:
    buttons = "".join(
        f'<button data-do="{name}" data-once title="{esc(BUTTONS[name][1])}">{BUTTONS[name][0]}</button>'
        for name in names
    )
    return (
        f'<div class="tools keeping" role="group" aria-label="keep this job"><span class="small muted" role="status" '
        f'aria-live="polite">{esc(said)}</span>{buttons}</div>'
    )

"""The buttons, and a line that says what one did or why it could not. Cancel asks once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from workbench.views.job import JobView
from workbench_widgets.actions import why_not
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import esc
from workbench_widgets.style import PANEL

BUTTONS: Final = (  # action, text, what it does
    ("stacks", "Stacks", "show where each rank's Python is now"),
    ("interrupt", "Interrupt", "KeyboardInterrupt in the running cell; ranks and their variables live on"),
    ("cancel", "Cancel", "end the job: SIGTERM, after a grace SIGKILL"),
)


class Controls:
    """See the module. `on_act` begins an action that the reader has confirmed."""

    def __init__(self, on_act: Callable[[str], None]) -> None:
        self._on_act = on_act
        self._view: JobView | None = None
        self._said, self._is_asking = "", False
        self.root = Live(name="controls", stylesheets=[PANEL], markup="", on_action=self._pressed)
        self._draw()

    def update(self, view: JobView | None) -> None:
        self._view = view
        if why_not("cancel", view):
            self._is_asking = False
        self._draw()

    def said(self, text: str) -> None:
        """What came of an action."""
        self._said = text
        self._draw()

    def _pressed(self, action: str, _: str) -> None:
        was_asking, self._is_asking = self._is_asking, False
        if action in ("keep", "close"):
            self.said("")
        elif reason := why_not(action, self._view):
            self.said(f"Nothing done: {reason}.")
        elif action == "cancel" and not was_asking:
            self._is_asking = True
            self.said("")
        elif action in ("cancel", "interrupt", "stacks"):
            self.said(f"{action}: asking the pool …")
            self._on_act(action)

    def _draw(self) -> None:
        self.root.markup = controls_html(self._view, self._said, is_asking=self._is_asking)


def controls_html(view: JobView | None, said: str, *, is_asking: bool) -> str:
    if is_asking:
        buttons = (
            '<span id="sure">End this job?</span>'
            '<button class="sure" data-do="cancel" aria-describedby="sure">Yes, cancel it</button>'
            '<button data-do="keep">Keep it</button>'
        )
    else:
        buttons = "".join(_button(view, *button) for button in BUTTONS)
    head, _, rest = said.partition("\n\n")
    close = '<button data-do="close">Close</button>' if rest else ""
    told = f'<pre tabindex="0" aria-label="stacks">{esc(rest)}</pre>' if rest else ""
    return (
        f'<div class="tools" role="group" aria-label="controls">{buttons}{close}</div>'
        f'<p class="small muted" role="status" aria-live="polite">{esc(head)}</p>{told}'
    )


def _button(view: JobView | None, action: str, text: str, does: str) -> str:
    reason = why_not(action, view)
    danger = ' class="danger"' if action == "cancel" and not reason else ""
    disabled = f' aria-disabled="true" title="{esc(reason)}"' if reason else f' title="{esc(does)}"'
    return f'<button data-do="{action}"{danger}{disabled}>{text}</button>'

"""The buttons, and a line that says what one did or why it could not. Cancel asks again; faults are behind a switch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from workbench.views.acts import FAULT_HELP, Act, why_not
from workbench.views.job import JobView
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import esc
from workbench_widgets.style import PANEL

BUTTONS: Final = (  # action, text, what it does
    ("stacks", "Stacks", "show where each rank's Python is now"),
    ("interrupt", "Interrupt", "KeyboardInterrupt in the running cell; ranks and their variables live on"),
    ("resume", "Resume", "go on from the newest checkpoint, on as many ranks as before or as said beside it"),
    ("resize", "Resize", "go on with the number of ranks beside it, from a checkpoint made for it"),
    ("cancel", "Cancel", "end the job: SIGTERM, after a grace SIGKILL"),
)
ONLY_LOOKS: Final = "Nothing done: this link is for looking only."
WITH_RANKS: Final = ("resume", "resize")
_RANKS: Final = (
    '<input type="number" class="few" data-set="ranks" min="1" step="1" placeholder="ranks" '
    'title="for Resume and Resize; empty: as many as before" aria-label="number of ranks for Resume and Resize">'
)


class Controls:
    """See the module. `on_act` begins an action that the reader has confirmed."""

    def __init__(self, on_act: Callable[[Act], None], *, may_act: bool = True) -> None:
        self._on_act, self._may_act = on_act, may_act
        self._view: JobView | None = None
        self._said, self._is_asking, self._has_faults = "", False, False
        self._ranks: int | None = None
        self._fault, self._rank = next(iter(FAULT_HELP)), 0
        self.root = Live(name="controls", stylesheets=[PANEL], markup="", on_action=self._pressed)
        self._draw()

    def update(self, view: JobView | None) -> None:
        self._view = view
        if why_not(Act("cancel"), view):
            self._is_asking = False
        self._draw()

    def said(self, text: str) -> None:
        """What came of an action."""
        self._said = text
        self._draw()

    def begin(self, act: Act) -> None:
        """Have it done when it can be, else say why not."""
        if not self._may_act:
            self.said(ONLY_LOOKS)
            return
        if reason := why_not(act, self._view):
            self.said(f"Nothing done: {reason}.")
            return
        self.said(f"{act.name}: asking the pool …")
        self._on_act(act)

    def _pressed(self, action: str, value: str) -> None:
        if action in ("ranks", "rank", "fault"):
            self._set(action, value)
            return
        was_asking, self._is_asking = self._is_asking, False
        if action in ("keep", "close"):
            self.said("")
        elif action == "faults":
            self._has_faults = not self._has_faults
            self.said("")
        elif action == "cancel" and not was_asking and not why_not(Act("cancel"), self._view):
            self._is_asking = True
            self.said("")
        elif action == "inject":
            self.begin(Act("inject", fault=self._fault, rank=self._rank))
        elif action in (name for name, *_ in BUTTONS):
            self.begin(Act(action, ranks=self._ranks if action in WITH_RANKS else None))

    def _set(self, name: str, value: str) -> None:
        number = int(value) if value.strip().isdigit() and len(value) < 6 else None
        if name == "ranks":
            self._ranks = number
        elif name == "rank":
            self._rank = -1 if number is None else number
        elif value in FAULT_HELP:
            self._fault = value

    def _draw(self) -> None:
        if not self._may_act:
            self.root.markup = looks_html(self._said)
            return
        faults = faults_html(self._view, self._fault) if self._has_faults else ""
        self.root.markup = controls_html(self._view, self._said, is_asking=self._is_asking, faults=faults)


def looks_html(said: str) -> str:
    """In place of the buttons."""
    return (
        f'<p class="small muted" title="{esc(ONLY_LOOKS)}">◎ only to look at</p>'
        f'<p class="small muted" role="status" aria-live="polite">{esc(said)}</p>'
    )


def controls_html(view: JobView | None, said: str, *, is_asking: bool, faults: str = "") -> str:
    if is_asking:
        buttons = (
            '<span id="sure">End this job?</span>'
            '<button class="sure" data-do="cancel" aria-describedby="sure">Yes, cancel it</button>'
            '<button data-do="keep">Keep it</button>'
        )
    else:
        made = {name: _button(view, name, text, does) for name, text, does in BUTTONS}
        made["resize"] = _RANKS + made["resize"]
        switch = (
            f'<button data-do="faults" aria-expanded="{"true" if faults else "false"}" '
            'title="do a fault to a rank on purpose, to see the job recover">Faults …</button>'
        )
        buttons = "".join(made.values()) + switch
    head, _, rest = said.partition("\n\n")
    close = '<button data-do="close">Close</button>' if rest else ""
    told = f'<pre tabindex="0" aria-label="stacks">{esc(rest)}</pre>' if rest else ""
    return (
        f'<div class="tools" role="group" aria-label="controls">{buttons}{close}</div>'
        f'{faults}<p class="small muted" role="status" aria-live="polite">{esc(head)}</p>{told}'
    )


def faults_html(view: JobView | None, chosen: str) -> str:
    """Which fault, to which rank."""
    options = "".join(
        f'<option value="{name}"{" selected" if name == chosen else ""} title="{esc(does)}">{name}</option>'
        for name, does in FAULT_HELP.items()
    )
    most = max(0, view.world_size - 1) if view is not None else 0
    return (
        '<div class="tools" role="group" aria-label="faults on purpose">'
        f'<select data-set="fault" aria-label="fault">{options}</select>'
        f'<label>rank <input type="number" class="few" data-set="rank" min="0" max="{most}" placeholder="0" '
        f'aria-label="rank"></label><button class="danger" data-do="inject">Inject</button>'
        f'<span class="small muted">{esc(FAULT_HELP[chosen])}</span></div>'
    )


def _button(view: JobView | None, action: str, text: str, does: str) -> str:
    reason = why_not(Act(action, ranks=0 if action == "resize" else None), view)
    reason = "" if action == "resize" and reason == "a job has at least 1 rank" else reason
    danger = ' class="danger"' if action == "cancel" and not reason else ""
    disabled = f' aria-disabled="true" title="{esc(reason)}"' if reason else f' title="{esc(does)}"'
    return f'<button data-do="{action}"{danger}{disabled}>{text}</button>'

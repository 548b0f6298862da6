"""The job's checkpoints: step, age, size, where, whole or why not; each with a button that resumes an ended job."""

from __future__ import annotations

from collections.abc import Callable

from workbench.views.acts import Act, why_not
from workbench.views.job import JobView
from workbench.views.table import Column, Table, checkpoints_table
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import Empty, esc, scrolled, table_html
from workbench_widgets.style import PANEL

_HOW = (
    "A script that steps through <code>run.steps(loader, state)</code> is saved every N steps with "
    "<code>--checkpoint-every N</code>"
)
EMPTY = Empty(
    f"None yet. {_HOW}; the newest is where the job goes on after a failure.",
    f"None was saved. {_HOW}; from the newest it could have been resumed.",
)


class Checkpoints:
    """See the module. `on_act` begins an action; a reader who may not act, and the past, get no buttons."""

    def __init__(self, on_act: Callable[[Act], None], *, may_act: bool = True) -> None:
        self._on_act, self._may_act = on_act, may_act
        self._view: JobView | None = None
        self.root = Live(name="checkpoints", stylesheets=[PANEL], markup=EMPTY.html(), on_action=self._pressed)

    def update(self, view: JobView, *, is_past: bool = False) -> None:
        self._view = view
        self.root.markup = checkpoints_html(view, may_act=self._may_act and not is_past)

    def _pressed(self, action: str, value: str) -> None:
        """`value` is the row that was pressed, as its step and path: the list may have grown meanwhile."""
        index = next((k for k, row in enumerate(keys_of(self._view)) if row == value), None)
        if action == "resume" and index is not None and self._view is not None:
            chosen = self._view.checkpoints[index]
            self._on_act(Act("resume", step=chosen.step, path=chosen.path))


def keys_of(view: JobView | None) -> list[str]:
    """What the buttons say of their rows: no path of the machine goes to the browser."""
    return [f"{known.tier.value}-{known.step}" for known in view.checkpoints] if view is not None else []


def checkpoints_html(view: JobView, *, may_act: bool = True) -> str:
    if not view.checkpoints:
        return EMPTY.html(is_over=view.is_over)
    table = checkpoints_table(view.checkpoints, view.now, since=view.submitted_at if view.is_over else None)
    if may_act:
        table = Table(table.caption, (*table.columns, Column("go on", False, 0, ("",) * table.length)))

    def cell(column: Column, index: int) -> str:
        text = esc(column.cells[index])
        if column.title == "go on":
            return _button(view, index)
        if column.title == "state":
            return f'<span class="tone-{"bad" if view.checkpoints[index].problem else "good"}">{text}</span>'
        return text

    shown = table_html(table, cell=cell)
    return scrolled("checkpoints", shown)


def _button(view: JobView, index: int) -> str:
    checkpoint = view.checkpoints[index]
    reason = why_not(Act("resume", step=checkpoint.step, path=checkpoint.path), view)
    about = f"resume from step {checkpoint.step:,}"
    disabled = f' aria-disabled="true" title="{esc(reason)}"' if reason else f' title="{about}"'
    return f'<button data-do="resume" value="{keys_of(view)[index]}" aria-label="{about}"{disabled}>Resume</button>'

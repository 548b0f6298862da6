"""A job's buttons as ipywidgets, for a notebook: the same acts, words and refusals as the live page has.

`Panel.update` looks how the job stands; a button does what it says at once, in the kernel, and tells what came of it. A
kernel that is busy cannot: the live page and `dtrain` in a shell can.
"""

from __future__ import annotations

from typing import Any, Final

import ipywidgets as widgets

from workbench import Job, WorkbenchError
from workbench.views.acts import FAULT_HELP, Act, why_not
from workbench.views.job import JobView
from workbench.views.table import headline
from workbench.views.wording import NOTHING
from workbench_widgets.actions import Once, perform

BY: Final = "the notebook's controls"
TEXTS: Final = {  # the acts of the page, in its order
    "stacks": "Stacks",
    "interrupt": "Interrupt",
    "resume": "Resume",
    "resize": "Resize",
    "cancel": "Cancel",
    "inject": "Inject",
}


class Panel(widgets.VBox):  # type: ignore[misc]
    """See the module. `buttons[name].click()` is what a reader's click does; `said.value` is what came of it."""

    def __init__(self, job: Job) -> None:
        self._job, self._once = job, Once()
        self._view: JobView | None = None
        self.buttons = {name: widgets.Button(description=text) for name, text in TEXTS.items()}
        self.ranks = widgets.Text(description="ranks", placeholder="as before", layout={"width": "170px"})
        self.checkpoint = widgets.Dropdown(description="from", options=[("newest checkpoint", None)])
        self.faults = widgets.ToggleButton(description="Faults …", value=False)
        self.fault = widgets.Dropdown(description="fault", options=list(FAULT_HELP))
        self.rank = widgets.BoundedIntText(description="rank", min=0, max=65_535, layout={"width": "150px"})
        self.head, self.said = widgets.Label(), widgets.HTML()
        for name, button in self.buttons.items():
            button.on_click(lambda _, name=name: self._pressed(name))
        self._on_purpose = widgets.HBox([self.fault, self.rank, self.buttons["inject"]])
        self._on_purpose.layout.display = "none"
        self.faults.observe(self._switched, "value")
        look = widgets.Button(description="Refresh")
        look.on_click(lambda _: self.update())
        plain = [self.buttons[name] for name in ("stacks", "interrupt", "cancel")]
        going_on = [self.buttons["resume"], self.checkpoint, self.ranks, self.buttons["resize"]]
        rows = [widgets.HBox([look, *plain, self.faults]), widgets.HBox(going_on), self._on_purpose]
        super().__init__([self.head, *rows, self.said])
        self.update()

    def update(self) -> None:
        """Look how the job stands, and what can be done now."""
        try:
            self._view = self._job.view()
        except WorkbenchError as error:
            self._say(f"It cannot be told how the job stands: {error}")
            return
        view = self._view
        self.head.value = headline(view)
        chosen = self.checkpoint.value
        found = [(f"step {c.step:,}, {c.problem or c.tier.value}", (c.step, c.path)) for c in view.checkpoints]
        self.checkpoint.options = [("newest checkpoint", None), *found]
        self.checkpoint.value = chosen if chosen in [value for _, value in found] else None
        for name, button in self.buttons.items():
            button.tooltip = why_not(self._act(name), view) or TEXTS[name]

    def _act(self, name: str) -> Act:
        ranks = int(self.ranks.value) if self.ranks.value.strip().isdigit() else None
        step, path = self.checkpoint.value or (None, "")
        match name:
            case "resume":
                return Act(name, step=step, path=path, ranks=ranks)
            case "resize":
                return Act(name, ranks=ranks)
            case "inject":
                return Act(name, fault=self.fault.value, rank=self.rank.value)
        return Act(name)

    def _pressed(self, name: str) -> None:
        act = self._act(name)
        if refusal := self._once.begin(act):
            self._say(f"Nothing done: {refusal}.")
            return
        try:
            self.update()  # what is known may be old: a notebook's controls look only when they are used
            self._say(perform(act, self._job, self._view, by=BY))
        finally:
            self._once.end(act)

    def _switched(self, change: Any) -> None:
        self._on_purpose.layout.display = "" if change["new"] else "none"

    def _say(self, text: str) -> None:
        from html import escape

        head, _, rest = text.partition("\n\n")
        more = f"<pre>{escape(rest)}</pre>" if rest else ""
        self.said.value = f"<span role='status'>{escape(head) or NOTHING}</span>{more}"


def panel(job: Job) -> Panel:
    """The controls of a job."""
    return Panel(job)

"""A form that launches a script, as ipywidgets, for a notebook: the fields, words and refusals of the live page's form.

The kernel launches, at once; one that is busy cannot: the live page and `dtrain` in a shell can. A script is taken from
the notebook's folder where the pool is this machine's. Once a job was launched, its own buttons stand below.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

import ipywidgets as widgets

from workbench import Job, Session
from workbench.views.acts import Act
from workbench.views.launching import FIELDS, Form, line_of, wrong
from workbench_widgets.actions import Once
from workbench_widgets.controls import Panel
from workbench_widgets.launcher import Launched, launched

LINE: Final = "The same in a cell, to copy:"
STYLE: Final = "user-select:all;white-space:pre-wrap;margin:0"  # a click marks the whole line


class LaunchForm(widgets.VBox):  # type: ignore[misc]
    """See the module. `button.click()` is what a reader's click does; `said.value` and `job` are what came of it."""

    def __init__(self, session: Session) -> None:
        self._session, self._once = session, Once()
        self.job: Job | None = None
        self.fields = {
            name: widgets.Text(description=label, placeholder=like, tooltip=means, layout={"width": "420px"})
            for name, label, like, means in FIELDS
        }
        if session.is_local:
            self.fields["script"].placeholder = "train.py"
            self.fields[
                "script"
            ].tooltip = "the script that every rank runs; of this notebook's folder, or a whole path"
        self.button = widgets.Button(description="Launch", button_style="primary")
        self.line, self.said = widgets.HTML(), widgets.HTML()
        self._below = widgets.VBox()
        for field in self.fields.values():
            field.observe(lambda _: self.update(), "value")
        self.button.on_click(lambda _: self._pressed())
        super().__init__([*self.fields.values(), self.button, self.line, self.said, self._below])
        self.update()

    @property
    def form(self) -> Form:
        """What is typed, with the whole path of the script, and the pool if it is not the one a line takes anyway."""
        typed = {name: field.value for name, field in self.fields.items()}
        script = typed["script"].strip()
        if script and self._session.is_local and not script.startswith(("/", "~")):
            typed["script"] = str(Path.cwd() / script)
        if not self._session.is_local:
            return Form(**typed, address=self._session.address)
        return Form(**typed, pool="" if self._session.name == "default" else self._session.name)

    def update(self) -> None:
        """The line of what is typed, or why it cannot be launched so."""
        form = self.form
        reason = wrong(form)
        self.button.tooltip = reason or "start it on the pool"
        self.line.value = "" if reason else f'{LINE}<pre style="{STYLE}">{escape(line_of(form))}</pre>'
        self._say(reason)

    def _pressed(self) -> None:
        form = self.form
        act = Act("launch", path=repr(form))
        if refusal := wrong(form) or self._once.begin(act):
            self._say(f"Nothing done: {refusal}.")
            return
        try:
            self._tell(launched(form, lambda: self._session))
        finally:
            self._once.end(act)

    def _tell(self, told: Launched) -> None:
        self._say(f"{told.job_id} {told.said}".strip())
        if told.job_id:
            self.job = self._session.attach(told.job_id)
            self._below.children = [Panel(self.job)]

    def _say(self, text: str) -> None:
        self.said.value = f"<span role='status'>{escape(text)}</span>"


def panel(session: Session) -> LaunchForm:
    """The form of a session."""
    return LaunchForm(session)

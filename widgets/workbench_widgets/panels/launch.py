"""A form that launches a script, and shows the `%dtrain` line that does the same, to copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from workbench.views.launching import FIELDS, Form, line_of, wrong
from workbench_widgets.launcher import Launched, Launcher
from workbench_widgets.live import Live
from workbench_widgets.panels.comparison import job_address
from workbench_widgets.panels.markup import esc
from workbench_widgets.style import PANEL

NUMBERS: Final = ("ranks", "restarts")
LAUNCH: Final = "Launch a job"  # what opens the form
COPIED: Final = "The line is in the clipboard."
NOT_COPIED: Final = "The browser does not let this page copy: mark the line, and copy it by keyboard."


class Launch:
    """See the module. `later` hands over what comes from other threads."""

    def __init__(self, launcher: Launcher, later: Callable[[float, Callable[[], None]], object], theme: str) -> None:
        self._launcher, self._later, self._theme = launcher, later, theme
        self._form, self._said = Form(), Launched("")
        self.root = Live(name="launch", stylesheets=[PANEL], markup="", on_action=self._pressed)
        self.draw()

    def draw(self) -> None:
        self.root.markup = form_html(self._form, self._launcher.names(), self._said, self._theme)

    def paint(self, theme: str) -> None:
        self._theme = theme
        self.draw()

    def _pressed(self, name: str, value: str) -> None:
        if name in Form._fields:
            said = self._said if value == getattr(self._form, name) else Launched("")  # it was of what stood there
            self._form, self._said = self._form._replace(**{name: value}), said
        elif name == "copied":
            self._said = Launched(COPIED if value else NOT_COPIED)
        elif name == "launch":
            self._said = Launched("launch: asking the pool …")
            self._launcher.launch(self._form, self._done)
        self.draw()

    def _done(self, told: Launched) -> None:
        self._later(0.0, lambda: self._tell(told))

    def _tell(self, told: Launched) -> None:
        self._said = told
        self.draw()


def form_html(form: Form, pools: Sequence[str], said: Launched, theme: str) -> str:
    fields = "".join(_field(*field) for field in FIELDS) + _pools(form, pools)
    reason = wrong(form)
    line = line_of(form) if not reason else ""
    copy = '<button data-copy="line" title="copy the line">Copy</button>' if line else ""
    shown = f'<pre id="line" tabindex="0" aria-label="the line that does the same">{esc(line)}</pre>' if line else ""
    off = f' aria-disabled="true" title="{esc(reason)}"' if reason else ' title="start it on the pool"'
    job = f'<a href="{job_address(said.job_id, theme)}">{esc(said.job_id)}</a> ' if said.job_id else ""
    return (
        f'<details class="launch"><summary>{LAUNCH}</summary><div class="tools" role="group" aria-label="launch">'
        f'{fields}<button data-do="launch" data-once{off}>Launch</button>{copy}</div>{shown}'
        f'<p class="small muted" role="status" aria-live="polite">{job}{esc(said.said or reason)}</p></details>'
    )


def _field(name: str, label: str, like: str, means: str) -> str:
    small = ' class="few"' if name in NUMBERS else ""
    return (
        f'<label title="{esc(means)}">{label} <input type="text"{small} data-set="{name}" placeholder="{esc(like)}" '
        f'autocomplete="off" spellcheck="false"></label>'
    )


def _pools(form: Form, pools: Sequence[str]) -> str:
    """Which, where there are several."""
    if len(pools) < 2:
        return ""
    options = "".join(
        f'<option value="{esc(name)}"{" selected" if name == form.pool else ""}>{esc(name)}</option>' for name in pools
    )
    usual = '<option value="">the usual one</option>'
    return f'<label>pool <select data-set="pool" aria-label="pool">{usual}{options}</select></label>'

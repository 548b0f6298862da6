"""What happened, the newest first, as the job's record has it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from workbench.views.happenings import Happening
from workbench.views.job import JobView
from workbench.views.panels import PanelView
from workbench.views.wording import count, ranks_text, span
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import Empty, esc
from workbench_widgets.style import PANEL

CHARACTERS: Final = 300  # of a line
EMPTY: Final = Empty("Nothing has been recorded yet.", "Nothing was recorded.")
NO_TROUBLE: Final = Empty("No trouble so far.", "There was no trouble.")


class Events:
    """See the module."""

    def __init__(self) -> None:
        self._only_trouble, self._shown = False, (0, 0, False, False)
        self._last: tuple[JobView, PanelView] | None = None
        self.root = Live(name="events", stylesheets=[PANEL], markup=EMPTY.html(), on_action=self._chosen)

    def update(self, view: JobView, more: PanelView) -> None:
        self._last = view, more
        newest = hash(more.happenings[0]) if more.happenings else 0
        state = (more.happened, newest, self._only_trouble, view.is_over)
        if state != self._shown:
            self._shown = state
            self._draw()

    def _chosen(self, name: str, value: str) -> None:
        if name == "trouble":
            self._only_trouble = value == "1"
            self._draw()

    def _draw(self) -> None:
        if self._last is None:
            return
        view, more = self._last
        self.root.markup = events_html(
            more.happenings, more.happened, view.submitted_at, only_trouble=self._only_trouble, is_over=view.is_over
        )


def events_html(
    happenings: Sequence[Happening], happened: int, start: float, *, only_trouble: bool = False, is_over: bool = False
) -> str:
    if not happenings:
        return EMPTY.html(is_over=is_over)
    shown = [one for one in happenings if one.is_trouble or not only_trouble]
    options = "".join(
        f'<option value="{value}"{" selected" if (value == "1") is only_trouble else ""}>{text}</option>'
        for value, text in (("", "all events"), ("1", "only trouble"))
    )
    rows = "".join(_row(one, start) for one in shown)
    told = rows or f"<tr><td>{NO_TROUBLE.html(is_over=is_over)}</td></tr>"
    gone = f"the newest {count(len(happenings))} of {count(happened)}" if happened > len(happenings) else ""
    return (
        f'<div class="tools"><select data-set="trouble" aria-label="which events">{options}</select></div>'
        '<div class="scroll events" tabindex="0" role="group" aria-label="events"><table>'
        f'<caption class="hidden">Events, the newest first</caption><tbody>{told}</tbody></table></div>'
        f'<p class="muted small">{esc(gone)}</p>'
    )


def _row(one: Happening, start: float) -> str:
    text = one.text.removeprefix(f"{one.kind}: ")
    text = text if len(text) <= CHARACTERS else text[: CHARACTERS - 1] + "…"
    who = ranks_text(one.ranks) if one.ranks else ""
    who = "" if re.search(rf"\b{re.escape(who)}\b", text) else who  # it says so itself
    kind = esc(one.kind)
    if one.is_trouble:
        kind = f'<span class="tone-bad"><span aria-hidden="true">▲ </span>{kind}</span>'
    return (
        f'<tr><td class="n muted">+{esc(span(max(0.0, one.time - start)))}</td><th scope="row">{kind}</th>'
        f'<td class="wide">{esc(text)}<span class="muted"> {esc(who)}</span></td></tr>'
    )

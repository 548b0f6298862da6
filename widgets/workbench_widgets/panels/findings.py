"""What is wrong or could be better: what was seen, the likely cause, what to do, and a button that does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from workbench.views.acts import Act
from workbench.views.findings import Shown, findings
from workbench.views.job import JobView
from workbench.views.panels import PanelView
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import Empty, esc, rank_button
from workbench_widgets.source import Choice
from workbench_widgets.style import PANEL

MARKS: Final = {"error": ("✗", "bad"), "warning": ("▲", "warn"), "notice": ("●", "accent")}
DOES: Final = {"resume": "Resume from the newest checkpoint", "stacks": "Show the stacks"}
_TICK: Final = '<span aria-hidden="true">✓</span> '
NOTHING_FOUND: Final = Empty(f"{_TICK}Nothing stands out.", f"{_TICK}Nothing stood out.")


class Findings:
    """See the module. `on_act` begins an act, `on_rank` hears of a rank that the reader chose."""

    def __init__(
        self, on_act: Callable[[Act], None], on_rank: Callable[[str, str], None], *, may_act: bool = True
    ) -> None:
        self._on_act, self._on_rank, self._may_act = on_act, on_rank, may_act
        self._found: tuple[Shown, ...] = ()
        self._rank: int | None = None
        self.root = Live(name="findings", stylesheets=[PANEL], markup=NOTHING_FOUND.html(), on_action=self._pressed)

    def choose(self, choice: Choice) -> None:
        self._rank = choice.rank

    def update(self, view: JobView, more: PanelView, *, is_past: bool = False) -> None:
        self._found = findings(view, more)
        may_act = self._may_act and not is_past
        self.root.markup = findings_html(self._found, self._rank, may_act=may_act, is_over=view.is_over)

    def _pressed(self, name: str, value: str) -> None:
        if name == "rank":
            self._on_rank(name, value)
            return
        act = next((one.act for one in self._found if one.act is not None and one.act.name == name), None)
        if act is not None:
            self._on_act(act)


def findings_html(
    found: tuple[Shown, ...], chosen: int | None = None, *, may_act: bool = True, is_over: bool = False
) -> str:
    if not found:
        return NOTHING_FOUND.html(is_over=is_over)
    return f'<ul class="findings">{"".join(_item(one, chosen, may_act) for one in found)}</ul>'


def _item(shown: Shown, chosen: int | None, may_act: bool) -> str:
    one, act = shown.finding, shown.act
    mark, tone = MARKS[one.severity.value]
    ranks = "".join(rank_button(rank, is_chosen=rank == chosen) for rank in shown.ranks)
    more = [
        f'<span class="muted">seen:</span> {esc("; ".join(one.evidence))}' if one.evidence else "",
        f'<span class="muted">likely cause:</span> {esc(one.cause)}' if one.cause else "",
        f'<span class="muted">what to do:</span> {esc(one.advice)}' if one.advice else "",
    ]
    button = f'<button data-do="{act.name}">{DOES[act.name]}</button>' if act is not None and may_act else ""
    lines = "".join(f"<p>{line}</p>" for line in more if line)
    return (
        f'<li><p><span class="tone-{tone} phase"><span aria-hidden="true">{mark}</span> {one.severity.value}</span> '
        f"{esc(one.dated())} {ranks}</p>{lines}{button}</li>"
    )

"""How much of a step goes into communication, and which collective each rank entered last."""

from __future__ import annotations

import statistics
from typing import Final

from workbench.views.communication import Entered, entered, odd_ones
from workbench.views.job import JobView
from workbench.views.table import Column, Table
from workbench.views.wording import NOTHING, count, percent, plural, ranks_text, span
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import esc, table_html
from workbench_widgets.style import PANEL

EMPTY: Final = '<p class="muted">Once ranks call torch.distributed, it is told here who is in which collective.</p>'
MOST: Final = 12  # lines


class Communication:
    """See the module."""

    def __init__(self) -> None:
        self.root = Live(name="communication", stylesheets=[PANEL], markup=EMPTY)

    def update(self, view: JobView) -> None:
        self.root.markup = communication_html(view)


def communication_html(view: JobView) -> str:
    found = entered(view.rows)
    shares = {row.rank: row.shares["comm"] for row in view.rows if "comm" in row.shares}
    if not found and not any(shares.values()):
        return EMPTY
    said = odd_ones(found)
    warning = f'<p class="notice" role="status">{esc(said)}</p>' if said else ""
    return f"{_share_html(shares)}{warning}{_last_html(found) if found else ''}"


def _share_html(shares: dict[int, float]) -> str:
    if not shares:
        return ""
    mean = statistics.fmean(shares.values())
    least, most = (pick(shares, key=lambda rank: shares[rank]) for pick in (min, max))
    rest = f"; least {percent(shares[least])} (rank {least}), most {percent(shares[most])} (rank {most})"
    text = f"{percent(mean)} of a step is communication and waiting for it{rest if len(shares) > 1 else ''}"
    return (
        f'<p>{esc(text)}</p><div class="shares wide" role="img" aria-label="{esc(text)}">'
        f'<i class="phase-comm" style="width:{mean * 100:.1f}%"></i><i class="phase-other" '
        f'style="width:{(1 - mean) * 100:.1f}%"></i></div>'
    )


def _last_html(found: tuple[Entered, ...]) -> str:
    shown = found[:MOST]
    columns = (
        Column("ranks", False, 0, tuple(ranks_text(one.ranks).partition(" ")[2] for one in shown)),
        Column("entered last", False, 0, tuple(one.collective for one in shown)),
        Column("number", True, 0, tuple(count(one.seq) if one.seq else NOTHING for one in shown)),
        Column("in it now", False, 0, tuple(_inside(one) for one in shown)),
        Column("behind", True, 0, tuple(plural(one.behind, "collective") if one.behind else "" for one in shown)),
    )
    marked = frozenset(k for k, one in enumerate(shown) if one.behind and any(other.inside for other in shown))
    table = table_html(Table("Last collective by rank", columns, marked))
    more = f'<p class="muted small">and {plural(len(found) - MOST, "more line")}</p>' if len(found) > MOST else ""
    label = "last collective by rank"
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{label}">{table}</div>{more}'


def _inside(one: Entered) -> str:
    if not one.inside:
        return "no"
    who = "yes" if one.inside == len(one.ranks) else f"{one.inside} of them"
    return f"{who}, for {span(one.since)}" if one.since >= 1 else who

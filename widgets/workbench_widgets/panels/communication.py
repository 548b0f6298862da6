"""How much of a step is communication, how much of that backward hides, what is sent, who entered which collective."""

from __future__ import annotations

import statistics
from typing import Final

from workbench.views.communication import Entered, Sent, entered, hidden, odd_ones, sent
from workbench.views.job import JobView
from workbench.views.table import Column, Table
from workbench.views.wording import NOTHING, count, number, percent, plural, ranks_text, size, span
from workbench_widgets.live import Live
from workbench_widgets.panels.markup import Empty, esc, scrolled, table_html
from workbench_widgets.style import PANEL

EMPTY: Final = Empty(
    "Once ranks call torch.distributed, it is told here who is in which collective.",
    "No rank was seen to call torch.distributed.",
)
MOST: Final = 12  # lines
UNSEEN: Final = '<p class="muted small">DDP reduces its buckets outside of Python: they are not among these.</p>'
DDP: Final = "all_reduce (DDP)"  # as ranks count its buckets


class Communication:
    """See the module."""

    def __init__(self) -> None:
        self.root = Live(name="communication", stylesheets=[PANEL], markup=EMPTY.html())

    def update(self, view: JobView) -> None:
        self.root.markup = communication_html(view)


def communication_html(view: JobView) -> str:
    found = entered(view.rows)
    shares = {row.rank: row.shares["comm"] for row in view.rows if "comm" in row.shares}
    counted = sent(view.rows)
    if not found and not counted and not any(shares.values()):
        return EMPTY.html(is_over=view.is_over)
    said = odd_ones(found)
    warning = f'<p class="notice" role="status">{esc(said)}</p>' if said else ""
    overlap = f"<p>{esc(overlap_text(hidden(view.rows)))}</p>"
    told, last = _sent_html(counted) if counted else "", _last_html(found) if found else ""
    unseen = UNSEEN if last and any(one.name == DDP for one in counted) else ""
    return f"{_share_html(shares)}{overlap}{warning}{told}{last}{unseen}"


def overlap_text(shares: dict[int, float]) -> str:
    if not shares:
        return "Overlap with backward: not measured; DistributedDataParallel alone times it, after some steps."
    mean = statistics.fmean(shares.values())
    least = min(shares, key=lambda rank: shares[rank])
    rest = f"; least {percent(shares[least])} (rank {least})" if percent(shares[least]) != percent(mean) else ""
    return f"Overlap: {percent(mean)} of DDP's communication is hidden behind backward{rest}"


def _sent_html(found: tuple[Sent, ...]) -> str:
    columns = (
        Column("call", False, 0, tuple(one.name for one in found)),
        Column("a step", True, 0, tuple(number(one.calls_per_step, 3) for one in found)),
        Column("bytes a step", True, 0, tuple(size(one.bytes_per_step) for one in found)),
        Column("all ranks, in all", True, 0, tuple(size(one.bytes) for one in found)),
    )
    return scrolled("communication by kind of call", table_html(Table("What a rank communicates", columns)))


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
    table = scrolled("last collective by rank", table_html(Table("Last collective by rank", columns, marked)))
    more = f'<p class="muted small">and {plural(len(found) - MOST, "more line")}</p>' if len(found) > MOST else ""
    return f"{table}{more}"


def _inside(one: Entered) -> str:
    if not one.inside:
        return "no"
    who = "yes" if one.inside == len(one.ranks) else f"{one.inside} of them"
    return f"{who}, for {span(one.since)}" if one.since >= 1 else who

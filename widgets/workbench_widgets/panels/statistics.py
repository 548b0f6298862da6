"""What gradients look like: by rank before the all-reduce, by module, and as histograms; blocks with the same in words.

Part of the panel of gradients.
"""

from __future__ import annotations

from workbench.views.statistics import (
    StatisticsView,
    bars,
    bin_start,
    broken_text,
    histogram_words,
    looks_text,
    shown_bins,
    zeros_text,
)
from workbench.views.table import Column, Table
from workbench.views.wording import count, number, percent, plural, ranks_text
from workbench_widgets.panels.markup import esc, scrolled, table_html

OFF = 1.5  # times the median, from which a norm has a mark


def statistics_html(view: StatisticsView) -> str:
    if not view.has_begun:
        return ""
    every = "each step" if view.every == 1 else f"each {count(view.every)} steps"
    missing = f" By rank, before the all-reduce: not measured, {esc(view.missing)}." if view.missing else ""
    said = f"Looked at {every}, {looks_text(view)}. Norm of the mean, which is used: {number(view.mean_norm, 3)}."
    parts = [f'<h2>What gradients are like</h2><p class="muted">{esc(said)}{missing}</p>']
    if view.rows:
        parts.append(_scroll(ranks_table(view)))
    if view.histograms:
        parts.append(_histograms(view))
    if view.layers:
        parts.append(f"<h2>By module</h2>{_scroll(layers_table(view))}")
    return "".join(parts)


def ranks_table(view: StatisticsView) -> Table:
    rows = view.rows
    return Table(
        "gradients by rank, before the all-reduce",
        (
            Column("ranks", False, 0, tuple(row.label for row in rows)),
            Column("norm", True, 0, tuple(number(row.norm, 3) for row in rows)),
            Column("× median", True, 0, tuple(times_text(row.times) for row in rows)),
            Column("cosine to mean", True, 0, tuple(number(row.cosine, 2) for row in rows)),
            Column("zeros", True, 2, tuple(zeros_text(row.zeros) for row in rows)),
            Column("not finite", True, 1, tuple(broken_text(row) for row in rows)),
        ),
    )


def times_text(times: float | None) -> str:
    """With an arrow where it is far off: "▲ 31"."""
    if times is None:
        return number(None)
    mark = "▲ " if times >= OFF else "▼ " if times <= 1 / OFF else ""
    return f"{mark}{number(times, 3)}"


def layers_table(view: StatisticsView) -> Table:
    layers = view.layers
    return Table(
        "mean gradient, weights and update by module",
        (
            Column("module", False, 0, tuple(layer.name for layer in layers)),
            Column("gradient, RMS", True, 0, tuple(number(layer.gradient, 3) for layer in layers)),
            Column("weights, RMS", True, 0, tuple(number(layer.weight, 3) for layer in layers)),
            Column("update / weights", True, 0, tuple(number(layer.update or None, 3) for layer in layers)),
        ),
    )


def _histograms(view: StatisticsView) -> str:
    bins = shown_bins(view.histograms)
    if not bins:
        return ""
    labels = [ranks_text(one.ranks) for one in view.histograms]
    wide = min(24, max(6, *map(len, labels)))
    rows = "".join(
        f'<div class="histo-row"><span class="agree-who" style="width:{wide}ch">{esc(label)}</span>'
        f'<span class="histo mono" role="img" aria-label="{esc(label)}: {esc(histogram_words(one))}" '
        f'title="{esc(histogram_words(one))}">{bars(one, bins)}</span></div>'
        for label, one in zip(labels, view.histograms, strict=True)
    )
    ends = f"<span>{number(bin_start(bins[0]), 2)}</span><span>{number(bin_start(bins[-1] + 1), 2)}</span>"
    what = "of the mean" if view.missing else "before the all-reduce"
    axis = (
        f'<div class="histo-row muted small"><span style="width:{wide}ch"></span>'
        f'<span class="histo-ends" style="width:{len(bins)}ch">{ends}</span></div>'
    )
    table = _scroll(histogram_table(view))
    return (
        f"<h2>How large gradients are, {what}</h2>"
        f"{scrolled('histograms by rank', rows)}{axis}"
        f"<details><summary>Histograms as a table, {plural(len(bins), 'bin')}, each a factor of 4 wide</summary>{table}"
        "</details>"
    )


def histogram_table(view: StatisticsView) -> Table:
    """A row a bin, a column a rank; shares of what is not zero."""
    bins = shown_bins(view.histograms)
    columns = [Column("from", True, 0, tuple(number(bin_start(k), 2) for k in bins))]
    for one in view.histograms:
        total = max(1, sum(one.counts))
        shares = tuple(percent(one.counts[k] / total) if one.counts[k] else "" for k in bins)
        columns.append(Column(ranks_text(one.ranks, 2), True, 0, shares))
    return Table("histograms of gradients", tuple(columns))


def _scroll(table: Table) -> str:
    return scrolled(table.caption, table_html(table))


STYLE = """
.histo-row{display:flex;align-items:center;gap:8px}
.histo{font-size:15px;line-height:1.25;letter-spacing:0;color:var(--dt-text);white-space:pre;
background:var(--dt-raised);border-radius:2px}
.histo-ends{display:flex;justify-content:space-between;font-family:monospace;font-size:15px}
.histo-ends>span{font:11px system-ui,sans-serif}
"""

"""Colours and sizes, named once. Light and dark are the same names with other values, as CSS variables and for charts.

Colours of ranks and phases are safe for the colour-blind (Okabe and Ito; Tol's light scheme), but never speak alone: a
line has its dash, a bar its text, a state its mark and word. A rank keeps its colour for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

THEMES: Final = ("light", "dark")
FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO: Final = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
TEXT_SIZE: Final = "13px"
SMALL_SIZE: Final = "12px"
CHART_HEIGHT: Final = 190  # px
LOG_HEIGHT: Final = 196  # px

_PAIRS: Final[Mapping[str, tuple[str, str]]] = {  # name: (light, dark)
    "page": ("#ffffff", "#111111"),  # JupyterLab's own, so that the frame has no edge
    "raised": ("#f5f6f7", "#1d1f21"),
    "line": ("#dcdfe3", "#34383c"),
    "text": ("#1c1e21", "#e6e6e6"),
    "muted": ("#5b6168", "#a3a9b0"),
    "accent": ("#0060a0", "#6cb8ee"),
    "good": ("#006b4a", "#3ecf9f"),
    "warn": ("#8a4b00", "#f0b04a"),
    "bad": ("#b3261e", "#ff8a80"),
    "mark": ("#fff3df", "#3a2c14"),  # behind the row that is pointed out
    "other": ("#dddddd", "#858b92"),  # the rest of a step, with black text on it: never what shines most
}
# Okabe-Ito without black; yellow and sky blue are darker on white, blue lighter on black: contrast 3 and more.
_RANKS: Final[Mapping[str, tuple[str, ...]]] = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#3A9AD9", "#B88900", "#7A5195", "#5C6166"),
    "dark": ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#B39DDB", "#BBBBBB"),
}
RANK_COLOURS: Final = len(_RANKS["light"])
DASHES: Final = ("solid", (7, 4), (2, 3), (9, 3, 2, 3))
PHASE_COLOURS: Final[Mapping[str, str]] = {  # with black text on them, in both themes; "other" is of the pairs above
    "data": "#EEDD88",
    "forward": "#99DDFF",
    "backward": "#77AADD",
    "comm": "#EE8866",
    "optimizer": "#44BB99",
    "checkpoint": "#FFAABB",
}

# What ranks do, on a timeline: (light, dark), and a pattern, so that no two that mean trouble differ by colour alone.
LANE_COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "SLOTS": ("#e4e7ea", "#2b2f33"),
    "LAUNCHING": ("#9ad0f0", "#2a6a94"),
    "RUNNING": ("#bfd3e0", "#40586a"),
    "STEPPING": ("#66c2a4", "#12805f"),
    "CHECKPOINTING": ("#cc79a7", "#cc79a7"),
    "WAITING": ("#f0e08a", "#9c8f2e"),
    "STALLED": ("#d55e00", "#e8752a"),
    "DEAD": ("#1c1e21", "#f2f2f2"),
    "FINISHED": ("#d0d4d8", "#4a5056"),
    "RECOVERING": ("#f0b04a", "#c98500"),
    "STOPPING": ("#a8adb3", "#777d84"),
}
LANE_HATCHES: Final[Mapping[str, str]] = {  # Bokeh's names
    "SLOTS": "dot",
    "LAUNCHING": "vertical_line",
    "WAITING": "horizontal_line",
    "STALLED": "left_diagonal_line",
    "DEAD": "cross",
    "RECOVERING": "right_diagonal_line",
    "STOPPING": "spiral",
}


def known_theme(name: str) -> str:
    """`name` when it is a theme, else the light one."""
    return name if name in THEMES else THEMES[0]


def colour(name: str, theme: str) -> str:
    return _PAIRS[name][THEMES.index(theme)]


def rank_colour(rank: int, theme: str) -> str:
    palette = _RANKS[theme]
    return palette[rank % len(palette)]


def rank_dash(rank: int) -> Any:
    """Ranks with the same colour, and ranks whose lines lie on each other, differ by it."""
    return DASHES[(rank + rank // RANK_COLOURS) % len(DASHES)]


def lane_colour(kind: str, theme: str) -> str:
    """Of a `SpanKind`, by its name."""
    return LANE_COLOURS[kind][THEMES.index(theme)]


def css_variables() -> str:
    """`--dt-NAME` for the page; the theme is the root element's `data-theme`."""
    blocks = []
    for index, theme in enumerate(THEMES):
        values = "".join(f"--dt-{name}:{pair[index]};" for name, pair in _PAIRS.items())
        ranks = "".join(f"--dt-rank{k}:{value};" for k, value in enumerate(_RANKS[theme]))
        lanes = "".join(f"--dt-lane-{name}:{pair[index]};" for name, pair in LANE_COLOURS.items())
        blocks.append(f':root[data-theme="{theme}"]{{color-scheme:{theme};{values}{ranks}{lanes}}}')
    return "".join(blocks)


def paint_chart(figure: Any, theme: str) -> None:
    """Give a Bokeh figure the theme's colours; its lines are the caller's."""
    muted, line = colour("muted", theme), colour("line", theme)
    figure.background_fill_color = figure.border_fill_color = figure.outline_line_color = None  # the page's shows
    figure.xaxis.axis_line_color = figure.yaxis.axis_line_color = line
    figure.xaxis.major_tick_line_color = figure.yaxis.major_tick_line_color = line
    figure.xaxis.major_label_text_color = figure.yaxis.major_label_text_color = muted
    figure.ygrid.grid_line_color = line

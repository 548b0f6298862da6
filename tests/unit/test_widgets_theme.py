"""Colours can be read in both themes, and a rank keeps its own."""

from __future__ import annotations

import itertools

import pytest
from workbench_widgets.theme import (
    PHASE_COLOURS,
    RANK_COLOURS,
    THEMES,
    colour,
    css_variables,
    known_theme,
    rank_colour,
    rank_dash,
)


def luminance(value: str) -> float:
    """WCAG 2's relative luminance."""
    parts = [int(value[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("behind", ["page", "raised", "mark"])
def test_text_can_be_read(theme: str, behind: str) -> None:
    for name in ("text", "muted", "accent", "good", "warn", "bad"):
        assert contrast(colour(name, theme), colour(behind, theme)) >= 4.5, name


@pytest.mark.parametrize("theme", THEMES)
def test_lines_of_ranks_stand_out_from_the_page(theme: str) -> None:
    for rank in range(RANK_COLOURS):
        assert contrast(rank_colour(rank, theme), colour("page", theme)) >= 3, rank


def test_numbers_in_bars_are_black_on_light() -> None:
    assert all(contrast(value, "#000000") >= 4.5 for value in PHASE_COLOURS.values())
    assert all(contrast(colour("other", theme), "#000000") >= 4.5 for theme in THEMES)
    assert contrast(colour("other", "dark"), colour("page", "dark")) < contrast(
        colour("text", "dark"), colour("page", "dark")
    )


def test_ranks_differ_by_colour_or_dash() -> None:
    looks = [(rank_colour(rank, "light"), rank_dash(rank)) for rank in range(16)]
    assert all(one != other for one, other in itertools.combinations(looks, 2))
    assert rank_dash(0) != rank_dash(1)  # ranks in step lie on each other


def test_an_unknown_theme_is_light() -> None:
    assert known_theme("dark") == "dark"
    assert known_theme('"><script>') == "light"
    assert all(f'[data-theme="{theme}"]' in css_variables() for theme in THEMES)

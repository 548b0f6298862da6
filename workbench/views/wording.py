"""Numbers and names as people read them; every number with its unit. Shared by text, HTML and panels."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from workbench.state import JobPhase, RankPhase

Clock = Callable[[float], str]  # a time (epoch s) in the reader's words; whoever shows the text brings it
NOTHING: Final = "–"
# A state never speaks by colour alone: a mark and the word go with it.
MARKS: Final[Mapping[str, str]] = {
    "INIT": "○",
    "LAUNCHING": "◔",
    "HEALTHY": "●",
    "RECOVERING": "↻",
    "STOPPING": "◌",
    "STOPPED": "■",
    "SUCCEEDED": "✓",
    "FAILED": "✗",
}
_SIZES: Final = ("B", "kB", "MB", "GB", "TB", "PB")


def rank_spans(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Unbroken runs of ranks, each as its first and last, in order."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    return spans


def ranks_text(ranks: Iterable[int], most: int = 8) -> str:
    """`(0, 1, 2, 5)` → "ranks 0–2, 5"; at most `most` ranges, then how many more."""
    spans = rank_spans(ranks)
    if not spans:
        return "no rank"
    parts = [f"{a}" if a == b else f"{a}–{b}" if b > a + 1 else f"{a}, {b}" for a, b in spans[:most]]
    more = sum(b - a + 1 for a, b in spans[most:])
    is_one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"{'rank' if is_one else 'ranks'} {', '.join(parts)}{f' and {more} more' if more else ''}"


def count(number: float) -> str:
    """1240 → "1,240"."""
    return f"{number:,.0f}" if math.isfinite(number) else NOTHING


def number(value: float | None, digits: int = 4) -> str:
    """A loss or a metric: 0.12345 → "0.1235", 1e-7 → "1e-07"; None and NaN → "–"."""
    return NOTHING if value is None or math.isnan(value) else f"{value:.{digits}g}"


def rate(value: float | None, unit: str = "samples/s") -> str:
    """3206.4 → "3,206 samples/s"; small ones keep three digits."""
    return NOTHING if value is None or not math.isfinite(value) else f"{bare_rate(value)} {unit}".rstrip()


def bare_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """A step's time, as short as it is: 0.0098 → "9.8 ms"."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0 s"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 100 else span(value)


def bounds(low: float, high: float) -> tuple[str, str]:
    """Both ends of a scale in seconds, in the unit of the upper one: 0.14, 2 → "0.14 s", "2 s"."""
    unit, factor = ("s", 1.0) if high >= 1 else ("ms", 1e3) if high >= 1e-3 else ("µs", 1e6)
    first, last = (bare_rate(value * factor) for value in (low, high))
    return f"{first} {unit}", f"{last} {unit}"


def span(value: float) -> str:
    """How long something lasts, for people: 62.4 → "1 min 02 s"."""
    whole = max(0, round(value))
    if whole < 60:
        return f"{max(value, 0.0):.1f} s" if value < 9.95 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def ago(seconds: float) -> str:
    """How long something is past, in one unit, so that it seldom changes: 184 → "3 min ago"."""
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{int(seconds / unit):,} {name} ago"
    return "just now"


def when(moment: Sequence[int], today: Sequence[int] = ()) -> str:
    """A moment of a calendar (year, month, day, hour, minute, …), its date only where it is not `today`'s."""
    time = f"{moment[3]:02}:{moment[4]:02}"
    return time if tuple(moment[:3]) == tuple(today[:3]) else f"{moment[0]}-{moment[1]:02}-{moment[2]:02} {time}"


def size(value: float | None) -> str:
    """Bytes in powers of 1000: 1_234_567 → "1.23 MB"."""
    if value is None:
        return NOTHING
    for unit in _SIZES:
        if value < 1000 or unit == _SIZES[-1]:
            break
        value /= 1000
    return f"{value:.3g} {unit}"


def percent(share: float) -> str:
    """0.412 → "41 %"; what is there but less than half a percent is not 0."""
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def plural(number: int, noun: str) -> str:
    """2, "rank" → "2 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def phase_text(phase: JobPhase | RankPhase) -> str:
    """The phase with its mark."""
    return f"{MARKS[phase.value]} {phase.value}"


def exit_text(exit_code: int | None, signal_number: int | None, *, is_ours: bool = False) -> str:
    """How a process ended, in a few words; empty when that is not known or was well. `is_ours`: the job ended it so."""
    if signal_number:
        how = "stopped by the job with" if is_ours else "killed by"
        try:
            return f"{how} {signal.Signals(signal_number).name}"
        except ValueError:
            return f"{how} signal {signal_number}"
    return f"exit code {exit_code}" if exit_code else ""

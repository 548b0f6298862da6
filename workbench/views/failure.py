"""A failed job told in one screen: which rank, how, at which step, where its log is, then that rank's own traceback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from workbench.state import Failure, JobPhase, JobState
from workbench.views.advice import advise
from workbench.views.wording import ranks_text

MOST: Final = 1900  # bytes
_KEPT_LINES: Final = 4  # of a traceback, at its beginning
_REASON: Final = 400
_EARLIER: Final = 200


def failure_text(state: JobState, most: int = MOST, earlier: Sequence[str] = ()) -> str:
    """What is to be told of the job's failure, in at most `most` bytes of UTF-8; empty when nothing failed.

    `earlier`: what became of the attempts before, a line each.
    """
    first = state.failure or (state.failures[0] if state.failures else None)
    if first is None:
        reason = state.reason if state.phase in (JobPhase.FAILED, JobPhase.STOPPED) else ""
        return _cut(reason, most)
    head = [_cut(first.reason, _REASON)]
    if first.log_path:
        head.append(f"log: {first.log_path}")
    advice = advise(first)
    told = (
        _others(state.failures, first),
        _why_it_ended(state, first),
        *(_cut(f"before it: {line}", _EARLIER) for line in earlier),
        *(advice.remedy() if advice else ()),
    )
    tail = [_cut(line, _REASON) for line in told if line]
    room = most - _size("\n".join([*head, *tail])) - 2
    traceback = trim_middle(first.traceback.rstrip().splitlines(), room) if first.traceback else []
    return _cut("\n".join([*head, *traceback, *tail]), most)


def trim_middle(lines: Sequence[str], room: int) -> list[str]:
    """The beginning and, above all, the end of a traceback in at most `room` bytes; says how much it left out."""
    lines = [_cut(line, 200) for line in lines]
    if _size("\n".join(lines)) <= room:
        return list(lines)
    head = lines[:_KEPT_LINES]
    while head and _size("\n".join(head)) > room // 3:
        head = head[:-1]
    left = room - _size("\n".join(head)) - len("  … 9999 lines left out …\n\n")
    tail: list[str] = []
    for line in reversed(lines[len(head) :]):
        left -= _size(line) + 1
        if left < 0:
            break
        tail.insert(0, line)
    if not tail:
        return [_cut(lines[-1], max(0, room))] if room > 1 else []
    return [*head, f"  … {len(lines) - len(head) - len(tail)} lines left out …", *tail]


def _others(failures: Sequence[Failure], first: Failure) -> str:
    """What the other ranks' errors were, folded."""
    others = [f for f in failures if f.rank is not None and f.rank != first.rank]
    if not others:
        return ""
    words: dict[str, list[int]] = {}
    for failure in others:
        said = failure.reason.removeprefix(f"rank {failure.rank} ").splitlines()[0]
        words.setdefault(said, []).append(failure.rank or 0)
    told = [f"{ranks_text(ranks)} {_cut(said, 120)}" for said, ranks in list(words.items())[:2]]
    more = len(words) - len(told)
    return f"after it: {'; '.join(told)}{f'; {more} more kinds of error' if more else ''}"


def _why_it_ended(state: JobState, first: Failure) -> str:
    """The job's own reason, or what it says besides the failure's."""
    return "" if state.reason == first.reason else state.reason.removeprefix(f"{first.reason}; ")


def _cut(text: str, most: int) -> str:
    """At most `most` bytes of UTF-8, an ellipsis where something is missing."""
    data = text.encode()
    if len(data) <= most:
        return text
    return data[: max(0, most - 3)].decode(errors="ignore") + "…" if most >= 3 else ""


def _size(text: str) -> int:
    return len(text.encode())

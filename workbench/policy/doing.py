"""What a rank that stands still is doing, told from the evidence about it alone, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from workbench.evidence import RankEvidence
from workbench.policy.waits import LISTED
from workbench.state import StallKind

BUSY: Final = 25.0  # percent of a core, which it may share


def main_thread(stack: str) -> str:
    """The part of py-spy's text that is the main thread's."""
    _, *threads = f"\n{stack}".split("\nThread ")
    return next((thread for thread in threads if '"MainThread"' in thread.partition("\n")[0]), stack)


def is_loading(rank: RankEvidence) -> bool:
    return rank.activity == "DATA" or "torch/utils/data/" in main_thread(rank.stack)


def instead(rank: RankEvidence) -> tuple[StallKind, str]:
    """What a rank does in place of getting on: the first line that fits."""
    main = main_thread(rank.stack)
    has_ended = rank.activity == "EXITING" or "_shutdown (threading.py" in main
    locked = rank.call.startswith(("wait (threading.py", "acquire (threading.py", "__enter__ (threading.py"))
    stopped = [child.pid for child in rank.children if child.state in ("T", "t")]
    table: tuple[tuple[bool, StallKind, str], ...] = (
        (
            bool(stopped),
            StallKind.DATA,
            f"its loader's worker process {stopped[0]} is stopped by a signal" if stopped else "",
        ),
        (is_loading(rank), StallKind.DATA, "it waits for its data loader"),
        (has_ended, StallKind.RETURNED, "its program has ended, its process has not"),
        (rank.answered is False and rank.state == "R", StallKind.BUSY, "it computes and lets no other thread run"),
        (rank.cpu >= BUSY, StallKind.BUSY, "it computes without getting on"),
        (rank.state == "D", StallKind.ABSENT, "it waits for a disk or a network file system"),
        (locked, StallKind.ABSENT, "it waits for a lock"),
        (rank.activity == "COLLECTIVE", StallKind.ABSENT, f"it is in {rank.collective or 'another collective'}"),
        (rank.activity == "IDLE", StallKind.RETURNED, "its cell has ended"),
        (True, StallKind.ABSENT, "it stands" if rank.where else "it is elsewhere"),
    )
    return next((kind, text) for fits, kind, text in table if fits)


def doing_now(rank: RankEvidence) -> str:
    if rank.missing:
        return f"rank {rank.rank} cannot be looked at: {rank.missing}"
    place = f" at {rank.where}" if rank.where else ""
    calling = f", in {rank.call}" if rank.call else ""
    silent = "; its line does not answer: something holds the interpreter" if rank.answered is False else ""
    return f"rank {rank.rank} has stood still for {rank.age:.1f} s{place}{calling}{silent}"


def child_words(ranks: Iterable[RankEvidence]) -> Iterable[str]:
    for rank in ranks:
        for child in rank.children[:LISTED]:
            place = f" at {child.where}" if child.where else ""
            how = "is stopped" if child.state in ("T", "t") else f"is in state {child.state}{place}"
            yield f"process {child.pid}, which rank {rank.rank} has started, {how}"


def at_step(rank: RankEvidence) -> str:
    return f" at step {rank.step}" if rank.step else ""


def at_line(rank: RankEvidence) -> str:
    """Where the rank, or the loader's worker that it waits for, is."""
    child = next((child.where for child in rank.children if child.where), "") if is_loading(rank) else ""
    where = child or rank.where
    return f" at {where}" if where else ""

"""Output fit for display."""

from __future__ import annotations

import time

from workbench.telemetry import OutputWritten
from workbench.views.logs import Level, LogRing, clean, level_of


def out(rank: int, text: str, at: float = 0.0, stream: str = "stdout", dropped: int = 0) -> OutputWritten:
    return OutputWritten(job_id="a-1", rank=rank, stream=stream, text=text, time=at, dropped=dropped)


def shown(ring: LogRing) -> list[str]:
    return [f"{line.label}: {line.text}" for line in ring.lines()]


def ring_of(*chunks: OutputWritten, limit: int = 2000) -> LogRing:
    ring = LogRing(limit)
    ring.add(chunks)
    return ring


def test_lines_are_labelled_and_put_together_from_chunks() -> None:
    ring = ring_of(out(0, "one\ntw"), out(1, "other\n"), out(0, "o\nthree"), out(0, "err\n", stream="stderr"))
    assert shown(ring) == ["rank 0: one", "rank 1: other", "rank 0: two", "rank 0: err"]
    assert [line.text for line in ring.unfinished()] == ["three"]


def test_the_same_line_of_many_ranks_is_shown_once() -> None:
    ring = ring_of(*(out(k, "loading\n", at=k * 0.1) for k in range(8)), out(0, "next\n", at=1.0))
    assert shown(ring) == ["ranks 0–7 ×8: loading", "rank 0: next"]


def test_each_rank_keeps_its_own_order() -> None:
    ring = ring_of(*(out(k, f"{word}\n") for k in (0, 1) for word in ("a", "b", "a")))
    assert shown(ring) == ["ranks 0, 1 ×2: a", "ranks 0, 1 ×2: b", "ranks 0, 1 ×2: a"]


def test_a_line_repeated_at_once_is_counted_and_later_it_is_a_new_one() -> None:
    ring = ring_of(*(out(0, "w\n", at=k * 0.01) for k in range(50)), out(0, "w\n", at=60.0))
    assert shown(ring) == ["rank 0 ×50: w", "rank 0: w"]
    assert shown(ring_of(out(0, "\n\n"))) == ["rank 0: ", "rank 0: "]


def test_the_ring_is_bounded_and_says_what_is_missing() -> None:
    ring = ring_of(*(out(0, f"{k}\n") for k in range(30)), out(1, "x\n", dropped=5_000_000), limit=10)
    assert len(ring.lines()) == 10 and ring.dropped_lines == 21
    assert ring.note() == "21 earlier lines and 5 MB of output not shown here; the log files have all of it"
    assert ring_of(out(0, "a\n")).note() == "" and "9 MB" in ring.note(output_dropped=9_000_000)


def test_a_gap_does_not_glue_two_halves_together() -> None:
    assert shown(ring_of(out(0, "half"), out(0, "other\n", dropped=100))) == ["rank 0: other"]


def test_escapes_go_and_a_progress_bar_is_its_last_state() -> None:
    assert clean("\x1b[31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07\x00\x08") == "red link"
    bar = "".join(f"\r {k:3d}%|{'#' * (k // 10)}" for k in range(0, 101, 10))
    assert clean(bar) == " 100%|##########" and clean("done\r") == "done" and clean("\r\r") == ""
    ring = ring_of(*(out(0, part) for part in bar.split("|")))
    assert ring.lines() == [] and len(ring.unfinished()) == 1


def test_a_bar_without_end_stays_small() -> None:
    ring = LogRing()
    for k in range(500):
        ring.add([out(0, f"\r{k:6d} " + "#" * 60)])
    assert ring.unfinished()[0].text.startswith("   499") and len(ring._open[0, "stdout"]) < 3000
    ring.add([out(0, "x" * 50_000 + "\n")])
    assert len(ring.lines()[0].text) == 2000


def test_filters() -> None:
    ring = ring_of(out(0, "Loss 0.5\n"), out(1, "UserWarning: slow\n"), out(2, "ValueError: bad\n"), out(3, "loss 1\n"))
    assert [line.ranks for line in ring.lines(text="loss")] == [(0,), (3,)]
    assert [line.ranks for line in ring.lines(level=Level.WARNING)] == [(1,), (2,)]
    assert [line.text for line in ring.lines(ranks=[0, 2], most=1)] == ["ValueError: bad"]


def test_levels_by_words() -> None:
    errors = ("ERROR: x", "RuntimeError: y", "Traceback (most recent call last):", "fatal: z")
    assert {level_of(text) for text in errors} == {Level.ERROR}
    assert level_of("DeprecationWarning: old") is level_of("WARN x") is Level.WARNING
    assert level_of("terrors of 0.1, forewarned, mirror") is Level.INFO


def test_ten_thousand_lines_are_quick() -> None:
    chunks = [out(k % 8, "".join(f"step {k} {j}\n" for j in range(10))) for k in range(100)]
    ring, before = LogRing(), time.process_time()
    ring.add(chunks)
    assert time.process_time() - before < 0.1 and len(ring.lines()) == 1000

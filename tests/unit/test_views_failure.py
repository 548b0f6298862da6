"""A failure told in one screen."""

from __future__ import annotations

from msgspec.structs import replace

from workbench.spec import JobSpec
from workbench.state import Failure, FailureKind, JobPhase, JobState
from workbench.views.failure import failure_text, trim_middle

TRACEBACK = "\n".join(
    [
        "Traceback (most recent call last):",
        *(f'  File "/x/deep.py", line {k}, in frame_{k}\n    call_{k}(batch)' for k in range(40)),
        "ValueError: bad batch",
    ]
)


def failure(rank: int, reason: str, **changes: object) -> Failure:
    whole = Failure(kind=FailureKind.EXCEPTION, rank=rank, reason=f"rank {rank} {reason}", time=1.0)
    return replace(whole, **changes)


FIRST = failure(2, "raised ValueError: bad batch at step 410", traceback=TRACEBACK, log_path="/h/a-1/logs/rank2.log")
OTHERS = tuple(
    failure(k, "raised RuntimeError: Connection closed by peer", kind=FailureKind.COLLECTIVE) for k in (0, 1, 3, 4)
)


def state(*failures: Failure, reason: str = "", first: Failure | None = None) -> JobState:
    return JobState(job_id="a-1", spec=JobSpec(), phase=JobPhase.FAILED, reason=reason, failures=failures,
                    failure=first)  # fmt: skip


def test_rank_cause_step_and_log_come_first_then_its_traceback_then_the_others_in_a_line() -> None:
    text = failure_text(state(*OTHERS, FIRST, first=FIRST, reason=f"{FIRST.reason}; no restart left"))
    lines = text.splitlines()
    assert lines[:3] == [
        "rank 2 raised ValueError: bad batch at step 410",
        "log: /h/a-1/logs/rank2.log",
        "Traceback (most recent call last):",
    ]
    assert lines[-3:] == [
        "ValueError: bad batch",
        "after it: ranks 0, 1, 3, 4 raised RuntimeError: Connection closed by peer",
        "no restart left",
    ]
    assert any("lines left out" in line for line in lines) and "frame_39" in text
    assert 1000 < len(text.encode()) <= 1900


def test_a_short_traceback_is_whole() -> None:
    short = replace(FIRST, traceback="Traceback:\n  File x\nValueError: bad batch")
    assert failure_text(state(short, first=short)).splitlines()[2:] == short.traceback.splitlines()


def test_a_killed_rank_has_no_traceback() -> None:
    killed = failure(1, "killed by SIGKILL at step 9 while in all_reduce", log_path="/l", kind=FailureKind.SIGNAL)
    told = failure_text(state(killed, first=killed, reason="a reason that says more"))
    assert told.splitlines()[:3] == [killed.reason, "log: /l", "a reason that says more"]


def test_what_is_likely_behind_it_comes_last() -> None:
    killed = failure(1, "raised MemoryError at step 9: out of memory")
    assert [line.split(":")[0] for line in failure_text(state(killed, first=killed)).splitlines()] == [
        "rank 1 raised MemoryError at step 9",
        "likely cause",
        "what to do",
    ]


def test_it_stays_small_whatever_the_ranks_say() -> None:
    for traceback in ("x" * 100_000, "ü\n" * 50_000, "\n".join("é" * 3000 for _ in range(300))):
        loud = failure(0, "raised " + "ä" * 5000, traceback=traceback, log_path="/l")
        many = tuple(failure(k, f"raised E{k} " + "z" * 900) for k in range(1, 1024))
        text = failure_text(state(loud, *many, first=loud, reason="q" * 9000))
        assert len(text.encode()) <= 1900
        assert text.startswith("rank 0 raised") and "after it: rank 1 raised E1" in text and "1021 more kinds" in text


def test_nothing_failed_nothing_said() -> None:
    assert failure_text(replace(state(), phase=JobPhase.HEALTHY, reason="every rank runs")) == ""
    assert failure_text(state(reason="refused: needs 9 slots")) == "refused: needs 9 slots"


def test_trimming_keeps_the_end_above_all() -> None:
    lines = [f"line {k}" for k in range(100)]
    kept = trim_middle(lines, 200)
    assert kept[0] == "line 0" and kept[-1] == "line 99" and len("\n".join(kept)) <= 200
    assert "… 7" in kept[4] and trim_middle(lines, 10_000) == lines
    assert trim_middle(["a" * 50], 20) == ["a" * 17 + "…"]


def test_attempts_before_it_are_told_too() -> None:
    killed = failure(1, "killed by SIGKILL at step 9", kind=FailureKind.SIGNAL)
    earlier = ["+0.9 s rank 0 exited with code 1 at step 9 → restart 1 of 2 → back after 0.5 s, 9 steps lost"]
    told = failure_text(state(killed, first=killed, reason=killed.reason), earlier=earlier)
    assert f"before it: {earlier[0]}" in told.splitlines()

"""What a terminal shows: golden texts, widths, empty states."""

from __future__ import annotations

from msgspec.structs import replace

from workbench.feed import JobSummary, PoolStatus, WorkerStatus
from workbench.state import Failure, FailureKind, JobPhase, RankPhase
from workbench.views.job import JobView, RankRow
from workbench.views.text import bar, one_line, render_jobs, render_pool, render_status
from workbench.views.wording import ago, count, number, percent, ranks_text, rate, seconds, size, span, when


def row(rank: int, **changes: object) -> RankRow:
    shares = {"data": 0.1, "forward": 0.3, "backward": 0.2, "comm": 0.3, "optimizer": 0.1, "checkpoint": 0.0}
    whole = RankRow(rank=rank, phase=RankPhase.HEALTHY, pid=100 + rank, worker="w", step=1240, activity="FORWARD",
                    since=0.01, step_time=0.0098, own_time=0.007, samples_per_s=1603.2, shares=shares | {"other": 0.0},
                    rss=412_000_000, cpu=98.0, loss=0.12345)  # fmt: skip
    return replace(whole, **changes)


def view(*rows: RankRow, **changes: object) -> JobView:
    whole = JobView(job_id="digits-12ab", label="digits", phase=JobPhase.HEALTHY, reason="every rank runs",
                    restart_count=0, max_restarts=3, restarts="", world_size=len(rows), is_interactive=False,
                    submitted_at=1000.0, ended_at=None, running_for=62.4, now=1062.4, step=1240, progress=(1240, 3000),
                    left=17.2, throughput=3206.4, step_time=0.0098, loss=0.12345, rows=rows)  # fmt: skip
    return replace(whole, **changes)


SLOW = row(1, is_slowest=True, own_time=0.0095, activity="COLLECTIVE", collective="all_reduce", since=3.2)
WHY = "rank 1 works 9.5 ms a step by itself, the other 7 ms"


def test_a_running_job() -> None:
    assert render_status(view(row(0), SLOW, slowest=WHY), width=130).splitlines() == [
        "digits-12ab · ● HEALTHY · 2 ranks · running for 1 min 02 s",
        "step 1,240 of 3,000 (41 %) · about 17 s left · 3,206 samples/s · 9.8 ms a step · loss 0.1235",
        f"slowest: {WHY}",
        "",
        "rank  state       step  samples/s  step time  own work    loss  now",
        "0     ● HEALTHY  1,240      1,603     9.8 ms      7 ms  0.1235  forward",
        "1     ● HEALTHY  1,240      1,603     9.8 ms    9.5 ms  0.1235  ◀ slowest, in all_reduce for 3.2 s",
    ]


def test_with_room_it_says_where_the_time_goes() -> None:
    header = render_status(view(row(0)), width=200).splitlines()[3]
    assert header.split("  ")[0] == "rank"
    for title in ("data", "forward", "backward", "comm wait", "optimizer", "memory", "CPU"):
        assert title in header
    assert "tokens" not in header and "GPU" not in header


def test_no_line_is_wider_than_asked_and_the_essential_stays() -> None:
    for width in (40, 60, 80, 100, 140):
        lines = render_status(view(row(0), SLOW, slowest=WHY), width=width).splitlines()
        assert max(map(len, lines)) <= width
        assert "samples/s" in lines[4] and "HEALTHY" in lines[5] and "1,603" in lines[5]


def test_many_ranks_fold_and_the_slowest_stand_out() -> None:
    rows = [row(k) for k in range(1024)]
    rows[700] = row(700, is_slowest=True, own_time=0.0095)
    rows[3] = row(3, phase=RankPhase.FAILED, exit="killed by SIGKILL", activity="", own_time=None, step=1239)
    lines = render_status(view(*rows), width=130).splitlines()
    assert lines[4].startswith("0–2, 4–1023  ● HEALTHY  1,240") and "forward" in lines[4]
    assert lines[5].startswith("3            ✗ FAILED   1,239") and lines[5].endswith("killed by SIGKILL")
    assert lines[6].startswith("700          ● HEALTHY") and "◀ slowest" in lines[6]
    assert len(lines) == 7


def test_a_silent_rank_says_so() -> None:
    assert "no data for 12 s, forward" in render_status(view(row(0, silent_for=12.0)), width=130)


def test_empty_states_say_what_would_fill_them() -> None:
    empty = {"step": 0, "throughput": 0.0, "progress": None, "left": None, "step_time": None, "loss": None}
    fresh = view(row(0, step=0, step_time=None, own_time=None, samples_per_s=0.0, shares={}, loss=None), **empty)
    assert "no step yet: the script has not called optimizer.step()" in render_status(fresh)
    assert "run a cell on the ranks with %%dtrain" in render_status(replace(fresh, is_interactive=True))
    waiting = replace(fresh, phase=JobPhase.INIT, reason="waiting: needs 4 slots, 2 free", rows=(), world_size=0)
    assert render_status(waiting).splitlines()[1:] == ["waiting: needs 4 slots, 2 free"]
    assert "never called optimizer.step()" in render_status(replace(fresh, phase=JobPhase.SUCCEEDED))
    never = replace(waiting, phase=JobPhase.STOPPED, reason="cancelled", ended_at=9.0)
    told = render_status(never)
    assert "no ranks · waited" in told and "no step was finished: it was never given slots" in told
    no_cell = replace(fresh, phase=JobPhase.STOPPED, is_interactive=True)
    assert "no step was finished: no cell on the ranks called optimizer.step()" in render_status(no_cell)
    assert "running" not in render_status(replace(fresh, is_saved=True))
    assert "%dtrain launch" in render_jobs([], str)


def test_what_was_dropped_is_told() -> None:
    text = render_status(view(row(0), telemetry_dropped=1200, output_dropped=5_000_000))
    assert "1,200 steps left out" in text and "5 MB of output left out of display; the log files have it" in text


def test_colour_comes_on_top_and_nothing_of_a_job_moves_the_cursor() -> None:
    evil = view(row(0), phase=JobPhase.FAILED, reason="rank 0 raised X: \x1b[2J\r\nboom")
    plain, colored = render_status(evil), render_status(evil, color=True)
    assert "\x1b" not in plain and "\r" not in plain and "[2J boom" in plain
    assert "\x1b[1;31m✗ FAILED\x1b[0m" in colored and "\x1b[2J" not in colored


def test_one_line() -> None:
    assert one_line(view(row(0)), width=200) == (
        "digits-12ab · ● HEALTHY · 1 rank · running for 1 min 02 s · step 1,240 of 3,000 (41 %) · about 17 s left · "
        "3,206 samples/s · 9.8 ms a step · loss 0.1235"
    )
    assert len(one_line(view(row(0)), width=50)) <= 50


def summary(job_id: str, phase: JobPhase, **changes: object) -> JobSummary:
    whole = JobSummary(job_id=job_id, label="x", phase=phase, reason="every rank runs", world_size=2, submitted_at=1.0)
    return replace(whole, **changes)


def test_a_bar() -> None:
    assert bar(0, 10, 4) == "░░░░ 0 %" and bar(3, 10, 10) == "███░░░░░░░ 30 %"
    assert bar(12, 10, 4) == "████ 100 %" and bar(5, 0) == ""


def test_the_list_of_jobs() -> None:
    jobs = [
        summary("digits-12ab", JobPhase.HEALTHY, step=1240, throughput=3206.4),
        summary("bert-9f", JobPhase.FAILED, reason="rank 1 raised\nboom", ended_at=63.0, step=10, restart_count=2),
    ]
    assert render_jobs(jobs, lambda time: f"14:0{time:.0f}").splitlines() == [
        "job          state      launched  ranks   step  samples/s        took  restarts",
        "digits-12ab  ● HEALTHY  14:01         2  1,240      3,206           –         0",
        "bert-9f      ✗ FAILED   14:01         2     10          –  1 min 02 s         2  rank 1 raised boom",
    ]


def test_a_pool() -> None:
    worker = WorkerStatus(address="tls://127.0.0.1:4242", host="127.0.0.1", pid=77, slots=4, free=1)
    pool = PoolStatus(name="default", version="0.1.0", address="tls://127.0.0.1:4000", slots=4, free=1,
                      workers=(worker,), waiting=(("a-1", "waiting: needs 2 slots, 1 free"),),
                      running=("b-2",))  # fmt: skip
    assert render_pool(pool).splitlines() == [
        "pool default · 4 slots, 1 free · 1 worker · 1 job unfinished",
        "tls://127.0.0.1:4000",
        "",
        "worker                host       slots  free  process",
        "tls://127.0.0.1:4242  127.0.0.1  4 CPU     1       77",
        "",
        "a-1  waiting: needs 2 slots, 1 free",
    ]
    assert "no worker has joined yet" in render_pool(replace(pool, workers=()))


def test_wording() -> None:
    assert [ranks_text(r) for r in ([], [3], [0, 1], [5, 0, 1, 2], range(8), [1, 3])] == [
        "no rank", "rank 3", "ranks 0, 1", "ranks 0–2, 5", "ranks 0–7", "ranks 1, 3",
    ]  # fmt: skip
    assert ranks_text(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"
    assert [seconds(s) for s in (None, 0, 5e-5, 0.0098, 0.25, 2.5, 150)] == [
        "–", "0 s", "50 µs", "9.8 ms", "250 ms", "2.5 s", "2 min 30 s",
    ]  # fmt: skip
    assert [span(s) for s in (0, 3.21, 59.4, 62.4, 3700, 90_000)] == [
        "0.0 s", "3.2 s", "59 s", "1 min 02 s", "1 h 01 min", "1 d 01 h",
    ]  # fmt: skip
    assert [ago(s) for s in (-1.0, 59, 60, 3599, 7300, 90_000, 10**8)] == [
        "just now", "just now", "1 min ago", "59 min ago", "2 h ago", "1 d ago", "1,157 d ago",
    ]  # fmt: skip
    today = (2026, 12, 1, 15, 37, 9)
    assert [when(moment, today) for moment in (today, (2026, 12, 1, 0, 5), (2026, 11, 30, 15, 37))] == [
        "15:37", "00:05", "2026-11-30 15:37",
    ]  # fmt: skip
    assert when(today) == "2026-12-01 15:37"
    assert [size(s) for s in (None, 0, 999, 1_234_567, 5e18)] == ["–", "0 B", "999 B", "1.23 MB", "5e+03 PB"]
    assert (count(1240), rate(3206.4), rate(None), rate(0.5), number(1e-7)) == (
        "1,240", "3,206 samples/s", "–", "0.5 samples/s", "1e-07",
    )  # fmt: skip
    assert (percent(0.001), percent(0.0), percent(0.412)) == ("<1 %", "0 %", "41 %")


def test_advice_is_told_whole_and_wrapped() -> None:
    killed = Failure(kind=FailureKind.SIGNAL, rank=1, reason="rank 1 killed by SIGKILL at step 4", time=1.0)
    text = render_status(view(row(0), phase=JobPhase.FAILED, failure=killed), width=60)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 60 and any(line.startswith("what to do: ") for line in lines)
    assert "a container at its memory limit" in " ".join(lines)
    assert "likely cause" not in render_status(view(row(0), failure=killed, has_recovered=True))


def test_a_long_reason_is_read_to_its_end() -> None:
    reason = (
        "rank 1 did not enter all_reduce[1048576 float32] (collective 66) at step 60: it stands at "
        "/home/ana/projects/digits/train.py:141 in load_batch; rank 0 waits in it; no restart left of 2"
    )
    lines = render_status(view(row(0), phase=JobPhase.FAILED, reason=reason), width=80).splitlines()
    assert " ".join(lines[2:5]) == reason and max(map(len, lines)) <= 80
    endless = render_status(view(row(0), phase=JobPhase.FAILED, reason="rank 0 raised X: " + "far " * 999), width=80)
    assert len(endless.splitlines()) < 12


def test_a_pass_of_many_is_no_step_of_the_job() -> None:
    text = render_status(view(row(0), step=69, progress=(8, 8), counts_steps=False, left=None))
    assert "step 69 · 8 of 8 done (100 %) · " in text


def test_no_advice_for_a_job_that_went_well_after_all() -> None:
    failure = Failure(kind=FailureKind.SIGNAL, rank=1, reason="rank 1 killed by SIGKILL at step 10", time=1.0)
    assert "what to do" in render_status(view(row(0), phase=JobPhase.FAILED, failure=failure))
    well = view(row(0), phase=JobPhase.SUCCEEDED, failure=failure, has_recovered=True)
    assert "what to do" not in render_status(well)

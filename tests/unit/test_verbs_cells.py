"""A cell on ranks: when it is free, what is on the screen, in which order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.fake_session import FakeSession, answer, context_of, interrupt, output, state, update
from workbench.errors import RankFailedError, UsageError
from workbench.spec import EntrypointKind, JobSpec
from workbench.state import Failure, FailureKind, JobPhase
from workbench.telemetry import RankBeat
from workbench.verbs.answers import doing, ends_quietly, shorten
from workbench.verbs.cells import run_cell
from workbench.verbs.context import WaitInterrupted


def cell(*batches: Any, source: str = "x", ranks: tuple[int, ...] | None = None, quiet: bool = False) -> Any:
    """Run a cell that these batches come of; the context, with the job as `.job`."""
    session = FakeSession("cells-1")
    context = context_of(session)
    context.job_ = job = session.known["cells-1"]
    job.cell = list(batches)
    context.error = None
    try:
        run_cell(context, job, source, ranks, is_quiet=quiet)
    except (RankFailedError, WaitInterrupted) as error:
        context.error = error
    return context


def test_values_by_rank_and_equal_ones_once() -> None:
    shown = cell([answer(1, "2"), answer(0, "2")]).screen.shown
    assert shown == [("display", {"text/plain": "ranks 0–1: 2"})]
    shown = cell([answer(1, "11")], [answer(0, "[1,\n 2]")]).screen.shown
    assert shown == [("display", {"text/plain": "rank 0:\n[1,\n 2]\nrank 1: 11"})]


def test_rich_values_are_shown_as_such_below_their_rank() -> None:
    rich = {"text/html": "<b>1</b>"}
    shown = cell([answer(0, "1", **rich), answer(1)]).screen.shown
    assert shown == [
        ("display", {"text/plain": "rank 0:"}),
        ("display", {"text/plain": "1", "text/html": "<b>1</b>"}),
    ]


@pytest.mark.parametrize(
    ("source", "quiet"),
    [("x;", True), ("x; # why\n\n", True), ("x", False), ("x  # ;", False), ("';'", False), ("def f(", False)],
)
def test_a_semicolon_keeps_quiet(source: str, quiet: bool) -> None:
    assert ends_quietly(source) is quiet
    assert bool(cell([answer(0, "1"), answer(1, "1")], source=source).screen.shown) is not quiet


def test_output_is_labelled_and_the_first_comes_at_once() -> None:
    session = FakeSession("cells-1")
    context = context_of(session)
    job = session.known["cells-1"]

    def check_first() -> list[Any]:
        assert context.screen.shown == [("out", "[rank 0] a\n")]
        return [output(1, "b\n"), output(0, "oops\n", "stderr"), output(1, "c")]

    job.cell = [[output(0, "a\n")], check_first, [answer(0), answer(1)]]
    run_cell(context, job, "x", None)
    assert context.screen.shown[1:] == [("out", "[rank 1] b\n"), ("err", "[rank 0] oops\n"), ("out", "[rank 1] c\n")]


def test_at_most_ten_writes_a_second() -> None:
    batches: list[Any] = [[output(0, f"{k}\n")] for k in range(1000)]
    context = cell(*batches, [answer(0), answer(1)])
    seconds = context.clock()
    assert seconds > 0.5
    assert len(context.screen.shown) <= seconds * 10 + 2
    assert context.screen.text("out").count("\n") == 1000


def test_asking_is_slowed_down_while_a_rank_prints_without_pause() -> None:
    batches: list[Any] = [[output(0, f"{k}\n")] for k in range(500)]
    assert cell(*batches, [answer(0), answer(1)]).clock() > 10


def test_much_output_is_bounded_and_says_where_it_is() -> None:
    block = [output(0, "".join(f"{k:08} {'x' * 90}\n" for k in range(n, n + 500))) for n in range(0, 5_000, 500)]
    context = cell(*([chunk] for chunk in block), [answer(0), answer(1)])
    assert len(context.screen.text("out")) < 260_000
    assert "00004999" in context.screen.text("out")
    assert "characters are not shown; whole: /logs/rank0.log" in context.screen.text("err")


def test_the_first_exception_frees_the_cell() -> None:
    trace = 'Traceback (most recent call last):\n  File "<cell>", line 1\nZeroDivisionError: division by zero'
    context = cell([answer(1, error="ZeroDivisionError: division by zero", traceback=trace)], 60.0)
    assert context.clock() < 0.3
    error = context.error
    assert (error.rank, str(error)) == (1, "rank 1 of cells-1: ZeroDivisionError: division by zero")
    text = "\n".join(error._render_traceback_())
    assert text.startswith("rank 1:\nTraceback")
    assert "rank 0 still in the cell; to free: %dtrain interrupt" in text


def test_identical_exceptions_are_shown_once() -> None:
    same = {"error": "ValueError: bad", "traceback": "Traceback\nValueError: bad"}
    context = cell([answer(1, **same)], [answer(0, **same)])
    text = "\n".join(context.error._render_traceback_())
    assert text.count("Traceback") == 1
    assert text.startswith("ranks 0–1:\n")
    assert "still in the cell" not in text


def test_what_is_told_of_a_failure_is_short() -> None:
    for text in ("x" * 100_000, "\n".join(f"line {k}" for k in range(10_000))):
        batch = [answer(k, error=f"ValueError: {k}{text}", traceback=f"Traceback {k}\n{text}\nend {k}") for k in (0, 1)]
        told = "\n".join(cell(batch).error._render_traceback_())
        assert len(told.encode()) < 2048
        assert "end 0" in told
    assert shorten("short\n", 10) == "short"


def test_a_rank_that_dies_is_told() -> None:
    def dies() -> Any:
        raise RankFailedError("rank 1 killed by SIGKILL", job_id="cells-1", rank=1, traceback="", log_path="/logs/1")

    context = cell([output(0, "before")], dies)
    assert str(context.error) == "rank 1 killed by SIGKILL (log: /logs/1)"
    assert context.screen.text("out") == "[rank 0] before\n"


def test_a_rank_that_is_gone_is_told_with_what_ended_it() -> None:
    session = FakeSession("cells-1")
    job, context = session.known["cells-1"], context_of(session)
    failure = Failure(kind=FailureKind.SIGNAL, rank=1, reason="rank 1 killed by SIGKILL", time=0.0, log_path="/logs/1")

    def told() -> Any:
        job.script = [update(state("cells-1", JobPhase.STOPPING, failures=(failure,), reason=failure.reason))]
        return []

    job.cell = [[answer(1, error="rank 1 ended"), answer(0, error="rank 0 ended")], 0.1, told, 60.0]
    with pytest.raises(RankFailedError, match=r"cells-1: rank 1 killed by SIGKILL \(log: /logs/1\)"):
        run_cell(context, job, "x", None)
    assert session.clock() < 0.2

    job.script, job.cell = [update(state("cells-1"))], [[answer(1, error="rank 1 ended")], 60.0]
    with pytest.raises(RankFailedError, match="rank 1 of cells-1: rank 1 ended"):
        run_cell(context, job, "x", None)
    assert session.clock() < 0.7


def test_an_interrupt_frees_the_cell_and_says_what_ranks_were_doing() -> None:
    beats = [
        RankBeat(job_id="j", restart_count=0, rank=0, time=0.0, step=40, activity="COLLECTIVE", since=3.14,
                 collective="all_reduce"),
        RankBeat(job_id="j", restart_count=0, rank=1, time=0.0, step=0, activity="CELL", since=3.0),
    ]  # fmt: skip
    context = cell(beats, 0.5, interrupt(), ranks=(0, 1))
    assert context.job_.calls[-1] == ("interrupt", (0, 1))
    assert context.error._render_traceback_() == [
        "cell left; cells-1 and its ranks live on\n"
        "  rank 0 was in all_reduce for 3.6 s, step 40\n"
        "  rank 1 was in the cell for 3.5 s"
    ]
    assert isinstance(context.error, KeyboardInterrupt)


def test_every_activity_has_words() -> None:
    from workbench.blackbox import Activity

    for activity in Activity:
        beat = RankBeat(job_id="j", restart_count=0, rank=0, time=0.0, step=0, activity=activity.name, since=1.0)
        assert doing(beat).islower()


def test_the_cell_waits_for_ranks_that_start_and_says_why() -> None:
    session = FakeSession("cells-1")
    job, context = session.known["cells-1"], context_of(session)
    spec = JobSpec(kind=EntrypointKind.INTERACTIVE, nproc_per_node=2)
    job.script = [
        update(state("cells-1", JobPhase.INIT, spec=spec, reason="waiting: needs 2 slots, 1 free")),
        update(state("cells-1", JobPhase.LAUNCHING, spec=spec), 2),
        update(state("cells-1", spec=spec), 3),
    ]
    job.cell = [[answer(0), answer(1)]]
    run_cell(context, job, "x", None)
    assert context.screen.shown == [("update", "cells-1: waiting: needs 2 slots, 1 free")]
    assert job.calls == [("execute", "x", None)]


def test_an_interrupt_while_ranks_start_sends_nothing() -> None:
    session = FakeSession("cells-1")
    job, context = session.known["cells-1"], context_of(session)
    starting = update(state("cells-1", JobPhase.LAUNCHING))
    job.script = [starting, KeyboardInterrupt(), update(state("cells-1"))]
    with pytest.raises(WaitInterrupted, match="the cell was not sent"):
        run_cell(context, job, "x", None)
    assert job.calls == []


def test_a_job_that_has_ended_is_told_with_what_to_do() -> None:
    session = FakeSession("cells-1")
    job = session.known["cells-1"]
    job.script = [update(state("cells-1", JobPhase.FAILED, reason="rank 1 exited with code 3"))]
    with pytest.raises(UsageError, match=r"is FAILED: rank 1 .*start another with: %dtrain launch --interactive -n 2"):
        run_cell(context_of(session), job, "x", None)
    assert job.calls == []


def test_ranks_that_have_not_begun_the_cell_are_named_once() -> None:
    def beat(rank: int, activity: str, since: float) -> RankBeat:
        return RankBeat(job_id="j", restart_count=0, rank=rank, time=0.0, step=0, activity=activity, since=since)

    beats = [beat(0, "CELL", 7.0), beat(1, "IDLE", 9.0)]
    context = cell(beats, beats, [answer(1)], [answer(0)])
    assert context.screen.text("err") == "[rank 0 still in an earlier cell; to free: interrupt this one]\n"
    assert cell([beat(0, "CELL", 0.1)], 2.0, [beat(0, "CELL", 2.1)], [answer(0), answer(1)]).screen.shown == []


def test_values_of_many_ranks_are_bounded() -> None:
    session = FakeSession("cells-1")
    job, context = session.known["cells-1"], context_of(session)
    job.cell = [[answer(k, str(k) * 30_000) for k in range(70)]]
    run_cell(context, job, "x", tuple(range(70)))
    (text,) = [bundle["text/plain"] for kind, bundle in context.screen.shown if kind == "display"]
    assert text.endswith("… and 6 more; to fetch them: %dtrain pull")
    assert len(text) < 64 * 20_100

"""What each verb asks of the pool, gives back and says."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_views_story import RECOVERED

from tests.unit.fake_session import FakeSession, context_of, state, update
from workbench.errors import PoolUnavailableError, RankFailedError, UsageError
from workbench.feed import Cursor
from workbench.state import Checkpoint, JobPhase
from workbench.verbs.context import WaitInterrupted
from workbench.verbs.table import run

SAVED = Path(__file__).parents[1] / "data" / "saved_session_v1" / "run.dtrain"


def do(context: Any, line: str) -> Any:
    return run(context, line.split())


# --- dashboard --------------------------------------------------------------------------------------------------------


def test_a_notebook_shows_the_pages_in_the_cell_and_no_link() -> None:
    context = context_of(FakeSession("a-1", running=["b-1"]))
    shown = do(context, "dashboard").value._repr_mimebundle_()
    assert "dtrain-job" in shown["text/html"] and "a-1" in shown["text/html"] and "b-1" in shown["text/plain"]
    assert do(context, "dashboard b-1").value.job_id == "b-1"
    for options in ("--read-only", "--no-browser", "--port 8080"):
        with pytest.raises(UsageError, match="in the cell"):
            do(context, f"dashboard {options}")
    with pytest.raises(UsageError, match="pools of this machine"):
        do(context_of(FakeSession("a-1")), "dashboard --address tls://h:1")


def test_a_notebook_shows_a_saved_session_and_asks_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.saved import session as saved

    shown: list[Path] = []
    monkeypatch.setattr(saved, "show_live", lambda path, start=False: shown.append((path, start)) or "run-1")
    context = context_of(FakeSession())
    job = do(context, f"dashboard {SAVED}").value
    assert shown == [(SAVED, True)] and job.job_id == "trial-1"  # the only one in it
    bundle = job._repr_mimebundle_()
    assert 'data-dtrain-page="job?id=run-1%3Atrial-1"' in bundle["text/html"] and "%dtrain logs" not in str(bundle)
    whole = job.session._repr_mimebundle_()
    assert 'data-dtrain-page="?file=run-1"' in whole["text/html"] and "run.dtrain: saved" in whole["text/plain"]
    assert do(context, f"dashboard {SAVED}:trial").value.job_id == "trial-1"
    monkeypatch.setattr(saved, "show_live", lambda path, start=False: "")
    assert "<script" not in job._repr_mimebundle_()["text/html"] + job.session._repr_mimebundle_()["text/html"]
    with pytest.raises(UsageError, match="in the cell"):
        do(context, f"dashboard {SAVED} --port 8080")


# --- which pool, which job --------------------------------------------------------------------------------------------


def test_a_session_is_opened_once_and_only_up_and_launch_start_a_pool() -> None:
    context = context_of(FakeSession("a-1"))
    do(context, "jobs")
    do(context, "up")
    assert context.opened == [(None, "default", None, False)]
    other = context_of(FakeSession("a-1"))
    do(other, "launch train.py")
    assert other.opened == [(None, "default", None, True)]


def test_another_pool_becomes_the_current_one() -> None:
    session = FakeSession("a-1")
    context = context_of(session)
    context.job_id = "a-1"
    do(context, "up -n 3 --name night")
    do(context, "jobs")
    do(context, "jobs --address tls://h:1")
    assert context.opened == [(None, "night", 3, True), ("tls://h:1", "default", None, False)]
    assert context.job_id == ""


def test_a_pool_that_is_gone_is_looked_for_anew() -> None:
    session = FakeSession("a-1")
    context = context_of(session)
    do(context, "jobs")
    session.is_gone = True
    with pytest.raises(PoolUnavailableError):
        run(context_with_dead_opener(context), ["jobs"])
    assert session.is_closed


def context_with_dead_opener(context: Any) -> Any:
    def opener(*_: Any, **__: Any) -> Any:
        raise PoolUnavailableError("pool default does not run", hint="start it with: %dtrain up")

    context.opener = opener
    return context


def test_environment_names_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_POOL", "night")
    context = context_of(FakeSession())
    do(context, "jobs")
    assert context.opened[0][1] == "night"


def test_which_job_is_meant() -> None:
    one = context_of(FakeSession("old-1", "old-2", running=["run-1"]))
    assert "run-1" in do(one, "status").text
    assert "old-2" in do(one, "status old-2").text
    do(one, "attach old-1")
    assert "old-1" in do(one, "status").text

    two = context_of(FakeSession(running=["run-1", "run-2"]))
    with pytest.raises(UsageError, match=r"which job\? 2 jobs run \(give one of: run-1, run-2\)"):
        do(two, "status")
    none = context_of(FakeSession("old-2", "old-1"))
    assert "old-2" in do(none, "status").text, "the newest that has ended"
    with pytest.raises(UsageError, match="launch one with"):
        do(context_of(FakeSession()), "status")


def test_quiet_leaves_out_what_only_says_that_it_was_done() -> None:
    context = context_of(FakeSession(running=["run-1"]))
    assert do(context, "cancel").text and not do(context, "cancel --quiet").text
    assert do(context, "status --quiet").text, "that was asked for"


# --- launch -----------------------------------------------------------------------------------------------------------


def test_launch_gives_the_job_and_passes_only_what_was_said() -> None:
    session = FakeSession()
    context = context_of(session)
    outcome = do(context, "launch train.py -n 2 --env A=1 --env B=2 --preload x,y -- --lr 0.1")
    assert outcome.value.job_id == context.job_id == "new-1"
    (fields,) = session.launched
    assert fields == {
        "entrypoint": "train.py",
        "args": ("--lr", "0.1"),
        "nproc_per_node": 2,
        "env": {"A": "1", "B": "2"},
        "preload": ("x", "y"),
    }
    assert context.screen.shown == []
    assert context.interactive_id == ""


def test_launch_of_a_module_and_of_ranks_that_wait() -> None:
    session = FakeSession()
    context = context_of(session)
    do(context, "launch -m pkg.train --cold")
    do(context, "launch -i -n 2")
    assert session.launched == [{"entrypoint": None, "args": (), "module": "pkg.train", "cold": True}, {
        "entrypoint": None, "args": (), "interactive": True, "nproc_per_node": 2}]  # fmt: skip
    assert context.interactive_id == "new-1"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("launch -n 2", "nothing to launch"),
        ("launch -i train.py", "SCRIPT and --interactive were given"),
        ("launch -m a -- b", ""),
        ("launch -i --wait", "no end to wait for"),
    ],
)
def test_launch_of_nothing_or_of_two_things(line: str, words: str) -> None:
    session = FakeSession()
    if not words:
        do(context_of(session), line)
        return
    with pytest.raises(UsageError, match=words):
        do(context_of(session), line)
    assert session.launched == []


def test_a_shell_is_told_the_id_at_once() -> None:
    session = FakeSession()
    context = context_of(session, shell=True)
    outcome = do(context, "launch train.py")
    assert context.screen.shown == [("out", "new-1\n")]
    assert outcome.text == ""
    assert do(context, "launch train.py --json").document["job_id"] == "new-1"
    assert len(context.screen.shown) == 1


def test_a_pool_that_was_started_is_said_unless_quiet() -> None:
    session = FakeSession()
    session.was_started = True
    context = context_of(session)
    do(context, "launch train.py -- --lr 1")
    assert context.screen.shown == [("out", "pool default started\n")]
    context = context_of(session)
    do(context, "launch -q train.py")
    assert context.screen.shown == []


# --- waiting ----------------------------------------------------------------------------------------------------------


def script(*phases: JobPhase, **fields: Any) -> list[Any]:
    return [update(state("run-1", phase, **fields), at) for at, phase in enumerate(phases, 1)]


def waiting(context: Any, session: FakeSession, updates: list[Any], line: str = "wait") -> Any:
    session.known["run-1"].script = updates
    return do(context, line)


def test_wait_shows_progress_and_ends_with_the_job() -> None:
    session = FakeSession(running=["run-1"])
    context = context_of(session, shell=True)
    outcome = waiting(context, session, script(*[JobPhase.HEALTHY] * 200, JobPhase.SUCCEEDED, reason="all ended well"))
    assert (outcome.code, outcome.text) == (0, "run-1 SUCCEEDED: all ended well")
    shown = context.screen.shown
    assert {kind for kind, _ in shown} == {"update"}
    assert 4 <= len(shown) <= 20 / 5 + 3
    assert session.clock() < 25


def test_a_notebook_is_not_told_the_end_twice() -> None:
    session = FakeSession(running=["run-1"])
    context = context_of(session)
    outcome = waiting(context, session, script(JobPhase.SUCCEEDED, reason="all ended well"))
    assert (outcome.value, outcome.text) == (None, "")
    assert "SUCCEEDED" in context.screen.shown[-1][1]


def test_wait_is_quiet_when_asked() -> None:
    session = FakeSession(running=["run-1"])
    context = context_of(session)
    waiting(context, session, script(JobPhase.HEALTHY, JobPhase.SUCCEEDED), "wait -q")
    assert context.screen.shown == []


def test_wait_raises_what_the_job_failed_of() -> None:
    session = FakeSession(running=["run-1"])
    session.known["run-1"].error = RankFailedError("rank 1 exited with code 3", job_id="run-1", rank=1)
    with pytest.raises(RankFailedError, match="rank 1 exited") as caught:
        waiting(context_of(session), session, script(JobPhase.FAILED))
    assert caught.value.document["phase"] == "FAILED"  # type: ignore[attr-defined]


def test_a_stopped_job_is_not_a_success() -> None:
    session = FakeSession(running=["run-1"])
    outcome = waiting(context_of(session, shell=True), session, script(JobPhase.STOPPED, reason="cancelled by ana"))
    assert (outcome.code, outcome.text) == (1, "run-1 STOPPED: cancelled by ana")


def test_wait_has_a_limit() -> None:
    session = FakeSession(running=["run-1"])
    outcome = waiting(context_of(session), session, script(JobPhase.HEALTHY), "wait --timeout 3")
    assert (outcome.code, outcome.text) == (1, "run-1 is still HEALTHY after 3 s; it goes on")
    assert 3 <= session.clock() < 4.5


def test_an_interrupt_ends_the_waiting_and_nothing_else() -> None:
    session = FakeSession(running=["run-1"])
    session.known["run-1"].script = [*script(JobPhase.HEALTHY), KeyboardInterrupt()]
    with pytest.raises(WaitInterrupted) as caught:
        do(context_of(session), "wait")
    assert caught.value._render_traceback_() == ["stopped waiting; run-1 goes on"]
    assert session.known["run-1"].calls == []


def test_a_terminal_gets_a_table_and_a_notebook_the_job() -> None:
    session = FakeSession(running=["run-1"])
    context = context_of(session, shell=True, redraws=True, interval=0.25)
    waiting(context, session, script(JobPhase.HEALTHY, JobPhase.SUCCEEDED), "top")
    assert "\n" in context.screen.shown[0][1]
    assert do(context_of(session), "top run-1").value is session.known["run-1"]


# --- output -----------------------------------------------------------------------------------------------------------


def test_logs_of_one_rank_are_as_printed_and_of_all_are_labelled() -> None:
    session = FakeSession(running=["run-1"])
    session.known["run-1"].pages = {0: "a\nb\n", 1: "c\n"}
    context = context_of(session)
    assert do(context, "logs -r 0 --tail 7 --grep loss").text == "a\nb"
    assert session.known["run-1"].calls == [("log_page", 0, 7, "loss", 0)]
    outcome = do(context, "logs")
    assert outcome.text == "[rank 0] a\n[rank 0] b\n[rank 1] c"
    assert outcome.document == {"job_id": "run-1", "ranks": {"0": "a\nb\n", "1": "c\n"}}


def test_attach_in_a_shell_is_the_whole_output_and_then_what_comes() -> None:
    session = FakeSession(running=["run-1"])
    job = session.known["run-1"]
    job.pages = {0: "old 1\n\rold 1\rold 2\n" + "y" * 300_000 + "\n", 1: "x"}
    job.page = 131_072
    job.script = script(JobPhase.HEALTHY, JobPhase.HEALTHY, JobPhase.SUCCEEDED, reason="well")
    context = context_of(session, shell=True)
    first = job.follow

    def follow(cursor: Cursor | None = None, timeout: float = 10.0) -> Any:
        found = first(cursor, timeout)
        if found.state.phase is JobPhase.SUCCEEDED:
            job.pages[0] += "new\n"
        return found

    job.follow = follow  # type: ignore[method-assign]
    outcome = do(context, "attach")
    assert outcome.code == 0
    long = "y" * 300_000
    shown = f"[rank 0] old 1\n[rank 0] old 2\n[rank 0] {long}\n[rank 0] new\n[rank 1] x\n"
    assert context.screen.text("out") == shown
    assert context.screen.text("err") == "run-1 SUCCEEDED: well\n"


def test_following_begins_with_the_tail_and_can_be_left() -> None:
    session = FakeSession(running=["run-1"])
    job = session.known["run-1"]
    job.pages, job.script = {0: "end of it\nhalf"}, [*script(JobPhase.HEALTHY), KeyboardInterrupt()]
    context = context_of(session, shell=True)
    with pytest.raises(WaitInterrupted, match="left run-1; it goes on"):
        do(context, "logs -r 0 -f --tail 2")
    assert job.calls[0] == ("log_page", 0, 2, None, 0)
    assert all(call[2] is None for call in job.calls[1:])
    assert context.screen.text("out") == "[rank 0] end of it\n[rank 0] half\n"
    with pytest.raises(UsageError, match="has no end"):
        do(context, "logs -f --json")


def test_attach_in_a_notebook_gives_the_job() -> None:
    session = FakeSession("old-1")
    context = context_of(session)
    assert do(context, "attach old").value is session.known["old-1"]
    assert context.job_id == "old-1"


def test_stacks_that_are_the_same_are_shown_once() -> None:
    session = FakeSession(running=["run-1"])
    session.known["run-1"].stack_texts = {0: "wait\n", 1: "main", 2: "wait\n"}
    outcome = do(context_of(session), "stacks")
    assert outcome.text == "--- ranks 0, 2 ---\nwait\n\n--- rank 1 ---\nmain"
    assert outcome.document["stacks"] == {"0": "wait\n", "1": "main", "2": "wait\n"}
    assert do(context_of(session), "stacks -r 1").text == "--- rank 1 ---\nmain"


def test_a_timeline_is_told_in_full() -> None:
    session = FakeSession(running=["run-1"])
    session.known["run-1"].script = [update(state("run-1"), events=tuple(RECOVERED), now=9.0)]
    outcome = do(context_of(session), "timeline")
    assert outcome.text.startswith("timeline of run-1 · until now 9.0 s\n1 restart · 1 step lost\n")
    assert outcome.value == outcome.text and "X dead" in outcome.text
    document = msgspec.json.decode(msgspec.json.encode(outcome.document))
    assert document["attempts"][0]["cause"]["reason"] == "rank 1 killed by SIGKILL at step 10"
    assert document["lost_steps"] == 1
    assert document["goodput"] == {**document["goodput"], "goodput": None, "ettr": None}
    in_status = do(context_of(session), "status")
    assert in_status.document["timeline"] == outcome.document
    assert "→ restart 1 of 3" in in_status.text and "\n  → back after 0.6 s, 1 step lost\n" in in_status.text


# --- acts -------------------------------------------------------------------------------------------------------------


def test_resume_and_resize() -> None:
    session = FakeSession("old-1", running=["run-1"])
    context = context_of(session)
    old, running = session.known["old-1"], session.known["run-1"]
    old.script = [update(state("old-1", JobPhase.FAILED, reason="rank 1 killed by SIGKILL"))]
    outcome = do(context, "resume old-1 --step 400 -n 3")
    assert outcome.text.startswith("old-1 RECOVERING") and outcome.value is old
    assert old.calls[-1] == ("resume", 400, 3, "")
    do(context, "resume old-1")
    assert old.calls[-1] == ("resume", None, None, "")
    assert do(context, "resume run-1").text.startswith("run-1 runs: ")
    assert not any(call[0] == "resume" for call in running.calls)
    do(context, "resize 4 run-1")
    assert running.calls[-1] == ("resize", 4)


def test_cancel_inject_and_interrupt() -> None:
    session = FakeSession("old-1", running=["run-1"])
    job, context = session.known["run-1"], context_of(session)
    assert do(context, "cancel --force").text == "run-1 STOPPING"
    assert job.calls[-1][:2] == ("cancel", True)
    do(context, "cancel")
    assert job.calls[-1][:2] == ("cancel", False)
    assert do(context, "inject reorder -r 1").text == ("reorder awaits rank 1 of run-1: at the rank's next collective")
    assert do(context, "inject stop -r 1").text == "stop done to rank 1 of run-1"
    assert job.calls[-1] == ("inject", "stop", 1)
    assert do(context, "interrupt -r 0,1").text == "interrupted the cell on ranks 0–1 of run-1"
    assert job.calls[-1] == ("interrupt", (0, 1))
    session.known["old-1"].script = [update(state("old-1", JobPhase.FAILED))]
    assert do(context, "cancel old-1").text == "old-1 had ended already: FAILED"
    assert session.known["old-1"].calls == []


def test_push_takes_a_variable_or_a_literal() -> None:
    session = FakeSession(running=["run-1"])
    job, context = session.known["run-1"], context_of(session)
    context.namespace["batch"] = [1, 2]
    do(context, "push batch -r 1")
    assert job.calls[-1] == ("push", "batch", [1, 2], (1,))
    do(context, "push lr=0.1")
    assert job.calls[-1] == ("push", "lr", 0.1, None)
    for line, words in [
        ("push bach", "no variable 'bach' here .*did you mean batch"),
        ("push 1x", "is no variable name"),
        ("push x=f(1)", "is no literal"),
    ]:
        with pytest.raises(UsageError, match=words):
            do(context, line)
    with pytest.raises(UsageError, match="a shell has no variables"):
        do(context_of(session, shell=True), "push x")


def test_pull_binds_and_returns() -> None:
    session = FakeSession(running=["run-1"])
    session.known["run-1"].values = {0: 1.5, 1: 2.5}
    context = context_of(session)
    assert do(context, "pull loss -r 1").value == context.namespace["loss"] == 2.5
    assert do(context, "pull loss").value == context.namespace["loss"] == {0: 1.5, 1: 2.5}
    assert do(context, "pull loss*2").value == {0: 1.5, 1: 2.5}
    assert list(context.namespace) == ["loss"]
    assert do(context_of(session, shell=True), "pull loss").text == "[rank 0] 1.5\n[rank 1] 2.5"


# --- lists ------------------------------------------------------------------------------------------------------------


def test_jobs_are_a_list_that_shows_itself() -> None:
    session = FakeSession(*(f"job-{k}" for k in range(30)))
    outcome = do(context_of(session), "jobs")
    assert len(outcome.value) == 20
    assert "older ones: %dtrain jobs --all" in outcome.value.table
    kept, told = (do(context_of(session, shell=is_shell), "jobs").text.splitlines()[1] for is_shell in (False, True))
    launched = time.localtime(session.jobs()[0].submitted_at)
    assert time.strftime("%Y-%m-%d %H:%M ", launched) in kept and "ago" not in kept  # a notebook is read again later
    assert re.search(r"\d\d:\d\d, [\d,]+ d ago ", told)
    assert len(do(context_of(session), "jobs --all").value) == 30
    assert len(do(context_of(session), "jobs --limit 30").value) == 30
    none = do(context_of(session), "jobs --phase failed")
    assert (none.value, none.text) == ([], "no job is FAILED; all there are: %dtrain jobs")
    assert "start one with: %dtrain launch" in do(context_of(FakeSession()), "jobs").text


def test_pool_status_of_a_pool_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    context = context_with_dead_opener(context_of(FakeSession()))
    outcome = do(context, "pool status")
    assert (outcome.code, outcome.text) == (1, "pool default does not run; start it with: %dtrain up")
    assert outcome.document == {"name": "default", "running": False}
    assert do(context, "down").text == "pool default did not run"
    assert "start one with" in do(context, "pool list").text or do(context, "pool list").value


def test_every_document_can_be_encoded() -> None:
    session = FakeSession("old-1", running=["run-1"])
    session.known["run-1"].pages = {0: "a"}
    context = context_of(session)
    session.known["run-1"].script = [update(state("run-1"), events=tuple(RECOVERED), now=9.0)]
    for line in ("jobs", "status", "timeline", "up", "pool", "logs", "stacks", "version", "cancel", "pull x",
                 "inject kill -r 0", "interrupt -r 1", "push x=1", "launch t.py"):  # fmt: skip
        assert msgspec.json.encode(do(context, line).document) not in (b"null", b""), line


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_how_often_checkpoints_are_made_is_steps_or_a_time() -> None:
    session = FakeSession()
    context = context_of(session)
    do(context, "launch --checkpoint-every 100 --checkpoint-dir out --checkpoint-keep 5 train.py")
    do(context, "launch --checkpoint-every 5m train.py")
    steps, time = session.launched
    assert (steps["checkpoint_every"], steps["checkpoint_seconds"]) == (100, 0.0)
    assert (steps["checkpoint_dir"], steps["checkpoint_keep"]) == ("out", 5)
    assert (time["checkpoint_every"], time["checkpoint_seconds"]) == (0, 300.0)
    assert "checkpoint_dir" not in time
    with pytest.raises(UsageError, match="steps, such as 100, or a time"):
        do(context, "launch --checkpoint-every often train.py")


def test_checkpoints_are_listed_with_what_is_wrong() -> None:
    session = FakeSession(running=["a-1"])
    context = context_of(session)
    outcome = do(context, "checkpoints")
    assert "no checkpoint" in outcome.text and outcome.document == [] and outcome.code == 0
    good = Checkpoint(step=400, path="/c/step-00000400", world_size=2, saved_at=1.0, size=2**20)
    bad = Checkpoint(step=410, path="/c/step-00000410", world_size=0, saved_at=0.0, problem="manifest.json is missing")
    session.known["a-1"].checkpoints = [bad, good]
    outcome = do(context, "checkpoints a-1 --verify")
    assert session.known["a-1"].calls == [("verify_checkpoints",)]
    assert "manifest.json is missing" in outcome.text and "whole" in outcome.text and "1.05 MB" in outcome.text
    assert [line["step"] for line in outcome.document] == [410, 400] and list(outcome.value) == [bad, good]
    session.known["a-1"].checkpoints = [bad]
    assert do(context, "checkpoints").code == 1

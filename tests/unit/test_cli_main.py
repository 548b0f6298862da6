"""The command line's contract: exit codes, streams, one JSON document, no traceback."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest

import workbench.verbs.context as context_module
from tests.unit.fake_session import FakeSession, state, update
from workbench import cli
from workbench.errors import NotEnoughSlotsError, RankFailedError
from workbench.state import JobPhase
from workbench.verbs.screen import TerminalScreen


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    """Every session of the command line is this one, and time is its clock's."""
    fake = FakeSession("old-1", running=["run-1"])
    real = context_module.Context

    def make(**fields: Any) -> Any:
        return real(**fields, opener=lambda *_, **__: fake, clock=fake.clock, sleep=fake.clock.sleep)

    monkeypatch.setattr(cli, "Context", make)
    return fake


def finish(session: FakeSession, phase: JobPhase, error: Any = None) -> None:
    """The next job that is launched ends so."""
    launch = session.launch

    def launched(*words: Any, **options: Any) -> Any:
        job = launch(*words, **options)
        job.script = [update(state("new-1")), update(state("new-1", phase, reason="because"), 2)]
        job.error = error
        return job

    session.launch = launched  # type: ignore[method-assign]


def test_launch_prints_the_id(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "train.py", "--nproc-per-node", "2", "--name", "x", "--", "--json", "#1"]) == 0
    assert capsys.readouterr() == ("new-1\n", "")
    assert session.launched[0]["args"] == ("--json", "#1")
    assert session.is_closed


def test_wait_ends_with_0_only_on_success(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    finish(session, JobPhase.SUCCEEDED)
    assert cli.main(["launch", "train.py", "--wait"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "new-1"
    assert out.splitlines()[-1] == "new-1 SUCCEEDED: because"
    assert err == ""


def test_wait_ends_with_1_and_the_reason(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    error = RankFailedError("rank 1 raised ValueError: bad", job_id="new-1", rank=1, traceback="Traceback\nValueError")
    finish(session, JobPhase.FAILED, error)
    assert cli.main(["launch", "train.py", "--wait"]) == 1
    assert capsys.readouterr().err == "Traceback\nValueError\ndtrain: rank 1 raised ValueError: bad\n"
    finish(session, JobPhase.STOPPED)
    assert cli.main(["launch", "train.py", "--wait", "-q"]) == 1
    assert capsys.readouterr().out == "new-1\nnew-1 STOPPED: because\n"


@pytest.mark.parametrize("phase", [JobPhase.SUCCEEDED, JobPhase.FAILED])
def test_json_is_one_document(session: FakeSession, capsys: pytest.CaptureFixture[str], phase: JobPhase) -> None:
    error = RankFailedError("rank 1", job_id="new-1", rank=1) if phase is JobPhase.FAILED else None
    finish(session, phase, error)
    code = cli.main(["launch", "train.py", "--wait", "--json"])
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (document["job_id"], document["phase"]) == ("new-1", phase.value)
    assert ("error" in document) is (code == 1)
    assert "new-1" in err


@pytest.mark.parametrize("line", ["jobs", "status", "pool status", "pool list", "logs", "stacks", "version", "up"])
def test_every_report_has_a_document(session: FakeSession, capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert cli.main([*line.split(), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) is not None
    assert err == ""


def test_errors_are_a_line_and_a_hint(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "nope"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "dtrain: no job 'nope' in pool default",
        "  did you mean one of: ['old-1', 'run-1']",
    ]
    assert cli.main(["lanch"]) == 2
    assert "did you mean launch?" in capsys.readouterr().err

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotEnoughSlotsError("needs 64 slots", hint="see %dtrain pool")

    session.launch = refuse  # type: ignore[method-assign]
    assert cli.main(["launch", "t.py"]) == 1
    assert capsys.readouterr().err == "dtrain: needs 64 slots\n  see dtrain pool\n"


def test_an_error_is_a_document_too(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "nope", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "UnknownJobError"
    assert cli.main(["status", "--jsn", "--json"]) == 2
    assert "--jsn" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_bug_is_told_shortly_and_wholly_with_debug(
    session: FakeSession, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session.pool_status = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    assert cli.main(["pool"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err
    assert "Traceback" not in err
    monkeypatch.setenv("DTRAIN_DEBUG", "1")
    cli.main(["pool"])
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_says_that_the_job_goes_on(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    session.known["run-1"].script = [update(state("run-1")), KeyboardInterrupt()]
    assert cli.main(["wait", "run-1"]) == 130
    assert capsys.readouterr().err == "dtrain: stopped waiting; run-1 goes on\n"


def test_nothing_is_help_and_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "launch" in err
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: dtrain VERB")
    assert cli.main(["logs", "-h"]) == 0
    assert capsys.readouterr().out.startswith("usage: dtrain logs [JOB] [options]\n")
    assert cli.main(["help", "pool", "list"]) == 0
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("dtrain-workbench ")


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh"):
        assert cli.main(["completion", shell]) == 0
        assert "dtrain complete --" in capsys.readouterr().out
    assert cli.main(["completion", "fish"]) == 2
    capsys.readouterr()
    assert cli.main(["complete", "--", "la"]) == 0
    assert cli.main(["complete", "--", "launch", "--nproc"]) == 0
    assert cli.main(["complete"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["launch", "--nproc-per-node"]


# --- the screen -------------------------------------------------------------------------------------------------------


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_redrawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    tty = Tty()
    screen = TerminalScreen(tty, tty)
    assert screen.redraws
    assert screen.has_color
    screen.update("a\nb")
    screen.update("c")
    assert tty.getvalue() == "\ra\x1b[K\nb\x1b[K\n\x1b[J" + "\x1b[2Fc\x1b[K\n\x1b[J"
    screen.write("done\n")
    screen.update("d")
    assert tty.getvalue().endswith("done\n\rd\x1b[K\n\x1b[J")
    screen.update("\n".join(map(str, range(500))))
    assert "more lines" in tty.getvalue()
    assert tty.getvalue().count("\n") < 60


def test_a_pipe_gets_lines_and_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, errors = io.StringIO(), io.StringIO()
    screen = TerminalScreen(pipe, errors)
    screen.update("a")
    screen.update("b")
    screen.write("c\n", is_error=True)
    assert (pipe.getvalue(), errors.getvalue()) == ("a\nb\n", "c\n")
    monkeypatch.setenv("TERM", "dumb")
    assert not TerminalScreen(Tty()).redraws
    assert TerminalScreen(pipe, errors, progress_to_error=True).out is errors


# --- as a process -----------------------------------------------------------------------------------------------------


def test_the_module_runs_and_a_closed_pipe_is_quiet() -> None:
    code = "import sys; sys.argv = ['dtrain', 'help']; import workbench.cli as c; raise SystemExit(c.main())"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(30) == cli.BROKEN_PIPE
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    done = subprocess.run([sys.executable, "-m", "workbench", "version"], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")

"""Notes of failures, recoveries and ends: what is in them, where they go, and that nothing secret is kept."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from workbench.events import FailureDetected, PhaseChanged, RecoveryFinished, StallDetected, Ticked
from workbench.runner import notify
from workbench.runner.notify import Notifier, deliver, note_of, targets_of
from workbench.spec import JobSpec
from workbench.state import Failure, FailureKind, JobPhase, JobState, Stall, StallKind

FAILURE = Failure(kind=FailureKind.SIGNAL, rank=1, reason="rank 1 killed by SIGKILL at step 41", time=9.0, step=41)
STATE = JobState(job_id="a-1", spec=JobSpec(), phase=JobPhase.RECOVERING, reason="restart 1 of 3", restart_count=1)
NOTE: dict[str, Any] = {"what": "failure", "job_id": "a-1"}


def told(event: Any, state: JobState = STATE) -> Any:
    return note_of(event, state, lambda: 77)


def test_a_note_says_what_to_whom_and_when() -> None:
    note = told(FailureDetected(time=9.5, restart_count=0, failure=FAILURE))
    assert note == {
        "what": "failure",
        "job_id": "a-1",
        "phase": "RECOVERING",
        "reason": FAILURE.reason,
        "rank": 1,
        "step": 41,
        "restart_count": 1,
        "time": 9.5,
    }


def test_stalls_recoveries_and_ends_are_told_and_nothing_else() -> None:
    stall = Stall(kind=StallKind.STOPPED, ranks=(2, 3), reason="rank 2 stands still", since=1.0, step=8)
    note = told(StallDetected(time=2.0, restart_count=1, stall=stall))
    assert (note["what"], note["rank"], note["step"], note["reason"]) == ("stall", 2, 8, "rank 2 stands still")
    note = told(RecoveryFinished(time=2.0, restart_count=1))
    assert (note["what"], note["rank"], note["step"], note["reason"]) == ("recovery", None, 77, "restart 1 of 3")
    end = PhaseChanged(time=3.0, phase=JobPhase.FAILED, reason="no restart left", restart_count=1)
    assert told(end)["what"] == "end" and told(end)["reason"] == "no restart left"
    assert told(PhaseChanged(time=3.0, phase=JobPhase.HEALTHY, reason="", restart_count=1)) is None
    assert told(Ticked(time=3.0)) is None


def test_the_launchers_environment_comes_before_the_file(tmp_path: Path) -> None:
    assert targets_of({}, tmp_path) == ()
    (tmp_path / "notify").write_text("# mine\n\nhttps://x/y\n  notify-send dtrain\n")
    assert targets_of({}, tmp_path) == ("https://x/y", "notify-send dtrain")
    assert targets_of({"DTRAIN_NOTIFY": " cat "}, tmp_path) == ("cat",)


def test_a_command_gets_json_in_the_launchers_environment(tmp_path: Path) -> None:
    deliver(f"cat > {tmp_path}/$NAME", NOTE, {"NAME": "told"})
    assert json.loads((tmp_path / "told").read_text()) == NOTE


def test_a_command_that_fails_or_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ChildProcessError, match="ended with 3"):
        deliver("exit 3", NOTE, {})
    monkeypatch.setattr(notify, "RUN", 0.1)
    with pytest.raises(TimeoutError, match=r"did not end within 0\.1 s"):
        deliver("sleep 60 | cat", NOTE, {})


class Hook(BaseHTTPRequestHandler):
    """Answers with what `statuses` has next, 200 when it has nothing."""

    statuses: list[int]
    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.statuses.pop(0) if self.statuses else 200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[tuple[str, type[Hook]]]:
    """A server of this machine, and what it was told."""
    handler = type("Handler", (Hook,), {"statuses": [], "bodies": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/secret", handler
        server.shutdown()
        thread.join()


def test_a_web_address_is_tried_three_times(hook: tuple[str, type[Hook]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "PAUSES", (0.0, 0.0))
    url, handler = hook
    handler.statuses = [500, 503]
    deliver(url, NOTE, {})
    assert [json.loads(body) for body in handler.bodies] == [NOTE] * 3
    handler.statuses = [500, 503, 404]
    with pytest.raises(ConnectionError) as error:
        deliver(url, NOTE, {})
    assert str(error.value) == "127.0.0.1 answers 404", "the address may be a secret"


def test_notes_are_delivered_in_order_and_trouble_is_logged_without_the_address(
    hook: tuple[str, type[Hook]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify, "PAUSES", ())
    url, handler = hook
    notifier = Notifier(lambda: 0.0)
    with caplog.at_level(logging.INFO):
        notifier.tell("http://127.0.0.1:1/token", NOTE, {})
        for number in range(3):
            notifier.tell(url, {**NOTE, "step": number}, {})
        notifier.tell("echo heard", NOTE, {})
        notifier.close(10.0)
    assert [json.loads(body)["step"] for body in handler.bodies] == [0, 1, 2]
    assert "failure of a-1 was not told: 127.0.0.1" in caplog.text and "the command says: heard" in caplog.text
    assert "token" not in caplog.text and "secret" not in caplog.text
    notifier.tell(url, NOTE, {})
    notifier.close(10.0)
    assert len(handler.bodies) == 4

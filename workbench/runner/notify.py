"""Tells somebody outside of failures, stalls, recoveries and ends: a command, or a web address that gets a POST.

Where to is said by `DTRAIN_NOTIFY` in the launcher's environment, else by the lines of the file `notify` in
DTRAIN_HOME. It may hold a secret, so it is in no record and no log. Nothing here waits: a thread delivers, and what
goes wrong is a line in the scheduler's log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from workbench.events import Event, FailureDetected, PhaseChanged, RecoveryFinished, StallDetected
from workbench.runner.live import LiveJob
from workbench.state import JobState
from workbench.store.home import home_dir

VARIABLE: Final = "DTRAIN_NOTIFY"
FILE: Final = "notify"
ANSWER: Final = 5.0  # s that a web address may take
RUN: Final = 30.0  # s that a command may take
PAUSES: Final = (1.0, 3.0)  # s before each further try of a web address
MOST: Final = 256  # notes that wait; older ones are dropped
SAID: Final = 2000  # bytes of a command's output that are logged
logger = logging.getLogger(__name__)

TOLD: Final = (FailureDetected, StallDetected, RecoveryFinished, PhaseChanged)
Note = dict[str, Any]


def note_of(event: Event, state: JobState, step: Callable[[], int]) -> Note | None:
    """What is told of the event, as JSON will have it; None: nothing. `state` is the job's after it."""
    rank: int | None = None
    at: int | None = None
    match event:
        case FailureDetected():
            what, reason, rank, at = "failure", event.failure.reason, event.failure.rank, event.failure.step
        case StallDetected() if not event.stall.patience:
            what, reason, at = "stall", event.stall.reason, event.stall.step
            rank = event.stall.ranks[0] if event.stall.ranks else None
        case RecoveryFinished():
            what, reason = "recovery", state.reason
        case PhaseChanged() if event.phase.is_terminal:
            what, reason, rank = "end", event.reason, state.failure.rank if state.failure else None
        case _:
            return None
    return {
        "what": what,
        "job_id": state.job_id,
        "phase": state.phase.value,
        "reason": reason,
        "rank": rank,
        "step": step() if at is None else at,
        "restart_count": state.restart_count,
        "time": event.time,
    }


def targets_of(ambient: Mapping[str, str], home: Path) -> tuple[str, ...]:
    """Commands and addresses; `#` begins a line of the file that is none."""
    if own := ambient.get(VARIABLE, "").strip():
        return (own,)
    try:
        lines = (home / FILE).read_text().splitlines()
    except OSError:
        return ()
    return tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


class Notifier:
    """`heard` and `tell` return at once. One thread, which ends when there is nothing to deliver."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._waiting: deque[tuple[str, Note, Mapping[str, str]]] = deque(maxlen=MOST)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def heard(self, job: LiveJob, event: Event) -> None:
        """The job's record has one more event."""
        if not isinstance(event, TOLD):
            return
        note = note_of(event, job.state, lambda: job.summary(self._now()).step)
        if note is not None:
            for target in targets_of(job.ambient, home_dir()):
                self.tell(target, note, job.ambient)

    def tell(self, target: str, note: Note, environ: Mapping[str, str]) -> None:
        """Have it delivered; a command runs with `environ`."""
        with self._lock:
            self._waiting.append((target, note, environ))
            if self._thread is None:
                self._thread = threading.Thread(target=self._deliver_all, name="dtrain-notify", daemon=True)
                self._thread.start()

    def close(self, timeout: float) -> None:
        """Give what still waits so many seconds."""
        if thread := self._thread:
            thread.join(timeout)

    def _deliver_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                target, note, environ = self._waiting.popleft()
            try:
                deliver(target, note, environ)
            except Exception as error:
                logger.warning("%s of %s was not told: %s", note["what"], note["job_id"], error)


def deliver(target: str, note: Note, environ: Mapping[str, str]) -> None:
    """Once, or for a web address up to three times. Raises what went wrong, without the address in it."""
    body = json.dumps(note).encode()
    if target.startswith(("http://", "https://")):
        post(target, body)
    else:
        run(target, body, environ)


def post(url: str, body: bytes) -> None:
    where = urlsplit(url).hostname  # the rest may be a secret
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "dtrain"})
    error = ""
    for pause in (0.0, *PAUSES):
        time.sleep(pause)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER):
                return
        except urllib.error.HTTPError as refused:
            error = f"{where} answers {refused.code}"
            refused.close()
        except (OSError, ValueError) as failed:
            error = f"{where}: {getattr(failed, 'reason', '') or type(failed).__name__}"
    raise ConnectionError(error)


def run(command: str, body: bytes, environ: Mapping[str, str]) -> None:
    """In a shell and a session of its own, the JSON on its standard input; its output goes to the log."""
    process = subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environ},
        start_new_session=True,
    )
    with process:
        try:
            said, _ = process.communicate(body + b"\n", timeout=RUN)  # a line of its own, where it is appended
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started as well: they hold its output open
            process.communicate()
            raise TimeoutError(f"the command did not end within {RUN:g} s") from None
    if said:
        logger.info("the command says: %s", said[-SAID:].decode(errors="replace").rstrip())
    if process.returncode:
        raise ChildProcessError(f"the command ended with {process.returncode}")

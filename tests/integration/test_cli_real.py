"""`dtrain` as a process over a real pool: ids at once, exit codes, one document, the whole output after attaching."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workbench.session import Session
from workbench.state import JobPhase

SCRIPT = """
import os, sys, time
for k in range(int(sys.argv[1])):
    print("line", k, flush=True)
    time.sleep(0.05)
if "--fail" in sys.argv and os.environ["RANK"] == "1":
    raise ValueError("bad batch")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def dtrain(*words: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "workbench", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)


def test_wait_for_success_and_for_failure(session: Session, script: str) -> None:
    done = dtrain("launch", script, "--nproc-per-node", "2", "--name", "well", "--wait", "--", "3")
    assert (done.returncode, done.stderr) == (0, "")
    job_id, *_, last = done.stdout.splitlines()
    assert job_id.startswith("well-")
    assert last == f"{job_id} SUCCEEDED: {session.attach(job_id).reason}"

    done = dtrain("launch", script, "-n", "2", "--wait", "--", "3", "--fail")
    assert done.returncode == 1
    assert "ValueError: bad batch" in done.stderr
    assert "rank 1 raised ValueError: bad batch" in done.stderr
    assert "workbench/" not in done.stderr
    assert "log: " in done.stderr


def test_json_of_everything_is_one_document(session: Session, script: str) -> None:
    done = dtrain("launch", "-n", "2", "--wait", "--json", script, "2")
    launched = json.loads(done.stdout)
    assert (done.returncode, launched["phase"]) == (0, "SUCCEEDED")
    job_id = launched["job_id"]
    for words in (["jobs"], ["status", job_id], ["pool", "status"], ["logs", job_id], ["stacks", job_id], ["version"]):
        done = dtrain(*words, "--json")
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)
    failed = json.loads(dtrain("launch", "-n", "2", "--wait", "--json", script, "2", "--fail").stdout)
    assert failed["phase"] == "FAILED"
    assert "bad batch" in failed["error"]["message"]


def test_the_id_comes_at_once_and_ctrl_c_only_ends_the_waiting(session: Session, script: str) -> None:
    argv = [sys.executable, "-m", "workbench", "launch", script, "-n", "1", "--wait", "--", "1000"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        job_id = process.stdout.readline().strip()
        job = session.attach(job_id)
        assert job.phase in (JobPhase.INIT, JobPhase.LAUNCHING, JobPhase.HEALTHY)
        process.stdout.readline()  # it shows progress, so it waits
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr.read() == f"dtrain: stopped waiting; {job_id} goes on\n"
    assert not job.phase.is_terminal


def test_attach_shows_the_whole_output_then_what_comes(session: Session, script: str) -> None:
    job = session.launch(script, args=["40"], nproc_per_node=2)
    deadline = time.monotonic() + 30
    while "line 10" not in job.logs(rank=0):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    done = dtrain("attach", job.job_id)
    assert done.returncode == 0
    for rank in (0, 1):
        mine = [line for line in done.stdout.splitlines() if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] line {k}" for k in range(40)]
    assert done.stderr == f"{job.job_id} SUCCEEDED: {job.reason}\n"


def test_wrong_requests(session: Session, script: str, tmp_path: Path) -> None:
    near = session.launch(script, args=["1"], nproc_per_node=1, name="resnet")
    for words, code, told in [
        (["attach", "resnt-" + near.job_id[-4:]], 2, near.job_id),
        (["launch", str(tmp_path / "trian.py")], 2, "train.py"),
        (["launch", script, "-n", "0"], 2, "a whole number from 1"),
        (["launch", script, "-n", "64"], 1, "needs 64 slots"),
        (["launch", script, "--name", "a/b"], 2, "cannot be a job name"),
        (["jobs", "--address", "tcp://127.0.0.1:9"], 1, "nothing answers at tcp://127.0.0.1:9"),
        (["logs", near.job_id, "-r", "7"], 2, "no rank 7"),
    ]:
        done = dtrain(*words)
        assert done.returncode == code, (words, done.stderr)
        assert told in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) <= 2


def test_cancel_and_inject(session: Session, script: str) -> None:
    job = session.launch(script, args=["1000"], nproc_per_node=2)
    deadline = time.monotonic() + 30
    while job.phase is not JobPhase.HEALTHY:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert dtrain("inject", "kill", job.job_id, "--rank", "1").returncode == 0
    done = dtrain("wait", job.job_id)
    assert done.returncode == 1
    assert "rank 1 killed by SIGKILL" in done.stderr
    other = session.launch(script, args=["1000"], nproc_per_node=1)
    assert dtrain("cancel", other.job_id, "--force").returncode == 0
    assert other.exception(20) is not None
    assert other.phase is JobPhase.STOPPED


def test_a_pool_from_start_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    assert dtrain("pool", "status").returncode == 1
    assert dtrain("jobs").returncode == 1
    try:
        first = json.loads(dtrain("pool", "start", "-n", "1", "--name", "night", "--json").stdout)
        again = json.loads(dtrain("up", "--name", "night", "--json").stdout)
        assert (first["started"], again["started"]) == (True, False)
        assert first["address"] == again["address"]
        listed = {pool["name"]: pool["running"] for pool in json.loads(dtrain("pool", "list", "--json").stdout)}
        assert listed["night"]
        assert not listed.get("default")
        assert "night" in dtrain("complete", "--", "jobs", "--pool", "").stdout.split()
    finally:
        stopped = dtrain("down", "--name", "night")
    assert stopped.stdout == "pool night stopped\n"
    assert dtrain("pool", "status", "--name", "night").returncode == 1
    assert "DTRAIN_HOME" in os.environ

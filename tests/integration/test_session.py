"""Real jobs on a real pool: launch, watch, fail, wait in the queue, attach."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.integration.conftest import await_phase
from tests.waiting import until
from workbench.errors import (
    JobError,
    NotEnoughSlotsError,
    RankFailedError,
    RestartsExhaustedError,
    SpecError,
    UnknownJobError,
    UsageError,
)
from workbench.events import FailureDetected, RecoveryFinished, RecoveryStarted
from workbench.session import Session
from workbench.state import JobPhase, RankPhase

DDP = """
import os, sys, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    dist.init_process_group("gloo")
    data = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pause = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    for epoch in range(int(sys.argv[1])):
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            time.sleep(pause)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} done")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Write a script and give its path."""

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_ddp_script_runs_and_is_watched(session: Session, script) -> None:  # type: ignore[no-untyped-def]
    job = session.launch(script(DDP), args=["2", "0.02"], nproc_per_node=2)
    assert job.wait(60) is JobPhase.SUCCEEDED
    assert job.job_id.startswith("train-")
    state = job.state
    assert [rank.phase for rank in state.ranks] == [RankPhase.SUCCEEDED] * 2
    assert job.logs(rank=1).strip() == "rank 1 of 2 done"
    assert sorted(job.logs().splitlines()) == ["[rank 0] rank 0 of 2 done", "[rank 1] rank 1 of 2 done"]
    buckets = job.history(width=60.0)
    for rank in (0, 1):
        mine = [bucket for bucket in buckets if bucket.rank == rank]
        assert sum(bucket.steps for bucket in mine) == 64
        assert sum(bucket.samples for bucket in mine) == 64 * 16
        assert max(bucket.last_step for bucket in mine) == 64
    view = job.view()
    assert (view.step, view.world_size) == (64, 2)
    assert view.throughput > 0


def test_module_source_and_function(session: Session, tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "work.py").write_text("import sys; print(__name__, sys.argv[1:])\n")
    job = session.launch(module="pkg.work", args=["a b"], nproc_per_node=1, cwd=str(tmp_path))
    job.wait(30)
    assert job.logs(rank=0).strip() == "__main__ ['a b']"

    cell = session.launch(source="import os\nprint('cell on', os.environ['RANK'])", nproc_per_node=2)
    cell.wait(30)
    assert cell.logs(rank=1).strip() == "cell on 1"

    def work(base: int, factor: int = 1) -> int:
        return (base + int(os.environ["RANK"])) * factor

    assert session.launch(work, args=(10,), kwargs={"factor": 2}, nproc_per_node=2).result(30) == [20, 22]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit(3)", "rank 1 exited with code 3"),
        ("raise ValueError('bad batch')", "rank 1 raised ValueError: bad batch"),
        ("os.kill(os.getpid(), 9)", "rank 1 killed by SIGKILL"),
        ("os.kill(os.getpid(), 11)", "rank 1 killed by SIGSEGV"),
        ("os._exit(7)", "rank 1 exited with code 7"),
    ],
)
def test_a_rank_that_fails_is_named(session: Session, script, body: str, words: str) -> None:  # type: ignore[no-untyped-def]
    path = script(f"""
        import os, sys, time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            time.sleep(0.3)
            {body}
        dist.barrier()
    """)
    job = session.launch(path, nproc_per_node=3)
    with pytest.raises(RankFailedError) as caught:
        job.wait(30)
    error = caught.value
    assert words in str(error)
    assert error.rank == 1
    assert str(job.log_path(1)) in str(error)
    assert len("\n".join(error._render_traceback_()).encode()) < 2048
    if "ValueError" in words:
        assert error.traceback.startswith("Traceback (most recent call last):\n")
        assert str(path) in error.traceback
        assert "workbench" not in error.traceback.replace(str(path), "")
    told = [event for event in job.events() if isinstance(event, FailureDetected)]
    assert [event.failure.rank for event in told] == [1]


def test_a_rank_that_leaves_before_init_is_named(session: Session) -> None:
    source = """
import os, sys
import torch.distributed as dist
if os.environ["RANK"] == "0":
    sys.exit(5)
dist.init_process_group("gloo")
"""
    job = session.launch(source=source, nproc_per_node=2)
    with pytest.raises(RankFailedError, match="rank 0 exited with code 5"):
        job.wait(30)


def test_restart_until_it_works(session: Session, tmp_path: Path) -> None:
    source = """
import os, sys
print("generation", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"])
import torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["TORCHELASTIC_RESTART_COUNT"] < "2" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), 9)
dist.barrier()
"""
    job = session.launch(source=source, nproc_per_node=2, max_restarts=3)
    assert job.wait(60) is JobPhase.SUCCEEDED
    assert job.state.restart_count == 2
    kinds = [type(event) for event in job.events()]
    assert kinds.count(RecoveryStarted) == kinds.count(RecoveryFinished) == 2
    lines = [line.split() for line in job.logs(rank=0, tail=None).splitlines() if line.startswith("generation")]
    assert [line[1] for line in lines] == ["0", "1", "2"]


def test_restarts_run_out(session: Session) -> None:
    job = session.launch(source="import sys; sys.exit(4)", nproc_per_node=1, max_restarts=1)
    with pytest.raises(RestartsExhaustedError, match="rank 0 exited with code 4; no restart left of 1"):
        job.wait(30)


def test_gang_queue(session: Session) -> None:
    first = session.launch(source="import time; time.sleep(60)", nproc_per_node=3)
    await_phase(first, JobPhase.HEALTHY)
    second = session.launch(source="print('ran')", nproc_per_node=2)
    third = session.launch(source="print('ran')", nproc_per_node=1)
    assert second.phase is JobPhase.INIT
    assert second.reason == "waiting: needs 2 slots, 1 free"
    assert third.reason == f"waiting: needs 1 slot, behind {second.job_id} in the queue"
    assert first.cancel(force=True) in (JobPhase.STOPPING, JobPhase.STOPPED)
    assert second.wait(30) is JobPhase.SUCCEEDED
    assert third.wait(30) is JobPhase.SUCCEEDED
    status = session.pool_status()
    assert (status.slots, status.free, status.waiting) == (4, 4, ())


def test_more_ranks_than_ever_is_refused(session: Session) -> None:
    with pytest.raises(NotEnoughSlotsError, match="needs 64 slots, the pool has 4 on 1 host"):
        session.launch(source="print(1)", nproc_per_node=64)


def test_cancel_gives_grace_and_force_does_not(session: Session, script) -> None:  # type: ignore[no-untyped-def]
    path = script("""
        import signal, sys, time
        def leave(*_):
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("ready", flush=True)
        time.sleep(60)
    """)
    job = session.launch(path, nproc_per_node=1)
    _await_output(job, "ready")
    job.cancel(by="a test")
    assert job.wait(10) is JobPhase.STOPPED
    assert job.reason == "cancelled by a test"
    assert "saved" in job.logs(rank=0)


def test_attach_from_another_process(session: Session) -> None:
    job = session.launch(source="print('hello from rank', __import__('os').environ['RANK'])", nproc_per_node=2)
    job.wait(30)
    code = f"""
import workbench as wb
job = wb.Session(start=False).attach({job.job_id[:-1]!r})
print(job.job_id, job.phase.value, len(job.events()), job.logs(rank=1).strip())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    job_id, phase, count, *words = done.stdout.split()
    assert (job_id, phase, " ".join(words)) == (job.job_id, "SUCCEEDED", "hello from rank 1")
    assert int(count) == len(job.events())


def test_unknown_job_lists_the_near_ones(session: Session) -> None:
    job = session.launch(source="pass", nproc_per_node=1, name="resnet")
    job.wait(30)
    with pytest.raises(UnknownJobError, match=job.job_id):
        session.attach("resnt-" + job.job_id[-4:])


def test_bad_requests_are_told_at_once(session: Session, script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    before = len(session.jobs(limit=1000))
    script("print(1)", "other.py")
    cases = [
        (functools.partial(session.launch, tmp_path / "none.py"), "there is no script .*none.py .*other.py"),
        (functools.partial(session.launch, script("def f(:\n  pass", "wrong.py")), r"wrong.py, line 1: "),
        (functools.partial(session.launch, source="  \n"), "the cell is empty"),
        (functools.partial(session.launch, source="#" + "x" * 2_100_000), "the cell is 2.0 MiB"),
        (functools.partial(session.launch, source="pass", nproc_per_node=-1), "at least 1 rank"),
        (functools.partial(session.launch, source="pass", name="a/b"), "cannot be a job name"),
        (functools.partial(session.launch, threading.Lock().acquire), "cannot be sent to the ranks"),
        (functools.partial(session.launch, source="pass", nprocs=2), "there is no launch option 'nprocs'"),
        (functools.partial(session.launch), "nothing to launch"),
        (functools.partial(session.launch, source="pass", python="python0.1"), "there is no interpreter"),
    ]
    for call, words in cases:
        with pytest.raises(SpecError, match=words):
            call()
    assert len(session.jobs(limit=1000)) == before


def test_a_port_in_use_is_named(session: Session) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = session.launch(source="pass", nproc_per_node=1, master_port=port)
        with pytest.raises(JobError, match=f"port {port} is in use"):
            job.wait(10)


def test_a_port_that_is_taken_for_a_moment_when_a_job_goes_on_is_waited_for(session: Session) -> None:
    import socket

    def take() -> socket.socket | None:
        """The port, once the job's own store has left it."""
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
        return None

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = session.launch(source="pass", nproc_per_node=1, master_port=port)
    assert job.wait(20) is JobPhase.SUCCEEDED
    with until(take, "its port", 5.0):
        job.resume()
        until(lambda: f"port {port} is in use" in job.reason, "word of it")
        assert job.phase is JobPhase.LAUNCHING
    assert job.wait(20) is JobPhase.SUCCEEDED


def test_awkward_output(session: Session) -> None:
    source = r"""
import os, sys
os.write(1, b"caf\xe9 \xff\n")
sys.stdout.write("no newline at the end")
"""
    job = session.launch(source=source, nproc_per_node=1)
    job.wait(30)
    assert job.logs(rank=0).splitlines() == ["caf� �", "no newline at the end"]


# --- interactive ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(session: Session):  # type: ignore[no-untyped-def]
    """An interactive job of 2 ranks."""
    job = session.launch(interactive=True, nproc_per_node=2)
    await_phase(job, JobPhase.HEALTHY)
    return job


def test_cells_keep_state_and_answer_by_rank(ranks) -> None:  # type: ignore[no-untyped-def]
    ranks.execute("import os; x = int(os.environ['RANK']) * 10").answers_or_raise()
    answers = ranks.execute("print('x is', x); x + 1").answers_or_raise()
    assert {rank: answer.data["text/plain"] for rank, answer in answers.items()} == {0: "1", 1: "11"}
    ranks.push("y", {"a": [1, 2]})
    assert ranks.pull("y['a'][1] + x", ranks=[1]) == {1: 12}
    only = ranks.execute("x", ranks=[1]).answers_or_raise()
    assert list(only) == [1]


def test_an_exception_frees_the_cell_while_the_peer_waits(ranks) -> None:  # type: ignore[no-untyped-def]
    ranks.execute("import torch, torch.distributed as dist; dist.init_process_group('gloo')").answers_or_raise()
    start = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1: ZeroDivisionError") as caught:
        ranks.execute("if dist.get_rank() == 1: 1 / 0\ndist.all_reduce(torch.ones(1))").answers_or_raise()
    assert time.monotonic() - start < 1.0
    assert "1 / 0" in caught.value.traceback
    ranks.interrupt()
    answers = ranks.execute("1 + 1").answers_or_raise()
    assert {a.data["text/plain"] for a in answers.values()} == {"2"}


def test_interrupt_inside_a_collective_keeps_state(ranks) -> None:  # type: ignore[no-untyped-def]
    ranks.execute(
        "import torch, torch.distributed as dist; dist.init_process_group('gloo'); kept = 7"
    ).answers_or_raise()
    run = ranks.execute("if dist.get_rank() == 0: dist.all_reduce(torch.ones(1))\nelse:\n    while True: pass")
    time.sleep(0.5)
    ranks.interrupt()
    deadline = time.monotonic() + 10
    while not run.is_done and time.monotonic() < deadline:
        run.poll(1.0)
    assert {answer.error.split(":")[0] for answer in run.answers.values()} == {"KeyboardInterrupt"}
    assert ranks.pull("kept") == {0: 7, 1: 7}
    again = (
        "dist.destroy_process_group(); dist.init_process_group('gloo'); t = torch.ones(1); dist.all_reduce(t); t.item()"
    )
    answers = ranks.execute(again).answers_or_raise()
    assert {a.data["text/plain"] for a in answers.values()} == {"2.0"}
    assert ranks.phase is JobPhase.HEALTHY


def test_a_rank_that_dies_in_a_cell_ends_the_wait(ranks) -> None:  # type: ignore[no-untyped-def]
    run = ranks.execute("import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)")
    with pytest.raises(RankFailedError, match="rank 1 killed by SIGKILL"):
        run.answers_or_raise()


def test_cells_on_a_job_that_is_not_interactive(session: Session) -> None:
    job = session.launch(source="import time; time.sleep(30)", nproc_per_node=1)
    await_phase(job, JobPhase.HEALTHY)
    with pytest.raises(UsageError, match="is not interactive"):
        job.execute("1")


def _await_output(job, words: str, timeout: float = 20.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout
    while words not in job.logs():
        assert time.monotonic() < deadline, f"no {words!r} in the output"
        time.sleep(0.05)


def test_a_notebook_s_form_launches_on_the_pool(
    session: Session,
    script,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[no-untyped-def]
) -> None:
    path = script(DDP)
    monkeypatch.chdir(path.parent)
    form = session.panel()
    form.fields["script"].value, form.fields["args"].value, form.fields["ranks"].value = path.name, "1", "2"
    form.button.click()
    assert "was launched on pool default" in form.said.value
    form.button.click()
    assert "launch was done just now" in form.said.value
    assert form.job.wait(60) is JobPhase.SUCCEEDED
    assert form.job.logs(rank=1).splitlines()[-1] == "rank 1 of 2 done"
    assert (form.job.spec.cwd, form.job.spec.args) == (str(path.parent), ("1",))
    (buttons,) = form._below.children
    buttons.update()
    assert form.job.job_id in buttons.head.value

"""Starting and ending ranks: each end is told once and truly, and nothing is left behind."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import shared_memory
from tests.integration.agent_host import (
    WORKER,
    AgentHost,
    agent_host,
    await_gone,
    children_of,
    descriptors,
    is_alive,
    start_ranks,
)
from workbench.commands import StartStore
from workbench.events import LaunchFailed, RankExited, RankRaised, RankStarted, StoreAwaited, StoreStarted
from workbench.spec import JobSpec
from workbench.telemetry import RankBeat, StepsTaken

FOREVER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.01)"
SPIN = "print('up', flush=True)\nwhile True: pass"
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(1e6)"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentHost]:
    """The module's agent; afterwards nothing that it started may run."""
    with agent_host(tmp_path_factory.mktemp("host")) as made:
        yield made


def up(host: AgentHost, text: str, ranks: int = 1) -> tuple[str, list[int]]:
    """A job whose ranks have said 'up', and their pids."""
    job = host.start(host.spec(text), ranks)
    for rank in range(ranks):
        host.says(job, "up", rank)
    return job, [news.pid for news in host.started(job, ranks)]


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_sigterm_ends_a_rank_that_takes_it(host: AgentHost) -> None:
    job, _ = up(host, FOREVER, ranks=2)
    host.stop(job, grace=10)
    for exited in host.ended(job, 2, timeout=3):
        assert (exited.exit_code, exited.signal, exited.stop_signal) == (None, signal.SIGTERM, signal.SIGTERM)


@pytest.mark.parametrize("text", [DEAF, DEAF.replace("time.sleep(1e6)", "\nwhile True: pass")])
def test_a_rank_that_ignores_sigterm_is_killed_after_its_grace(host: AgentHost, text: str) -> None:
    job, _ = up(host, text)
    start = time.monotonic()
    host.stop(job, grace=0.5)
    exited = host.ended(job, timeout=5)[0]
    assert (exited.signal, exited.stop_signal) == (signal.SIGKILL, signal.SIGKILL)
    assert 0.4 < time.monotonic() - start < 2


def test_an_endless_loop_is_ended(host: AgentHost) -> None:
    job, _ = up(host, SPIN)
    host.stop(job, grace=5)
    assert host.ended(job, timeout=3)[0].signal == signal.SIGTERM


@pytest.mark.parametrize("grace", [0.0, 5.0])
def test_a_stopped_rank_is_ended(host: AgentHost, grace: float) -> None:
    job, _ = up(host, FOREVER)
    host.inject(job, "stop")
    host.stop(job, grace=grace)
    assert host.ended(job, timeout=3)[0].signal == (signal.SIGTERM if grace else signal.SIGKILL)


def test_a_later_stop_without_grace_kills_at_once(host: AgentHost) -> None:
    job, _ = up(host, DEAF)
    host.stop(job, grace=60)
    host.stop(job, grace=0)
    assert host.ended(job, timeout=3)[0].stop_signal == signal.SIGKILL


def test_sigterm_leaves_the_ranks_workers_to_the_rank(host: AgentHost) -> None:
    """What saves a last checkpoint may need its DataLoader workers for it."""
    text = """
        import os, signal, sys, time
        def save(*_):
            print("worker", os.waitpid(child, os.WNOHANG)[0])
            sys.exit(7)
        child = os.fork()
        if not child: time.sleep(1e6)
        signal.signal(signal.SIGTERM, save)
        print("up", flush=True)
        time.sleep(1e6)
    """
    job, _ = up(host, text)
    host.stop(job, grace=10)
    assert host.ended(job, timeout=5)[0].exit_code == 7
    assert "worker 0" in host.log(job)


def test_what_a_rank_leaves_in_its_group_is_killed(host: AgentHost) -> None:
    text = """
        import os, time
        if not os.fork(): time.sleep(1e6)
        print("up", flush=True)
        while not os.path.exists("go"): time.sleep(0.01)
        os._exit(3)
    """
    job, (pid,) = up(host, text)
    children = children_of(pid)
    assert len(children) == 1
    (host.folder / "go").touch()
    assert host.ended(job)[0].exit_code == 3
    await_gone(children, 1.0)


def test_stop_of_an_unknown_generation_does_nothing(host: AgentHost) -> None:
    job, pids = up(host, FOREVER)
    host.stop(job, restart_count=3)
    host.stop("no-such-job")
    time.sleep(0.1)
    assert is_alive(pids[0])
    assert not host.of(job, RankExited)
    host.stop(job)
    host.ended(job)


# --- ends of themselves -----------------------------------------------------------------------------------------------


def test_each_rank_is_told_started_once_and_exited_once(host: AgentHost) -> None:
    job = host.run(host.spec("import os, sys; sys.exit(int(os.environ['RANK']) + 1)"), ranks=4)
    time.sleep(0.1)
    assert sorted(news.rank for news in host.of(job, RankStarted)) == [0, 1, 2, 3]
    assert [(news.rank, news.exit_code, news.signal) for news in host.ended(job, 4)] == [
        (rank, rank + 1, None) for rank in range(4)
    ]
    for rank in range(4):
        told = [type(news) for news in host.news[job] if getattr(news, "rank", None) == rank]
        assert told.index(RankStarted) < told.index(RankExited)


def test_a_killed_rank_is_told_at_once_with_its_step_and_what_it_did(host: AgentHost) -> None:
    text = """
        import time, torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        print("up", flush=True)
        time.sleep(1e6)
    """
    job, pids = up(host, text)
    killed = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    exited = host.ended(job, timeout=2)[0]
    assert time.monotonic() - killed < 0.3
    assert (exited.signal, exited.exit_code, exited.step, exited.stop_signal) == (signal.SIGKILL, None, 3, None)
    assert exited.log_path == str(host.jobs_dir / job / "logs" / "rank0.log")
    assert sum(len(steps.block) for steps in host.of(job, StepsTaken)) == 3 * 96


def test_an_injected_kill_is_no_stop_of_ours(host: AgentHost) -> None:
    job, _ = up(host, FOREVER)
    host.inject(job, "kill")
    exited = host.ended(job, timeout=3)[0]
    assert (exited.signal, exited.stop_signal, exited.detail) == (signal.SIGKILL, None, "on purpose")


def test_stop_and_continue_are_injected(host: AgentHost) -> None:
    job, pids = up(host, FOREVER)
    host.inject(job, "stop")
    _await_state(pids[0], b"T")
    assert "SIGSTOP" in host.agent.stacks(job)[0]
    host.inject(job, "continue")
    _await_state(pids[0], b"S")
    host.stop(job)
    host.ended(job)


def _await_state(pid: int, state: bytes) -> None:
    deadline = time.monotonic() + 3
    while Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != state:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_injecting_into_nothing_is_harmless(host: AgentHost) -> None:
    host.inject("no-such-job", "kill")
    job, _ = up(host, FOREVER)
    host.inject(job, "melt")
    host.inject(job, "kill", rank=5)
    host.stop(job)
    assert host.ended(job)[0].stop_signal == signal.SIGKILL


# --- stores -----------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_told_at_once(host: AgentHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        start = time.monotonic()
        job = host.start(JobSpec(entrypoint="x.py"), port=port)
        failed = host.refusal(job, timeout=2)
    assert time.monotonic() - start < 0.2
    assert f"port {port} is in use on 127.0.0.1" in failed.reason
    assert failed.rank is None


def await_port(host: AgentHost, port: int, patience: float) -> str:
    """Ask for a store there; once it is said that the port is tried again."""
    job_id = f"port{port}-{patience:g}"
    command = StartStore(job_id=job_id, restart_count=1, worker=WORKER, host="127.0.0.1", port=port, patience=patience)
    host.agent.submit(command)
    (told,) = host.until(job_id, lambda: host.of(job_id, StoreAwaited))
    assert f"port {port} is in use on 127.0.0.1, and tried again for {patience:g} s" == told.reason
    return job_id


def test_a_port_that_comes_free_in_time_is_used(host: AgentHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = await_port(host, port, 20.0)
    (started,) = host.until(job, lambda: host.of(job, StoreStarted), timeout=2)
    assert started.port == port
    host.stop(job, restart_count=1)
    assert len(host.of(job, StoreAwaited)) == 1


def test_a_port_that_stays_in_use_is_told_in_the_end(host: AgentHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        job = await_port(host, taken.getsockname()[1], 0.5)
        failed = host.refusal(job, timeout=5)
    assert "is in use on 127.0.0.1, and was for 0.5 s; choose another" in failed.reason


def test_nothing_waits_for_a_port_once_it_was_stopped(host: AgentHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = await_port(host, port, 20.0)
        host.stop(job, restart_count=1)
        host.start(JobSpec(entrypoint="x.py"), port=port, job_id="another")  # asked after it: it has been stopped now
    time.sleep(0.3)
    assert not host.of(job, StoreStarted)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_port_asked_for_is_used_and_free_again_afterwards(host: AgentHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for _ in range(2):
        job = host.run(host.spec("import os; print(os.environ['MASTER_PORT'])"), port=port)
        assert host.log(job) == f"{port}\n"


def test_an_address_that_is_not_ours_is_told(host: AgentHost) -> None:
    job = host.start(JobSpec(entrypoint="x.py"), host="192.0.2.1")
    assert "192.0.2.1" in host.refusal(job, timeout=5).reason


def test_the_store_goes_with_the_last_rank(host: AgentHost) -> None:
    job = host.start(host.spec("import time; time.sleep(0.3)"), ranks=2)
    store = host.of(job, StoreStarted)[0]
    socket.create_connection((store.host, store.port), timeout=2).close()
    host.ended(job, 2)
    _await_refused(store.port)


def test_the_store_goes_with_a_stop_when_no_rank_was_started(host: AgentHost) -> None:
    job = "only-a-store"
    host.start(JobSpec(entrypoint="missing.py", cwd=str(host.folder)), job_id=job)
    store = host.of(job, StoreStarted)[0]
    host.stop(job)
    _await_refused(store.port)
    assert len(host.of(job, LaunchFailed)) == 1


def _await_refused(port: int) -> None:
    deadline = time.monotonic() + 3
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return
        assert time.monotonic() < deadline, f"port {port} still listens"
        time.sleep(0.02)


# --- generations ------------------------------------------------------------------------------------------------------


def test_the_next_generation_runs_with_its_count_and_appends_to_the_log(host: AgentHost) -> None:
    spec = host.spec("import os; print('count', os.environ['TORCHELASTIC_RESTART_COUNT'])", max_restarts=2)
    job = host.run(spec)
    host.start(spec, job_id=job, restart_count=1)
    host.until(job, lambda: len(host.of(job, RankExited)) == 2)
    assert host.log(job) == "count 0\n[dtrain] restart 1\ncount 1\n"
    assert [news.restart_count for news in host.of(job, RankExited)] == [0, 1]


def test_a_rank_that_still_runs_is_not_started_again(host: AgentHost) -> None:
    job, _ = up(host, FOREVER)
    host.agent.submit(start_ranks(job, host.spec(FOREVER), 1, restart_count=1))
    assert "still runs" in host.refusal(job).reason
    host.stop(job)
    host.until(job, lambda: host.of(job, RankExited))


# --- what is left behind ----------------------------------------------------------------------------------------------


def test_thirty_launches_leave_nothing(host: AgentHost) -> None:
    host.output("")
    zygote = host.agent.zygote_pids()[0]
    before, shm = descriptors(), shared_memory.names()
    zygote_fds = descriptors(zygote)
    for _ in range(15):
        job = host.start(host.spec(FOREVER), ranks=2)
        host.stop(job)
        host.ended(job, 2)
    deadline = time.monotonic() + 3
    while children_of(zygote) or len(descriptors()) > len(before):
        assert time.monotonic() < deadline, (children_of(zygote), descriptors() - before)
        time.sleep(0.02)
    assert shared_memory.left(shm, 3, ours=(os.getpid(), zygote)) == []
    assert descriptors(zygote) == zygote_fds
    assert host.agent.zygote_pids() == (zygote,)


def test_stop_leaves_no_process_descriptor_or_thread(tmp_path: Path) -> None:
    before, threads = len(descriptors()), threading.active_count()
    with agent_host(tmp_path) as own:
        job, pids = up(own, "import os\nos.fork()\n" + DEAF)
        zygote = own.agent.zygote_pids()[0]
        group = [*pids, *children_of(pids[0])]
        assert len(group) == 2
        started = time.monotonic()
        own.agent.stop()
        assert time.monotonic() - started < 2
        await_gone([zygote, *group], 1.0)
        own.agent.stop()  # the second time it does nothing
    assert len(descriptors()) == before
    assert threading.active_count() == threads
    assert zygote not in children_of(os.getpid())
    assert own.ended(job)[0].stop_signal == signal.SIGKILL


AGENT_PROGRAM = """
import sys, time
from pathlib import Path
from tests.integration.agent_host import AgentHost
host = AgentHost(Path(sys.argv[1]))
job = host.start(host.spec('''import os, time
if os.fork(): print("up", os.getpid(), flush=True)
time.sleep(1e6)'''), ranks=2)
pids = [news.pid for news in host.started(job, 2)]
for rank in (0, 1): host.says(job, "up", rank)
cold = host.start(host.spec("print('up', flush=True)\\nimport time; time.sleep(1e6)", cold=True))
host.says(cold, "up")
print(*host.agent.zygote_pids(), *pids, host.started(cold)[0].pid, flush=True)
time.sleep(1e6)
"""


def test_sigkill_of_the_agents_process_leaves_nothing_a_second_later(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", AGENT_PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            pids = [int(word) for word in process.stdout.readline().split()]
            assert len(pids) == 5  # two zygotes, three ranks
            everything = [*pids, *(child for pid in pids[2:4] for child in children_of(pid))]
            assert len(everything) == 7
        finally:
            process.kill()
        await_gone(everything, 1.0)


# --- a zygote that dies -----------------------------------------------------------------------------------------------


def test_a_dead_zygote_is_replaced_and_its_ranks_are_lost_with_it(tmp_path: Path) -> None:
    with agent_host(tmp_path) as own:
        job, pids = up(own, DEAF, ranks=2)
        first = own.agent.zygote_pids()[0]
        os.kill(first, signal.SIGKILL)
        for exited in own.ended(job, 2, timeout=3):
            assert exited.detail == "lost with its zygote"
            assert (exited.exit_code, exited.signal, exited.stop_signal) == (None, None, None)
        await_gone(pids, 0.5)
        assert own.output("print('again')") == "again\n"
        assert own.agent.zygote_pids()[0] != first


def test_ranks_wait_for_a_zygote_that_warms_up_and_can_be_stopped_meanwhile(tmp_path: Path) -> None:
    with agent_host(tmp_path) as own:
        waiting = own.start(own.spec("print('ran')"), ranks=2)
        stopped = own.start(own.spec("print('ran')"), ranks=2)
        own.stop(stopped, grace=5)
        ends = own.ended(stopped, 2, timeout=1)  # long before the zygote is warm
        assert [(end.exit_code, end.signal, end.stop_signal) for end in ends] == [(None, None, signal.SIGKILL)] * 2
        assert ends[0].detail == "stopped before it had started"
        own.ended(waiting, 2)
        assert own.log(waiting) == "ran\n"
        assert not own.of(stopped, RankStarted)


# --- telemetry --------------------------------------------------------------------------------------------------------


def test_beats_come_twice_a_second_with_what_the_rank_uses(host: AgentHost) -> None:
    text = "import os\nbig = bytearray(50_000_000)\nos.fork()\nprint('up', flush=True)\nwhile True: pass"
    job, _ = up(host, text)
    host.until(job, lambda: len(host.of(job, RankBeat)) >= 6)
    host.stop(job)
    host.ended(job)
    beats = host.of(job, RankBeat)
    spacing = [later.time - former.time for former, later in itertools.pairwise(beats[1:])]
    assert 0.3 < statistics.median(spacing) < 1.0  # a loaded machine may be late with one, and so early with the next
    assert beats[-1].rss > 50_000_000
    assert beats[-1].cpu > 30  # rank and child, on whatever cores are free
    assert beats[-1].activity == "RUNNING"


def test_watching_ranks_costs_next_to_nothing(host: AgentHost) -> None:
    """8 ranks: less than 2 % of a core, in the agent's thread."""
    job, _ = up(host, "import time; print('up', flush=True); time.sleep(1e6)", ranks=8)
    before, start = _agent_cpu(), time.monotonic()
    time.sleep(2.0)
    share = (_agent_cpu() - before) / (time.monotonic() - start)
    host.stop(job)
    host.ended(job, 8)
    assert share < 0.02


def _agent_cpu() -> float:
    """CPU seconds of the agent's thread."""
    for task in Path("/proc/self/task").iterdir():
        if _is_agent(int(task.name)):
            nanoseconds = int(task.joinpath("schedstat").read_text().split()[0])
            return nanoseconds / 1e9
    raise AssertionError("the agent's thread is not there")


def _is_agent(native_id: int) -> bool:
    return any(thread.native_id == native_id and thread.name == "dtrain-agent" for thread in threading.enumerate())


# --- stacks -----------------------------------------------------------------------------------------------------------


def test_stacks_show_the_users_frames_of_every_rank(host: AgentHost) -> None:
    text = "import time\ndef stuck_here():\n    print('up', flush=True)\n    time.sleep(1e6)\nstuck_here()"
    job, _ = up(host, text, ranks=2)
    stacks = host.agent.stacks(job)
    host.stop(job)
    assert sorted(stacks) == [0, 1]
    for stack in stacks.values():
        assert "stuck_here" in stack
        assert "<module>" in stack
        assert "bootstrap" not in stack
    assert host.agent.stacks("no-such-job") == {}


def test_a_stack_that_cannot_be_had_says_why(host: AgentHost, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = up(host, FOREVER)
    monkeypatch.setattr("workbench.agent.stacks.find_spy", lambda: None)
    assert "py-spy is not installed" in host.agent.stacks(job)[0]
    monkeypatch.setattr("workbench.agent.stacks.find_spy", lambda: "/no/py-spy")
    assert "cannot be started" in host.agent.stacks(job)[0]
    host.stop(job)
    host.ended(job)


# --- collectives ------------------------------------------------------------------------------------------------------

LOST_PEER = textwrap.dedent("""
    import os, signal, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.all_reduce(torch.ones(4))
    """)


def test_the_survivors_error_is_told_as_a_collectives(host: AgentHost) -> None:
    job = host.run(host.spec(LOST_PEER), ranks=2)
    killed, survivor = host.ended(job, 2)[1], host.of(job, RankRaised)[0]
    assert killed.signal == signal.SIGKILL
    assert (survivor.rank, survivor.is_collective) == (0, True), survivor


def test_a_broken_pipe_of_the_programs_own_is_no_collectives(host: AgentHost) -> None:
    job = host.run(host.spec("import os\nr, w = os.pipe(); os.close(r); os.write(w, b'x')"))
    assert host.raised(job).error == "BrokenPipeError: [Errno 32] Broken pipe"
    assert not host.raised(job).is_collective


def test_a_rank_that_is_leaving_when_it_is_stopped_has_left_of_itself(host: AgentHost) -> None:
    text = "import atexit, sys, time\natexit.register(time.sleep, 1e6)\nprint('up', flush=True)\nsys.exit(3)"
    job, _ = up(host, text)
    time.sleep(0.1)
    host.stop(job, grace=0.0)
    exited = host.ended(job, timeout=3)[0]
    assert (exited.exit_code, exited.signal, exited.stop_signal) == (3, None, None)


def test_a_rank_that_leaves_because_it_is_stopped_was_stopped(host: AgentHost) -> None:
    text = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(0))\n"
    text += "print('up', flush=True)\ntime.sleep(1e6)"
    job, _ = up(host, text)
    host.stop(job, grace=10)
    exited = host.ended(job, timeout=5)[0]
    assert (exited.exit_code, exited.signal, exited.stop_signal) == (0, None, signal.SIGTERM)

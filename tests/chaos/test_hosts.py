"""Jobs on several hosts, and what happens to hosts: lost, cut off, slow, lossy, with a wrong clock, suspended.

Host 1's clocks are all an hour ahead, always: whatever is tested here must be right all the same. What ranks did when
is told by files that they touch, whose times are the machine's.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import netlab
from tests.chaos.hosts import Hosts, cluster
from tests.waiting import until
from workbench.events import FailureDetected, RecoveryStarted, RunResumed
from workbench.session import Job, Session
from workbench.state import JobPhase

pytestmark = pytest.mark.skipif(bool(netlab.missing()), reason=netlab.missing() or "possible")

# Notes its steps in a file; another one ends it.
TRAIN = """
import os, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from workbench.training import Run

folder, generation, rank = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
(folder / f"born-{generation}-{rank}").touch()

def live():
    while True:
        (folder / f"alive-{generation}-{rank}").touch()
        time.sleep(0.01)

threading.Thread(target=live, daemon=True).start()
dist.init_process_group("gloo")
print("generation", generation, "world", dist.get_world_size(), "on", os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
parameter = torch.nn.Parameter(torch.ones(100))
optimizer = torch.optim.SGD([parameter], lr=0.01)
module = torch.nn.ParameterList([parameter])
loader = torch.utils.data.DataLoader(range(100_000))
for step, _ in Run.current().steps(loader, {"module": module, "optimizer": optimizer}):
    is_over = torch.tensor(float((folder / "end").exists()))
    dist.broadcast(is_over, 0)
    if is_over:
        break
    parameter.square().sum().backward()
    dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        (folder / "steps.new").write_text(str(step))
        (folder / "steps.new").replace(folder / "steps")
    time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
"""
# The rank at the address that is given fails; the others do a little later, and say nothing of a collective.
FAIL = """
import signal, socket, sys, time
import torch, torch.distributed as dist
signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.01)
for _ in range(5):
    parameter.square().sum().backward()
    optimizer.step()
    time.sleep(0.1)
dist.barrier()
mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
mine.connect(("10.78.0.1", 9))
if mine.getsockname()[0] == sys.argv[1]:
    raise ValueError("first")
time.sleep(0.1)
raise ValueError("second")
"""
ADDRESSES = [netlab.Network.address(host) for host in range(3)]
AHEAD = 3600  # s by which host 1's clocks are wrong


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hosts, Session]]:
    """Three hosts of one slot each."""
    with tempfile.TemporaryDirectory(prefix="dt-") as home, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTRAIN_HOME", home)
        with cluster(3, tmp_path_factory.mktemp("shared"), {1: AHEAD}) as made:
            yield made


@pytest.fixture
def hosts(pool: tuple[Hosts, Session]) -> Hosts:
    return pool[0]


@pytest.fixture
def session(pool: tuple[Hosts, Session]) -> Iterator[Session]:
    yield pool[1]
    for summary in pool[1].jobs():
        if not summary.phase.is_terminal:
            pool[1].attach(summary.job_id).cancel(force=True)


class Training:
    """One job of `TRAIN`, and what its files tell."""

    def __init__(self, session: Session, folder: Path, **options: object) -> None:
        self.folder = folder
        saving = {"checkpoint_every": 10, "checkpoint_dir": str(folder / "checkpoints")}
        wishes = {"nnodes": 2, "nproc_per_node": 1, "max_restarts": 3, **saving, **options}
        self.job: Job = session.launch(source=TRAIN, args=[folder], **wishes)

    @property
    def steps(self) -> int:
        path = self.folder / "steps"
        return int(path.read_text()) if path.exists() else 0

    def hosts(self) -> list[int]:
        """Those of the ranks, in order."""
        return [ADDRESSES.index(place.host) for place in self.job.state.placements]

    def victim(self) -> tuple[int, int]:
        """A rank that is not on the scheduler's host, and its host."""
        return next((rank, host) for rank, host in enumerate(self.hosts()) if host != 0)

    def trains(self, generation: int, ranks: int = 2, timeout: float = 30.0) -> None:
        """Wait until that generation has taken steps."""

        def is_up() -> bool:
            state = self.job.state
            assert not state.phase.is_terminal, state.reason
            return (state.phase, state.restart_count, len(state.ranks)) == (JobPhase.HEALTHY, generation, ranks)

        until(is_up, f"generation {generation}", timeout)
        until((self.folder / f"alive-{generation}-0").exists, "start of rank 0")
        self.gets_on(5)

    def gets_on(self, steps: int) -> None:
        goal = self.steps + steps
        until(lambda: self.steps >= goal, "steps")

    def saves(self) -> None:
        """Wait for one more checkpoint."""
        known = self.job.state.checkpoints
        until(lambda: self.job.state.checkpoints != known, "checkpoint")

    def born(self, generation: int, rank: int) -> float:
        return (self.folder / f"born-{generation}-{rank}").stat().st_mtime

    def last_alive(self, generation: int, rank: int) -> float:
        return (self.folder / f"alive-{generation}-{rank}").stat().st_mtime

    def end(self) -> None:
        (self.folder / "end").touch()
        assert self.job.wait(30) is JobPhase.SUCCEEDED


def test_a_job_over_three_hosts_starts_trains_and_ends(session: Session, tmp_path: Path) -> None:
    training = Training(session, tmp_path, nnodes=3)
    training.trains(0, ranks=3)
    state = training.job.state
    assert sorted(training.hosts()) == [0, 1, 2]
    assert state.master is not None
    assert state.master[0] == state.placements[0].host, "the rendezvous store is on rank 0's host"
    for rank in range(3):
        assert "generation 0 world 3 on e0" in training.job.logs(rank=rank)
    training.end()
    assert session.pool_status().free == 3


def test_lost_hosts_are_named_and_replaced_or_done_without_until_they_come_back(
    hosts: Hosts, session: Session, tmp_path: Path
) -> None:
    training = Training(session, tmp_path, min_nnodes=1)
    training.trains(0)
    for generation, ranks in ((1, 2), (2, 1)):  # another host takes its place; then there is none
        rank, host = training.victim()
        training.saves()
        hosts.kill(host)
        training.trains(generation, ranks)
        assert host not in training.hosts()
        assert f"rank {rank} was lost with its worker tcp://{ADDRESSES[host]}" in _failures(training.job)[-1]
    assert training.hosts() == [0]
    for host in (1, 2):
        hosts.start_worker(host)
    training.trains(3, 2)
    assert "grows to 2 ranks" in _reasons(training.job)
    resumed = {e.restart_count: e.step for e in training.job.events() if isinstance(e, RunResumed)}
    assert 0 < resumed[1] < resumed[2] < resumed[3], "each generation went on where the one before had got to"
    training.end()
    until(lambda: session.pool_status().free == 3, "the other host")


def test_a_host_that_is_cut_off_is_given_up_after_its_ranks_have_ended_and_comes_back(
    hosts: Hosts, session: Session, tmp_path: Path
) -> None:
    training = Training(session, tmp_path)
    training.trains(0)
    rank, host = training.victim()
    hosts.net.cut(host)
    cut_at = time.time()
    training.trains(1)
    assert host not in training.hosts()
    assert "its host is cut off" in _failures(training.job)[-1]
    assert training.last_alive(0, rank) < min(training.born(1, 0), training.born(1, 1)) < cut_at + 16
    hosts.net.heal(host)
    until(lambda: session.pool_status().free == 1, "the host's return")
    training.gets_on(20)
    assert training.job.state.restart_count == 1
    training.end()
    (tmp_path / "again").mkdir()
    again = Training(session, tmp_path / "again", nnodes=3)
    again.trains(0, 3)
    again.end()


def test_bad_links_are_no_failure_and_a_worker_of_two_on_one_host_is_done_without(
    hosts: Hosts, session: Session, tmp_path: Path
) -> None:
    """Two jobs at once, since each has to wait: one on bad links, and one that loses a worker meanwhile."""
    second = hosts.start_worker(2)
    until(lambda: session.pool_status().slots == 4, "second worker")
    folders = [tmp_path / "over", tmp_path / "within"]
    for folder in folders:
        folder.mkdir()
    within = Training(session, folders[1], nnodes=1, nproc_per_node=2, min_ranks=1)
    within.trains(0)
    over = Training(session, folders[0])
    over.trains(0)
    assert (within.hosts(), sorted(over.hosts())) == ([2, 2], [0, 1])
    hosts.net.lose(1, 5)
    hosts.net.slow_down(0, "10mbit")
    try:
        end = time.monotonic() + 20
        second.kill()
        within.trains(1, 1)
        third = hosts.start_worker(2)
        within.trains(2, 2)
        while time.monotonic() < end:
            over.gets_on(1)
    finally:
        hosts.net.repair(1)
        hosts.net.repair(0)
    for training in (within, over):
        training.end()
    assert over.job.state.restart_count == 0
    third.kill()
    until(lambda: session.pool_status().slots == 3, "end of the second worker")


def test_a_wrong_clock_changes_no_cause_no_time_and_no_order(session: Session, tmp_path: Path) -> None:
    """The rank on the host that is an hour ahead fails first, and the others because of it."""
    began = time.time()
    job = session.launch(source=FAIL, args=[ADDRESSES[1]], nnodes=3, nproc_per_node=1)
    assert "ValueError: first" in str(job.exception(30))
    times = [event.time for event in job.events()]
    assert began - 1 < min(times) <= max(times) < time.time() + 1
    assert max(earlier - later for earlier, later in itertools.pairwise(times)) < 1.0
    history = job.history(width=1.0)
    assert {bucket.rank for bucket in history} == {0, 1, 2}
    assert all(began - 2 < bucket.start < time.time() for bucket in history)


def test_a_suspended_machine_is_no_failure(hosts: Hosts, session: Session, tmp_path: Path) -> None:
    training = Training(session, tmp_path, nnodes=3)
    training.trains(0, 3)
    with hosts.suspended():
        time.sleep(12)
    training.gets_on(50)
    training.end()
    assert training.job.state.restart_count == 0
    assert session.pool_status().free == 3


def _failures(job: Job) -> list[str]:
    return [event.failure.reason for event in job.events() if isinstance(event, FailureDetected)]


def _reasons(job: Job) -> str:
    return "; ".join(event.reason for event in job.events() if isinstance(event, RecoveryStarted))

"""Ranks of a real pool that are killed go on from memory: one step is lost at most, and nothing differs at the end."""

from __future__ import annotations

import functools
import json
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_host import WORKER, AgentHost, agent_host, kill, start_ranks
from conftest import await_phase
from msgspec.structs import replace

from tests.waiting import until
from workbench.commands import StartStore
from workbench.events import CheckpointSaved, FaultHappened, RunResumed, StallDetected, StoreStarted
from workbench.session import Job, Session
from workbench.spec import JobSpec
from workbench.state import CheckpointTier, JobPhase, StallKind

STEPS = 24
TRAIN = """
    import json, os, signal, sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from workbench.training.snapshots import Snapshots

    folder, steps, kills = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    generation, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    torch.manual_seed(int(rank))
    dist.init_process_group("gloo")
    layers = torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    memory = Snapshots.open()
    restored = memory.restore()
    step = 0
    if restored is not None:
        step = restored.step
        model.load_state_dict(restored.state["model"])
        optimizer.load_state_dict(restored.state["optimizer"])
        if int(rank) in restored.extras:
            torch.set_rng_state(restored.extras[int(rank)]["rng"])
    with open(f"{folder}/log{rank}", "a") as log:
        log.write(json.dumps({"generation": int(generation), "first": step, "reason": memory.reason}) + "\\n")
    while step < steps:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        step += 1
        with open(f"{folder}/step{rank}", "w") as file:
            file.write(str(step))
        if kills.get(generation, {}).get(rank) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        if memory.is_due(step):
            memory.take(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                        {"rng": torch.get_rng_state()})
        assert memory.off == "", memory.off
    torch.save([parameter.detach() for parameter in model.parameters()], f"{folder}/final{rank}.pt")
    dist.destroy_process_group()
"""


def launch(session: Session, folder: Path, kills: dict[str, dict[str, int]], text: str = TRAIN) -> Job:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text))
    return session.launch(
        script, args=[str(folder), str(STEPS), json.dumps(kills)], nproc_per_node=2, max_restarts=4, snapshot_every=1
    )


def told(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"log{rank}").read_text().splitlines()]


def final(folder: Path) -> list[torch.Tensor]:
    both = [torch.load(folder / f"final{rank}.pt") for rank in range(2)]
    assert all(map(torch.equal, *both))
    return list(both[0])


def held_by(session: Session) -> int:
    """Descriptors of snapshots in the pool's workers."""
    count = 0
    for worker in session.pool_status().workers:
        for path in Path(f"/proc/{worker.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                count += "dtrain-snapshot" in str(path.readlink())
    return count


def await_held(session: Session, count: int) -> None:
    deadline = time.monotonic() + 10
    while held_by(session) != count:
        assert time.monotonic() < deadline, f"{held_by(session)} are held, not {count}"
        time.sleep(0.02)


def test_killed_ranks_go_on_from_memory_with_at_most_one_step_lost(session: Session, tmp_path: Path) -> None:
    kills = {"0": {"1": 7}, "1": {"0": 12}, "2": {"0": 17, "1": 17}}
    job = launch(session, tmp_path / "killed", kills)
    await_phase(job, JobPhase.SUCCEEDED)
    plain = launch(session, tmp_path / "plain", {})
    await_phase(plain, JobPhase.SUCCEEDED)
    for rank in range(2):
        generations = told(tmp_path / "killed", rank)
        assert [one["first"] for one in generations] == [0, 6, 11, 16], generations
        assert generations[1]["reason"].startswith("every rank has its copy of step 6")
    for one, other in zip(final(tmp_path / "killed"), final(tmp_path / "plain"), strict=True):
        assert torch.equal(one, other)
    await_held(session, 0)


def test_no_memory_is_held_for_a_job_that_has_been_cancelled(session: Session, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    job = launch(session, folder, {"0": {"1": 5}, "1": {"0": 9}, "2": {"0": 13}})
    deadline = time.monotonic() + 30
    while not (folder / "log0").exists() or len(told(folder, 0)) < 2:
        assert time.monotonic() < deadline, job.reason
        time.sleep(0.02)
    job.cancel(force=True)
    job.exception(timeout=20)
    await_held(session, 0)


def test_a_job_that_never_restarts_keeps_nothing(session: Session, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from workbench.training.snapshots import Snapshots\nassert Snapshots.open() is None\nprint('none')\n"
    )
    await_phase(session.launch(script, nproc_per_node=1), JobPhase.SUCCEEDED)
    await_phase(session.launch(script, nproc_per_node=1, max_restarts=1, snapshot_every=-1), JobPhase.SUCCEEDED)


RUN = """
    import json, os, signal, sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    from workbench.training import Run

    folder, steps, kills = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    generation, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    torch.manual_seed(int(rank))
    dist.init_process_group("gloo")
    layers = torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    data = TensorDataset(torch.arange(56.0).reshape(7 * 8, 1) / 50 * torch.ones(8), torch.arange(56))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, seed=3))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with open(f"{folder}/log{rank}", "a") as log:
        for step, (inputs, numbers) in Run.current().steps(loader, state, epochs=4):
            print(json.dumps({"generation": int(generation), "step": step, "data": numbers.tolist()}), file=log)
            log.flush()
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
            scheduler.step()
            if kills.get(generation, {}).get(rank) == step:
                os.kill(os.getpid(), signal.SIGKILL)
    torch.save([parameter.detach() for parameter in model.parameters()], f"{folder}/final{rank}.pt")
    dist.destroy_process_group()
"""


def test_the_steps_of_a_run_go_on_from_memory(session: Session, tmp_path: Path) -> None:
    """4 epochs of 7 steps, killed in the first, at the end of the second and twice in the third."""
    kills = {"0": {"1": 4}, "1": {"0": 13}, "2": {"0": 16, "1": 16}}
    job = launch(session, tmp_path / "killed", kills, RUN)
    await_phase(job, JobPhase.SUCCEEDED)
    plain = launch(session, tmp_path / "plain", {}, RUN)
    await_phase(plain, JobPhase.SUCCEEDED)
    for one, other in zip(final(tmp_path / "killed"), final(tmp_path / "plain"), strict=True):
        assert torch.equal(one, other)
    resumed = [event for event in job.events() if isinstance(event, RunResumed)]
    assert [(event.tier, event.step) for event in resumed] == [(CheckpointTier.MEMORY, step) for step in (4, 13, 16)]
    for rank in range(2):
        lived: dict[int, Any] = {}
        for line in told(tmp_path / "killed", rank):
            lived[line["step"]] = line["data"]
        assert lived == {line["step"]: line["data"] for line in told(tmp_path / "plain", rank)}
    await_held(session, 0)


def test_a_skipped_reduce_is_named_and_no_copy_from_then_on_is_gone_on_from(session: Session, tmp_path: Path) -> None:
    """The rank's next reduce meets the one that it left out, of the other, and both compute nonsense until they are
    compared.
    """
    slow = RUN.replace("epochs=4", "epochs=12").replace("scheduler.step()\n", "scheduler.step(); time.sleep(0.04)\n")
    slow = slow.replace("import json", "import time; import json", 1)
    job = launch(session, tmp_path / "skipped", {}, slow)
    log = tmp_path / "skipped" / "log1"
    until(lambda: log.exists() and len(told(tmp_path / "skipped", 1)) > 20, "steps")
    job.inject("skip", 1)
    await_phase(job, JobPhase.SUCCEEDED)
    plain = launch(session, tmp_path / "plain", {}, slow)
    await_phase(plain, JobPhase.SUCCEEDED)
    (stall,) = [event.stall for event in job.events() if isinstance(event, StallDetected)]
    assert (stall.kind, stall.ranks) == (StallKind.ABSENT, (1,)) and "rank 1 skipped a collective" in stall.reason
    (skipped,) = [event for event in job.events() if isinstance(event, FaultHappened)]
    (resumed,) = [event for event in job.events() if isinstance(event, RunResumed)]
    assert resumed.tier is CheckpointTier.MEMORY and skipped.step - 2 <= resumed.step <= skipped.step
    for one, other in zip(final(tmp_path / "skipped"), final(tmp_path / "plain"), strict=True):
        assert torch.equal(one, other)


# --- one agent, without a pool ----------------------------------------------------------------------------------------

KEEP = """
    import sys, time
    import torch
    from workbench.training.snapshots import Snapshots
    first = open("/dev/null").fileno()
    memory = Snapshots.open()
    restored = memory.restore()
    print("from", restored.step if restored else memory.reason, flush=True)
    step = restored.step if restored else 0
    for step in range(step + 1, step + 4):
        assert memory.is_due(step)
        memory.take(step, {"weight": torch.full((1000,), float(step))}, {})
    print("more descriptors:", open("/dev/null").fileno() - first, flush=True)
    print("done", step, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[AgentHost]:
    with agent_host(tmp_path) as made:
        yield made


def test_a_program_finds_its_descriptors_as_they_would_be(host: AgentHost) -> None:
    job_id = host.start(host.spec(KEEP, max_restarts=1))
    assert "more descriptors: 1\n" in host.says(job_id, "done 3")  # the connection to the store
    kill(host.started(job_id)[0].pid)
    host.ended(job_id)


def test_a_generation_after_another_on_one_agent_and_nothing_after_it(host: AgentHost, tmp_path: Path) -> None:
    spec = host.spec(KEEP, max_restarts=9)
    job_id = host.start(spec)
    host.says(job_id, "done 3")
    for restart_count in (1, 2):
        kill(host.started(job_id, restart_count)[-1].pid)
        host.ended(job_id, restart_count)
        host.start(spec, restart_count=restart_count, job_id=job_id)
        assert f"from {3 * restart_count}\n" in host.says(job_id, f"done {3 * restart_count + 3}")
    host.agent.stop()
    (tmp_path / "later").mkdir()
    with agent_host(tmp_path / "later") as later:
        spec = later.spec(KEEP, max_restarts=9)
        later.start(spec, restart_count=3, job_id=job_id)
        assert "from no copy in memory is left\n" in later.says(job_id, "done 3")
        later.stop(job_id, restart_count=3)
        later.ended(job_id)


TIERS = """
    import sys, time
    import torch
    from workbench.training import Run
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in Run.current().steps(torch.ones(40, 2, 4), {"model": model, "optimizer": optimizer}):
        if step == int(sys.argv[1]):
            print("at", step, flush=True)
            time.sleep(60)
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
"""


def _has_said(host: AgentHost, job_id: str, text: str, count: int) -> bool:
    return host.shown(job_id).count(text) >= count


def test_memory_is_gone_with_its_agent_and_the_disk_is_used(host: AgentHost, tmp_path: Path) -> None:
    fields = {"checkpoint_every": 8, "checkpoint_dir": str(tmp_path / "checkpoints"), "snapshot_every": 1}
    spec = replace(host.spec(TIERS, max_restarts=9, **fields), args=("13",))
    job_id = host.start(spec)
    for restart_count in (0, 1):
        host.until(job_id, functools.partial(_has_said, host, job_id, "at 13", restart_count + 1))
        host.until(job_id, lambda: [one for one in host.of(job_id, CheckpointSaved) if one.checkpoint.step == 8])
        kill(host.started(job_id, restart_count + 1)[-1].pid)
        host.ended(job_id, restart_count + 1)
        if restart_count == 0:
            host.start(spec, restart_count=1, job_id=job_id)
    resumed = host.of(job_id, RunResumed)
    assert [(one.tier, one.step, one.path) for one in resumed] == [(CheckpointTier.MEMORY, 13, "")]
    host.agent.stop()
    (tmp_path / "later").mkdir()
    with agent_host(tmp_path / "later") as later:
        later.start(spec, restart_count=2, job_id=job_id)
        later.says(job_id, "at 13")
        resumed = later.of(job_id, RunResumed)
        assert [(one.tier, one.step) for one in resumed] == [(CheckpointTier.DISK, 8)]
        later.stop(job_id, restart_count=2)
        later.ended(job_id)


def test_a_newer_checkpoint_on_disk_comes_before_memory(host: AgentHost, tmp_path: Path) -> None:
    fields = {"checkpoint_dir": str(tmp_path / "checkpoints"), "snapshot_every": 4}
    by_hand = TIERS.replace("optimizer.step()\n", "optimizer.step()\n        SAVE\n").replace(
        "SAVE", "if step == 9: Run.current().save({'model': model, 'optimizer': optimizer})"
    )
    spec = replace(host.spec(by_hand, max_restarts=9, **fields), args=("11",))
    job_id = host.start(spec)
    host.says(job_id, "at 11")
    host.until(job_id, lambda: [one for one in host.of(job_id, CheckpointSaved) if one.checkpoint.step == 10])
    kill(host.started(job_id)[-1].pid)
    host.ended(job_id)
    host.start(spec, restart_count=1, job_id=job_id)
    (resumed,) = host.until(job_id, lambda: host.of(job_id, RunResumed))
    assert (resumed.tier, resumed.step) == (CheckpointTier.DISK, 10)  # in memory was step 8


MOVE = """
    import os, sys, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from workbench.training.snapshots import Snapshots
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(300, 300))
    memory = Snapshots.open()
    restored = memory.restore()
    if restored:
        model.load_state_dict(restored.state)
        print("from", restored.step, sorted(restored.extras), restored.extras[rank]["rank"], flush=True)
    step = restored.step if restored else 0
    for step in range(step + 1, step + 3):
        torch.nn.init.constant_(model.module.weight, step)
        assert memory.is_due(step)
        memory.take(step, model.state_dict(), {"rank": rank})
        dist.barrier()
        assert memory.off == ""
    end = time.monotonic() + 20
    while memory.buddies and memory.buddies.steps() != dict.fromkeys(memory.buddies.wards, step):
        assert time.monotonic() < end, memory.buddies.fault
        time.sleep(0.01)
    print("done", step, float(model.module.weight.sum()), memory.reason, flush=True)
    time.sleep(60)
"""


def test_a_host_that_has_no_copy_gets_it_from_one_that_has(host: AgentHost, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with agent_host(tmp_path / "other") as other:
        spec = host.spec(MOVE, max_restarts=9, snapshot_every=1)
        job_id = host.start(spec, ranks=2)
        host.says(job_id, "done 2", rank=1)
        host.says(job_id, "done 2", rank=0)
        host.stop(job_id)
        host.ended(job_id, 2)
        for restart_count, step in ((1, 2), (2, 4)):  # from the first host; then each has its own
            spread(host, other, spec, job_id, restart_count)
            for agent, rank in ((host, 0), (other, 1)):
                text = agent.says(job_id, f"done {step + 2}", rank=rank)
                assert f"from {step} [{rank}] {rank}\n" in text
            for agent in (host, other):
                agent.stop(job_id, restart_count=restart_count)
            host.ended(job_id, 2 + restart_count)
            other.ended(job_id, restart_count)


@pytest.mark.parametrize("is_first_lost", [True, False])
def test_a_lost_host_does_not_send_the_job_to_disk(host: AgentHost, tmp_path: Path, is_first_lost: bool) -> None:
    """Its ranks go on elsewhere with what was their own; the store was on the first one."""
    (tmp_path / "other").mkdir()
    with agent_host(tmp_path / "other") as other:
        spec = host.spec(MOVE, max_restarts=9, snapshot_every=1)
        spread(host, other, spec, "job", 0)
        for agent, rank in ((host, 0), (other, 1)):
            agent.says("job", "done 2", rank=rank)
        lost, left = (host, other) if is_first_lost else (other, host)
        lost.agent.stop()
        left.stop("job")
        left.ended("job", 1)
        left.start(spec, ranks=2, restart_count=1, job_id="job")
        for rank in range(2):
            assert f"from 2 [{rank}] {rank}\n" in left.says("job", "done 4", rank=rank)


def spread(host: AgentHost, other: AgentHost, spec: JobSpec, job_id: str, restart_count: int) -> None:
    """Start rank 0 on one agent, rank 1 on the other."""
    host.agent.submit(StartStore(job_id=job_id, restart_count=restart_count, worker=WORKER, host="127.0.0.1"))
    store = host.until(
        job_id, lambda: [one for one in host.of(job_id, StoreStarted) if one.restart_count == restart_count]
    )[0]
    command = start_ranks(job_id, spec, 2, restart_count, (store.host, store.port))
    for agent, place in zip((host, other), command.placements, strict=True):
        agent.agent.submit(replace(command, placements=(replace(place, node_rank=place.rank),), nnodes=2))

"""Warm and cold starts, what is preloaded, which environment a rank has, and torchrun's contract."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.agent_host import AgentHost, agent_host, await_gone, children_of, is_alive
from workbench.spec import JobSpec

PROGRAMS = Path(__file__).parents[1] / "bench" / "programs"
DUMP = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentHost]:
    """The module's agent; afterwards nothing that it started may run."""
    with agent_host(tmp_path_factory.mktemp("host")) as made:
        yield made


# --- the zygote -------------------------------------------------------------------------------------------------------


def test_the_zygote_has_one_thread_and_no_device(host: AgentHost) -> None:
    host.output("")
    pid = host.agent.zygote_pids()[0]
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
    assert "nvidia" not in " ".join(str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir())
    assert os.getsid(pid) == pid
    assert str(Path(f"/proc/{pid}/cwd").readlink()) == "/"


def test_a_rank_has_torch_and_dynamo_already(host: AgentHost) -> None:
    text = "import sys; print(all(n in sys.modules for n in ('torch', 'torch._dynamo', 'torch.distributed', 'numpy')))"
    assert host.output(text) == "True\n"


def test_the_heavy_and_the_agents_own_libraries_are_not_in_a_rank(host: AgentHost) -> None:
    text = "import sys; print([n for n in ('msgspec', 'distributed', 'dask', 'IPython', 'psutil') if n in sys.modules])"
    assert host.output(text) == "[]\n"


def test_modules_are_preloaded_into_a_zygote_of_their_own(host: AgentHost) -> None:
    before = host.agent.zygote_pids()
    text = "import sys; print('sklearn' in sys.modules)"
    assert host.output(text) == "False\n"
    assert host.output(text, preload=("sklearn",)) == "True\n"  # with pandas and pyarrow, whose allocator has a thread
    assert len(host.agent.zygote_pids()) == len(before) + 1
    assert host.agent.zygote_pids()[0] == before[0]


def test_a_users_module_is_not_preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_model.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with agent_host(tmp_path) as own:
        job = own.start(own.spec("", preload=("my_model",)), ranks=2)
        reason = own.refusal(job).reason
        assert f"my_model cannot be preloaded: it lies in {tmp_path}, outside site-packages" in reason
        own.until(job, lambda: sum(getattr(news, "reason", "") == reason for news in own.news[job]) == 2)
        missing = own.start(own.spec("", preload=("no_such_module",)))
        assert "has no module no_such_module" in own.refusal(missing).reason
        assert own.output("print('the pool goes on')") == "the pool goes on\n"


def test_an_interpreter_without_torch_says_so(host: AgentHost, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    job = host.start(host.spec("", python=str(tmp_path / "bare" / "bin" / "python")))
    assert "No module named 'torch'" in host.refusal(job).reason


def test_another_interpreter_gets_its_own_zygote(host: AgentHost, tmp_path: Path) -> None:
    """It has torch and nothing else of ours: ranks need the standard library and torch alone."""
    other = tmp_path / "other"
    venv.create(other, with_pip=False, symlinks=True)
    site = next(other.glob("lib/python*/site-packages"))
    for path in Path(torch.__file__).parents[1].iterdir():
        ours = r"msgspec|distributed|dask|cloudpickle|IPython|psutil|threadpoolctl|dtrain|_dtrain|__"
        if not re.match(ours, path.name):
            (site / path.name).symlink_to(path)
    python = str(other / "bin" / "python")
    text = """
        import sys, torch
        from workbench.training import Run
        print(sys.prefix, Run.current().is_watched)
        try:
            import msgspec
        except ImportError:
            print("no msgspec")
    """
    assert host.output(text, python=python) == f"{other} True\nno msgspec\n"
    assert host.output(text, python=python, cold=True) == f"{other} True\nno msgspec\n"
    pids = host.agent.zygote_pids()
    assert any(Path(f"/proc/{pid}/cmdline").read_bytes().startswith(python.encode()) for pid in pids)


def test_few_idle_zygotes_are_kept(tmp_path: Path) -> None:
    with agent_host(tmp_path) as own:
        for modules in (("sklearn",), ("yaml",), ("jinja2",), ("requests",)):
            own.output("", preload=modules)
        pids = own.agent.zygote_pids()
        assert len(pids) == 4
        assert all(map(is_alive, pids))


# --- cold starts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cold": True}, "--cold"),
        ({"env": {"MALLOC_ARENA_MAX": "2"}}, "MALLOC_ARENA_MAX must be set before the interpreter starts"),
        ({"env": {"PYTORCH_ALLOC_CONF": "x:1"}}, "PYTORCH_ALLOC_CONF must be set before torch is loaded"),
    ],
)
def test_a_cold_start_is_told_with_its_reason(host: AgentHost, fields: dict[str, object], reason: str) -> None:
    text = """
        import os, sys
        print(os.getpgid(0) == os.getpid() == os.getsid(0), sys.stdin.read() == "", sys.argv[1:], sys.path[0], __file__)
        print(sys.modules["__main__"].__dict__ is globals(), sys.stdout.line_buffering, open(os.devnull).fileno())
        raise SystemExit(4)
    """
    spec = host.spec(text, args=("a",), **fields)
    job = host.run(spec)
    assert reason in host.started(job)[0].cold
    assert host.ended(job)[0].exit_code == 4
    assert host.log(job).split("\n")[:2] == [
        f"True True ['a'] {host.folder} {spec.entrypoint}",
        f"True {not os.environ.get('PYTHONUNBUFFERED')} 3",
    ]


def test_a_cold_rank_is_watched_stopped_and_heard_like_a_warm_one(host: AgentHost) -> None:
    job = host.run(host.spec("def f():\n    raise ValueError('cold')\nf()", cold=True))
    assert host.raised(job).error == "ValueError: cold"
    assert host.raised(job).traceback == host.log(job)
    job = host.start(host.spec("import os, time\nos.fork()\nprint('up', flush=True)\ntime.sleep(1e6)", cold=True))
    host.says(job, "up")
    pid = host.started(job)[0].pid
    group = [pid, *children_of(pid)]
    host.stop(job, grace=5)
    assert host.ended(job)[0].signal == 15
    await_gone(group, 1.0)


def test_cold_ranks_form_a_group(host: AgentHost, tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    spec = JobSpec(entrypoint=str(PROGRAMS / "first_step.py"), args=(str(stamp),), cwd=str(tmp_path), cold=True)
    job = host.run(spec, ranks=2, timeout=60)
    assert [exited.exit_code for exited in host.ended(job, 2)] == [0, 0], host.log(job)


def test_variables_that_a_forked_rank_can_take_on_keep_the_start_warm(host: AgentHost) -> None:
    env = {"OMP_NUM_THREADS": "2", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "PYTHONWARNINGS": "error", "TZ": "Asia/Tokyo"}
    text = """
        import sys, time, warnings, torch, torch.distributed as dist
        print(torch.get_num_threads(), dist.get_debug_level().name, sys.warnoptions, time.tzname[0])
        warnings.warn("now an error")
    """
    job = host.run(host.spec(text, env=env))
    assert host.started(job)[0].cold == ""
    assert host.log(job).startswith("2 DETAIL ['error'] JST\n")
    assert host.raised(job).error == "UserWarning: now an error"


# --- environment and contract -----------------------------------------------------------------------------------------


def rank_environs(host: AgentHost, ranks: int, **fields: object) -> list[dict[str, str]]:
    job = host.run(host.spec(DUMP, **fields), ranks)
    return [json.loads(host.log(job, rank)) for rank in range(ranks)]


def test_the_environment_is_the_hosts_the_jobs_and_the_contracts_alone(
    host: AgentHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_AFTER_THE_AGENT_BEGAN", "1")
    (environ,) = rank_environs(host, 1, env={"MINE": "1", "PATH": "/mine"})
    assert environ["MINE"] == "1"
    assert environ["PATH"] == "/mine"
    assert environ["HOME"] == os.environ["HOME"]
    assert "SET_AFTER_THE_AGENT_BEGAN" not in environ
    assert "OMP_NUM_THREADS" not in environ or "OMP_NUM_THREADS" in os.environ


def test_the_contract_is_torchruns(host: AgentHost, tmp_path: Path) -> None:
    script = tmp_path / "dump.py"
    script.write_text("import json, os\nopen(f\"{os.environ['RANK']}.json\", 'w').write(json.dumps(dict(os.environ)))")
    clean = {name: os.environ[name] for name in ("PATH", "HOME")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "3", str(script)]
    subprocess.run(command, env=clean, cwd=tmp_path, check=True, capture_output=True, timeout=100)
    job = host.run(host.spec(DUMP, max_restarts=3), ranks=2)
    for rank in (0, 1):
        theirs = json.loads((tmp_path / f"{rank}.json").read_text())
        ours = json.loads(host.log(job, rank))
        promised = theirs.keys() - clean.keys() - {"LC_CTYPE"}
        assert promised <= ours.keys()
        assert ours.keys() - theirs.keys() - os.environ.keys() == {"DTRAIN_JOB_ID", "DTRAIN_CHECKPOINT_DIR"}
        free = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        for name in promised - free:
            assert ours[name] == theirs[name], name
        assert ours["TORCHELASTIC_RUN_ID"] == ours["DTRAIN_JOB_ID"] == job


def test_a_recorded_error_goes_to_the_promised_file(host: AgentHost) -> None:
    text = """
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main(): raise ValueError("recorded")
        main()
    """
    job = host.run(host.spec(text))
    file = host.jobs_dir / job / "errors" / "rank0.restart0.json"
    assert "recorded" in json.loads(file.read_text())["message"]["message"]


def test_devices_are_named_by_the_slots_of_the_job(tmp_path: Path) -> None:
    with agent_host(tmp_path, gpus=("4", "5", "GPU-abc")) as own:
        job = own.run(own.spec("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"), ranks=2)
        assert [own.log(job, rank) for rank in (0, 1)] == ["4,5\n", "4,5\n"]


# --- a training job ---------------------------------------------------------------------------------------------------


def test_an_unmodified_torchrun_script_trains_at_once(host: AgentHost, tmp_path: Path) -> None:
    """From the launch to the first finished DDP step of 2 ranks: a fraction of the 3 s that torchrun takes."""
    seconds = []
    for number in range(3):
        stamp = tmp_path / f"stamp{number}"
        spec = JobSpec(entrypoint=str(PROGRAMS / "first_step.py"), args=(str(stamp),), cwd=str(tmp_path))
        start = time.time()
        job = host.run(spec, ranks=2)
        assert [exited.exit_code for exited in host.ended(job, 2)] == [0, 0], host.log(job)
        seconds.append(float(stamp.read_text()) - start)
    assert min(seconds) < 0.5, seconds


def test_the_first_line_runs_at_once(host: AgentHost) -> None:
    job = host.run(host.spec("import time; print(time.time())"))
    seconds = []
    for _ in range(5):
        job = host.run(host.spec("import time; print(time.time())"))
        seconds.append(float(host.log(job)) - host.started(job)[0].time)
    assert min(seconds) < 0.05, seconds

"""From a command to what one rank is told, without a process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from workbench.agent import zygote
from workbench.agent.fresh import split_path, stream_encoding, thread_count
from workbench.agent.launch import Host, describe, find_fault, first_path, rank_environ
from workbench.agent.rank import exit_code, read_launch
from workbench.agent.stacks import tidy
from workbench.agent.usage import NvmlDevices, tree_usage
from workbench.agent.wire import SIZES
from workbench.commands import StartRanks
from workbench.spec import EntrypointKind, JobSpec
from workbench.state import Placement

HOST = Host(environ={"PATH": "/bin", "OMP_NUM_THREADS": "8"}, gpus=(), python="/python")


def command(spec: JobSpec, slots: tuple[int, ...] = (0,)) -> StartRanks:
    placements = tuple(
        Placement(rank=rank, local_rank=rank, node_rank=0, worker="w", slot=slot) for rank, slot in enumerate(slots)
    )
    return StartRanks(
        job_id="job",
        restart_count=0,
        worker="w",
        spec=spec,
        placements=placements,
        world_size=len(slots),
        nnodes=1,
        master=("127.0.0.1", 5),
    )


def environ(spec: JobSpec, host: Host = HOST, slots: tuple[int, ...] = (0,)) -> dict[str, str]:
    start = command(spec, slots)
    return rank_environ(start, start.placements[0], host, Path("/errors"))


def test_the_jobs_environment_comes_before_the_hosts_and_the_contract_before_both() -> None:
    found = environ(JobSpec(env={"PATH": "/mine", "RANK": "77", "NEW": "1"}))
    assert (found["PATH"], found["RANK"], found["NEW"], found["OMP_NUM_THREADS"]) == ("/mine", "0", "1", "8")
    assert found["DTRAIN_JOB_ID"] == "job"


def test_a_users_thread_count_comes_before_torchruns() -> None:
    host = Host(environ={}, gpus=(), python="/python")
    assert environ(JobSpec(), host, slots=(0, 1))["OMP_NUM_THREADS"] == "1"
    assert environ(JobSpec(env={"OMP_NUM_THREADS": "4"}), host, slots=(0, 1))["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in environ(JobSpec(), host)


def test_all_the_jobs_devices_of_the_host_are_visible_by_local_rank() -> None:
    host = Host(environ={}, gpus=("0", "1", "2", "3"), python="/python")
    assert environ(JobSpec(), host, slots=(3, 1))["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert "CUDA_VISIBLE_DEVICES" not in environ(JobSpec(), HOST)


def test_ranks_on_several_hosts_are_told_by_which_interface_unless_the_user_has() -> None:
    place = Placement(rank=0, local_rank=0, node_rank=0, worker="w", slot=0, host="127.0.0.1")
    here = msgspec.structs.replace(command(JobSpec()), nnodes=2, world_size=2, placements=(place,))
    assert rank_environ(here, place, HOST, Path("/errors"))["GLOO_SOCKET_IFNAME"] == "lo"
    mine = msgspec.structs.replace(here, spec=JobSpec(env={"GLOO_SOCKET_IFNAME": "ib0"}))
    assert rank_environ(mine, place, HOST, Path("/errors"))["GLOO_SOCKET_IFNAME"] == "ib0"
    elsewhere = msgspec.structs.replace(place, host="192.0.2.1")
    assert "GLOO_SOCKET_IFNAME" not in rank_environ(here, elsewhere, HOST, Path("/errors"))
    assert "GLOO_SOCKET_IFNAME" not in environ(JobSpec())


def test_a_deterministic_job_has_cublas_told() -> None:
    assert environ(JobSpec(deterministic=True))["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    own = JobSpec(deterministic=True, env={"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert environ(own)["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_deterministic_job_has_one_order_of_sets_one_thread_and_a_seed() -> None:
    host = Host(environ={"PYTHONHASHSEED": "random"}, gpus=(), python="/python")
    found = environ(JobSpec(deterministic=True), host)
    assert (found["PYTHONHASHSEED"], found["OMP_NUM_THREADS"], found["NCCL_ALGO"]) == ("0", "1", "Ring")
    assert environ(JobSpec(deterministic=True))["OMP_NUM_THREADS"] == "8"  # the user's own
    for spec, seed in ((JobSpec(deterministic=True), 0), (JobSpec(deterministic=True, seed=3), 3), (JobSpec(), None)):
        start = command(spec)
        data = describe(start, start.placements[0], {}, "/python", Path("/program.py"))
        assert json.loads(data[SIZES.size : SIZES.size + SIZES.unpack_from(data)[0]])["seed"] == seed


def test_a_rank_reads_what_the_agent_wrote(tmp_path: Path) -> None:
    spec = JobSpec(kind=EntrypointKind.SOURCE, source="x = 'é'", entrypoint="c", args=("-v",), seed=3, cwd="/tmp")
    start = command(spec)
    data = describe(start, start.placements[0], {"A": "1"}, "/python", Path("/program.py"))
    (tmp_path / "launch").write_bytes(data)
    fd = os.open(tmp_path / "launch", os.O_RDONLY)
    launch = read_launch(fd)
    os.close(fd)
    assert launch.payload.decode() == "x = 'é'"
    assert {name: launch.header[name] for name in ("kind", "label", "args", "seed", "path0", "env")} == {
        "kind": "source", "label": "c", "args": ["-v"], "seed": 3, "path0": "/tmp", "env": {"A": "1"},
    }  # fmt: skip
    assert json.loads(data[SIZES.size : SIZES.size + SIZES.unpack_from(data)[0]]) == launch.header


def test_the_first_path_is_the_scripts_own_folder_links_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").touch()
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "train.py")
    assert first_path(JobSpec(entrypoint="link.py"), str(tmp_path)) == str(tmp_path / "real")
    assert first_path(JobSpec(entrypoint="real"), str(tmp_path)) == str(tmp_path / "real")
    assert first_path(JobSpec(entrypoint="m", kind=EntrypointKind.MODULE), str(tmp_path)) == str(tmp_path)


def test_what_cannot_be_started_is_seen_beforehand(tmp_path: Path) -> None:
    assert "there is no script" in find_fault(JobSpec(entrypoint="no.py", cwd=str(tmp_path)), HOST)
    assert "there is no directory" in find_fault(JobSpec(entrypoint="no.py", cwd="/no/such"), HOST)
    (tmp_path / "yes.py").touch()
    assert find_fault(JobSpec(entrypoint="yes.py", cwd=str(tmp_path)), HOST) == ""
    assert "there is no interpreter" in find_fault(JobSpec(entrypoint="yes.py", cwd=str(tmp_path), python="/x"), HOST)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LANG": "C.UTF-8"}, ("utf-8", "strict")),
        ({}, ("utf-8", "surrogateescape")),
        ({"LANG": "C.UTF-8", "LC_ALL": "C"}, ("utf-8", "surrogateescape")),
        ({"LANG": "C.UTF-8", "PYTHONIOENCODING": "latin-1"}, ("latin-1", "strict")),
        ({"PYTHONIOENCODING": ":replace"}, ("utf-8", "replace")),
    ],
)
def test_the_streams_encodings_are_pythons(variables: dict[str, str], expected: tuple[str, str]) -> None:
    assert stream_encoding(variables) == expected


@pytest.mark.parametrize(("value", "count"), [("4", 4), ("4,2", 4), ("", 0), ("0", 0), ("many", 0), (" 2 ", 2)])
def test_thread_counts(value: str, count: int) -> None:
    assert thread_count({"OMP_NUM_THREADS": value}, "UNSET", "OMP_NUM_THREADS") == count


def test_pythonpath_is_split_as_the_interpreter_does() -> None:
    assert split_path("") == []
    assert split_path("/a:/b:/a") == ["/a", "/b"]


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (3, 3), (256 + 7, 7), ("text", 1), (True, 1)])
def test_exit_codes_are_the_interpreters(code: object, expected: int) -> None:
    assert exit_code(SystemExit(code)) == expected


def test_only_installed_modules_may_be_preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("json", "msgspec", "numpy.linalg"):
        zygote.check_module(name)
    with pytest.raises(zygote.RefusedError, match=f"it lies in {tmp_path}, outside site-packages"):
        zygote.check_module("mine.part")
    with pytest.raises(zygote.RefusedError, match="has no module no_such"):
        zygote.check_module("no_such")


def test_our_own_frames_are_left_out_of_a_stack() -> None:
    text = (
        'Process 1: python x\nPython v3.11\n\nThread 1 (idle): "MainThread"\n    stuck (train.py:4)\n'
        "    run (workbench/agent/programs.py:30)\n    <module> (/x/workbench/agent/bootstrap.py:43)"
    )
    assert tidy(text) == 'Thread 1 (idle): "MainThread"\n    stuck (train.py:4)'


def test_usage_of_this_process_and_of_none() -> None:
    usage = tree_usage(os.getpid())
    assert usage.rss > 10_000_000
    assert usage.cpu > 0
    assert tree_usage(2**22 + 1) == (0, 0.0, 0, 0)


class FakeNvml:
    """One device, and one that has fallen off its bus."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index:
            raise self.NVMLError
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        return "handle" if uuid == b"GPU-a" else self.nvmlDeviceGetHandleByIndex(1)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> object:
        return type("Rates", (), {"gpu": 87})

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> object:
        return type("Memory", (), {"used": 5 * 2**30})


def test_devices_are_found_by_index_and_by_uuid() -> None:
    devices = NvmlDevices(FakeNvml())
    assert devices.usage("0") == devices.usage("GPU-a") == (87.0, 5 * 2**30)
    assert devices.usage("1") is None
    assert devices.usage("GPU-b") is None

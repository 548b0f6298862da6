"""What a forked rank can take on, what makes its start cold, and torchrun's promise."""

from __future__ import annotations

import pytest

from workbench.agent.contract import Seat, contract, defaults
from workbench.agent.environment import BY_CALL, COLD, Start, decide_start, needed_before, zygote_environ

BASE = {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "MKL_NUM_THREADS": "1"}


@pytest.mark.parametrize("pattern", COLD)
def test_every_row_of_the_table_makes_a_start_cold(pattern: str) -> None:
    name = pattern.replace("*", "X_UNHEARD_OF")
    start, reason = decide_start({**BASE, name: "1"}, BASE, cold=False)
    assert (start, reason) == (Start.COLD, f"{name} must be set before {COLD[pattern]}")


@pytest.mark.parametrize("name", sorted(BY_CALL))
def test_what_can_be_told_again_keeps_it_warm(name: str) -> None:
    assert decide_start({**BASE, name: "1"}, BASE, cold=False) == (Start.WARM, "")


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "RANK", "HF_HOME", "MINE"]
)
def test_what_is_read_when_it_is_used_keeps_it_warm(name: str) -> None:
    assert decide_start({**BASE, name: "1"}, BASE, cold=False)[0] is Start.WARM


def test_the_same_value_as_the_zygotes_keeps_it_warm() -> None:
    assert decide_start(dict(BASE), BASE, cold=False)[0] is Start.WARM


def test_a_changed_or_a_missing_value_makes_it_cold() -> None:
    assert decide_start({**BASE, "LD_LIBRARY_PATH": "/mine"}, BASE, cold=False)[0] is Start.COLD
    start, reason = decide_start({"PATH": "/bin", "MKL_NUM_THREADS": "1"}, BASE, cold=False)
    assert (start, reason) == (Start.COLD, "LD_LIBRARY_PATH is unset, which must be before the interpreter starts")


def test_it_is_cold_when_asked_for() -> None:
    assert decide_start(BASE, BASE, cold=True) == (Start.COLD, "asked for with --cold")


def test_what_preloaded_modules_have_read_matters_only_where_some_are() -> None:
    assert needed_before("HF_HOME") == ""
    assert needed_before("HF_HOME", preloads=True) == "the preloaded modules are imported"


def test_what_only_the_zygote_is_told_does_not_make_every_start_cold() -> None:
    assert decide_start(BASE, zygote_environ(BASE), cold=False)[0] is Start.WARM


def test_the_contract_names_a_ranks_place() -> None:
    promised = contract(
        Seat(rank=5, local_rank=1, node_rank=2, world_size=8, local_world_size=2, nnodes=4),
        master=("10.0.0.1", 29500),
        job_id="job",
        restart_count=1,
        max_restarts=3,
        error_file="/e",
    )
    picked = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
    assert [promised[name] for name in picked] == ["5", "1", "8", "2", "2", "4", "5"]
    assert (promised["MASTER_ADDR"], promised["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert (promised["TORCHELASTIC_RESTART_COUNT"], promised["TORCHELASTIC_USE_AGENT_STORE"]) == ("1", "True")


def test_threads_are_limited_only_where_ranks_share_a_host() -> None:
    assert "OMP_NUM_THREADS" not in defaults(1)
    assert defaults(2)["OMP_NUM_THREADS"] == "1"

"""The environment that a rank is promised: torchrun's, complete. Pure.

Source: `LocalElasticAgent._start_workers` and `torch.distributed.run` of torch 2.13; a test compares with what the
installed torchrun sets.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SIGNALS: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


class Seat(NamedTuple):
    """Where one rank sits in its job."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    nnodes: int


def contract(
    seat: Seat, *, master: tuple[str, int], job_id: str, restart_count: int, max_restarts: int, error_file: str
) -> dict[str, str]:
    """What torchrun would set for this rank. The store listens outside the ranks, as torchrun's agent store does."""
    return {
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.local_rank),
        "WORLD_SIZE": str(seat.world_size),
        "LOCAL_WORLD_SIZE": str(seat.local_world_size),
        "GROUP_RANK": str(seat.node_rank),
        "GROUP_WORLD_SIZE": str(seat.nnodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(seat.rank),
        "ROLE_WORLD_SIZE": str(seat.world_size),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": SIGNALS,
        "TORCHELASTIC_ERROR_FILE": error_file,
    }


def defaults(local_world_size: int) -> dict[str, str]:
    """What torchrun sets only where the user has not."""
    threads = {"OMP_NUM_THREADS": "1"} if local_world_size > 1 else {}
    return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **threads}

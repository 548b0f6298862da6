"""The environment contract of a rank: torchrun's, complete. Pure; standard library only."""

from __future__ import annotations


def rank_environment(
    *,
    rank: int,
    local_rank: int,
    node_rank: int,
    world_size: int,
    local_world_size: int,
    nnodes: int,
    master: tuple[str, int],
    job_id: str,
    restart_count: int,
    max_restarts: int,
) -> dict[str, str]:
    """What torchrun sets for its workers (`torch.distributed.elastic.agent.server.local_elastic_agent`), and DTRAIN_JOB_ID.

    `TORCHELASTIC_USE_AGENT_STORE`: the rendezvous store lives outside the ranks, who join it as clients.
    """
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": node_rank,
        "ROLE_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_WORLD_SIZE": nnodes,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_PORT": master[1],
        "TORCHELASTIC_RESTART_COUNT": restart_count,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
    }
    return {key: str(value) for key, value in numbers.items()} | {
        "ROLE_NAME": "default",
        "MASTER_ADDR": master[0],
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "DTRAIN_JOB_ID": job_id,
    }

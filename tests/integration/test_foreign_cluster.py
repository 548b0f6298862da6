"""Clusters that the user already runs: the plugins go there from the client, by client, address and scheduler file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

from workbench.errors import PoolUnavailableError
from workbench.session import Session
from workbench.state import JobPhase

SOURCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
local = [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]]
print("sum", total.item(), "of", dist.get_world_size(), "local", *local)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two worker processes of one thread each, as somebody else might have started them."""
    before = os.environ.get("DTRAIN_HOME")
    os.environ["DTRAIN_HOME"] = str(tmp_path_factory.mktemp("home"))
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    ) as cluster:
        yield cluster
    if before is None:
        del os.environ["DTRAIN_HOME"]
    else:
        os.environ["DTRAIN_HOME"] = before


def test_join_by_client_and_by_address(cluster: LocalCluster, tmp_path: Path) -> None:
    with Client(cluster) as client, Session(client) as session:
        status = session.pool_status()
        assert (status.slots, len(status.workers)) == (2, 2)
        job = session.launch(source=SOURCE, nproc_per_node=2)
        assert job.wait(60) is JobPhase.SUCCEEDED
        assert job.logs(rank=1).strip() == "sum 1.0 of 2 local 1 2", "two workers of one host are one node"
    with Session(cluster.scheduler_address) as session:
        again = session.attach(job.job_id)
        assert again.phase is JobPhase.SUCCEEDED
    file = tmp_path / "scheduler.json"
    file.write_text(f'{{"address": "{cluster.scheduler_address}"}}')
    with Session(str(file)) as session:
        assert session.launch(source="print(1)", nproc_per_node=1).wait(60) is JobPhase.SUCCEEDED


def test_an_address_where_nothing_listens() -> None:
    with pytest.raises(PoolUnavailableError, match=r"nothing answers at tcp://127\.0\.0\.1:9"):
        Session("tcp://127.0.0.1:9", timeout=2.0)

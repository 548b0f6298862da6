"""Evidence of real ranks that hang: from py-spy, from the rank's own handler, from its line, from /proc."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.agent_host import AgentHost, agent_host
from workbench.agent import evidence
from workbench.events import RankStarted
from workbench.evidence import RankEvidence

HANGS = {  # the program's line, whether the rank can answer meanwhile
    "sleeping": ("time.sleep(600)", True),
    "regex": ("re.match('(a?){28}a{28}', 'a' * 28)", False),
    "lock": ("lock = threading.Lock(); lock.acquire(); lock.acquire()", True),
}
PROGRAM = """import re, threading, time

print("here", flush=True)
def hang():
    {}
hang()
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentHost]:
    with agent_host(tmp_path_factory.mktemp("agent")) as made:
        yield made


def look(host: AgentHost, job_id: str) -> RankEvidence:
    (found,) = host.agent.evidence(job_id, 0, deep=True, timeout=5.0)
    return found


@pytest.fixture(params=HANGS)
def hanging(request: pytest.FixtureRequest, host: AgentHost) -> Iterator[tuple[str, str]]:
    job_id = host.start(host.spec(PROGRAM.format(HANGS[request.param][0])))
    host.says(job_id, "here")
    yield request.param, job_id
    host.stop(job_id)
    host.ended(job_id, 1, 10.0)


@pytest.mark.parametrize("has_spy", [True, False])
def test_a_hanging_ranks_line_is_found_with_py_spy_and_where_that_may_not_trace(
    host: AgentHost, hanging: tuple[str, str], has_spy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, job_id = hanging
    if not has_spy:
        monkeypatch.setattr(evidence, "find_spy", lambda: None)
    deadline = time.monotonic() + 10
    while " in hang" not in (found := look(host, job_id)).where and time.monotonic() < deadline:
        time.sleep(0.05)  # it has said that it is there a moment before
    assert found.where.endswith(":5 in hang"), found
    assert Path(found.where.partition(":")[0]).suffix == ".py"
    assert found.answered is HANGS[name][1]
    assert "hang (" in found.stack


def test_a_stopped_rank_is_read_all_the_same(host: AgentHost) -> None:
    job_id = host.start(host.spec(PROGRAM.format("time.sleep(600)")))
    host.says(job_id, "here")
    host.inject(job_id, "stop")
    deadline = time.monotonic() + 10
    while (found := look(host, job_id)).state != "T" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (found.state, found.answered) == ("T", None)
    assert found.where.endswith("in hang")
    (shallow,) = host.agent.evidence(job_id, 0, deep=False, timeout=0.1)
    assert (shallow.state, shallow.stack) == ("T", "")
    assert host.agent.evidence(job_id, 7, deep=True, timeout=1.0) == [], "of another generation"
    started = host.of(job_id, RankStarted)
    assert shallow.pid == started[0].pid
    host.stop(job_id)
    host.ended(job_id, 1, 10.0)

"""The table of faults, and that each is done somewhere: from outside, or in the rank."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from workbench.agent import memory
from workbench.agent.faults import ACTS, CannotBeDone, largest_file
from workbench.faults import FAULTS, ON_CHECKPOINT, Place
from workbench.training.control import Control
from workbench.training.deeds import DEEDS, PARTS, Deed
from workbench.training.faults import KNOWN, Faults
from workbench.training.points import ANYWHERE, BACKWARD, BATCH, COLLECTIVE, WRITE, Call
from workbench.verbs.help import verb_help
from workbench.verbs.table import find_verb

PLACES = {Place.STEP: ANYWHERE, Place.BATCH: (BATCH,), Place.BACKWARD: (BACKWARD,), Place.CHECKPOINT: (WRITE,)}


def test_every_fault_is_done_somewhere() -> None:
    outside = {name for name, fault in FAULTS.items() if fault.place is Place.AGENT}
    assert set(ACTS) == outside
    assert set(DEEDS) == set(FAULTS) - outside - {"kill-scheduler"}, "which the runner does to itself"
    assert set(ON_CHECKPOINT) <= outside
    assert not set(PARTS) & set(FAULTS)


@pytest.mark.parametrize("name", DEEDS)
def test_a_fault_happens_where_the_help_says(name: str) -> None:
    place, points = FAULTS[name].place, DEEDS[name].points
    assert (not points) is (place is Place.LINE)
    if place is Place.COLLECTIVE:
        assert COLLECTIVE in points
    elif not DEEDS[name].stays and points:
        assert points == PLACES[place]


def test_help_lists_every_fault_in_a_line() -> None:
    text = verb_help(find_verb(["inject"])[0], "%dtrain")
    for name, fault in FAULTS.items():
        assert f"\n  {name} " in text
        assert fault.help.split()[0] in text


# --- in the rank, with deeds that harm nobody -------------------------------------------------------------------------


class Line:
    """What the rank's line was given."""

    def __init__(self) -> None:
        self.facts: list[dict[str, Any]] = []

    def send(self, header: dict[str, Any], payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        self.facts.append(header["fields"])


def rank_of(monkeypatch: pytest.MonkeyPatch, **deeds: Deed) -> tuple[Faults, Line]:
    for name, deed in deeds.items():
        monkeypatch.setitem(KNOWN, name, deed)
    line = Line()
    return Faults(Control(lambda: ({}, b"", ()), line.send, {})), line


def is_touched() -> bool:
    import torch

    return "meet" in torch.autograd._engine_run_backward.__code__.co_freevars  # type: ignore[attr-defined]


def test_a_fault_waits_for_its_call_and_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    faults, line = rank_of(monkeypatch, odd=Deed(lambda faults, call: call.run(), (BACKWARD,)))
    assert not is_touched()
    faults.ask({"fault": "odd"})
    assert is_touched() and not line.facts
    before = time.time()
    torch.ones(1, requires_grad=True).sum().backward()
    assert not is_touched()
    (fact,) = line.facts
    assert fact["fault"] == "odd" and fact["detail"] == "backward" and before <= fact["time"] <= time.time()
    torch.ones(1, requires_grad=True).sum().backward()
    assert len(line.facts) == 1


def test_continue_takes_back_what_has_not_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    faults, line = rank_of(monkeypatch, odd=Deed(lambda faults, call: 1 / 0, (BACKWARD,)))
    faults.ask({"fault": "odd"})
    faults.ask({"fault": "continue"})
    assert not is_touched() and not line.facts and faults.is_released


def test_what_stays_is_told_once_and_yields_to_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    faults, line = rank_of(
        monkeypatch,
        often=Deed(lambda faults, call: done.append("often"), (COLLECTIVE,), stays=True),
        once=Deed(lambda faults, call: done.append("once"), (COLLECTIVE,)),
    )
    call = Call(COLLECTIVE, "all_reduce", lambda: None, (), {})
    faults.ask({"fault": "often"})
    faults.ask({"fault": "once"})
    for _ in range(3):
        faults.meet(call)
    assert done == ["once", "often", "often"]
    assert [fact["fault"] for fact in line.facts] == ["once", "often"]
    faults.end()
    faults.meet(call)
    assert len(done) == 3


def test_other_threads_pass_by_but_may_save(monkeypatch: pytest.MonkeyPatch) -> None:
    faults, line = rank_of(monkeypatch, odd=Deed(lambda faults, call: None, (COLLECTIVE, WRITE)))
    faults.ask({"fault": "odd"})
    made: list[str] = []
    for point in (COLLECTIVE, WRITE):
        call = Call(point, point, made.append, (point,), {})
        thread = threading.Thread(target=faults.meet, args=(call,))
        thread.start()
        thread.join()
    assert made == [COLLECTIVE] and [fact["detail"] for fact in line.facts] == [WRITE]


def test_where_torch_is_not_called_the_program_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.training.faults.PATIENCE", 0.0)
    faults, _ = rank_of(monkeypatch)
    faults.ask({"fault": "exception"})
    deadline = time.monotonic() + 10
    with pytest.raises(RuntimeError, match="exception injected on purpose"):
        while time.monotonic() < deadline:
            pass


def test_an_unknown_fault_and_one_that_cannot_be_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    faults, line = rank_of(monkeypatch)
    faults.ask({"fault": "melt"})
    faults.ask({"fault": "kill-loader"})
    assert [fact["problem"] for fact in line.facts] == [
        "this rank knows no such fault",
        "it has no DataLoader worker now",
    ]


def test_memory_runs_out_under_a_limit_that_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_AS)
    faults, _ = rank_of(monkeypatch)
    with pytest.raises(MemoryError):
        DEEDS["oom"].act(faults, Call("", "", lambda: None, (), {}))
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_nan_reaches_loss_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    faults, _ = rank_of(monkeypatch)
    faults.ask({"fault": "nan"})
    weight = torch.ones(3, requires_grad=True)
    loss = weight.exp().sum()
    loss.backward()
    assert weight.grad is not None and weight.grad.isnan().all() and loss.isnan()


# --- outside ----------------------------------------------------------------------------------------------------------


def test_the_largest_file_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "manifest").write_bytes(b"1")
    (tmp_path / "deep" / "shard").write_bytes(b"12345")
    assert largest_file(str(tmp_path)) == tmp_path / "deep" / "shard"
    assert largest_file(str(tmp_path / "manifest")) == tmp_path / "manifest"
    with pytest.raises(CannotBeDone, match="no checkpoint yet"):
        largest_file("")
    with pytest.raises(CannotBeDone, match="nothing in"):
        largest_file(str(tmp_path / "gone"))


def group(folder: Path, kills: int, name: str = "memory.events") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"low 0\noom {kills + 3}\noom_kill {kills}\noom_group_kill 0\n")
    return folder


@pytest.mark.parametrize(
    ("lines", "there", "found"),
    [
        (["0::/user/job"], "user/job", "user/job"),
        (["4:memory:/a/b", "0::/"], "memory/a/b", "memory/a/b"),
        (["9:cpu,memory:/a", "0::/"], "memory/a", "memory/a"),
        (["0::/../host/path"], ".", "."),
        (["4:memory:/docker/1f"], "memory", "memory"),
        ([], "elsewhere", None),
    ],
)
def test_the_memory_cgroup_of_a_process(tmp_path: Path, lines: list[str], there: str, found: str | None) -> None:
    group(tmp_path / there, 0)
    assert memory.find_group(lines, tmp_path) == (None if found is None else tmp_path / found)


def test_one_kill_of_the_kernel_explains_one_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = group(tmp_path, 5)
    monkeypatch.setattr(memory, "group_of", lambda: folder)
    monkeypatch.setattr(memory, "logged_kills", lambda: None)
    ledger = memory.Ledger()
    before = ledger.count()
    assert before == 5 and not ledger.explains(1, before)
    group(tmp_path, 6)
    assert ledger.explains(1, before)
    assert not ledger.explains(2, before), "somebody else sent that one's SIGKILL"
    group(tmp_path, 9)
    assert not ledger.explains(3, ledger.count()), "it began after these"
    assert ledger.explains(4, before) and ledger.explains(5, before)


def test_the_kernels_log_names_who_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = group(tmp_path, 0)
    monkeypatch.setattr(memory, "group_of", lambda: folder)
    monkeypatch.setattr(memory, "logged_kills", lambda: frozenset({7}))
    ledger = memory.Ledger()
    group(tmp_path, 1)
    assert not ledger.explains(6, 0)
    assert ledger.explains(7, 0)


def test_the_kernels_log_is_read_where_it_can_be(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("3,1,2,-;Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB\n")
    known = memory.logged_kills(str(log))
    assert known is None or known == {4242}
    assert memory.logged_kills(str(tmp_path / "none")) is None


def test_a_group_counts_what_the_kernel_ended(tmp_path: Path) -> None:
    assert memory.count_kills(group(tmp_path, 4, "memory.oom_control")) == 4
    assert memory.count_kills(None) >= 0
    assert memory.group_of(os.getpid()) == memory.group_of()
    assert memory.group_of(2**22 + 1) is None

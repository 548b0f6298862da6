"""What crosses Dask's connections comes back as it was, and errors as the errors they were."""

from __future__ import annotations

import pytest

from workbench.commands import ExecuteCell, StopRanks
from workbench.errors import InternalError, JobError, NotEnoughSlotsError, UnknownJobError, UsageError, WorkbenchError
from workbench.events import RankExited
from workbench.pool.messages import Fault, Message, decode, decode_batch, decode_command, encode, from_fault, to_fault
from workbench.telemetry import CellFinished, StepsTaken


def test_a_batch_keeps_facts_and_reports_apart() -> None:
    batch = [
        Message("a-1", RankExited(time=1.5, restart_count=0, rank=3, signal=9), None),
        Message("a-1", None, StepsTaken(job_id="a-1", restart_count=0, rank=3, block=b"\0\xff")),
        Message("b-2", None, CellFinished(job_id="b-2", cell_id="c", rank=0, ok=True, payload=b"\x80")),
    ]
    assert decode_batch(encode(batch)) == batch


@pytest.mark.parametrize(
    "command",
    [
        StopRanks(job_id="a-1", restart_count=2, worker="tls://h:1", grace=0.0),
        ExecuteCell(job_id="a-1", worker="tls://h:1", cell_id="cell-1", source="1 + 1", ranks=(0, 2)),
    ],
)
def test_commands_come_back(command: StopRanks | ExecuteCell) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize("kind", [UsageError, UnknownJobError, NotEnoughSlotsError])
def test_an_error_is_raised_again_as_what_it_was(kind: type[WorkbenchError]) -> None:
    error = from_fault(decode(encode(to_fault(kind("what happened", hint="what to do"))), Fault))
    assert type(error) is kind
    assert str(error) == "what happened (what to do)"
    assert isinstance(error, WorkbenchError)
    assert error.hint == "what to do"


def test_what_is_not_of_our_tree_is_a_bug_in_the_pool() -> None:
    for strange in (KeyError("x"), JobError("r", job_id="a-1")):
        error = from_fault(to_fault(strange))
        assert isinstance(error, InternalError)
        assert type(strange).__name__ in str(error)

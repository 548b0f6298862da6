"""Cells for interactive ranks: sent on, and answered here where a rank cannot."""

from __future__ import annotations

import signal

from workbench.agent.jobs import Jobs
from workbench.agent.wire import Header
from workbench.commands import ExecuteCell, InterruptRanks, PullValue, PushValue
from workbench.spec import EntrypointKind
from workbench.telemetry import CellFinished


class Cells:
    """All in the loop's thread."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def ask(self, command: ExecuteCell | PushValue | PullValue) -> None:
        """Pass a request on to its ranks; every one of them is answered, whatever becomes of it."""
        header, payload = _frame(command)
        for rank in command.ranks:
            process = self._jobs.ranks.get((command.job_id, rank))
            if process is None or not process.pid:
                self._refuse(command, rank, f"rank {rank} is not running")
            elif process.plan.command.spec.kind is not EntrypointKind.INTERACTIVE:
                self._refuse(command, rank, f"{command.job_id} is not an interactive job")
            else:
                process.cells.add(command.cell_id)
                process.tell(header, payload)

    def interrupt(self, command: InterruptRanks) -> None:
        """A frame, for a rank inside a collective, and SIGINT, for one in Python; to the rank's process alone."""
        for rank in command.ranks:
            process = self._jobs.ranks.get((command.job_id, rank))
            is_open = process is not None and process.plan.command.spec.kind is EntrypointKind.INTERACTIVE
            if process is not None and process.pid and is_open and process.cells:
                process.tell({"op": "interrupt"})
                process.send_signal(signal.SIGINT)

    def _refuse(self, command: ExecuteCell | PushValue | PullValue, rank: int, reason: str) -> None:
        answer = CellFinished(job_id=command.job_id, cell_id=command.cell_id, rank=rank, ok=False, error=reason)
        self._jobs.emit(command.job_id, answer)


def _frame(command: ExecuteCell | PushValue | PullValue) -> tuple[Header, bytes]:
    match command:
        case ExecuteCell():
            return {"op": "execute", "cell_id": command.cell_id, "source": command.source}, b""
        case PushValue():
            return {"op": "push", "cell_id": command.cell_id, "name": command.name}, command.payload
        case PullValue():
            return {"op": "pull", "cell_id": command.cell_id, "name": command.name}, b""

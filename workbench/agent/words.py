"""What a rank was doing, and how it ended, in words. Pure."""

from __future__ import annotations

import os
from typing import Final

from workbench.blackbox import Activity, Snapshot

DOING: Final = {
    Activity.STARTING: "starting",
    Activity.RUNNING: "",
    Activity.DATA: "waiting for data",
    Activity.FORWARD: "in the forward pass",
    Activity.BACKWARD: "in the backward pass",
    Activity.OPTIMIZER: "in the optimizer's step",
    Activity.CHECKPOINT: "saving a checkpoint",
    Activity.IDLE: "waiting for a cell",
    Activity.CELL: "running a cell",
    Activity.EXITING: "",
}


def doing(box: Snapshot) -> str:
    """As in "killed by SIGKILL at step 410 while …"; empty: in the program, nothing more is known."""
    if box.activity is Activity.COLLECTIVE:
        return f"in {box.collective or 'a collective'}"
    return DOING[box.activity]


def split_status(status: int | None) -> tuple[int | None, int | None]:
    """`(exit code, signal)` of a wait status, one of them None; both when there is no status."""
    if status is None:
        return None, None
    code = os.waitstatus_to_exitcode(status)
    return (code, None) if code >= 0 else (None, -code)

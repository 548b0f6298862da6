"""Faults done on purpose by the agent: signals, a memory cgroup, damage to a checkpoint. The rest the rank does itself.

Each answers with `FaultHappened`: the moment it was done, or why it could not be.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from workbench.agent.memory import make_group
from workbench.agent.processes import RankProcess
from workbench.commands import InjectFault
from workbench.events import FaultHappened
from workbench.faults import FAULTS, Place

if TYPE_CHECKING:
    from workbench.agent.jobs import Jobs

NOTICE: Final = 0.05  # s in which the worker's last word can get out
ROOM: Final = 64 * 2**20  # bytes that the rank may use more before the kernel ends it


class CannotBeDone(Exception):
    """Why, in words."""


def inject(jobs: Jobs, command: InjectFault) -> None:
    """Do the fault; an unknown one, or rank, is left alone: the runner has checked both."""
    process = jobs.ranks.get((command.job_id, command.rank))
    fault = FAULTS.get(command.fault)
    if process is None or fault is None:
        return
    answer = partial(_answer, jobs, process, command)
    try:
        if fault.place is not Place.AGENT:
            _pass_on(process, command.fault)
        else:
            answer(ACTS[command.fault](jobs, process, command))
    except CannotBeDone as error:
        answer("", problem=str(error))
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        answer("", problem=f"{error.strerror or error}{where}")


def _answer(jobs: Jobs, process: RankProcess, command: InjectFault, detail: str | None, problem: str = "") -> None:
    """`detail` None: somebody else answers."""
    if detail is None:
        return
    happened = FaultHappened(
        time=jobs.wall(),
        restart_count=process.restart_count,
        fault=command.fault,
        rank=command.rank,
        step=process.last_step,
        detail=detail,
        problem=problem,
    )
    jobs.emit(command.job_id, happened)


def _pass_on(process: RankProcess, fault: str, **fields: Any) -> None:
    if not process.pid:
        raise CannotBeDone(f"rank {process.rank} is still being started")
    process.tell({"op": "inject", "fault": fault, **fields})


def _kill(jobs: Jobs, process: RankProcess, command: InjectFault) -> str:
    process.detail = "on purpose"
    return _signal(process, signal.SIGKILL)


def _stop(jobs: Jobs, process: RankProcess, command: InjectFault) -> str:
    return _signal(process, signal.SIGSTOP)


def _continue(jobs: Jobs, process: RankProcess, command: InjectFault) -> str:
    _signal(process, signal.SIGCONT)
    _pass_on(process, command.fault)
    return ""


def _signal(process: RankProcess, number: signal.Signals) -> str:
    if not process.send_signal(number):
        raise CannotBeDone(f"rank {process.rank} does not run")
    return ""


def _kill_zygote(jobs: Jobs, process: RankProcess, command: InjectFault) -> str:
    pid = jobs.zygote_of(process)
    os.kill(pid, signal.SIGKILL)
    return f"zygote {pid}"


def _kill_worker(jobs: Jobs, process: RankProcess, command: InjectFault) -> None:
    """It says so first, and waits for the word to get out: the time told is that of the kill."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    happened = FaultHappened(
        time=jobs.wall() + NOTICE,
        restart_count=process.restart_count,
        fault=command.fault,
        rank=command.rank,
        step=process.last_step,
        detail=f"worker process {os.getpid()}",
    )
    jobs.emit(command.job_id, happened)
    jobs.call_later(NOTICE, die)


def _kill_by_kernel(jobs: Jobs, process: RankProcess, command: InjectFault) -> None:
    """The rank gets a memory cgroup of its own and then uses more than that allows; it answers itself."""
    process.own_group = make_group(f"dtrain-{process.job_id}-{process.rank}", process.pid, ROOM)
    _pass_on(process, "exhaust", size=4 * ROOM, name=command.fault)


def _corrupt(jobs: Jobs, process: RankProcess, command: InjectFault) -> str:
    path = largest_file(command.path)
    with path.open("r+b") as file:
        position, bit = secrets.randbelow(path.stat().st_size), secrets.randbelow(8)
        file.seek(position)
        (old,) = file.read(1)
        file.seek(position)
        file.write(bytes([old ^ 1 << bit]))
    return f"bit {bit} of byte {position} of {path}"


def _truncate(jobs: Jobs, process: RankProcess, command: InjectFault) -> str:
    path = largest_file(command.path)
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return f"{path}: {size // 2} of {size} bytes are left"


def largest_file(checkpoint: str) -> Path:
    """The file of a checkpoint (a folder, or one file) in which most of it lies."""
    if not checkpoint:
        raise CannotBeDone("the job has no checkpoint yet")
    root = Path(checkpoint)
    files = [root] if root.is_file() else [path for path in root.rglob("*") if path.is_file()]
    sizes = {}
    for path in files:
        with suppress(OSError):
            sizes[path] = path.stat().st_size
    if not any(sizes.values()):
        raise CannotBeDone(f"there is nothing in {checkpoint}")
    return max(sizes, key=lambda path: (sizes[path], str(path)))


ACTS: Final[dict[str, Callable[[Jobs, RankProcess, InjectFault], str | None]]] = {
    "kill": _kill,
    "stop": _stop,
    "continue": _continue,
    "oom-kill": _kill_by_kernel,
    "corrupt": _corrupt,
    "truncate": _truncate,
    "kill-zygote": _kill_zygote,
    "kill-worker": _kill_worker,
}

"""From a command to what one rank is told: its environment, and whether it can be had at all."""

from __future__ import annotations

import os
import socket
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec.structs import asdict

from workbench import __version__
from workbench.agent.checkpoints import checkpoint_dir
from workbench.agent.contract import Seat, contract, defaults
from workbench.agent.network import network_defaults
from workbench.agent.wire import pack
from workbench.commands import StartRanks
from workbench.spec import EntrypointKind, JobSpec
from workbench.state import THE_START, Placement

# What a rank itself has to know of its job's spec: see `training.control`.
SETTINGS: Final = (
    "checkpoint_every", "checkpoint_seconds", "checkpoint_dir", "checkpoint_keep", "checkpoint_keep_every",
    "consistency_every", "consistency_budget", "deterministic", "progress_timeout", "snapshot_every", "max_restarts",
    "min_ranks", "min_nnodes", "max_steps", "check_reduce", "bitwise", "exact_reduce", "replay_steps",
)  # fmt: skip

# What a deterministic job's ranks have in their environment where the user says nothing else: `training.determinism` is
# the rest of it. One order for strings in sets, one number of threads, one algorithm for NCCL's sums.
DETERMINISTIC: Final = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}


@dataclass(frozen=True)
class Host:
    """What this host gives to every rank."""

    environ: Mapping[str, str]
    gpus: tuple[str, ...]
    python: str


def find_fault(spec: JobSpec, host: Host) -> str:
    """Why the program cannot be started on this host; empty: nothing that could be seen beforehand."""
    cwd = Path(spec.cwd) if spec.cwd else Path.cwd()
    if not cwd.is_dir():
        return f"there is no directory {cwd} on {socket.gethostname()}"
    if spec.kind is EntrypointKind.SCRIPT and not (cwd / spec.entrypoint).exists():
        return f"there is no script {cwd / spec.entrypoint} on {socket.gethostname()}"
    if spec.python and not os.access(spec.python, os.X_OK):
        return f"there is no interpreter {spec.python} on {socket.gethostname()}"
    return ""


def rank_environ(command: StartRanks, placement: Placement, host: Host, error_file: Path) -> dict[str, str]:
    """The host's environment, the spec's, and the contract's, the later before the earlier."""
    # A node may be more than one worker.
    local = command.spec.nproc_per_node or len(command.placements)
    seat = Seat(
        rank=placement.rank,
        local_rank=placement.local_rank,
        node_rank=placement.node_rank,
        world_size=command.world_size,
        local_world_size=local,
        nnodes=command.nnodes,
    )
    promised = contract(
        seat,
        master=command.master,
        job_id=command.job_id,
        restart_count=command.restart_count,
        max_restarts=command.spec.max_restarts,
        error_file=str(error_file),
    )
    own = {**host.environ, **_gpu_environ(command, host), **command.spec.env}
    if command.spec.deterministic:
        own = {**DETERMINISTIC, **own}
        own["PYTHONHASHSEED"] = own["PYTHONHASHSEED"].replace("random", DETERMINISTIC["PYTHONHASHSEED"])
    own = {**network_defaults(placement.host, command.nnodes, own), **own}
    return {**defaults(local), **own, **promised, "DTRAIN_JOB_ID": command.job_id}


def _gpu_environ(command: StartRanks, host: Host) -> dict[str, str]:
    """All of the job's GPUs of this host, by local rank: `torch.cuda.set_device(LOCAL_RANK)` is the rank's own."""
    if not host.gpus:
        return {}
    places = sorted(command.placements, key=lambda placement: placement.local_rank)
    return {"CUDA_VISIBLE_DEVICES": ",".join(host.gpus[place.slot % len(host.gpus)] for place in places)}


def describe(command: StartRanks, placement: Placement, environ: dict[str, str], python: str, program: Path) -> bytes:
    """What the rank reads: one frame. `program` is where a cell's text lies as a file, in the job's folder."""
    spec = command.spec
    cwd = spec.cwd or str(Path.cwd())
    header: dict[str, Any] = {
        "kind": spec.kind.value,
        "entrypoint": spec.entrypoint,
        "label": spec.entrypoint or spec.label,
        "args": list(spec.args),
        "env": environ,
        "cwd": cwd,
        "path0": first_path(spec, cwd),
        "python": python,
        "program": str(program),
        "rank": placement.rank,
        "seed": 0 if spec.seed is None and spec.deterministic else spec.seed,
        "deterministic": spec.deterministic,
        "settings": {
            **{name: value for name, value in asdict(spec).items() if name in SETTINGS},
            "on_mismatch": spec.on_mismatch.value,
            "peers": sorted(place.rank for place in command.placements),  # the ranks of this agent
            "checkpoint_dir": str(checkpoint_dir(spec, program.parent)),
            "resume": "" if command.resume == THE_START else command.resume,
            "from_the_start": command.resume == THE_START,
            "job_id": command.job_id,
            "version": __version__,
        },
    }
    return pack(header, spec.payload or spec.source.encode())


def first_path(spec: JobSpec, cwd: str) -> str:
    """The first entry of `sys.path`: a script's own folder (links followed), else the working directory.

    A folder or an archive with a `__main__` in it is an entry itself.
    """
    if spec.kind is not EntrypointKind.SCRIPT:
        return cwd
    path = Path(cwd, spec.entrypoint).resolve()
    is_container = path.is_dir() or (path.suffix != ".py" and zipfile.is_zipfile(path))
    return str(path if is_container else path.parent)


def memory_file(name: str, data: bytes) -> int:
    """A descriptor of an anonymous file that holds `data`."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return fd

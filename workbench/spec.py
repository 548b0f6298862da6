"""What to run: a frozen description in torchrun's words, checked before anything starts.

A `JobSpec` holds no path that is looked up, no clock, no live object: a pool on another host carries it out.
"""

from __future__ import annotations

import enum
import hashlib
import re
from math import inf
from typing import Final

import msgspec

from workbench.errors import SpecError

MAX_RANKS: Final = 65_536
MAX_SOURCE: Final = 2**20  # bytes: more is data, and data belongs in a file
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")


class EntrypointKind(enum.Enum):
    """How `JobSpec.entrypoint` is to be read."""

    SCRIPT = "script"  # a path, as in `python train.py`
    MODULE = "module"  # a dotted name, as in `python -m package.train`
    SOURCE = "source"  # a label; the program's text is in `source` (a notebook cell)
    FUNCTION = "function"  # a label; the pickled call is in `payload` (cloudpickle of `(function, args, kwargs)`)
    INTERACTIVE = "interactive"  # ranks wait for cells


class NanPolicy(enum.Enum):
    """What becomes of a job whose loss is not finite."""

    WARN = "warn"
    STOP = "stop"
    ROLLBACK = "rollback"  # restart from the newest checkpoint before it


class MismatchPolicy(enum.Enum):
    """What becomes of a job whose replicas differ."""

    WARN = "warn"
    STOP = "stop"
    REPAIR = "repair"  # send what the majority has; stop where there is none
    ROLLBACK = "rollback"  # restart from the newest checkpoint in which all agreed


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job, as asked for.

    Times are in seconds, `log_limit` in bytes a rank, `checkpoint_every` and `consistency_every` in steps.
    `checkpoint_seconds` is the same in time (0: no). `nproc_per_node` = 0 lets the pool decide: one rank a slot. `cwd`
    is an absolute path on the ranks' hosts.
    """

    entrypoint: str = ""
    kind: EntrypointKind = EntrypointKind.SCRIPT
    args: tuple[str, ...] = ()
    source: str = ""  # the program's text; of a function its own, for people to read
    payload: bytes = b""
    name: str = ""
    nnodes: int = 1
    nproc_per_node: int = 0
    max_restarts: int = 0
    env: dict[str, str] = {}
    cwd: str = ""
    python: str = ""  # another interpreter for the ranks; empty: the pool's own
    cold: bool = False  # always a fresh interpreter, never a fork of the zygote
    preload: tuple[str, ...] = ()  # site-packages modules that the zygote imports as well
    backend: str = ""  # empty: nccl where the ranks have GPUs, else gloo
    master_port: int = 0  # 0: any free port
    startup_timeout: float = 300.0
    progress_timeout: float = 0.0  # 0: learned from the job's own steps
    stop_grace: float = 10.0
    checkpoint_every: int = 0
    checkpoint_seconds: float = 0.0
    checkpoint_dir: str = ""  # empty: the job's own folder
    checkpoint_keep: int = 3  # the newest so many
    checkpoint_keep_every: int = 0  # and each whose step is a multiple of it
    resume_from: str = ""  # the folder of a checkpoint, of any job, that it begins from
    snapshot_every: int = 0  # copies in memory, in steps; 0: as often as they cost little, -1: never
    min_ranks: int = 0  # elastic: go on with so many when there are no slots for all; 0: all or none
    min_nnodes: int = 0
    on_nan: NanPolicy = NanPolicy.WARN
    consistency_every: int = 0  # checks of replicas, in steps; 0: as the budget allows, -1: never
    consistency_budget: float = 0.02  # of a step's time
    on_mismatch: MismatchPolicy = MismatchPolicy.WARN
    max_steps: int = 0  # optimizer steps after which the job has done enough; 0: when its program ends
    check_reduce: bool = False  # checksums with each all-reduce of DDP, done again when it went wrong
    bitwise: bool = False  # the same in a collective of their own: training stays as it is, bit for bit
    exact_reduce: int = 0  # all-reduces of integers of 32 or 64 bits, which no order of ranks changes; 0: no
    seed: int | None = None
    deterministic: bool = False
    replay_steps: int = 0  # note what so many steps compute, then end (`training.replay`); 0: an ordinary job
    rotate_slots: bool = False  # each rank runs in the slot of the next one, and node in the place of the next
    log_limit: int = 512 * 2**20

    @property
    def label(self) -> str:
        """What people call the job: its name, else its program's."""
        return self.name or default_name(self)

    @property
    def signature(self) -> str:
        """16 hex digits over all that differs from the defaults: equal specs, equal signatures."""
        return hashlib.sha256(msgspec.msgpack.encode(self, order="sorted")).hexdigest()[:16]

    @property
    def world_size(self) -> int:
        """Ranks in all; 0 while the pool is still to decide."""
        return self.nnodes * self.nproc_per_node

    @property
    def least_ranks(self) -> int:
        """How few ranks an elastic job goes on with; 0: all or none."""
        if not (self.min_ranks or self.min_nnodes):
            return 0
        return max(self.min_ranks, self.min_nnodes * self.nproc_per_node, 1)


def default_name(spec: JobSpec) -> str:
    """A name from the entrypoint: `path/to/train.py` → `train`, `package.train` → `train`."""
    match spec.kind:
        case EntrypointKind.SCRIPT:
            stem = re.split(r"[\\/]", spec.entrypoint)[-1].removesuffix(".py")
        case EntrypointKind.MODULE:
            stem = spec.entrypoint.rpartition(".")[2]
        case EntrypointKind.SOURCE:
            stem = spec.entrypoint or "cell"
        case _:
            stem = spec.entrypoint or spec.kind.value
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).lstrip("-._")[:40].rstrip("-._")
    return cleaned or "job"


def check_spec(spec: JobSpec) -> JobSpec:
    """Return the spec unchanged, or raise `SpecError` with the first thing wrong and how to put it right."""
    for is_wrong, message, hint in _complaints(spec):
        if is_wrong:
            raise SpecError(message, hint=hint)
    return spec


def _complaints(spec: JobSpec) -> list[tuple[bool, str, str]]:
    """The rules as one table, long because they are many: whether it is broken, what is wrong, what to do."""
    kind = spec.kind
    return [
        (
            kind in (EntrypointKind.SCRIPT, EntrypointKind.MODULE) and not spec.entrypoint,
            "there is nothing to launch",
            "give a script, -m MODULE, a cell or --interactive",
        ),
        (kind is EntrypointKind.SOURCE and not spec.source.strip(), "the cell is empty", "put the program in the cell"),
        (
            len(spec.source) > MAX_SOURCE,
            f"the cell is {len(spec.source) / 2**20:.1f} MiB",
            f"at most {MAX_SOURCE / 2**20:.0f} MiB is sent to the ranks; put data in a file that they read",
        ),
        (
            bool(spec.name) and not NAME_PATTERN.match(spec.name),
            f"{spec.name!r} cannot be a job name",
            "use up to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit",
        ),
        (spec.nproc_per_node < 0, f"nproc_per_node is {spec.nproc_per_node}", "a job has at least 1 rank"),
        (spec.nnodes < 1, f"nnodes is {spec.nnodes}", "a job runs on at least 1 node"),
        (
            spec.world_size > MAX_RANKS,
            f"{spec.world_size} ranks asked for",
            f"at most {MAX_RANKS} are supported",
        ),
        (spec.max_restarts < 0, f"max_restarts is {spec.max_restarts}", "give 0 or more"),
        (
            not 0 <= spec.master_port <= 65_535,
            f"master_port is {spec.master_port}",
            "give 1 to 65535, or 0 for any free port",
        ),
        (not 0 < spec.startup_timeout < inf, f"startup_timeout is {spec.startup_timeout}", "give seconds above 0"),
        (
            not 0 <= spec.progress_timeout < inf,
            f"progress_timeout is {spec.progress_timeout}",
            "give seconds, or 0 to learn it",
        ),
        (not 0 <= spec.stop_grace < inf, f"stop_grace is {spec.stop_grace}", "give seconds, 0 to kill at once"),
        (spec.checkpoint_every < 0, f"checkpoint_every is {spec.checkpoint_every}", "give steps, 0 for never"),
        (
            not 0 <= spec.checkpoint_seconds < inf,
            f"checkpoint_seconds is {spec.checkpoint_seconds}",
            "give seconds, 0 for never",
        ),
        (
            bool(spec.resume_from) and kind is EntrypointKind.INTERACTIVE,
            "an interactive job cannot begin from a checkpoint",
            "have a cell load it",
        ),
        (
            spec.snapshot_every < -1,
            f"snapshot_every is {spec.snapshot_every}",
            "give steps, 0 for as often as it costs little, -1 for never",
        ),
        (spec.checkpoint_keep < 1, f"checkpoint_keep is {spec.checkpoint_keep}", "at least the newest one is kept"),
        (spec.checkpoint_keep_every < 0, f"checkpoint_keep_every is {spec.checkpoint_keep_every}", "give steps, or 0"),
        (
            not 0 <= spec.min_ranks <= (spec.world_size or spec.min_ranks),
            f"min_ranks is {spec.min_ranks}, of {spec.world_size} ranks",
            "give at most the ranks that the job wants, 0 for all of them",
        ),
        (
            not 0 <= spec.min_nnodes <= spec.nnodes,
            f"at least {spec.min_nnodes} of {spec.nnodes} nodes were asked for",
            "write it as --nnodes MIN:MAX",
        ),
        (
            spec.consistency_every < -1,
            f"consistency_every is {spec.consistency_every}",
            "give steps, 0 for as often as the budget allows, -1 for never",
        ),
        (
            not 0 < spec.consistency_budget <= 1,
            f"consistency_budget is {spec.consistency_budget}",
            "give a share of a step's time, such as 0.02",
        ),
        (spec.max_steps < 0, f"max_steps is {spec.max_steps}", "give steps, 0 for no limit"),
        (
            spec.consistency_every == -1 and bool(spec.check_reduce or spec.bitwise or spec.exact_reduce),
            "all-reduces are to be checked, and checks are off",
            "leave --consistency-every off out",
        ),
        (
            spec.exact_reduce not in (0, 32, 64),
            f"exact_reduce is {spec.exact_reduce}",
            "give 32 or 64, the bits of an integer, or 0 for none",
        ),
        (spec.replay_steps < 0, f"replay_steps is {spec.replay_steps}", "give steps from 1, 0 for an ordinary job"),
        (spec.log_limit < 2**16, f"log_limit is {spec.log_limit} bytes", "give at least 65536"),
        (
            any(not key or "=" in key for key in spec.env),
            "an environment variable has no name, or '=' in it",
            "use NAME=VALUE",
        ),
        (
            any(
                map(
                    _is_no_text,
                    (
                        spec.entrypoint,
                        spec.cwd,
                        spec.python,
                        spec.resume_from,
                        *spec.args,
                        *spec.env,
                        *spec.env.values(),
                    ),
                )
            ),
            "a path, an argument or an environment variable has a NUL byte or is not UTF-8",
            "no process can be given one",
        ),
    ]


def _is_no_text(text: str) -> bool:
    """Whether neither a process nor the job's record could take it: NUL, or half of a surrogate pair."""
    return "\0" in text or any("\ud800" <= character <= "\udfff" for character in text)

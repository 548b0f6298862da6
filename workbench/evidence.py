"""What is known of one rank at one moment, gathered to tell why a job does not get on. Frozen values, no clock.

An agent gathers it (`agent/evidence.py`), the policy `diagnosis` reads it.
"""

from __future__ import annotations

import msgspec


class Entered(msgspec.Struct, frozen=True, array_like=True):
    """A collective that a rank has entered: its number within its group, from 1, its name, what it was given."""

    seq: int
    op: str  # "all_reduce"
    numel: int = 0  # of all inputs
    dtype: str = ""  # "float32"

    @property
    def text(self) -> str:
        """As a black box names it: `all_reduce[1024 float32]`."""
        return f"{self.op}[{self.numel} {self.dtype}]" if self.dtype else self.op


class GroupEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One process group as torch's Flight Recorder in the rank knows it.

    `ranks`: its members; empty: not known. `entered` counts collectives, `completed` those that are over; `last`: the
    newest, oldest first.
    """

    name: str
    ranks: tuple[int, ...] = ()
    entered: int = 0
    completed: int = 0
    last: tuple[Entered, ...] = ()


class ChildEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """A process that a rank has started, such as a DataLoader's worker."""

    pid: int
    state: str
    where: str = ""
    stack: str = ""


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. `missing`: why nothing more is known, empty where it is.

    `state`: the process' letter in /proc. `cpu`: percent of a core meanwhile, `cpu_time` s that the process has used by
    `clock`, s of its host's. `answered`: the rank's own
    thread answered, which it cannot while something holds the interpreter; None: it was not asked. `where`: the
    program's innermost line, `train.py:41 in load`; `call`: what that has called, `all_reduce
    (torch/distributed/distributed_c10d.py)`. Times in s.
    """

    rank: int
    missing: str = ""
    worker: str = ""
    pid: int = 0
    state: str = ""
    cpu: float = 0.0
    cpu_time: float = 0.0
    clock: float = 0.0
    step: int = 0
    activity: str = ""
    age: float = 0.0
    collective: str = ""
    collective_seq: int = 0
    is_evaluating: bool = False
    expected: float = 0.0
    answered: bool | None = None
    groups: tuple[GroupEvidence, ...] = ()
    stack: str = ""
    where: str = ""
    call: str = ""
    children: tuple[ChildEvidence, ...] = ()

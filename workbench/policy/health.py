"""Whether a job still gets on, told from what its ranks' black boxes say. Pure; why it does not is `diagnosis`.

A rank's *age* is how long its box has not changed, counted in its agent's looks: a suspended machine or a clock that is
set adds nothing. A job is suspected when a rank is older than the job's *patience*: in synchronous training one rank's
pause holds up all, so the most patient rank's situation is everybody's. Patience is learned from the job's own steps,
and from the pauses that ended by themselves.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from math import inf
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from workbench.spec import EntrypointKind, JobSpec
from workbench.telemetry import RankBeat

FLOOR: Final = 1.5  # s within which a hang of short steps is to be told
STEPS: Final = 5.0  # as many median steps
PAUSES: Final = 5.0  # as many times the longest pause that ended by itself (as NVRx learns its timeouts)
EARLY: Final = 0.85  # of the patience, so that it is told within it
CELL: Final = 10.0  # s that a collective of a cell may wait for a rank; only told
KEPT_WAITING: Final = 10.0  # s at the start after which who waits in a collective, and for whom, is told


class Situation(enum.Enum):
    """Why a rank may take its time; the least patient first."""

    STEPPING = "stepping"
    CELL = "in a cell"
    EVALUATING = "evaluating"
    SAVING = "saving a checkpoint"
    STARTING = "before its first step"
    LEAVING = "ending"
    IDLE = "waiting for a cell"


FIRST: Final = {  # s that the first pause of its kind may last; then `PAUSES` times the longest, but AGAIN at least
    Situation.EVALUATING: 60.0,
    Situation.SAVING: 120.0,
    Situation.LEAVING: 60.0,
    Situation.CELL: CELL,
    Situation.IDLE: inf,
}
AGAIN: Final = 10.0
LEARNS: Final = {  # which pauses, by what the rank was doing, teach what
    "EVALUATION": Situation.EVALUATING,
    "CHECKPOINT": Situation.SAVING,
    "EXITING": Situation.LEAVING,
    "IDLE": Situation.IDLE,
    "CELL": Situation.CELL,
    "STARTING": Situation.STARTING,
}


class Standing(Protocol):
    """What is looked at of a rank: of its newest beat, or of evidence that was gathered."""

    @property
    def rank(self) -> int: ...
    @property
    def activity(self) -> str: ...
    @property
    def age(self) -> float: ...
    @property
    def is_evaluating(self) -> bool: ...
    @property
    def expected(self) -> float: ...


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned of a job. `step`: its median step, s. `pauses`: the longest that ended, s, by situation.

    `has_begun`: every rank of the generation has finished a step; `begins`: the longest time that this took, s.
    """

    step: float = 0.0
    pauses: dict[Situation, float] = {}
    has_begun: bool = False
    begins: float = 0.0

    def learn(self, beat: RankBeat) -> Pace:
        """With the pause that this beat tells the end of.

        Until the first step is over compilers and peers that start take their time, which comes once; a loader takes
        its own again in every epoch.
        """
        situation = LEARNS.get(beat.gap_in, Situation.STEPPING)
        is_once = not self.has_begun and beat.gap_in != "DATA"
        if beat.expected or is_once or beat.gap <= self.pauses.get(situation, 0.0):
            return self
        return replace(self, pauses={**self.pauses, situation: beat.gap})

    def begin(self, seconds: float) -> Pace:
        """The generation's first steps are over, `seconds` after its start."""
        return replace(self, has_begun=True, begins=max(self.begins, seconds))

    def restart(self) -> Pace:
        """Another generation starts."""
        return replace(self, has_begun=False)


def situation_of(beat: Standing, pace: Pace) -> Situation:
    """What the rank may take its time for."""
    known = LEARNS.get("EVALUATION" if beat.is_evaluating else beat.activity)
    if known in (Situation.IDLE, Situation.CELL, Situation.LEAVING):
        return known
    if not pace.has_begun:
        return Situation.STARTING
    return known or Situation.STEPPING


def patience_of(situation: Situation, pace: Pace, spec: JobSpec) -> float:
    """Seconds that a rank may stand still in this situation."""
    if situation is Situation.STARTING:
        return min(spec.startup_timeout, max(AGAIN, PAUSES * pace.begins)) if pace.begins else spec.startup_timeout
    if situation is Situation.IDLE:
        return inf
    if spec.progress_timeout:
        return spec.progress_timeout
    usual = max(FLOOR, STEPS * pace.step, PAUSES * pace.pauses.get(Situation.STEPPING, 0.0))
    if situation is Situation.STEPPING:
        return usual
    longest = PAUSES * pace.pauses.get(situation, 0.0)
    return max(usual, AGAIN, longest) if longest else max(usual, FIRST[situation])


def patience(beats: Mapping[int, Standing], pace: Pace, spec: JobSpec) -> float:
    """Seconds that any rank of the job may stand still now; `beats`: the newest of each rank that runs."""
    if spec.kind is EntrypointKind.INTERACTIVE:
        # One that is idle is no excuse: the others may wait for it.
        return spec.progress_timeout or max((b.expected for b in beats.values()), default=0.0) or CELL
    return max(
        (max(patience_of(situation_of(beat, pace), pace, spec), beat.expected) for beat in beats.values()),
        default=inf,
    )


def is_kept_waiting(beats: Mapping[int, Standing], pace: Pace, spec: JobSpec) -> str | None:
    """Why to say, long before the patience of a start is over, who keeps the others waiting; None: nobody does."""
    if pace.has_begun or spec.kind is EntrypointKind.INTERACTIVE:
        return None
    waiting = [b for b in beats.values() if b.activity == "COLLECTIVE" and b.age >= max(KEPT_WAITING, b.expected)]
    if not waiting:
        return None
    first = min(waiting, key=lambda beat: (-beat.age, beat.rank))
    return f"rank {first.rank} has waited in a collective for {first.age:.0f} s, before its first step"


def may_wait(beat: Standing) -> bool:
    """Whether it may wait for other ranks: in a collective, or where DDP and sharding have theirs."""
    return beat.activity in ("COLLECTIVE", "FORWARD", "BACKWARD", "OPTIMIZER", "DATA")


def is_stalled(beats: Mapping[int, Standing], pace: Pace, spec: JobSpec, early: float = EARLY) -> str | None:
    """Why the job is to be looked at more closely, or None: it gets on, or may take its time.

    Their ages are as of now. `early`: the share of the patience at which to say so. Before the first step, and in
    cells, only a rank that trains is suspected: a program may do what it likes.
    """
    if not beats:
        return None
    oldest = max(beats.values(), key=lambda beat: (beat.age, -beat.rank))
    most = patience(beats, pace, spec)
    if oldest.age < early * most:
        return None
    if spec.kind is EntrypointKind.INTERACTIVE or not pace.has_begun:
        waiting = [b for b in beats.values() if may_wait(b) and b.age >= early * most]
        if not waiting:
            return None
        oldest = waiting[0]
    return f"rank {oldest.rank} has stood still for {oldest.age:.1f} s; {early * most:.1f} s are usual at most"

"""Copies of training states that ranks leave with their agent: descriptors of anonymous memory, outside every rank.

Nothing here looks into them: what is in a slot is between two generations of ranks (`training.slot`). The memory is
held until the job has ended, or the agent has; being anonymous, it can never be left behind.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from workbench.agent.wire import MAX_FDS, Frame, close_all

if TYPE_CHECKING:
    from workbench.agent.processes import RankProcess

OPS: Final = ("keep", "kept", "drop")  # frames of a rank that are for this


class Kept:
    """All in the loop's thread. Owns the descriptors: by job, then by rank and slot."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[tuple[int, int], int]] = {}

    def on_frame(self, process: RankProcess, frame: Frame) -> None:
        """A rank's word: `keep` this slot of mine; `kept`: what have you; `drop` all but these ranks'."""
        header = frame.header
        match header["op"]:
            case "keep" if len(frame.fds) == 1:
                self.keep(process.job_id, process.rank, int(header["slot"]), frame.fds[0])
            case "kept":
                self._answer(process)
            case "drop":
                self.drop(process.job_id, frozenset(header["keep"]))
            case _:
                close_all(frame.fds)

    def keep(self, job_id: str, rank: int, slot: int, fd: int) -> None:
        """Hold the descriptor; one that was held for this slot goes."""
        slots = self._jobs.setdefault(job_id, {})
        if (old := slots.get((rank, slot))) is not None:
            os.close(old)
        slots[rank, slot] = fd

    def drop(self, job_id: str, ranks: frozenset[int]) -> None:
        """Let go of the slots of all ranks but these: of an earlier generation, which had more or others here."""
        slots = self._jobs.get(job_id, {})
        for name in [name for name in slots if name[0] not in ranks]:
            os.close(slots.pop(name))

    def of(self, job_id: str) -> dict[tuple[int, int], int]:
        """The descriptors held for a job, by rank and slot; they stay ours."""
        return dict(self._jobs.get(job_id, {}))

    def forget(self, job_id: str) -> None:
        """The job has ended."""
        close_all(tuple(self._jobs.pop(job_id, {}).values()))

    def close(self) -> None:
        for job_id in tuple(self._jobs):
            self.forget(job_id)

    def _answer(self, process: RankProcess) -> None:
        """Duplicates of all that is held for the job, over as many frames as they need; the last one says so."""
        held = sorted(self.of(process.job_id).items())
        parts = [held[at : at + MAX_FDS] for at in range(0, len(held), MAX_FDS)] or [[]]
        for number, part in enumerate(parts, 1):
            header = {"op": "kept", "slots": [name for name, _ in part], "is_last": number == len(parts)}
            process.tell(header, fds=tuple(os.dup(fd) for _, fd in part))

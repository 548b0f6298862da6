"""What a rank says to its agent of copies in memory, and asks: see `agent.snapshots` for the other side."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from workbench.training.control import Control

PATIENCE: Final = 10.0  # s


class Held(NamedTuple):
    """A slot that the agent holds: whose, and a descriptor that is ours to close."""

    rank: int
    number: int
    fd: int


class Line:
    """One for a process."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._held: list[Held] = []
        self._is_answered = threading.Event()
        control.on("kept", self._on_kept)

    def keep(self, number: int, fd: int) -> None:
        """Have this slot of ours held; the descriptor stays the caller's."""
        self._control.send({"op": "keep", "slot": number}, b"", (fd,))

    def kept(self) -> list[Held]:
        """What is held for the job on this host, by ranks of any generation; raises `TimeoutError`."""
        self._is_answered.clear()
        self._held = []
        self._control.send({"op": "kept"})
        if not self._is_answered.wait(PATIENCE):
            raise TimeoutError("the agent does not answer")
        held, self._held = self._held, []
        return held

    def drop(self, keep: Iterable[int]) -> None:
        """Have the slots of all ranks but these let go."""
        self._control.send({"op": "drop", "keep": sorted(keep)})

    def _on_kept(self, header: dict[str, Any], _: bytes, fds: tuple[int, ...]) -> None:
        self._held += [Held(rank, number, fd) for (rank, number), fd in zip(header["slots"], fds, strict=True)]
        if header["is_last"]:
            self._is_answered.set()


def close_all(held: Iterable[Held]) -> None:
    for one in held:
        os.close(one.fd)

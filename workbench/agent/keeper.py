"""The agent's handle on one zygote: starts it, asks it for children, and knows when it is gone."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from workbench.agent.loop import Loop
from workbench.agent.wire import Channel, Frame, Header

BOOTSTRAP: Final = Path(__file__).with_name("bootstrap.py")
LAST_WORDS: Final = 4096  # bytes of a zygote's stderr that are kept


class Child(Protocol):
    """A process that a zygote is to start, as the agent holds it."""

    def request(self) -> tuple[Header, tuple[int, ...]]:
        """What to ask for, and the descriptors that go with it; called once, when the zygote can take it."""

    def forked(self, pid: int, pidfd: int, time: float) -> None:
        """It runs. The descriptor is the child's to close."""

    def exited(self, status: int | None, time: float, peak: int) -> None:
        """It has ended, with this wait status; None: its zygote has, and it is being killed."""

    def refused(self, reason: str) -> None:
        """It was not, and will not be, started."""


@dataclass(frozen=True)
class Recipe:
    """What makes zygotes alike: interpreter, preloaded modules, a PYTHONHASHSEED of its own (empty: the environment's).

    `is_bare`: a keeper of fresh interpreters.
    """

    python: str
    modules: tuple[str, ...] = ()
    is_bare: bool = False
    hash_seed: str = ""

    def argv(self, fd: int) -> list[str]:
        kind = "keeper" if self.is_bare else "zygote"
        return [self.python, str(BOOTSTRAP), kind, str(fd), *self.modules]


class Keeper:
    """One zygote process. Made in the loop's thread, with which it dies. `is_over` once it is gone."""

    def __init__(self, recipe: Recipe, environ: dict[str, str], loop: Loop) -> None:
        self.recipe, self.environ, self._loop = recipe, environ, loop
        self.is_ready = False
        self.is_over = False
        self.used = 0.0  # when something was last asked for
        self._refusal = ""
        self._waiting: list[Child] = []
        self._asked: dict[int, Child] = {}  # sent, and not yet exited or refused
        self._count = 0
        self._stderr = bytearray()
        self._process, self._channel = self._launch()
        loop.add_channel(self._channel, self._on_frames, self._on_close)
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        loop.add(self._process.stderr.fileno(), self._read_stderr)

    def _launch(self) -> tuple[subprocess.Popen[bytes], Channel]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                self.recipe.argv(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=self.environ,
                cwd="/",
                start_new_session=True,
            )
        return process, Channel(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def children(self) -> Iterator[Child]:
        """Those asked for, and not yet gone."""
        yield from self._waiting
        yield from self._asked.values()

    def start(self, child: Child) -> None:
        """Have the zygote start this, as soon as it is warm."""
        self.used = self._loop.now()
        if not self.is_ready:
            self._waiting.append(child)
            return
        try:
            header, fds = child.request()
        except OSError as error:
            child.refused(f"this host cannot take it: {error}")
            return
        self._count += 1
        self._asked[self._count] = child
        self._loop.send(self._channel, {**header, "id": self._count}, fds=fds)

    def forget(self, child: Child) -> bool:
        """Do not start this after all; False when the zygote has been asked already."""
        if child not in self._waiting:
            return False
        self._waiting.remove(child)
        return True

    def _on_frames(self, frames: list[Frame]) -> None:
        for frame in frames:
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        header = frame.header
        match header["op"]:
            case "ready":
                self.is_ready = True
                waiting, self._waiting = self._waiting, []
                for child in waiting:
                    self.start(child)
            case "refused":
                self._refusal = header["reason"]
            case "forked":
                self._asked[header["id"]].forked(header["pid"], frame.fds[0], header["time"])
            case "exited":
                self._asked.pop(header["id"]).exited(header["status"], header["time"], header["peak"])
            case "failed":
                self._asked.pop(header["id"]).refused(header["reason"])

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        try:
            data = os.read(self._process.stderr.fileno(), 65_536)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove(self._process.stderr.fileno())
        self._stderr = (self._stderr + data)[-LAST_WORDS:]

    def _on_close(self) -> None:
        with suppress(subprocess.TimeoutExpired):  # it is ending of itself: its own exit code tells more
            self._process.wait(timeout=0.5)
        self.end()

    def end(self) -> None:
        """It is gone, or is to go at once; its children are lost with it."""
        if self.is_over:
            return
        self.is_over = True
        self._process.kill()
        self._process.wait(timeout=10)
        self._read_stderr()
        waiting, self._waiting = self._waiting, []
        for child in waiting:
            child.refused(self._refusal or self._last_words())
        asked, self._asked = self._asked, {}
        for child in asked.values():
            child.exited(None, self._loop.wall(), 0)
        self._close()

    def _close(self) -> None:
        assert self._process.stderr is not None
        self._loop.remove(self._process.stderr.fileno())
        self._process.stderr.close()
        self._loop.remove(self._channel.fileno())
        self._channel.close()

    def _last_words(self) -> str:
        words = self._stderr.decode(errors="replace").strip().splitlines()
        return f"the zygote ({self.recipe.python}) ended with {self._process.returncode}" + (
            f": {words[-1]}" if words else ""
        )

"""A terminal, or a pipe, as a `Screen`: what is redrawn where it can be, else a line from time to time."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import Final, TextIO

TTY_INTERVAL: Final = 0.25
PIPE_INTERVAL: Final = 5.0


class TerminalScreen:
    """Standard output and error. With `progress_to_error`, standard output is left to a document."""

    def __init__(
        self, out: TextIO | None = None, err: TextIO | None = None, *, progress_to_error: bool = False
    ) -> None:
        self.progress_to_error = progress_to_error
        self._out, self._err = out, err
        self._shown = 0  # lines that the last update left below the place where it began

    @property
    def out(self) -> TextIO:
        """Looked up each time: whoever redirects `sys.stdout` means us as well."""
        if self.progress_to_error:
            return self.err
        return self._out or sys.stdout

    @property
    def err(self) -> TextIO:
        return self._err or sys.stderr

    @property
    def redraws(self) -> bool:
        return self.out.isatty() and os.environ.get("TERM") != "dumb"

    @property
    def has_color(self) -> bool:
        return self.redraws and not os.environ.get("NO_COLOR")

    @property
    def interval(self) -> float:
        return TTY_INTERVAL if self.redraws else PIPE_INTERVAL

    @property
    def width(self) -> int:
        return shutil.get_terminal_size((100, 24)).columns if self.redraws else 100

    def write(self, text: str, *, is_error: bool = False) -> None:
        self.settle()
        stream = self.err if is_error else self.out
        stream.write(text)
        stream.flush()

    def update(self, text: str) -> None:
        lines = text.rstrip("\n").split("\n")
        if not self.redraws:
            self.out.write("\n".join(lines) + "\n")
            self.out.flush()
            return
        height = max(shutil.get_terminal_size((100, 24)).lines - 1, 1)
        if len(lines) > height:  # what scrolled away could not be redrawn
            lines = [*lines[: height - 1], f"… {len(lines) - height + 1} more lines"]
        back = f"\x1b[{self._shown}F" if self._shown else "\r"
        self.out.write(back + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
        self.out.flush()
        self._shown = len(lines)

    def settle(self) -> None:
        self._shown = 0

    def display(self, bundle: Mapping[str, str]) -> None:
        text = bundle.get("text/plain", "")
        if text:
            self.write(text if text.endswith("\n") else text + "\n")

"""What a dashboard draws from, whatever is behind it: a job that runs, a record, a test's own updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from workbench.views.acts import Act
from workbench.views.job import JobView
from workbench.views.logs import Level, LogLine
from workbench.views.panels import PanelView
from workbench_widgets.files import Made


class Picture(NamedTuple):
    """The job as far as it is known. `view` None: nothing has come yet. `notice`: why nothing comes now, or ''.

    `at`: the moment of the past (epoch s) that this is of; None: now. `is_saved`: of a saved session: no pool has it.
    `heard`: when news last came, by the monotonic clock, s.
    """

    view: JobView | None = None
    notice: str = ""
    more: PanelView = PanelView()
    at: float | None = None
    is_saved: bool = False
    heard: float | None = None


class Choice(NamedTuple):
    """What the reader points at: a rank, a step. None: nothing. All panels show it."""

    rank: int | None = None
    step: int | None = None


NO_CHOICE: Final = Choice()


class Filter(NamedTuple):
    """Which log lines a page wants: of these ranks (None: all), at least of this level, with this text."""

    ranks: tuple[int, ...] | None = None
    level: Level = Level.INFO
    text: str = ""


class LogTail(NamedTuple):
    """The newest lines of those wanted, oldest first, and what is not among them in words."""

    lines: tuple[LogLine, ...]
    note: str


class Source(Protocol):
    """Methods are called from the page's event loop and do not wait."""

    @property
    def job_id(self) -> str: ...

    @property
    def picture(self) -> Picture: ...

    @property
    def log_version(self) -> int:
        """Differs when `log` may give something else."""

    def log(self, wanted: Filter, most: int, until: float | None = None) -> LogTail:
        """`until` (epoch s): only what had been printed by then."""

    def travel(self, time: float, done: Callable[[Picture], object]) -> None:
        """Begin to find out how the job stood at `time` (epoch s); `done` gets it, from any thread.

        Where it cannot be told, a picture without a view, whose notice says why.
        """

    def subscribe(self, changed: Callable[[], object]) -> Callable[[], None]:
        """Have `changed` called, from any thread, after each change; the answer ends it."""

    def act(self, act: Act, done: Callable[[str], None], *, by: str) -> None:
        """Begin it; `done` gets what came of it in words, from any thread."""

    def make(self, what: str, done: Callable[[Made], None], *, with_code: bool) -> None:
        """Begin to make a file of it, see `files`; `done` gets it, from any thread."""

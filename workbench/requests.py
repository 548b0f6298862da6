"""What a client may ask of the runner, and it of an agent: bodies of requests, by the request's name. Values only."""

from __future__ import annotations

from typing import Final

import msgspec

from workbench.feed import Cursor
from workbench.origin import Origin
from workbench.spec import JobSpec
from workbench.state import JobPhase

# Not to be sent again when it is not known whether they were taken; all others come to the same then.
ONCE: Final = frozenset(("launch", "execute", "inject"))


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """`launch`: answered with the job's id. `ambient` is the caller's own environment: used, never recorded."""

    spec: JobSpec
    ambient: dict[str, str] = {}
    origin: Origin | None = None


class ListJobs(msgspec.Struct, frozen=True, kw_only=True):
    """`jobs`: newest first, answered with `list[JobSummary]`. `search`: a part of the id, capitals or not."""

    limit: int = 50
    offset: int = 0
    phase: JobPhase | None = None
    search: str = ""


class CountJobs(msgspec.Struct, frozen=True, kw_only=True):
    """`job_counts`: answered with `dict[str, int]`, how many jobs are in which phase."""

    search: str = ""


class ListIds(msgspec.Struct, frozen=True, kw_only=True):
    """`ids`: job ids that begin with `prefix`, newest first."""

    prefix: str = ""
    limit: int = 200


class Follow(msgspec.Struct, frozen=True, kw_only=True):
    """`follow`: answered with an `Update`, at once when there is news, else after at most `timeout` seconds."""

    job_id: str
    cursor: Cursor = Cursor()
    timeout: float = 10.0


class History(msgspec.Struct, frozen=True, kw_only=True):
    """`history`: answered with `list[Bucket]`; `width` in s, None lets the amount of data decide."""

    job_id: str
    since: float = 0.0
    until: float | None = None
    ranks: tuple[int, ...] | None = None
    width: float | None = None


class ReadSteps(msgspec.Struct, frozen=True, kw_only=True):
    """`steps`: single steps as they are kept, a page at a time; answered with `StepPage`. `after`: the last `next`."""

    job_id: str
    after: int = 0


class ReadFrames(msgspec.Struct, frozen=True, kw_only=True):
    """`frames`: what all ranks were doing, answered with `list[BeatFrame]`; `until`: the newest by that time alone."""

    job_id: str
    until: float | None = None


class ReadLog(msgspec.Struct, frozen=True, kw_only=True):
    """`log`: one rank's page of its log, read on the rank's host."""

    job_id: str
    rank: int
    tail: int | None = None
    grep: str | None = None
    since: int = 0


class ListCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    """`checkpoints`: a job's on disk, newest first, looked up on its ranks' host. `thorough`: every byte is read.

    `folder` is put in by the runner, where the job's spec names one; empty: the job's own.
    """

    job_id: str
    thorough: bool = False
    folder: str = ""


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    """`cancel`."""

    job_id: str
    force: bool = False
    by: str = ""


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """`resume`: an ended job goes on; answered with its phase. `step`, `path`: which checkpoint, as in the event."""

    job_id: str
    step: int | None = None
    path: str = ""
    ranks: int | None = None
    by: str = ""
    ambient: dict[str, str] = {}
    origin: Origin | None = None


class Resize(msgspec.Struct, frozen=True, kw_only=True):
    """`resize`: a running job goes on with that many ranks; answered with its phase."""

    job_id: str
    ranks: int
    by: str = ""


class Execute(msgspec.Struct, frozen=True, kw_only=True):
    """`execute`: answered with `CellStarted`; `ranks` None means all."""

    job_id: str
    source: str
    ranks: tuple[int, ...] | None = None


class Push(msgspec.Struct, frozen=True, kw_only=True):
    """`push`: answered with `CellStarted`."""

    job_id: str
    name: str
    payload: bytes
    ranks: tuple[int, ...] | None = None


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """`pull`: answered with `CellStarted`."""

    job_id: str
    name: str
    ranks: tuple[int, ...] | None = None


class Interrupt(msgspec.Struct, frozen=True, kw_only=True):
    """`interrupt`."""

    job_id: str
    ranks: tuple[int, ...] | None = None


class Inject(msgspec.Struct, frozen=True, kw_only=True):
    """`inject`: a fault, on purpose."""

    job_id: str
    fault: str
    rank: int


class AskEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """`evidence`, asked of an agent: answered with `list[RankEvidence]` of its ranks of that generation.

    `deep`: with stacks and the ranks' own answers, within `timeout` s; else boxes and processes only, at once.
    """

    job_id: str
    restart_count: int
    deep: bool = False
    timeout: float = 1.0

"""The words of `session.json`, and which names a file may have in a saved session. Values only.

A saved session is a zip:

    session.json                    this document: what was saved, and every other file's size and SHA-256
    seal.json                       a keyed digest of session.json: whoever has the key knows that he saved it
    schema.json                     JSON schema of session.json, for other readers
    report.html                     a page about its jobs, for people without this program; since version 2
    jobs/JOB/events.jsonl           the record: one event a line; code in it is named by its digest
    jobs/JOB/telemetry.msgpack      what a follower is given first: buckets, totals, output, beats; frames of beats
    jobs/JOB/history.msgpack        buckets, as finely as they are kept
    jobs/JOB/steps.msgpack          single steps by rank, `blackbox.STEP` records
    jobs/JOB/logs/rank0.log         the end of a rank's output
    code/DIGEST.py                  a cell or source file, scrubbed, by its SHA-256
    code/DIGEST.pickle              a launched function, scrubbed, by its SHA-256; since version 2
    checkpoints/JOB/STEP/FILE       where they were asked for
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from workbench.feed import BeatFrame, Bucket, Cursor, Moment, Total
from workbench.state import Checkpoint
from workbench.telemetry import CellFinished, Check, OutputWritten, RankBeat

FORMAT: Final = "dtrain session"
VERSION: Final = 2
DOCUMENT: Final = "session.json"
REPORT: Final = "report.html"
SEAL: Final = "seal.json"
SCHEMA: Final = "schema.json"
_JOB: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"
NAME: Final = re.compile(
    rf"""(?:
      session\.json | seal\.json | schema\.json | report\.html
    | jobs/{_JOB}/(?:events\.jsonl | telemetry\.msgpack | history\.msgpack | steps\.msgpack | logs/rank\d{{1,5}}\.log)
    | code/[0-9a-f]{{64}}\.(?:py|pickle)
    | (?P<checkpoint>checkpoints/{_JOB}/\d{{1,15}}/(?!\.{{1,2}}\Z)[A-Za-z0-9_.-]{{1,200}})
    )\Z""",
    re.VERBOSE,
)


JOB: Final = re.compile(rf"{_JOB}\Z")


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the zip: bytes, and hexadecimal SHA-256, unpacked."""

    size: int
    sha256: str


class CodeEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One text of code. `names`: what it was called. `is_cut`: a secret was taken out, so that it cannot run."""

    names: tuple[str, ...] = ()
    is_cut: bool = False
    has_home: bool = False  # a mark stands for the home directory


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The kept end of a rank's output begins at `start`, in bytes of all it wrote."""

    rank: int
    start: int


class PoolShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Slots by worker, without addresses."""

    name: str = ""
    slots: int = 0
    workers: tuple[int, ...] = ()
    accelerator: str = "CPU"


class HostShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where it was saved."""

    platform: str = ""
    python: str = ""
    cores: int = 0
    packages: dict[str, str] = {}


class GitState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The commit at the launch; `changed`: files of the job's code that differed from it (None: not known)."""

    commit: str
    branch: str = ""
    changed: tuple[str, ...] | None = None


class JobEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job. `env_left_out`: names of variables of the spec whose values were not kept."""

    job_id: str
    label: str
    phase: str
    world_size: int
    is_running: bool = False
    logs: tuple[LogEntry, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    contents: dict[int, str] = {}  # by step: a digest of the training state, where its files could be read
    included: tuple[int, ...] = ()  # steps of checkpoints that are in the file
    env_left_out: tuple[str, ...] = ()
    git: GitState | None = None


class Document(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`session.json`. Times are epoch seconds."""

    format: str
    version: int
    dtrain: str
    saved_at: float
    host: HostShape
    pool: PoolShape | None = None
    jobs: tuple[JobEntry, ...] = ()  # oldest first
    code: dict[str, CodeEntry] = {}
    left_out: tuple[str, ...] = ()
    files: dict[str, FileEntry] = {}


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """An `Update` from an empty cursor, without state and events: these come from the record."""

    now: float
    cursor: Cursor
    beats: tuple[RankBeat, ...] = ()
    usage: tuple[Moment, ...] = ()
    frames: tuple[BeatFrame, ...] = ()  # what ranks were doing, by time
    buckets: tuple[Bucket, ...] = ()
    totals: tuple[Total, ...] = ()
    output: tuple[OutputWritten, ...] = ()
    cells: tuple[CellFinished, ...] = ()
    checks: tuple[Check, ...] = ()
    output_dropped: int = 0
    telemetry_dropped: int = 0
    problems: tuple[str, ...] = ()


def schema() -> bytes:
    """JSON schema of `session.json`."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Document)), indent=1)

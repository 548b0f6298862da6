"""A job's part of a saved session: values to files and back. Code is taken out of the events, named by its digest."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from workbench.blackbox import STEP, StepRecord, iter_steps
from workbench.controller import transition
from workbench.errors import InvalidTransitionError, SavedFileError
from workbench.events import CellSent, Event, LaunchRequested, OriginRecorded, decode_event, encode_event
from workbench.feed import Bucket
from workbench.state import JobState
from workbench.store.saved.archive import Archive
from workbench.store.saved.document import JobEntry, Telemetry
from workbench.store.saved.pickles import rewrite
from workbench.store.saved.scrub import HOME_IN_CODE

_MARK: Final = "code:"
_PICKLE: Final = b"pickle:"
T = TypeVar("T")
_Steps = list[tuple[int, bytes]]
Put = Callable[[str], str]  # a text of code; what stands for it
PutData = Callable[[bytes], bytes]  # the same of a pickle


@dataclass(frozen=True)
class JobRecord:
    """All that is kept of one job. `history` None: `telemetry` has it as finely as it is kept.

    `steps`: by rank, in the order in which they were taken. `logs`: by rank, the end of its output.
    """

    events: tuple[Event, ...]
    telemetry: Telemetry
    history: tuple[Bucket, ...] | None = None
    steps: tuple[tuple[int, bytes], ...] = ()
    logs: Mapping[int, str] = field(default_factory=dict)


def files_of(job_id: str, record: JobRecord, code: dict[str, str]) -> dict[str, bytes]:
    """The job's files by name; `code` gets the texts that they name."""

    def put(text: str) -> str:
        digest = hashlib.sha256(text.encode()).hexdigest()
        code[digest] = text
        return f"{_MARK}{digest}"

    pickles: dict[str, bytes] = {}

    def put_pickle(data: bytes) -> bytes:
        digest = hashlib.sha256(data).hexdigest()
        pickles[f"code/{digest}.pickle"] = data
        return _PICKLE + digest.encode()

    folder = f"jobs/{job_id}"
    events = b"".join(encode_event(_outside(event, put, put_pickle)) + b"\n" for event in record.events)
    files = {
        **pickles,
        f"{folder}/events.jsonl": events,
        f"{folder}/telemetry.msgpack": msgspec.msgpack.encode(record.telemetry),
    }
    if record.history is not None:
        files[f"{folder}/history.msgpack"] = msgspec.msgpack.encode(record.history)
    if record.steps:
        files[f"{folder}/steps.msgpack"] = msgspec.msgpack.encode(record.steps)
    files.update({f"{folder}/logs/rank{rank}.log": text.encode() for rank, text in record.logs.items()})
    return files


def code_file(digest: str) -> str:
    return f"code/{digest}.py"


class SavedRecord:
    """One job of an open archive; each part is read when it is first asked for. Raises `SavedFileError`."""

    def __init__(self, archive: Archive, entry: JobEntry) -> None:
        self.archive, self.entry = archive, entry

    def code(self, digest: str) -> str:
        """A text of code, this user's home in place of the one it was saved from."""
        return self.raw_code(digest).replace(HOME_IN_CODE, str(Path.home()))

    def raw_code(self, digest: str) -> str:
        return self.archive.read(code_file(digest)).decode()

    def pickle(self, digest: str) -> bytes:
        """A function that was launched, not loaded; this user's home in it."""
        data = self.archive.read(f"code/{digest}.pickle")
        if HOME_IN_CODE.encode() not in data:
            return data
        try:
            return rewrite(data, lambda text: text.replace(HOME_IN_CODE, str(Path.home())))
        except ValueError as error:
            raise self._wrong(f"its function cannot be read: {error}") from error

    @functools.cached_property
    def events(self) -> tuple[Event, ...]:
        lines = self._read("events.jsonl").splitlines()
        try:
            return tuple(_inside(decode_event(line), self.code, self.pickle) for line in lines)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._wrong(f"its record cannot be read: {error}") from error

    @functools.cached_property
    def state(self) -> JobState:
        return self.state_after(self.events)

    def state_after(self, events: Iterable[Event]) -> JobState:
        """As the controller makes it of these events."""
        state: JobState | None = None
        try:
            for event in events:
                state, _ = transition(state, event)
        except InvalidTransitionError as error:
            raise self._wrong(f"its record cannot be: {error.args[0]}") from error
        if state is None:
            raise self._wrong("its record is empty")
        return state

    @functools.cached_property
    def telemetry(self) -> Telemetry:
        return self._decode("telemetry.msgpack", Telemetry)

    @functools.cached_property
    def history(self) -> list[Bucket]:
        has_own = f"jobs/{self.entry.job_id}/history.msgpack" in self.archive.document.files
        return self._decode("history.msgpack", list[Bucket]) if has_own else list(self.telemetry.buckets)

    @functools.cached_property
    def step_blocks(self) -> _Steps:
        data = self._read("steps.msgpack")
        blocks = self._decode("steps.msgpack", _Steps) if data else []
        if any(len(block) % STEP.size for _, block in blocks):
            raise self._wrong("its steps cannot be read")
        return blocks

    def steps(self, rank: int) -> list[StepRecord]:
        """One rank's single steps, in the order in which they were taken; a step may come twice, after a restart."""
        return [record for owner, block in self.step_blocks if owner == rank for record in iter_steps(block)]

    def log(self, rank: int) -> tuple[int, str]:
        """Where the kept end of the rank's output begins, and the text."""
        known = {entry.rank: entry.start for entry in self.entry.logs}
        if rank not in known:
            return 0, ""
        return known[rank], self._read(f"logs/rank{rank}.log").decode(errors="replace")

    def _read(self, name: str) -> bytes:
        return self.archive.read(f"jobs/{self.entry.job_id}/{name}")

    def _decode(self, name: str, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(self._read(name), type=kind)
        except msgspec.DecodeError as error:
            raise self._wrong(f"{name} cannot be read: {error}") from error

    def _wrong(self, what: str) -> SavedFileError:
        return SavedFileError(f"{self.archive.path.name}: job {self.entry.job_id}: {what}")


def _outside(event: Event, put: Put, put_pickle: PutData) -> Event:
    """The event with marks in place of code."""
    match event:
        case LaunchRequested(spec=spec) if spec.source or spec.payload:
            source = put(spec.source) if spec.source else ""
            payload = put_pickle(spec.payload) if spec.payload else b""
            return replace(event, spec=replace(spec, source=source, payload=payload))
        case OriginRecorded(origin=origin):
            marked = tuple(replace(one, text=put(one.text) if one.text else "") for one in origin.sources)
            return replace(event, origin=replace(origin, sources=marked))
        case CellSent(source=source) if source:
            return replace(event, source=put(source))
    return event


def _inside(event: Event, get: Callable[[str], str], get_pickle: Callable[[str], bytes]) -> Event:
    """The inverse."""

    def text(mark: str) -> str:
        return get(mark.removeprefix(_MARK)) if mark.startswith(_MARK) else mark

    def pickled(mark: bytes) -> bytes:
        return get_pickle(mark.removeprefix(_PICKLE).decode("ascii", "replace")) if mark.startswith(_PICKLE) else b""

    return _outside(event, text, pickled)

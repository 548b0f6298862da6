"""A job's steps and spans in other programs' formats: CSV, Chrome's trace events, TensorBoard's event files, Parquet.

TensorBoard's format is simple enough to be written here, so that nothing has to be installed; Parquet needs pyarrow.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from workbench.blackbox import StepRecord
from workbench.errors import SavedFileError, UsageError
from workbench.saved.traces import steps_of
from workbench.session import Job
from workbench.store.home import atomic_write, private_dir
from workbench.views.buckets import PHASES

Steps = Mapping[int, list[StepRecord]]
COLUMNS: Final = ("rank", *StepRecord._fields)
_SCALARS: Final = ("loss", "duration", "samples", "tokens")


def export(job: Job, form: str, target: Path) -> Path:
    """Write one job in that format to `target` (a folder for TensorBoard); where it lies.

    Raises `UsageError` for an unknown format or a missing library, `SavedFileError` when the job has no steps.
    """
    if form not in FORMATS:
        raise UsageError(f"there is no format {form!r}", hint=f"formats: {', '.join(FORMATS)}")
    steps = steps_of(job)
    if not any(steps.values()) and form != "chrome-trace":
        raise SavedFileError(f"{job.job_id} has no steps to export")
    return FORMATS[form](job, steps, target)


# --- tables -----------------------------------------------------------------------------------------------------------


def _rows(steps: Steps) -> Iterator[tuple[Any, ...]]:
    for rank, records in steps.items():
        for record in records:
            yield (rank, *record)


def _csv(job: Job, steps: Steps, target: Path) -> Path:
    """A row a rank and step; what is not known is empty. Times in s, `end` in epoch s."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    writer.writerows([("" if value != value else value) for value in row] for row in _rows(steps))
    atomic_write(target, text.getvalue().encode())
    return target


def _parquet(job: Job, steps: Steps, target: Path) -> Path:
    """The columns of `_csv`; what is not known is null."""
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        hint = "pip install pyarrow, which the extra 'export' brings as well; csv needs nothing"
        raise UsageError("parquet needs pyarrow, which is not installed", hint=hint) from None
    kinds = {name: arrow.int64() if name in ("rank", "step") else arrow.float64() for name in COLUMNS}
    columns = zip(*_rows(steps), strict=True)
    arrays = [arrow.array(column, kind, from_pandas=True) for column, kind in zip(columns, kinds.values(), strict=True)]
    data = io.BytesIO()
    parquet.write_table(arrow.table(arrays, names=list(COLUMNS)), data)
    atomic_write(target, data.getvalue())
    return target


# --- chrome's trace events: chrome://tracing, Perfetto ----------------------------------------------------------------
# Perfetto drops spans of a thread that cross each other, so they are clipped until they nest; whole µs stay exact.


def _chrome(job: Job, steps: Steps, target: Path) -> Path:
    """A process a rank with its steps and their parts, one for the job with its attempts; marks as instants."""
    view = job.view()
    start = view.submitted_at
    events = _named(0, f"job {job.job_id}", "attempts")
    timeline = view.timeline
    if timeline is not None:
        clock = 0
        for one in timeline.attempts:
            begin = max(clock, _micro(one.start - start))
            clock = max(begin, _micro((timeline.end if one.end is None else one.end) - start))
            events.append(_span(f"attempt {one.restart_count}", 0, begin, clock, "attempt"))
        events += [
            {"name": f"{mark.kind.value}: {mark.title}", "ph": "i", "s": "g", "pid": 0, "tid": 0, "cat": "mark",
             "ts": _micro(mark.time - start)}
            for mark in timeline.marks
        ]  # fmt: skip
    for rank, records in steps.items():
        events += _named(rank + 1, f"rank {rank}", "steps")
        clock = 0
        for record in sorted(records, key=lambda one: one.end):
            begin = max(clock, _micro(record.end - record.duration - start))
            clock = max(begin, _micro(record.end - start))
            events += _step(rank + 1, record, begin, clock)
    atomic_write(target, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
    return target


def _step(pid: int, record: StepRecord, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """The step, and its parts one after another: they are sums, whose true order inside the step is not kept."""
    known = {name: value for name in ("samples", "tokens", "loss") if not math.isnan(value := getattr(record, name))}
    told = {name: value if math.isfinite(value) else str(value) for name, value in known.items()}  # JSON has no inf
    yield _span(f"step {record.step}", pid, begin, end, "step", told)
    for phase in PHASES:
        if (until := min(begin + _micro(getattr(record, phase)), end)) > begin:
            yield _span(phase, pid, begin, until, "phase")
            begin = until


def _span(
    name: str, pid: int, begin: int, end: int, kind: str, told: Mapping[str, float | str] | None = None
) -> dict[str, Any]:
    event = {"name": name, "ph": "X", "pid": pid, "tid": pid, "cat": kind, "ts": begin, "dur": end - begin}
    return {**event, "args": dict(told)} if told else event


def _named(pid: int, process: str, thread: str) -> list[dict[str, Any]]:
    bare = {"ph": "M", "pid": pid, "tid": pid}
    return [
        {"name": "process_name", **bare, "args": {"name": process}},
        {"name": "process_sort_index", **bare, "args": {"sort_index": pid}},
        {"name": "thread_name", **bare, "args": {"name": thread}},
    ]


def _micro(seconds: float) -> int:
    return round(max(seconds, 0.0) * 1e6)


# --- TensorBoard: TFRecord files of protobuf Events -------------------------------------------------------------------


def _tensorboard(job: Job, steps: Steps, target: Path) -> Path:
    """A folder with a run a rank; each step's loss, duration (s), samples and tokens as scalars."""
    for rank, records in steps.items():
        folder = private_dir(target / job.job_id / f"rank{rank}")
        name = f"events.out.tfevents.{int(records[0].end) if records else 0:010d}.dtrain"
        atomic_write(folder / name, b"".join(_tf_records(records)))
    return target


def _tf_records(records: list[StepRecord]) -> Iterator[bytes]:
    first = records[0].end if records else 0.0
    yield _tf_record(_double(1, first) + _bytes(3, b"brain.Event:2"))
    for record in records:
        values = b"".join(
            _bytes(1, _bytes(1, f"step/{name}".encode()) + _float(2, value))
            for name in _SCALARS
            if not math.isnan(value := getattr(record, name)) and (value or name in ("loss", "duration"))
        )
        yield _tf_record(_double(1, record.end) + _varint(2 << 3) + _varint(record.step) + _bytes(5, values))


def _tf_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    try:
        data = struct.pack("<f", value)
    except OverflowError:
        data = struct.pack("<f", math.copysign(math.inf, value))
    return _varint(field << 3 | 5) + data


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _crc_table() -> tuple[int, ...]:
    """Of CRC-32C (Castagnoli), reflected polynomial 0x82F63B78."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # noqa: PLW2901
        table.append(byte)
    return tuple(table)


_CRC: Final = _crc_table()


def masked_crc(data: bytes) -> int:
    """As TFRecord has it: rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


FORMATS: Final[Mapping[str, Callable[[Job, Steps, Path], Path]]] = {
    "csv": _csv,
    "parquet": _parquet,
    "chrome-trace": _chrome,
    "tensorboard": _tensorboard,
}
SUFFIXES: Final[Mapping[str, str]] = {"csv": ".csv", "parquet": ".parquet", "chrome-trace": ".json", "tensorboard": ""}

"""From a pool's answers to a saved session: what is kept, and that nothing is kept which must not be told.

A running job is saved as it stands. What cannot be had (a host that is gone, a log too long) is left out and said.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

import workbench.requests as rq
from workbench import __version__
from workbench.agent.logs import LogPage
from workbench.capture import digest_of, git_state, installed
from workbench.errors import SavedFileError, WorkbenchError
from workbench.events import CellSent, Event, LaunchRequested, OriginRecorded, decode_event, encode_event
from workbench.feed import BeatFrame, Bucket, Cursor, PoolStatus, StepPage, Update
from workbench.spec import EntrypointKind, JobSpec
from workbench.state import Checkpoint, CheckpointTier
from workbench.store.coverage import TIERS
from workbench.store.saved import archive, pickles
from workbench.store.saved.document import (
    FORMAT,
    NAME,
    REPORT,
    VERSION,
    CodeEntry,
    Document,
    HostShape,
    JobEntry,
    LogEntry,
    PoolShape,
    Telemetry,
)
from workbench.store.saved.records import JobRecord, code_file, files_of
from workbench.store.saved.scrub import HOME_IN_CODE, REMOVED, Scrubber, is_allowed
from workbench.store.saved.told import chapter_of, page
from workbench.telemetry import OutputWritten
from workbench.training import manifest as mf
from workbench.views.report import Chapter

STEP_BYTES: Final = 48 * 2**20  # of a job's single steps: half a million
BUCKETS: Final = 150_000
LOG_BYTES: Final = 2**20  # of one rank; less where there are many
LOGS_BYTES: Final = 16 * 2**20
OUTPUT_BYTES: Final = 2**20
LINES: Final = 200_000
Ask = Callable[..., Any]  # (request, body, kind) -> value


@dataclass
class _Gathering:
    """What comes together while jobs are read."""

    ask: Ask
    homes: tuple[str, ...]
    scrub: Scrubber
    env: tuple[str, ...]
    with_checkpoints: bool
    files: dict[str, bytes | Path] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    chapters: dict[str, Chapter] = field(default_factory=dict)


def save(
    path: Path,
    ask: Ask,
    job_ids: Sequence[str],
    *,
    env: Sequence[str] = (),
    with_checkpoints: bool = False,
) -> Document:
    """Write these jobs to `path`, in place of what was there; what was written.

    `env`: patterns of environment variables whose values may be told besides the usual ones.
    """
    if not path.absolute().parent.is_dir():
        raise SavedFileError(f"there is no directory {path.absolute().parent}", hint="make it, or save elsewhere")
    homes = tuple({str(Path.home()), str(Path.home().resolve())})
    gathering = _Gathering(ask, homes, Scrubber(homes, os.environ), tuple(env), with_checkpoints)
    jobs = [_job(gathering, job_id) for job_id in job_ids]
    texts = {digest: text.encode() for digest, text in gathering.code.items()}
    document = Document(
        format=FORMAT,
        version=VERSION,
        dtrain=__version__,
        saved_at=time.time(),
        host=_host(),
        pool=_pool(ask),
        jobs=tuple(entry for _, entry in sorted(jobs, key=lambda job: job[0])),
        code={digest: _code_entry(gathering, digest, text) for digest, text in sorted(gathering.code.items())},
        left_out=tuple(dict.fromkeys([*gathering.left_out, *_removed(gathering.scrub)])),
    )
    report = page(document, [gathering.chapters[entry.job_id] for entry in document.jobs])
    files = {**gathering.files, **{code_file(d): t for d, t in texts.items()}, REPORT: report}
    return archive.write(path, document, files)


def _code_entry(gathering: _Gathering, digest: str, text: str) -> CodeEntry:
    names = tuple(sorted(gathering.names.get(digest, ())))
    return CodeEntry(names=names, is_cut=REMOVED in text, has_home=HOME_IN_CODE in text)


def _removed(scrub: Scrubber) -> list[str]:
    return [f"{what} ({count} times)" for what, count in sorted(scrub.removed.items()) if count]


def _host() -> HostShape:
    return HostShape(
        platform=f"{platform.system()}-{platform.machine()}",
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        packages=installed(),
    )


def _pool(ask: Ask) -> PoolShape | None:
    try:
        status = ask("status", None, PoolStatus)
    except WorkbenchError:
        return None
    kinds = {worker.accelerator for worker in status.workers}
    return PoolShape(
        name=status.name,
        slots=status.slots,
        workers=tuple(worker.slots for worker in status.workers),
        accelerator="GPU" if "GPU" in kinds else "CPU",
    )


# --- one job ----------------------------------------------------------------------------------------------------------


def _job(gathering: _Gathering, job_id: str) -> tuple[float, JobEntry]:
    update: Update = gathering.ask("follow", rq.Follow(job_id=job_id, timeout=0.0), Update)
    state = update.state
    logs = _logs(gathering, job_id, state.world_size)
    checkpoints = _checkpoints(gathering, job_id, update)
    history = _history(gathering, update)
    record = JobRecord(
        events=tuple(_event(gathering, job_id, event) for event in update.events),
        telemetry=_telemetry(gathering, job_id, update),
        history=history,
        steps=_steps(gathering, job_id),
        logs={rank: text for rank, (_, text) in logs.items()},
    )
    gathering.files.update(files_of(job_id, record, gathering.code))
    entry = JobEntry(
        job_id=job_id,
        label=state.spec.label,
        phase=state.phase.value,
        world_size=state.world_size,
        is_running=not state.phase.is_terminal,
        logs=tuple(LogEntry(rank=rank, start=start) for rank, (start, _) in logs.items()),
        checkpoints=tuple(replace(one, path=gathering.scrub.text(one.path)) for one in checkpoints),
        contents=contents_of(checkpoints),
        included=_include(gathering, job_id, checkpoints) if gathering.with_checkpoints else (),
        env_left_out=tuple(sorted(name for name in state.spec.env if not is_allowed(name, gathering.env))),
        git=git_state(next((e.origin for e in update.events if isinstance(e, OriginRecorded)), None)),
    )
    gathering.chapters[job_id] = chapter_of(record, entry, update)
    return state.submitted_at, entry


def _event(gathering: _Gathering, job_id: str, event: Event) -> Event:
    """The event without what must not be told. Code is scrubbed as code, so that it can run again."""
    scrub = gathering.scrub
    match event:
        case LaunchRequested(spec=spec):
            bare = replace(spec, source="", payload=b"", env={}, args=())
            clean: Any = _scrubbed(scrub, replace(event, spec=bare))
            return LaunchRequested(
                time=clean.time, job_id=clean.job_id, spec=_spec(gathering, job_id, spec, clean.spec)
            )
        case OriginRecorded(origin=origin):
            texts = [_code(gathering, source.path, source.text) for source in origin.sources]
            bare_sources = tuple(replace(source, text="") for source in origin.sources)
            clean = _scrubbed(scrub, replace(event, origin=replace(origin, sources=bare_sources)))
            gathering.left_out += [f"{job_id}: {what}" for what in clean.origin.left_out]
            sources = tuple(replace(s, text=t) for s, t in zip(clean.origin.sources, texts, strict=True))
            return OriginRecorded(time=clean.time, origin=replace(clean.origin, sources=sources))
        case CellSent(source=source):
            return replace(event, source=_code(gathering, "cell", source))
    return _scrubbed(scrub, event)


def _scrubbed(scrub: Scrubber, event: Event) -> Event:
    return decode_event(msgspec.json.encode(scrub.tree(msgspec.json.decode(encode_event(event)))))


def _spec(gathering: _Gathering, job_id: str, spec: JobSpec, clean: JobSpec) -> JobSpec:
    """What a rerun needs of it and may be told."""
    kept = {name: value for name, value in spec.env.items() if is_allowed(name, gathering.env)}
    if hidden := sorted(set(spec.env) - set(kept)):
        hint = "save with --env NAME to keep one"
        gathering.left_out.append(f"{job_id}: values of environment variables: {', '.join(hidden)} ({hint})")
    return replace(
        clean,
        payload=_function(gathering, job_id, spec),
        source=_code(gathering, spec.label, spec.source),
        env={name: gathering.scrub.text(value) for name, value in kept.items()},
        args=gathering.scrub.words(spec.args),
    )


def _function(gathering: _Gathering, job_id: str, spec: JobSpec) -> bytes:
    """The pickle of a launched function; empty, and said why, where it must not be told."""
    if spec.kind is not EntrypointKind.FUNCTION:
        return b""
    scrub = Scrubber(gathering.homes, os.environ)
    data, why = pickles.clean(spec.payload, scrub)
    if why:
        gathering.left_out.append(f"{job_id}: the launched function {spec.label}, which cannot be run again: {why}")
    else:
        gathering.scrub.removed.update(scrub.removed)
    return data


def _code(gathering: _Gathering, name: str, text: str) -> str:
    if not text:
        return ""
    clean = gathering.scrub.code(text)
    gathering.names.setdefault(digest_of(clean.encode()), set()).add(name)
    return clean


def _telemetry(gathering: _Gathering, job_id: str, update: Update) -> Telemetry:
    output = _whole_lines(update.output)
    kept, held = [], 0
    for chunk in reversed(output):
        held += len(chunk.text)
        if held > OUTPUT_BYTES:
            break
        kept.append(replace(chunk, text=gathering.scrub.text(chunk.text)))
    if any(cell.payload for cell in update.cells):
        gathering.left_out.append(f"{job_id}: values that came back from ranks, which are pickles")
    cells = [
        replace(cell, payload=b"", data=gathering.scrub.tree(cell.data), error=gathering.scrub.text(cell.error),
                traceback=gathering.scrub.text(cell.traceback))
        for cell in update.cells
    ]  # fmt: skip
    cursor = Cursor(
        event=len(update.events), beat=update.cursor.beat, output=len(kept), cells=len(cells),
        checks=len(update.checks), bucket=update.cursor.bucket,
    )  # fmt: skip
    return Telemetry(
        now=update.now,
        cursor=cursor,
        beats=update.beats,
        usage=update.usage,
        frames=tuple(gathering.ask("frames", rq.ReadFrames(job_id=job_id), list[BeatFrame])),
        buckets=update.buckets,
        totals=update.totals,
        output=tuple(reversed(kept)),
        cells=tuple(cells),
        checks=update.checks,
        output_dropped=update.output_dropped + sum(len(c.text) for c in output[: len(output) - len(kept)]),
        telemetry_dropped=update.telemetry_dropped,
        problems=tuple(map(gathering.scrub.text, update.problems)),
    )


def _whole_lines(chunks: Sequence[OutputWritten]) -> list[OutputWritten]:
    """A word that two chunks share is one again: half a token looks like none."""
    found: list[OutputWritten] = []
    open_at: dict[tuple[int, str], int] = {}
    for chunk in chunks:
        key = chunk.rank, chunk.stream
        at = open_at.get(key)
        if at is not None and not chunk.dropped and not found[at].text.endswith("\n"):
            found[at] = replace(found[at], text=found[at].text + chunk.text)
        else:
            open_at[key] = len(found)
            found.append(chunk)
    return found


def _history(gathering: _Gathering, update: Update) -> tuple[Bucket, ...] | None:
    """As fine as there is room for; None where what a follower gets is that already."""
    state = update.state
    seconds = max((state.ended_at or update.now) - state.submitted_at, 1.0)
    width = next((w for w in TIERS if state.world_size * seconds / w <= BUCKETS), TIERS[-1])
    found = gathering.ask("history", rq.History(job_id=state.job_id, width=width), list[Bucket])
    return None if _packed(found) == _packed(update.buckets) else tuple(found)


def _packed(buckets: Sequence[Bucket]) -> bytes:
    return msgspec.msgpack.encode(list(buckets))  # NaN is not equal to itself


def _steps(gathering: _Gathering, job_id: str) -> tuple[tuple[int, bytes], ...]:
    pages: list[StepPage] = []
    after: int | None = 0
    is_cut = False
    while after is not None:
        page = gathering.ask("steps", rq.ReadSteps(job_id=job_id, after=after), StepPage)
        pages.append(page)
        while len(pages) > 1 and sum(_size(held) for held in pages) > STEP_BYTES:
            pages.pop(0)
            is_cut = True
        after = page.next
    if is_cut:
        gathering.left_out.append(f"{job_id}: the oldest single steps; {STEP_BYTES // 2**20} MiB of them are kept")
    by_rank: dict[int, list[bytes]] = {}
    for page in pages:
        for rank, block in page.blocks:
            by_rank.setdefault(rank, []).append(block)
    return tuple((rank, b"".join(blocks)) for rank, blocks in sorted(by_rank.items()))


def _size(page: StepPage) -> int:
    return sum(len(block) for _, block in page.blocks)


def _logs(gathering: _Gathering, job_id: str, ranks: int) -> dict[int, tuple[int, str]]:
    """By rank: where the kept end begins, and the text."""
    room = min(LOG_BYTES, LOGS_BYTES // max(ranks, 1))
    found: dict[int, tuple[int, str]] = {}
    for rank in range(ranks):
        try:
            page = gathering.ask("log", rq.ReadLog(job_id=job_id, rank=rank, tail=LINES), LogPage)
        except WorkbenchError as error:
            gathering.left_out.append(f"{job_id}: output of the ranks: {error.args[0]}")
            break
        data = page.text.encode()
        kept = data[-room:]
        if page.truncated or page.start or len(kept) < len(data):
            gathering.left_out.append(f"{job_id}: the beginning of rank {rank}'s output")
        if page.text:
            found[rank] = page.start + len(data) - len(kept), gathering.scrub.text(kept.decode(errors="ignore"))
    return found


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _checkpoints(gathering: _Gathering, job_id: str, update: Update) -> tuple[Checkpoint, ...]:
    try:
        return tuple(gathering.ask("checkpoints", rq.ListCheckpoints(job_id=job_id), list[Checkpoint]))
    except WorkbenchError as error:
        if update.state.checkpoints:
            gathering.left_out.append(f"{job_id}: what its checkpoints are like now: {error.args[0]}")
        return tuple(reversed(update.state.checkpoints))


def contents_of(checkpoints: Sequence[Checkpoint]) -> dict[int, str]:
    """Digests of training states by step, of those whose manifests can be read from here."""
    found: dict[int, str] = {}
    for one in reversed(checkpoints):
        if not one.problem and one.tier is CheckpointTier.DISK:
            try:
                found[one.step] = mf.content_digest(mf.read(Path(one.path)))
            except mf.ManifestError:
                continue
    return found


def _include(gathering: _Gathering, job_id: str, checkpoints: Sequence[Checkpoint]) -> tuple[int, ...]:
    """Put the files of the newest one that can be used into the session; its step."""
    usable = [one for one in checkpoints if not one.problem and one.tier is CheckpointTier.DISK]
    if not usable:
        gathering.left_out.append(f"{job_id}: checkpoints: it has none that can be used")
        return ()
    newest = usable[0]
    folder = Path(newest.path)
    names = {f"checkpoints/{job_id}/{newest.step}/{path.name}": path for path in _files_in(folder)}
    if not names or not all(map(NAME.match, names)):
        gathering.left_out.append(
            f"{job_id}: the checkpoint of step {newest.step}: its folder cannot be read from here"
        )
        return ()
    gathering.files.update(names)
    return (newest.step,)


def _files_in(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_file())
    except OSError:
        return []

"""What is saved, loaded and saved again is the same file, bit for bit; and nothing secret gets through the scrubber."""

from __future__ import annotations

import base64
import re
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.property.test_codecs import event_of, real, record, text, whole
from workbench.blackbox import pack_step
from workbench.events import EVENT_TYPES, CellSent, Event, LaunchRequested, OriginRecorded, decode_event
from workbench.feed import BeatFrame, Bucket, Cursor, Moment, Spread
from workbench.saved.session import load_session
from workbench.store.saved import archive
from workbench.store.saved.document import (
    FORMAT,
    VERSION,
    CodeEntry,
    Document,
    HostShape,
    JobEntry,
    LogEntry,
    Telemetry,
)
from workbench.store.saved.records import JobRecord, code_file, files_of
from workbench.store.saved.scrub import HOME_IN_CODE, REMOVED, Scrubber
from workbench.telemetry import OutputWritten

events = st.lists(st.sampled_from(EVENT_TYPES).flatmap(event_of), max_size=8)
buckets = st.builds(
    Bucket, rank=whole, start=real, width=real, steps=whole, last_step=whole, duration=real, slowest=real, data=real,
    forward=real, backward=real, comm=real, optimizer=real, checkpoint=real, samples=real, tokens=real, loss=real,
)  # fmt: skip
spreads = st.builds(Spread, real, real, real, whole)
telemetry = st.builds(
    Telemetry,
    now=real,
    cursor=st.builds(Cursor, event=whole, bucket=real),
    buckets=st.lists(buckets, max_size=3).map(tuple),
    usage=st.lists(
        st.builds(Moment, real, st.dictionaries(text, st.builds(Spread, real, real, real, whole), max_size=2)),
        max_size=2,
    ).map(tuple),
    frames=st.lists(st.builds(BeatFrame, time=real, data=st.binary(max_size=9)), max_size=2).map(tuple),
    output=st.lists(
        st.builds(OutputWritten, job_id=text, rank=whole, stream=text, text=text, time=real), max_size=2
    ).map(tuple),
)
records = st.builds(
    JobRecord,
    events=events.map(tuple),
    telemetry=telemetry,
    history=st.none() | st.lists(buckets, max_size=3).map(tuple),
    steps=st.lists(st.integers(0, 9).map(lambda k: (k, pack_step(record(k)) * k)), max_size=3).map(tuple),
    logs=st.dictionaries(st.integers(0, 99), text, max_size=3),
)


def no_mark(event: Event) -> bool:
    """Code never looks like what stands for code, and holds no mark of a home: `collect` sees to it."""
    data = msgspec.json.encode(event)
    marks = (b"code:", base64.b64encode(b"pickle")[:8])
    return not any(mark in data for mark in marks) and HOME_IN_CODE.encode() not in data


@pytest.fixture
def home(dtrain_home: Path) -> Path:
    return dtrain_home


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True), records, max_size=3), real)
def test_save_load_save_is_the_identity(home: Path, jobs: dict[str, JobRecord], saved_at: float) -> None:
    code: dict[str, str] = {}
    files = {name: data for job_id, record in jobs.items() for name, data in files_of(job_id, record, code).items()}
    entries = tuple(
        JobEntry(job_id=job_id, label="x", phase="HEALTHY", world_size=100,
                 logs=tuple(LogEntry(rank=rank, start=0) for rank in record.logs))
        for job_id, record in jobs.items()
    )  # fmt: skip
    document = Document(
        format=FORMAT, version=VERSION, dtrain="0", saved_at=saved_at, host=HostShape(), jobs=entries,
        code={digest: CodeEntry(names=("x",)) for digest in code},
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=home) as folder:
        first, second = Path(folder, "1.dtrain"), Path(folder, "2.dtrain")
        archive.write(first, document, {**files, **{code_file(d): text.encode() for d, text in code.items()}})
        with load_session(first) as session:
            assert session.is_ours
            for job_id, kept in jobs.items():
                found = session.record(job_id)
                if all(map(no_mark, kept.events)):
                    assert found.events == kept.events
                assert found.telemetry == kept.telemetry
                assert found.history == list(kept.history if kept.history is not None else kept.telemetry.buckets)
                assert found.step_blocks == [(rank, block) for rank, block in kept.steps]
                assert {rank: found.log(rank)[1] for rank in kept.logs} == dict(kept.logs)
            session.save(second)
        assert second.read_bytes() == first.read_bytes()
        with load_session(second) as session:
            assert session.is_ours


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([LaunchRequested, OriginRecorded, CellSent]).flatmap(event_of))
def test_code_is_taken_out_of_events(event: Event) -> None:
    code: dict[str, str] = {}
    written = files_of("j", JobRecord((event,), Telemetry(now=0.0, cursor=Cursor())), code)["jobs/j/events.jsonl"]
    match decode_event(written):
        case LaunchRequested(spec=spec):
            left = [spec.source, spec.payload.decode()]
        case OriginRecorded(origin=origin):
            left = [source.text for source in origin.sources]
        case CellSent(source=source):
            left = [source]
    assert all(re.fullmatch(r"(?:(?:code|pickle):[0-9a-f]{64})?", text) for text in left)


# --- the scrubber -----------------------------------------------------------------------------------------------------

letters = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", min_size=20, max_size=40)
secrets = st.builds(
    lambda form, body: form.format(body),
    st.sampled_from(
        ["hf_{}", "ghp_{}", "github_pat_{}", "glpat-{}", "sk-{}", "xoxb-{}", "password='{}1'", "--api-key={}1",
         "API_TOKEN: {}1", "Authorization: Bearer {}", "https://ana:{}@host/x", "my_secret = \"{}\"",
         "key='{}0123456789ab'"]
    ),
    letters,
)  # fmt: skip
around = st.text(st.characters(exclude_categories=["Cs"]), max_size=15)


@settings(max_examples=300, deadline=None)
@given(around, secrets, around)
def test_a_secret_does_not_get_through(before: str, secret: str, after: str) -> None:
    body = max((part for part in secret.replace("'", " ").replace('"', " ").split()), key=len).split("@")[0][-20:]
    scrub = Scrubber()
    assert body not in scrub.text(f"{before}\n{secret}\n{after}")
    assert scrub.removed.total() >= 1


@pytest.mark.parametrize(
    "text", ["# Basic functionality of the model", "Basic classification", "id_token = base64url_encode(json.dumps(x))"]
)
def test_prose_and_calls_are_no_secrets(text: str) -> None:
    """Else code that nobody has a secret in could not be run again."""
    assert Scrubber().code(text) == text


@pytest.mark.parametrize("unit", ["7", "a", "a1_-", "token", "eyJ.", " ", "auth ", "://", "http", "-----BEGIN "])
def test_a_long_line_is_scrubbed_in_one_go(unit: str) -> None:
    """It took time by the square of its length: a program that prints a megabyte of digits could not be saved."""
    text = unit * (500_000 // len(unit))
    assert Scrubber(("/home/ana",)).text(text) == text
    assert "hunter2hunter2hunter2" not in Scrubber().text(f"{text} token=hunter2hunter2hunter2")


@settings(max_examples=300, deadline=None)
@example(["TOKEN", " ", "/home/ana/", 'my_secret = "00000000000000000000"'])
@given(st.lists(around | secrets | st.sampled_from(["/home/ana", "/home/ana/x", REMOVED, "token", "=", " "])))
def test_scrubbing_twice_changes_nothing(parts: list[str]) -> None:
    scrub = Scrubber(("/home/ana",), {"A_TOKEN": "swordfish-4711"})
    for clean in (scrub.text, scrub.code):
        once = clean("".join(parts))
        assert clean(once) == once
        assert "/home/ana/" not in once

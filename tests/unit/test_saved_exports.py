"""What is made of a saved session: a page, a notebook, other programs' files. Each is read as its reader would."""

from __future__ import annotations

import csv
import itertools
import json
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import nbformat
import pytest

from tests.unit.fake_session import FakeSession, context_of
from tests.unit.saved_files import LOSSES, SPEC, fake, save_fake, steps_of
from workbench.errors import SavedFileError, UsageError
from workbench.saved.export import COLUMNS, export, masked_crc
from workbench.saved.notebook import notebook_of
from workbench.saved.page import page_of
from workbench.saved.session import SavedSession, load_session
from workbench.spec import JobSpec
from workbench.verbs.table import run
from workbench.views.charts import POINTS, Series, chart, thin


@pytest.fixture
def session(dtrain_home: Path, tmp_path: Path) -> SavedSession:
    save_fake(tmp_path / "run.dtrain")
    return load_session(tmp_path / "run.dtrain")


# --- the page ---------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags that are opened and closed, and all that could be fetched."""

    VOID = ("meta", "rect", "path", "polyline", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.labels: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in (*self.VOID, "th", "td"):
            self.open.append(tag)
        told = dict(attrs)
        self.fetched += [
            str(told[name]) for name in ("src", "href") if told.get(name) and not str(told[name]).startswith("#")
        ]
        if tag in ("script", "link", "iframe", "object"):
            self.fetched.append(tag)
        if tag == "svg" and "aria-hidden" not in told:
            assert told["role"] == "img" and told["aria-label"]
            self.labels.append(str(told["aria-label"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        if tag not in (*self.VOID, "th", "td"):
            assert self.open.pop() == tag


def test_a_page_stands_alone_and_has_words_for_its_pictures(session: SavedSession) -> None:
    text = page_of([session.attach("trial-1")], "a <title>").decode()
    page = Page(text)
    assert page.open == [] and page.fetched == []
    assert any(label.startswith("Loss by step") and "from 2" in label for label in page.labels)
    assert any("What the ranks did" in label for label in page.labels)
    assert "a &lt;title&gt;" in text and "<details><summary>values" in text and "lr = 0.05" in text
    assert "@import" not in text and "url(" not in text


def test_what_was_saved_is_shown_as_text_only(dtrain_home: Path, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    asked = fake(msgspec.structs.replace(SPEC, source=f"# {evil}\n", args=(evil,)))
    save_fake(tmp_path / "run.dtrain", asked=asked)
    with load_session(tmp_path / "run.dtrain") as session:
        text = page_of([session.attach("trial-1")], evil).decode()
    assert "<script" not in text and "&lt;script&gt;" in text


def test_an_hour_of_eight_ranks_is_under_a_megabyte(dtrain_home: Path, tmp_path: Path) -> None:
    spec = JobSpec(entrypoint="train.py", nproc_per_node=8)
    asked = fake(spec)
    losses = [1.0 / (k + 1) for k in range(3600)]
    asked.steps = {rank: steps_of(rank, losses, seconds=1.0) for rank in range(8)}
    save_fake(tmp_path / "run.dtrain", asked=asked)
    with load_session(tmp_path / "run.dtrain") as session:
        data = page_of([session.attach("trial-1")], "an hour")
    assert 10_000 < len(data) < 1_000_000


def test_thinning_keeps_the_spikes() -> None:
    points = [(float(k), 1000.0 if k == 777 else 1.0) for k in range(10_000)]
    found = thin(points)
    assert len(found) <= POINTS and (777.0, 1000.0) in found and found == sorted(found)
    assert chart("x", "", [Series("a", [(1.0, float("nan"))])], str) == ""


# --- the notebook -----------------------------------------------------------------------------------------------------


def test_a_notebook_looks_and_can_run_again(session: SavedSession) -> None:
    notebook = nbformat.reads(notebook_of(session, "run.dtrain").decode(), as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code[0].metadata.tags == ["parameters"] and "path = 'run.dtrain'" in code[0].source
    for cell in code:
        compile(cell.source, "cell", "exec")
    assert "run_again" in code[-1].source


# --- other programs' files --------------------------------------------------------------------------------------------


def test_csv(session: SavedSession, tmp_path: Path) -> None:
    target = export(session.attach("trial-1"), "csv", tmp_path / "steps.csv")
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS and len(rows) == 2 * len(LOSSES)
    assert [float(row["loss"]) for row in rows if row["rank"] == "0"] == LOSSES
    assert {row["loss"] for row in rows if row["rank"] == "1"} == {""}


def test_a_trace_keeps_to_the_format_that_perfetto_reads(session: SavedSession, tmp_path: Path) -> None:
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: JSON object format."""
    target = export(session.attach("trial-1"), "chrome-trace", tmp_path / "trace.json")
    document = json.loads(target.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    events = document["traceEvents"]
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= set(event)
        assert event["ph"] in "XiM" and isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] in "gpt"
    steps = [event for event in events if event.get("cat") == "step"]
    assert len(steps) == 2 * len(LOSSES)
    by_pid = [event for event in events if event["pid"] == 1 and event["ph"] == "X"]
    for one, following in itertools.pairwise(by_pid):  # spans of a thread nest, or follow each other
        inside = following["ts"] + following["dur"] <= one["ts"] + one["dur"] + 1
        assert inside or following["ts"] >= one["ts"] + one["dur"] - 1


def fields(data: bytes) -> list[tuple[int, Any]]:
    """A protobuf message as (field, value)."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        value: Any
        if kind == 0:
            value = varint()
        elif kind == 1:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        elif kind == 5:
            value, at = struct.unpack_from("<f", data, at)[0], at + 4
        else:
            size = varint()
            value, at = data[at : at + size], at + size
        found.append((key >> 3, value))
    return found


def test_tensorboards_files_hold_scalars_by_step(session: SavedSession, tmp_path: Path) -> None:
    """Read by the rules of TFRecord and of event.proto; TensorBoard itself need not be installed."""
    target = export(session.attach("trial-1"), "tensorboard", tmp_path / "runs")
    (path,) = (target / "trial-1" / "rank0").iterdir()
    assert path.name.startswith("events.out.tfevents.")
    data, records = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        body = data[12 : 12 + length]
        assert struct.unpack_from("<I", data, 8)[0] == masked_crc(data[:8])
        assert struct.unpack_from("<I", data, 12 + length)[0] == masked_crc(body)
        records.append(dict(fields(body)))
        data = data[16 + length :]
    assert records[0][3] == b"brain.Event:2" and len(records) == 1 + len(LOSSES)
    for number, record in enumerate(records[1:]):
        values = {dict(fields(value))[1]: dict(fields(value))[2] for field, value in fields(record[5]) if field == 1}
        assert record[2] == number + 1
        assert values[b"step/loss"] == pytest.approx(LOSSES[number], rel=1e-6)
        assert values[b"step/duration"] == pytest.approx(0.1)


def test_the_checksum_is_crc32c() -> None:
    """The check value of CRC-32C, of RFC 3720, masked as TFRecord has it."""
    assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_parquet_says_what_it_needs(session: SavedSession, tmp_path: Path) -> None:
    job, target = session.attach("trial-1"), tmp_path / "steps.parquet"
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        with pytest.raises(UsageError, match="pip install pyarrow"):
            export(job, "parquet", target)
        return
    export(job, "parquet", target)
    assert parquet.read_table(target).num_rows == 2 * len(LOSSES)


def test_what_cannot_be_exported(session: SavedSession, dtrain_home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="formats: csv"):
        export(session.attach("trial-1"), "xml", tmp_path / "x")
    save_fake(tmp_path / "none.dtrain", lambda asked: asked.steps.clear())
    with load_session(tmp_path / "none.dtrain") as empty, pytest.raises(SavedFileError, match="no steps"):
        export(empty.attach("trial-1"), "csv", tmp_path / "x.csv")


def test_the_verbs_formats_are_those_there_are() -> None:
    from workbench.saved.export import FORMATS, SUFFIXES
    from workbench.verbs.beside import FORMATS as OFFERED

    assert tuple(FORMATS) == OFFERED and set(SUFFIXES) == set(FORMATS)


# --- runs beside each other -------------------------------------------------------------------------------------------


def test_saved_runs_beside_each_other_as_text_and_as_tables(session: SavedSession, tmp_path: Path) -> None:
    path = tmp_path / "run.dtrain"
    shown = run(context_of(FakeSession()), ["compare", str(path), str(path), str(path)])
    assert len(shown.document) == 2 and all(one["a"] == one["b"] for one in shown.document)
    bundle = shown.value._repr_mimebundle_()
    assert bundle["text/plain"] == shown.text and "How they went" in bundle["text/html"]
    assert "<script>" not in bundle["text/html"]  # no page has what is saved
    shell = context_of(FakeSession(), shell=True)
    with pytest.raises(UsageError, match="pools of this machine"):
        run(shell, ["compare", str(path), str(path), "--open"])
    with pytest.raises(UsageError, match="7 runs"):
        run(shell, ["compare", *[str(path)] * 7])

"""What is made of a saved session: a page, a notebook, other programs' files. Each is read as its reader would."""

from __future__ import annotations

import csv
import json
import math
import stat
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import nbformat
import pyarrow.parquet as parquet
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.unit.fake_session import FakeSession, context_of
from tests.unit.saved_files import LOSSES, SPEC, START, fake, save_fake, steps_of
from workbench.blackbox import StepRecord, pack_step
from workbench.errors import SavedFileError, UsageError
from workbench.saved.export import COLUMNS, export, masked_crc
from workbench.saved.notebook import notebook_of
from workbench.saved.page import report
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
    text = report([session.attach("trial-1")], "a <title>").decode()
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
        text = report([session.attach("trial-1")], evil).decode()
    assert "<script" not in text and "&lt;script&gt;" in text


def test_an_hour_of_eight_ranks_is_under_a_megabyte(dtrain_home: Path, tmp_path: Path) -> None:
    spec = JobSpec(entrypoint="train.py", nproc_per_node=8)
    asked = fake(spec)
    losses = [1.0 / (k + 1) for k in range(3600)]
    asked.steps = {rank: steps_of(rank, losses, seconds=1.0) for rank in range(8)}
    save_fake(tmp_path / "run.dtrain", asked=asked)
    with load_session(tmp_path / "run.dtrain") as session:
        data = report([session.attach("trial-1")], "an hour")
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


def trace_of(text: str) -> list[dict[str, Any]]:
    """The events of a trace, held to the rules of the Trace Event Format (its JSON object form), strictly:

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, and what Perfetto adds to them in
    https://perfetto.dev/docs/faq: spans of a thread nest, or one of them is dropped.
    """
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(document) == {"traceEvents", "displayTimeUnit"} and document["displayTimeUnit"] in ("ms", "ns")
    named: dict[str, dict[int, str]] = {"process_name": {}, "thread_name": {}}
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in document["traceEvents"]:
        keys = {"name", "ph", "pid", "tid"} | {"M": {"args"}, "X": {"cat", "ts", "dur"}, "i": {"cat", "ts", "s"}}[
            event["ph"]
        ]
        assert keys <= set(event) <= keys | {"args"}, event
        assert isinstance(event["name"], str) and event["name"] and isinstance(event.get("args", {}), dict)
        assert all(type(event[key]) is int and event[key] >= 0 for key in ("pid", "tid", "ts", "dur") if key in event)
        if event["ph"] == "M" and event["name"] in named:
            assert event["pid"] not in named[event["name"]], "a process or thread has one name"
            named[event["name"]][event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            spans.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"]))
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    assert len({tid for _, tid in spans}) == len(spans), "Perfetto takes thread ids to be unique"
    assert {pid for pid, _ in spans} <= set(named["process_name"]) == set(named["thread_name"])
    for of_thread in spans.values():
        open_until: list[int] = []
        for begin, negative in sorted(of_thread):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or begin - negative <= open_until[-1], "spans cross"
            open_until.append(begin - negative)
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def test_a_trace_keeps_to_the_format_that_perfetto_reads(session: SavedSession, tmp_path: Path) -> None:
    target = export(session.attach("trial-1"), "chrome-trace", tmp_path / "trace.json")
    events = trace_of(target.read_text())
    steps = [event for event in events if event.get("cat") == "step"]
    assert len(steps) == 2 * len(LOSSES) and {event["dur"] for event in steps} == {100_000}  # µs
    assert steps[1]["args"] == {"samples": 16.0, "tokens": 0.0, "loss": 1.0}
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"job trial-1", "rank 0", "rank 1"}
    assert any(event["ph"] == "i" for event in events)


def test_a_trace_of_steps_that_overlap_nests(dtrain_home: Path, tmp_path: Path) -> None:
    """Parts that sum to more than their step, clocks that were put right, a loss that JSON cannot tell, a restart."""
    asked = fake(kills=True)
    odd = [
        StepRecord(1, START + 2, 0.5, *[0.4] * 6, 8.0, 0.0, math.inf),
        StepRecord(2, START + 2.1, 0.5, *[0.0] * 9),
        StepRecord(3, START + 2.05, 0.1, *[0.0] * 8, math.nan),
        StepRecord(4, START - 5, 0.1, *[0.0] * 9),
    ]
    asked.steps = {0: b"".join(map(pack_step, odd))}
    save_fake(tmp_path / "odd.dtrain", asked=asked)
    with load_session(tmp_path / "odd.dtrain") as odd_session:
        events = trace_of(export(odd_session.attach("trial-1"), "chrome-trace", tmp_path / "t.json").read_text())
    assert next(event for event in events if event["name"] == "step 1")["args"]["loss"] == "inf"


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """(step, value, epoch s) by tag, as TensorBoard itself reads them."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(one.step, one.value, one.wall_time) for one in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_scalars_by_step(session: SavedSession, tmp_path: Path) -> None:
    target = export(session.attach("trial-1"), "tensorboard", tmp_path / "runs")
    first, second = (scalars(target / "trial-1" / f"rank{rank}") for rank in (0, 1))
    assert set(first) == {"step/loss", "step/duration", "step/samples"} and set(second) == set(first) - {"step/loss"}
    assert first["step/loss"] == [
        (k + 1, pytest.approx(loss, rel=1e-6), pytest.approx(START + 1 + 0.1 * (k + 1)))
        for k, loss in enumerate(LOSSES)
    ]
    assert all(value == pytest.approx(0.1) for _, value, _ in second["step/duration"])


def test_a_loss_beyond_a_float_is_infinite_in_tensorboard(dtrain_home: Path, tmp_path: Path) -> None:
    save_fake(tmp_path / "run.dtrain", asked=fake(losses=[1e300, -1e300, math.inf]))
    with load_session(tmp_path / "run.dtrain") as huge:
        target = export(huge.attach("trial-1"), "tensorboard", tmp_path / "runs")
    assert [value for _, value, _ in scalars(target / "trial-1" / "rank0")["step/loss"]] == [
        math.inf,
        -math.inf,
        math.inf,
    ]


def test_the_checksum_is_crc32c() -> None:
    """The check value of CRC-32C, of RFC 3720, masked as TFRecord has it."""
    assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_parquet(session: SavedSession, tmp_path: Path) -> None:
    target = export(session.attach("trial-1"), "parquet", tmp_path / "steps.parquet")
    table = parquet.read_table(target)
    assert tuple(table.column_names) == COLUMNS and {str(table.schema.field(n).type) for n in ("rank", "step")} == {
        "int64"
    }
    losses = [row["loss"] for row in table.select(["rank", "loss"]).to_pylist() if row["rank"] == 0]
    assert losses == LOSSES and table.column("loss").null_count == len(LOSSES)  # rank 1 reported none
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_parquet_says_what_it_needs(session: SavedSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match="pip install pyarrow"):
        export(session.attach("trial-1"), "parquet", tmp_path / "steps.parquet")
    assert not list(tmp_path.glob("*parquet*"))


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
    assert "<script>" not in bundle["text/html"]  # no server runs that could show them
    shell = context_of(FakeSession(), shell=True)
    with pytest.raises(UsageError, match="7 runs"):
        run(shell, ["compare", *[str(path)] * 7])

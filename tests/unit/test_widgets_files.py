"""What a page makes of a job for its reader to keep: the report, the saved session, an error report to copy."""

from __future__ import annotations

from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_views_job import state, update, view_of
from test_widgets_dashboard import Page
from test_widgets_more_panels import panels_of
from workbench_widgets import files
from workbench_widgets.files import make
from workbench_widgets.panels.header import Header
from workbench_widgets.panels.keeping import Keeping
from workbench_widgets.source import Picture

from tests.unit.saved_files import save_fake
from workbench import WorkbenchError, load_session
from workbench.events import OriginRecorded
from workbench.origin import Origin
from workbench.spec import JobSpec
from workbench.state import Failure, FailureKind, JobPhase
from workbench.views.compare import differing_fields
from workbench.views.error_report import error_report
from workbench.views.sides import Side, asked_table


@pytest.fixture
def job(dtrain_home: Path, tmp_path: Path) -> Any:
    save_fake(tmp_path / "run.dtrain")
    with load_session(tmp_path / "run.dtrain") as session:
        yield session.attach("trial-1")


def test_the_report_with_the_program_and_without(job: Any) -> None:
    whole, bare = (make("report", job, with_code=with_code) for with_code in (True, False))
    assert whole.kind == "text/html" and "went to your browser" in whole.said and b"trial-1" in bare.data
    assert "without the program" in bare.said and len(bare.data) < len(whole.data)
    line = max(next(iter(job.code.values())).splitlines(), key=len)
    assert escape(line).encode() in whole.data and escape(line).encode() not in bare.data


def test_a_session_is_written_as_the_verb_does_and_leaves_nothing_behind(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def save(path: Path, jobs: list[str]) -> tuple[str, ...]:
        asked.append(jobs)
        path.write_bytes(b"PK")
        places.append(path)
        return ("a token", "a path")

    places: list[Path] = []
    made = make("save", SimpleNamespace(job_id="a-1", session=SimpleNamespace(save=save)), with_code=True)  # type: ignore[arg-type]
    assert made.data == b"PK" and asked == [["a-1"]] and "2 things left out" in made.said
    assert not places[0].exists()


def test_what_cannot_be_made_is_told(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "%dtrain pool" in make("report", None, with_code=True).said
    assert make("save", job, with_code=True).data == b"" and "did not work" in make("save", job, with_code=True).said
    monkeypatch.setattr(files, "MOST", 10)
    made = make("report", job, with_code=True)
    assert made.data == b"" and "%dtrain report trial-1" in made.said

    def fails(*_: object, **__: object) -> bytes:
        raise WorkbenchError("the record is gone")

    monkeypatch.setattr(files, "report", fails)
    assert make("report", job, with_code=True).said == "It did not work: the record is gone"


def test_a_page_sends_what_was_made_and_says_so() -> None:
    page = Page()
    sent: list[tuple[str, str, Any]] = []
    page.dashboard.frame.send = lambda *file: sent.append(file)  # type: ignore[method-assign]
    page.dashboard._keeping._pressed("report", "")
    assert "reading" in page.dashboard._keeping.root.markup
    page.run(0.2)
    assert sent == [("digits-12ab.html", "text/html", b"made")] and page.source.acts == ["report with code"]
    assert "report &lt;is&gt; made" in page.dashboard._keeping.root.markup


def test_a_page_that_only_shows_keeps_the_code() -> None:
    asked: list[str] = []
    keeping = Keeping(asked.append, may_act=False)
    keeping._pressed("save", "")
    keeping._pressed("report", "")
    assert asked == ["report"] and "Save session" not in keeping.root.markup


def broken() -> Picture:
    failure = Failure(
        kind=FailureKind.EXCEPTION, rank=1, reason="rank 1 raised ValueError: <bad>", time=1.0, step=300,
        traceback="Traceback …\nValueError: <bad>", log_path="/logs/rank1.log",
    )  # fmt: skip
    ended = update(
        state=state(phase=JobPhase.FAILED, failure=failure, failures=(failure,)),
        events=(OriginRecorded(time=1.0, origin=Origin(packages={"torch": "2.13.0", "left-pad": "1"})),),
    )
    return Picture(view_of(ended), more=panels_of(ended))


def test_an_error_report_says_what_where_and_with_what() -> None:
    picture = broken()
    assert picture.view is not None
    text = error_report(picture.view, picture.more.packages)
    first, second, *_ = text.splitlines()
    assert first == "dtrain job digits-12ab (train): FAILED, 2 ranks"
    assert second == "rank 1 raised ValueError: <bad> at step 300"
    assert "versions: torch 2.13.0\n" in text and text.endswith("ValueError: <bad>\n") and "/logs/rank1.log" in text
    assert error_report(view_of(update()), {}) == ""


def test_the_header_says_whether_it_was_copied() -> None:
    header = Header("x")
    header.update(broken())
    assert 'data-copy="error"' in header.root.markup and "<bad>" not in header.root.markup
    header._pressed("copied", "1")
    assert "in the clipboard" in header.root.markup
    header._pressed("copied", "")
    assert "does not let" in header.root.markup


def test_values_of_the_environment_are_not_told() -> None:
    def spec(**env: str) -> JobSpec:
        return JobSpec(entrypoint="train.py", nproc_per_node=2, env=env)

    a, b = spec(TOKEN="s3cret", SAME="1"), spec(TOKEN="other", SAME="1", NEW="x")
    lines = {line.what: (line.before, line.now, line.note) for line in differing_fields(a, b)}
    assert lines == {"env TOKEN": ("set", "set", "another value"), "env NEW": ("–", "set", "")}
    sides = [
        Side(name, view_of(update()), panels_of(update(state=state(spec=one))))
        for name, one in zip("ab", (a, b), strict=True)
    ]
    table = asked_table(sides)
    assert [column.cells for column in table.columns] == [
        ("env TOKEN", "env NEW"), ("value A", "–"), ("value B", "value A"),
    ]  # fmt: skip

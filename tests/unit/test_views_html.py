"""The snapshot that a notebook keeps: whole HTML, readable without us, small, with nothing of the machine in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from msgspec.structs import replace
from test_views_text import row, summary, view

from workbench.feed import PoolStatus, WorkerStatus
from workbench.state import Failure, FailureKind, JobPhase, RankPhase
from workbench.views.html import snapshot_html, snapshot_jobs_html, snapshot_pool_html

EVIL = '<script>alert("x")</script><b onload=y>&'


class Page(HTMLParser):
    """Checks that tags are closed in order; keeps elements and the text outside style and script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data + " "

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


def test_an_accessible_table_of_the_ranks() -> None:
    page = Page(snapshot_html(view(row(0), row(1, is_slowest=True))))
    scopes = [attrs["scope"] for attrs in page.all("th")]
    assert scopes.count("row") == 2 and scopes.count("col") == len(scopes) - 2
    assert len(page.all("caption")) == 1 and page.all("p")[0]["role"] == "status"
    assert "Ranks of job digits-12ab" in page.text and "3,206 samples/s" in page.text and "◀ slowest" in page.text
    assert len(page.all("script")) == 1


def test_every_value_is_escaped() -> None:
    evil = view(row(0, activity=EVIL, exit=EVIL), job_id=EVIL, phase=JobPhase.FAILED, reason=EVIL)
    page = Page(snapshot_html(evil))
    assert [len(page.all(tag)) for tag in ("script", "b")] == [1, 0]
    assert page.all("div")[0]["data-dtrain-job"] == EVIL
    assert page.text.count("alert") >= 3
    lists = snapshot_jobs_html([summary(EVIL, JobPhase.FAILED, reason=EVIL)], str)
    assert not Page(lists).all("script") and not Page(lists).all("b")


def test_no_colour_is_hard_and_no_background_set() -> None:
    style = snapshot_html(view(row(0))).partition("</style>")[0]
    assert re.findall(r"background:([^;}]*)", style) == ["none"] and "#" not in style
    assert re.findall(r"[{;]color:([^;}]*)", style) == [
        "var(--jp-ui-font-color1,inherit)",
        "var(--jp-ui-font-color2,inherit)",
        "inherit",
    ]


def test_it_is_small_at_any_number_of_ranks() -> None:
    assert len(snapshot_html(view(*(row(k) for k in range(4)))).encode()) < 8_000
    assert len(snapshot_html(view(*(row(k) for k in range(32)))).encode()) < 50_000
    phases = list(RankPhase)
    mixed = [
        row(k, phase=phases[k % len(phases)], exit=f"exit code {k}" if k % 2 else "", own_time=k * 0.001)
        for k in range(1024)
    ]
    huge = view(*mixed, phase=JobPhase.FAILED, reason="x" * 100_000)
    assert len(snapshot_html(huge).encode()) < 50_000


def test_nothing_of_the_machine_is_in_it() -> None:
    failure = Failure(kind=FailureKind.EXCEPTION, rank=1, reason="boom", time=1.0, traceback="File '/home/x.py'",
                      log_path="/home/ana/.local/share/dtrain/jobs/a/logs/rank1.log")  # fmt: skip
    reason = "rank 1 was lost with its worker tls://10.0.0.5:40123: see /home/ana/x/train.py and https://h:99/a"
    html = snapshot_html(view(row(0, log_path=failure.log_path), phase=JobPhase.FAILED, reason=reason, failure=failure))
    assert "/home" not in html and "40123" not in html and ":99" not in html and "…/train.py" in html
    assert "%dtrain logs digits-12ab -r 1" in html
    pool = PoolStatus(name="p", version="1", address="tls://127.0.0.1:4000", slots=1, free=0,
                      workers=(WorkerStatus(address="tls://127.0.0.1:4242", host="h", pid=7, slots=1, free=0),),
                      waiting=(("a-1", "waiting: needs 2 slots"),))  # fmt: skip
    page = Page(snapshot_pool_html(pool))
    assert "4242" not in page.text and "4000" not in page.text and "needs 2 slots" in page.text
    assert not page.all("script")


def test_the_script_leaves_nothing_global_and_uses_only_jupyters_own_address() -> None:
    script = re.search(r"<script>(.*)</script>", snapshot_html(view(row(0))), re.S)
    assert script is not None
    code = script[1]
    assert code.startswith("(function(){") and code.endswith("})()")
    assert "http" not in code and "window." not in code and "digits-12ab" not in code
    assert "jupyter-config-data" in code and "base+'dtrain/healthz'" in code and "f.title=" in code


def test_empty_lists_say_what_would_fill_them() -> None:
    assert "%dtrain launch" in snapshot_jobs_html([], str)
    pool = PoolStatus(name="p", version="1", address="", slots=0, free=0)
    assert "no worker has joined yet" in snapshot_pool_html(pool)
    nothing = replace(view(), rows=())
    assert "<table" not in snapshot_html(nothing)

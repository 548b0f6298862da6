"""The form that launches, and the line that does the same."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from workbench_widgets.launcher import Launched, Launcher
from workbench_widgets.panels.launch import Launch

from tests.waiting import until
from workbench import WorkbenchError
from workbench.verbs.parse import parse
from workbench.verbs.table import find_verb
from workbench.views.launching import Form, launch_options, line_of, wrong

FORM = Form("/data/me/train.py", "--lr 0.1 --name 'a b'", "4", "3")


def test_the_line_does_what_the_form_does() -> None:
    line = line_of(FORM)
    assert line == "%dtrain launch --cwd /data/me -n 4 --max-restarts 3 /data/me/train.py --lr 0.1 --name 'a b'"
    verb, rest = find_verb(shlex.split(line)[1:])
    args = parse(verb, rest)
    assert (args.script, args.cwd, args.nproc_per_node, args.max_restarts) == ("/data/me/train.py", "/data/me", 4, 3)
    words = {"cwd": args.cwd, "nproc_per_node": args.nproc_per_node, "max_restarts": args.max_restarts}
    assert launch_options(FORM) == {"args": list(args.args), **words}
    assert line_of(Form("~/train.py", pool="big"), "dtrain") == "dtrain launch --cwd ~ --pool big ~/train.py"
    assert launch_options(Form("/t.py")) == {"args": [], "cwd": "/"}


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (Form(), "give the script"),
        (Form("train.py"), "whole path"),
        (Form("/t.py", ranks="0"), "ranks: a whole number, at least 1"),
        (Form("/t.py", ranks="9" * 30), "ranks"),
        (Form("/t.py", ranks="²"), "ranks"),
        (Form("/t.py", restarts="-1"), "restarts"),
        (Form("/t.py", args="'"), "arguments: no closing quotation"),
        (FORM, ""),
    ],
)
def test_what_is_wrong_with_a_form(form: Form, reason: str) -> None:
    assert reason in wrong(form) and bool(wrong(form)) is bool(reason)


class FakePools:
    """Pools whose launch waits for `go`."""

    def __init__(self, *names: str, error: Exception | None = None) -> None:
        self.launched: list[tuple[str, str, dict[str, Any]]] = []
        self._names, self._error, self.go = names, error, threading.Event()

    def names(self) -> list[str]:
        return list(self._names)

    def session(self, name: str) -> Any:
        def launch(script: str, **options: Any) -> Any:
            self.go.wait(10)
            if self._error is not None:
                raise self._error
            self.launched.append((name, script, options))
            return SimpleNamespace(job_id="train-1f2e")

        return SimpleNamespace(launch=launch)


class Page:
    def __init__(self, *names: str, error: Exception | None = None) -> None:
        self.pools = FakePools(*names, error=error)
        self.calls: list[Callable[[], None]] = []
        self.form = Launch(Launcher(self.pools), lambda _, call: self.calls.append(call), "dark")  # type: ignore[arg-type]

    def type(self, **fields: str) -> None:
        for name, value in fields.items():
            self.form._pressed(name, value)

    def answer(self) -> str:
        self.pools.go.set()
        until(lambda: bool(self.calls), "the launch is answered")
        while self.calls:
            self.calls.pop(0)()
        return str(self.form.root.markup)


def test_two_clicks_launch_one_job_and_say_which() -> None:
    page = Page("big", "default")
    page.type(script="/data/me/train.py", args="--lr 0.1", ranks="2")
    assert "%dtrain launch --cwd /data/me -n 2" in page.form.root.markup and 'data-copy="line"' in page.form.root.markup
    page.form._pressed("launch", "")
    assert "asking the pool" in page.form.root.markup
    page.form._pressed("launch", "")
    until(lambda: len(page.calls) == 1, "the second one is refused")
    page.calls.pop()()
    assert "under way already" in page.form.root.markup
    text = page.answer()
    options = {"args": ["--lr", "0.1"], "cwd": "/data/me", "nproc_per_node": 2}
    assert page.pools.launched == [("default", "/data/me/train.py", options)]
    assert 'href="job?id=train-1f2e&amp;theme=dark"' in text and "was launched on pool default" in text


def test_why_it_cannot_be_launched() -> None:
    page = Page("default", error=WorkbenchError("there is no script <x>"))
    page.form._pressed("launch", "")
    assert "Nothing done: give the script" in page.answer() and page.pools.launched == []
    assert 'aria-disabled="true"' in page.form.root.markup and "data-copy" not in page.form.root.markup
    page.type(script="/x.py")
    page.form._pressed("launch", "")
    assert "It did not work: there is no script &lt;x&gt;" in page.answer()
    nowhere = Page()
    nowhere.type(script="/x.py")
    nowhere.form._pressed("launch", "")
    assert "no pool runs here" in nowhere.answer()


def test_the_pool_is_chosen_where_there_are_several() -> None:
    page = Page("big", "default")
    page.type(script="/x.py", pool="big")
    assert "--pool big" in page.form.root.markup and "<select" not in Page("default").form.root.markup
    page.form._pressed("launch", "")
    assert "on pool big" in page.answer()
    page.form._pressed("copied", "1")
    assert "in the clipboard" in page.form.root.markup
    assert Launched("x").job_id == ""

"""The form that launches, and the line that does the same."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_session import FakeSession
from workbench_widgets.controls import Panel
from workbench_widgets.launch_form import LaunchForm
from workbench_widgets.launcher import Launched, Launcher
from workbench_widgets.panels.launch import Launch

from tests.waiting import until
from workbench import WorkbenchError
from workbench.errors import UsageError
from workbench.verbs.parse import parse
from workbench.verbs.table import find_verb
from workbench.views.launching import FIELDS, Form, launch_options, line_of, wrong

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
    far = shlex.split(line_of(Form("/t.py", address="tls://host:8786")))
    assert parse(*find_verb(far[1:])).address == "tls://host:8786"
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

        return SimpleNamespace(launch=launch, name=name)


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
    page.type(script="/x.py", ranks="many")
    assert "Nothing done" not in page.form.root.markup and "ranks: a whole number" in page.form.root.markup
    page.type(ranks="")
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


# --- in a notebook ----------------------------------------------------------------------------------------------------


def test_a_notebook_s_form_launches_once_for_two_clicks_and_shows_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session: Any = FakeSession()
    form = LaunchForm(session)
    assert list(form.fields) == [name for name, *_ in FIELDS]
    typed = {"script": "train.py", "args": "--lr 0.1", "ranks": "2", "restarts": "3"}
    for name, value in typed.items():
        form.fields[name].value = value
    whole = f"{tmp_path}/train.py"
    line = f"%dtrain launch --cwd {tmp_path} -n 2 --max-restarts 3 {whole} --lr 0.1"
    assert line in form.line.value and form.said.value == "<span role='status'></span>"
    form.button.click()
    assert "new-1 was launched on pool default." in form.said.value
    form.button.click()
    options = {"args": ["--lr", "0.1"], "cwd": str(tmp_path), "nproc_per_node": 2, "max_restarts": 3}
    assert session.launched == [{"entrypoint": whole, **options}] and "launch was done just now" in form.said.value
    (buttons,) = form._below.children
    assert isinstance(buttons, Panel) and form.job is session.known["new-1"]


def test_a_notebook_s_form_says_why_it_cannot_launch() -> None:
    session: Any = FakeSession()
    form = LaunchForm(session)
    assert "give the script" in form.said.value and "give the script" in form.button.tooltip and form.line.value == ""
    form.button.click()
    assert "Nothing done: give the script" in form.said.value and session.launched == [] and form.job is None
    form.fields["script"].value, form.fields["ranks"].value = "/<x>.py", "many"
    assert "ranks: a whole number, at least 1" in form.said.value and form.line.value == ""
    form.fields["ranks"].value = ""
    assert "&lt;x&gt;.py" in form.line.value

    def refused(*_: Any, **__: Any) -> Any:
        raise UsageError("there is no script /<x>.py", hint="is it there?")

    session.launch = refused
    form.button.click()
    assert "It did not work: there is no script /&lt;x&gt;.py" in form.said.value and form._below.children == ()


def test_a_notebook_s_form_is_of_the_session_s_pool() -> None:
    session: Any = FakeSession()
    session.name = "big"
    form = LaunchForm(session)
    form.fields["script"].value = "/t.py"
    assert "--pool big /t.py" in form.line.value
    session.is_local = False
    form = LaunchForm(session)
    form.fields["script"].value = "t.py"
    assert "whole path" in form.said.value and form.line.value == ""
    form.fields["script"].value = "/t.py"
    assert "--address tls://s /t.py" in form.line.value

"""A saved session in the pages of live jobs: no pool, nothing to act with, and any moment of what was recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from axe import violations
from lab import LiveView, Tab, wait_for
from playwright.sync_api import Browser
from test_dashboard_tab import Reader
from workbench_widgets.address import socket_path

SAVED = Path(__file__).parents[1] / "data" / "saved_session_v1" / "run.dtrain"


def assert_only_looks(view: LiveView) -> None:
    """It shows how it ended, a moment of the past, and how it ended again."""
    assert view.phase() == "SUCCEEDED" and view.step() == 30
    for act in ("Resume", "Notify me"):
        assert view.frame.get_by_role("button", name=act).count() == 0
    slider = view.frame.get_by_label("moment that is shown")
    slider.fill("2.5")
    view.frame.get_by_text("As it stood 2.5 s after the start").wait_for(timeout=20_000)
    assert view.phase() == "HEALTHY" and 0 < view.step() < 30


def test_a_shell_shows_it_without_a_pool(browser: Browser, tmp_path: Path) -> None:
    env = {**os.environ, "DTRAIN_HOME": str(tmp_path)}
    argv = [sys.executable, "-m", "workbench", "dashboard", str(SAVED), "--json"]
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
    reader = Reader(browser)
    try:
        assert process.stdout is not None
        link = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")["url"]
        view = reader.open(link.replace("?", "?theme=light&"))
        reader.shot("saved-end-light")
        assert_only_looks(view)
        assert violations(reader.page) == []
        reader.shot("saved-past-light")
        reader.page.evaluate("document.documentElement.dataset.theme = 'dark'")
        view.frame.get_by_label("moment that is shown").press("ArrowLeft")
        wait_for(lambda: reader.where()["at"] == ["2.4"], "a place back", 10)
        assert violations(reader.page) == []
        reader.shot("saved-past-dark")
        reader.page.get_by_role("link", name="all jobs").click()
        reader.page.get_by_text("run.dtrain: saved").wait_for(timeout=20_000)
        reader.shot("saved-jobs")
        reader.page.get_by_role("link", name="trial-1").click()
        reader.page.get_by_text("SUCCEEDED").first.wait_for(timeout=20_000)
        errors = reader.errors.copy()  # once the server is gone the page says so, and the browser too
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert errors == [] and reader.foreign == []
    finally:
        process.kill()
        process.communicate()
        reader.close()
    assert list(tmp_path.glob("pools")) == []


def test_saved_sessions_beside_each_other(browser: Browser, tmp_path: Path) -> None:
    env = {**os.environ, "DTRAIN_HOME": str(tmp_path)}
    files = [str(SAVED), str(SAVED.parents[1] / "saved_session_v2" / "run.dtrain") + ":trial-1"]
    argv = [sys.executable, "-m", "workbench", "compare", *files, "--open", "--json"]
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
    reader = Reader(browser)
    try:
        assert process.stdout is not None
        told = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        assert told["read_only"]
        reader.open(told["url"].replace("?", "?theme=dark&"))
        reader.page.get_by_role("heading", name="How they went").wait_for(timeout=20_000)
        reader.shot("saved-compare-dark")
        assert violations(reader.page) == []
        reader.page.get_by_role("link", name="trial-1").first.click()
        reader.page.get_by_text("SUCCEEDED").first.wait_for(timeout=20_000)
        errors = reader.errors.copy()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert errors == [] and reader.foreign == []
        socket = socket_path(tmp_path)
        wait_for(lambda: not socket.exists(), "the server ends with its guest", 60)
    finally:
        process.kill()
        process.communicate()
        reader.close()
    assert list(tmp_path.glob("pools")) == []


def test_a_notebook_shows_it_in_the_cell(tab: Tab) -> None:
    tab.open(tab.lab.write("saved.ipynb", f"%load_ext workbench\n%dtrain dashboard {SAVED}"))
    tab.run_cell(0)
    view = tab.live(40)
    assert_only_looks(view)
    tab.shot("saved-notebook")
    tab.save()
    path = tab.lab.work / "saved.ipynb"
    saved = wait_for(lambda: json.loads(path.read_text())["cells"][0]["outputs"], "the output is saved")
    assert str(SAVED.parent) not in json.dumps(saved) and tab.lab.token not in json.dumps(saved)

"""A real JupyterLab and a real browser, driven as a person would: open a notebook, run cells, look, reload, click."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Frame, Page, Request

ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # No name is looked up: what is not on this machine cannot be reached, and is recorded when it is tried.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
]
LOCAL = ("127.0.0.1", "localhost", "")
START_TIMEOUT = 60.0


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 30.0, every: float = 0.05) -> Any:
    """Poll until something true comes back; say what did not come."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(every)
    return found


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Lab:
    """One JupyterLab, or Notebook 7, with directories of its own; `url` has no token, `token` is its login."""

    def __init__(self, root: Path, base_url: str = "/", *, is_notebook: bool = False) -> None:
        self.root, self.base_url, self.is_notebook = root, base_url, is_notebook
        self.work = root / "work"
        self.work.mkdir(parents=True)
        self.token = secrets.token_hex(8)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}{base_url}"
        self.log = root / "lab.log"
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        config = self.root / "config"
        pages = config / "labconfig" / "page_config.json"
        pages.parent.mkdir(parents=True)
        calls_home = ["@jupyterlab/apputils-extension:announcements", "@jupyterlab/extensionmanager-extension"]
        pages.write_text(json.dumps({"disabledExtensions": dict.fromkeys(calls_home, True)}))
        places = {"CONFIG": config, "DATA": self.root / "data", "RUNTIME": self.root / "runtime"}
        env = {
            **os.environ,
            **{f"JUPYTER_{name}_DIR": str(path) for name, path in places.items()},
            "JUPYTERLAB_SETTINGS_DIR": str(self.root / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(self.root / "workspaces"),
            "IPYTHONDIR": str(self.root / "ipython"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        app = [
            "-m", "jupyterlab", "--LabApp.extension_manager=readonly", "--LabApp.expose_app_in_browser=True",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        ]  # fmt: skip
        argv = [
            sys.executable, *(["-m", "notebook", "--expose-app-in-browser"] if self.is_notebook else app),
            "--no-browser", "--allow-root", f"--ServerApp.root_dir={self.work}", f"--ServerApp.port={self.port}",
            "--ServerApp.port_retries=0", f"--IdentityProvider.token={self.token}",
            f"--ServerApp.base_url={self.base_url}", "--ServerApp.ip=127.0.0.1",
        ]  # fmt: skip
        with self.log.open("wb") as log:
            process = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True, cwd=self.work)
        wait_for(lambda: self._answers(process), "JupyterLab answers", START_TIMEOUT)
        return process

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, self.log.read_text()[-3000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}api?token={self.token}", timeout=2):
            return True
        return False

    def _ask(self, method: str, path: str) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}{path}", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or "null")

    def write(self, name: str, *cells: str) -> Path:
        """A notebook of code cells, without outputs; a kernel that an earlier try of a test left for it is ended."""
        for session in self._ask("GET", "api/sessions"):
            if session["path"] == name:
                self._ask("DELETE", f"api/sessions/{session['id']}")
        empty = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
        made = [{**empty, "id": f"cell{k}", "source": source} for k, source in enumerate(cells)]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        path = self.work / name
        path.write_text(json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
        return path

    def stop(self) -> None:
        """End it and its kernels; they are in its session."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


class Tab:
    """A browser tab on a JupyterLab. `errors`: what went wrong in it, `foreign`: what it asked of other hosts."""

    def __init__(self, browser: Browser, lab: Lab, **options: Any) -> None:
        self.lab = lab
        options.setdefault("viewport", {"width": 1280, "height": 900})
        self._context = browser.new_context(**options)
        self.page: Page = self._context.new_page()
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.expected: tuple[str, ...] = ()  # parts of errors that the test brings about
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self._context.on("request", self._asked)
        self.page.goto(f"{lab.url}api?token={lab.token}")  # log in: a cookie from here on

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")

    def unexpected(self) -> list[str]:
        return [error for error in self.errors if not any(part in error for part in self.expected)]

    def _asked(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in LOCAL:
            self.foreign.append(request.url)

    def close(self) -> None:
        self._context.close()

    def shot(self, name: str) -> Path:
        """A screenshot, in $DTRAIN_SCREENSHOTS or beside the lab's files."""
        folder = Path(os.environ.get("DTRAIN_SCREENSHOTS") or self.lab.root / "screenshots")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        self.page.screenshot(path=str(path))
        return path

    # --- notebooks ---

    def open(self, notebook: Path) -> None:
        """Show a notebook in a workspace of its own and wait for its kernel."""
        where = f"lab/workspaces/{notebook.stem}/tree/{quote(notebook.name)}?reset"
        if self.lab.is_notebook:
            where = f"notebooks/{quote(notebook.name)}"
        self.page.goto(f"{self.lab.url}{where}")
        self._await_notebook()
        self._await_kernel("idle")

    def reload(self) -> None:
        """Reload as the reader's browser does; the kernel may be busy."""
        self.page.reload()
        self._await_notebook()

    def _await_notebook(self) -> None:
        self.page.wait_for_function(
            "() => window.jupyterapp && window.jupyterapp.shell.currentWidget && "
            "window.jupyterapp.shell.currentWidget.content && window.jupyterapp.shell.currentWidget.content.widgets",
            timeout=60_000,
        )

    def _await_kernel(self, status: str) -> None:
        self.page.wait_for_function(
            "status => window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === status",
            arg=status,
            timeout=60_000,
        )

    def command(self, name: str, **arguments: Any) -> None:
        """A JupyterLab command, not waited for."""
        self.page.evaluate("([name, args]) => { window.jupyterapp.commands.execute(name, args); }", [name, arguments])

    def run_cell(self, index: int) -> None:
        """Select a cell and run it; returns at once."""
        self.page.evaluate(
            "index => { const nb = window.jupyterapp.shell.currentWidget.content; nb.activeCellIndex = index; "
            "nb.deselectAll(); window.jupyterapp.commands.execute('notebook:run-cell'); }",
            index,
        )

    def await_cell(self, index: int, timeout: float = 60.0) -> None:
        """Until the cell has an execution count, that is, has ended."""
        self.page.wait_for_function(
            "index => window.jupyterapp.shell.currentWidget.content.widgets[index].model.executionCount != null",
            arg=index,
            timeout=timeout * 1000,
        )

    def is_busy(self) -> bool:
        return bool(
            self.page.evaluate(
                "() => window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'busy'"
            )
        )

    def text_of(self, index: int) -> str:
        """What a cell's output area shows."""
        return str(
            self.page.evaluate(
                "index => { const c = window.jupyterapp.shell.currentWidget.content.widgets[index]; "
                "return c.outputArea ? c.outputArea.node.innerText : ''; }",
                index,
            )
        )

    def save(self) -> None:
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.save()")

    def restart_kernel(self) -> None:
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
        self._await_kernel("idle")

    def theme(self, name: str) -> None:
        """ "JupyterLab Light" or "JupyterLab Dark"."""
        light = "true" if name.endswith("Light") else "false"
        self.command("apputils:change-theme", theme=name)
        self.page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{light}'", timeout=20_000)

    # --- the live page ---

    def live(self, timeout: float = 20.0) -> LiveView:
        """The live page within the notebook, once it is alive."""

        def found() -> LiveView | None:
            self.page.evaluate("1")  # lets Playwright hear of new frames
            for frame in self.page.frames:
                if "/dtrain/job" in frame.url and not frame.is_detached():
                    view = LiveView(frame)
                    if view.is_live():
                        return view
            return None

        return wait_for(found, f"a live view in {[f.url for f in self.page.frames]}", timeout)

    def go_live(self, job_id: str, theme: str = "light") -> LiveView:
        """The live page alone, without a notebook around it."""
        self.page.goto(f"{self.lab.url}dtrain/job?id={quote(job_id)}&theme={theme}")
        return self.live()


class LiveView:
    """The page of a job, through Playwright's eyes, which see into shadow roots."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame

    def is_live(self) -> bool:
        with contextlib.suppress(Exception):  # the frame is being loaded
            return bool(self.frame.evaluate("() => document.documentElement.dataset.live === '1'"))
        return False

    def now(self) -> float:
        """The scheduler's time of what is shown."""
        return float(self.frame.locator(".head[data-now]").get_attribute("data-now", timeout=20_000) or 0)

    def staleness(self) -> float:
        return time.time() - self.now()

    def step(self) -> int:
        text = self.frame.locator("dl.stats dd").first.inner_text(timeout=20_000)
        return int(text.split()[0].replace(",", ""))

    def text(self, selector: str) -> str:
        return self.frame.locator(selector).first.inner_text(timeout=20_000)

    def phase(self) -> str:
        return self.text(".head .phase").split()[-1]

    def click(self, name: str) -> None:
        """Press a button, also one that says it is disabled: it is to say why."""
        button = self.frame.get_by_role("button", name=name)
        button.wait_for(timeout=20_000)
        button.click(timeout=20_000, force=True)

    def points(self) -> int:
        """How many points the longest curve has."""
        return int(
            self.frame.evaluate(
                "() => Math.max(0, ...[...Bokeh.documents[0].all_models].filter(m => m.type === 'ColumnDataSource')"
                ".map(m => ((m.data.get ? m.data.get('x') : m.data.x) || []).length))"
            )
        )


@contextlib.contextmanager
def running_lab(root: Path, base_url: str = "/", *, is_notebook: bool = False) -> Iterator[Lab]:
    lab = Lab(root, base_url, is_notebook=is_notebook)
    try:
        yield lab
    finally:
        lab.stop()

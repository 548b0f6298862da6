"""Live pages that stay open for long, and that are opened and closed often: what grows in server and browser?

A job of 8 ranks that has run for 10 minutes and says something 10 times a second, through the server's own follower and
pages, in Chromium. The same page stays open for BENCH_SECONDS; then pages are opened and closed BENCH_PAGES times.
Growth is taken from when half of the time, or a quarter of the pages, is over: what is bounded is full by then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SECONDS = float(os.environ.get("BENCH_SECONDS", "120"))
PAGES = int(os.environ.get("BENCH_PAGES", "60"))
RANKS, HISTORY, HERTZ = 8, 600, 10.0
HALF_HOUR = 1800.0
Row = tuple[str, str, str]


class Talking:
    """What a follower asks of a job; it answers ten times a second."""

    def __init__(self, scenes: Any) -> None:
        self._scenes, self._count, self._begun = scenes, 0, time.monotonic()
        self.job_id, self.is_saved = "scene", False

    def follow(self, cursor: Any, timeout: float) -> Any:
        from workbench.feed import Cursor

        scenes = self._scenes
        if cursor is None:
            (whole,) = scenes.running(RANKS, HISTORY, 1.0, lambda rank, at: 1.0 + 0.8 * (rank == 5))
            return msgspec_replace(whole, cursor=Cursor(beat=1), now=time.time())
        due = self._begun + (self._count + 1) / HERTZ
        time.sleep(max(0.0, due - time.monotonic()))
        self._count += 1
        at = HISTORY + self._count / HERTZ
        is_second = self._count % int(HERTZ) == 0
        return scenes.update(
            at, scenes.state(RANKS), cursor=Cursor(beat=self._count + 1),
            beats=tuple(scenes.beat(rank, at) for rank in range(RANKS)),
            buckets=tuple(scenes.bucket(rank, at - 1, 1.0) for rank in range(RANKS)) if is_second else (),
            output=(scenes.output(self._count % RANKS, at, f"step {self._count}\n"),),
        )  # fmt: skip


def msgspec_replace(update: Any, **changes: Any) -> Any:
    from msgspec.structs import replace

    return replace(update, **changes)


def serve(socket: Path) -> None:
    from tornado.ioloop import IOLoop
    from workbench_widgets.follower import Followers
    from workbench_widgets.pages import Pages
    from workbench_widgets.server import make_server

    sys.path.insert(0, str(HERE.parent / "browser"))
    import scenes

    pages = Pages(socket.parent)
    pages._followers = Followers(lambda job_id: Talking(scenes), lost=lambda job: None)  # type: ignore[arg-type, return-value]
    server, _ = make_server(pages, socket, socket.parent / "dashboard")
    server.start()
    IOLoop.current().start()


def main() -> list[Row]:
    """Rows of (what, measured, bar)."""
    sys.path.insert(0, str(HERE.parent / "browser"))
    import psutil
    from lab import ARGS, chromium
    from playwright.sync_api import sync_playwright
    from workbench_widgets import tab as tab_module

    path = chromium()
    if path is None:
        return [("Chromium", "there is none", "")]
    with tempfile.TemporaryDirectory(prefix="dt-pages-") as folder, sync_playwright() as play:
        socket = Path(folder) / "s.sock"
        process = subprocess.Popen([sys.executable, __file__, "--serve", str(socket)], stderr=subprocess.DEVNULL)
        tab_module.socket_path = lambda home: socket
        browser = play.chromium.launch(executable_path=path, args=ARGS)
        try:
            url, server = tab_module.open_tab(Path(folder)).link("talking"), psutil.Process(process.pid)
            return [*_stay(browser, url, server), *_open_and_close(browser, url, server)]
        finally:
            browser.close()
            process.terminate()
            process.wait(20)


def _stay(browser: Any, url: str, server: Any) -> list[Row]:
    page = browser.new_page()
    frames = [0]
    page.on("websocket", lambda line: line.on("framereceived", lambda _: frames.__setitem__(0, frames[0] + 1)))
    _open(page, url)
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable")

    def look() -> dict[str, float]:
        devtools.send("HeapProfiler.collectGarbage")
        found = {one["name"]: one["value"] for one in devtools.send("Performance.getMetrics")["metrics"]}
        return {
            "at": time.monotonic(), "heap": found["JSHeapUsedSize"] / 1e6, "nodes": found["Nodes"],
            "browser": found["TaskDuration"], "server": sum(server.cpu_times()[:2]), "frames": frames[0],
            "memory": server.memory_full_info().uss / 1e6,
        }  # fmt: skip

    looks: list[dict[str, float]] = []
    for part in range(5):  # at a tenth, a quarter, half, three quarters, the end
        _wait(page, SECONDS * (0.1, 0.15, 0.25, 0.25, 0.25)[part])
        looks.append(look())
    page.close()
    _, early, middle, _, last = looks
    assert last["frames"] - middle["frames"] > SECONDS * HERTZ / 20, "the page has heard next to nothing"
    minutes = (last["at"] - middle["at"]) / HALF_HOUR

    def each(name: str, one: dict[str, float], two: dict[str, float]) -> float:
        return (two[name] - one[name]) / max(two["frames"] - one["frames"], 1) * 1e3

    ratios = [each(name, middle, last) / each(name, early, middle) for name in ("browser", "server")]
    growth = [(last[name] - middle[name]) / minutes for name in ("heap", "memory")]
    return [
        (
            f"open for {SECONDS:g} s at {HERTZ:g} Hz: messages/s",
            f"{last['frames'] / (last['at'] - looks[0]['at']):.1f}",
            "",
        ),
        ("browser's heap", f"{looks[0]['heap']:.1f} → {last['heap']:.1f} MB", ""),
        ("… growth in 30 min, from the second half", f"{growth[0]:+.1f} MB", "< 20 MB"),
        ("server's memory", f"{looks[0]['memory']:.1f} → {last['memory']:.1f} MB", ""),
        ("… growth in 30 min, from the second half", f"{growth[1]:+.1f} MB", "< 20 MB"),
        ("DOM nodes", f"{looks[0]['nodes']:.0f} → {last['nodes']:.0f}", "not growing"),
        (
            "CPU a message, browser / server",
            f"{each('browser', middle, last):.1f} / {each('server', middle, last):.1f} ms",
            "",
        ),
        ("… second half against the quarter before", f"{ratios[0]:.2f} / {ratios[1]:.2f} ×", "≈ 1"),
    ]


def _open_and_close(browser: Any, url: str, server: Any) -> list[Row]:
    page = browser.new_page()

    def memory() -> float:
        return float(server.memory_full_info().uss / 1e6)

    def visit(times: int) -> None:
        for _ in range(times):
            _open(page, url)
            page.goto("about:blank")

    visit(PAGES // 4)
    _settle(page)
    before, begun = memory(), time.monotonic()
    visit(PAGES - PAGES // 4)
    took = (time.monotonic() - begun) / (PAGES - PAGES // 4)
    _settle(page)
    after = memory()
    page.close()
    grown = (after - before) / (PAGES - PAGES // 4) * 200
    return [
        (f"{PAGES} pages opened and closed, each", f"{took:.2f} s", ""),
        ("server's memory meanwhile", f"{before:.1f} → {after:.1f} MB", ""),
        ("… growth in 200 pages", f"{grown:+.1f} MB", "< 30 MB"),
        ("connections of the server left", f"{len(server.net_connections())}", ""),
    ]


def _open(page: Any, url: str) -> None:
    page.goto(url)
    page.wait_for_function("() => document.documentElement.dataset.live === '1'", timeout=60_000)


def _settle(page: Any) -> None:
    """Closed pages are forgotten after 5 s."""
    _wait(page, 15)


def _wait(page: Any, seconds: float) -> None:
    """Playwright hears of messages only while it is asked something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        page.wait_for_timeout(500)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
    else:
        for row in main():
            print("  ".join(row))

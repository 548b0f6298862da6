"""Every panel in a real browser, over jobs that never ran (`scenes`): drawn, readable, operable, without an error."""

from __future__ import annotations

import base64
import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from axe import violations
from lab import wait_for
from playwright.sync_api import Browser
from test_dashboard_tab import Reader
from workbench_widgets import tab as tab_module
from workbench_widgets.tab import Tab

SCENES = Path(__file__).parent / "scenes.py"
SHADES = """
async data => {  // how many different colours a PNG has
  const image = new Image();
  image.src = 'data:image/png;base64,' + data;
  await image.decode();
  const canvas = document.createElement('canvas'), seen = new Set();
  canvas.width = image.width; canvas.height = image.height;
  const pen = canvas.getContext('2d');
  pen.drawImage(image, 0, 0);
  const all = pen.getImageData(0, 0, canvas.width, canvas.height).data;
  for (let k = 0; k < all.length; k += 4 * 97) seen.add(all[k] + ',' + all[k + 1] + ',' + all[k + 2]);
  return seen.size;
}
"""
COLOURS = """
name => {  // how many different colours the chart of that name shows
  const seen = new Set(), walk = root => { for (const e of root.querySelectorAll('*')) {
    if (e.shadowRoot) walk(e.shadowRoot);
    if (e.nodeName === 'CANVAS' && e.closest('.bk-layer, div') && e.width > 50) {
      const data = e.getContext('2d').getImageData(0, 0, e.width, e.height).data;
      for (let k = 0; k < data.length; k += 4 * 97) seen.add(data[k] + ',' + data[k + 1] + ',' + data[k + 2]);
    } } };
  walk(document.querySelector(`section[aria-label="${name}"]`));
  return seen.size;
}
"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    """The pages of all scenes, on a port."""
    with tempfile.TemporaryDirectory(prefix="dt-scenes-") as folder, pytest.MonkeyPatch.context() as patch:
        socket = Path(folder) / "s.sock"
        process = subprocess.Popen([sys.executable, str(SCENES), str(socket)], stderr=subprocess.DEVNULL)
        patch.setattr(tab_module, "socket_path", lambda home: socket)
        try:
            yield tab_module.open_tab(Path(folder))
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture
def reader(browser: Browser) -> Iterator[Reader]:
    made = Reader(browser)
    yield made
    errors, foreign = made.errors, made.foreign
    made.close()
    assert errors == [] and foreign == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("scene", ["small", "large", "failed", "hung", "empty"])
def test_a_scene_is_drawn_and_can_be_read(reader: Reader, tab: Tab, scene: str, theme: str) -> None:
    reader.open(tab.link(scene).replace("?", f"?theme={theme}&"))
    if scene != "empty":
        wait_for(
            lambda: reader.page.evaluate(COLOURS, "Ranks over time") > 10, "the heatmap has colours", 30, every=0.3
        )
    assert violations(reader.page) == []
    reader.shot(f"panels-{scene}-{theme}")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_jobs_beside_each_other(reader: Reader, tab: Tab, theme: str) -> None:
    reader.open(tab.link("small", "other", "failed", read_only=True).replace("?", f"?theme={theme}&"))
    wait_for(lambda: reader.page.evaluate(COLOURS, "Loss") > 10, "the curves are drawn", 30, every=0.3)
    reader.page.get_by_label("what the axis counts").select_option("time")
    reader.page.get_by_text("Throughput of all ranks, samples/s by time since the start").wait_for(timeout=10_000)
    wait_for(lambda: reader.where().get("by") == ["time"], "the address follows", 10)
    assert reader.where()["id"] == ["small", "other", "failed"]
    reader.page.get_by_text("the same as a table").first.click()
    assert violations(reader.page) == []
    reader.shot(f"compare-{theme}")


def test_a_place_of_the_heatmap_tells_its_rank_and_how_long_a_step_took(reader: Reader, tab: Tab) -> None:
    reader.open(tab.link("small", read_only=True))
    wait_for(lambda: reader.page.evaluate(COLOURS, "Ranks over time") > 10, "the heatmap has colours", 30, every=0.3)
    chart = reader.page.get_by_role("group", name="ranks over time, coloured by the time of a step")
    chart.scroll_into_view_if_needed()
    chart.hover()
    tip = reader.page.locator(".bk-Tooltip")
    for words in (r"^[0-7]$", r"^\d+(\.\d+)? ms$", r"^0:0\d:\d\d$"):
        tip.get_by_text(re.compile(words)).locator("visible=true").first.wait_for(timeout=10_000)


def test_every_chart_can_be_saved(reader: Reader, tab: Tab, tmp_path: Path) -> None:
    reader.open(tab.link("small", read_only=True).replace("?", "?theme=dark&"))
    wait_for(lambda: reader.page.evaluate(COLOURS, "Ranks over time") > 10, "the heatmap has colours", 30, every=0.3)
    for summary in reader.page.locator("details.save summary").all():
        summary.press("Enter")
    found = {}
    for button in reader.page.locator("details.save button").all():
        with reader.page.expect_download(timeout=40_000) as waits:
            button.press("Enter")
        reader.page.wait_for_timeout(120)  # Chromium drops a frame's 11th download within a second, without a word
        name = waits.value.suggested_filename
        waits.value.save_as(tmp_path / name)
        found[name] = (tmp_path / name).read_bytes()
    in_time = ("timeline", "throughput", "loss", "ranks-over-time", "resources")
    charts = (*in_time, "agreement-of-ranks")
    assert set(found) == {f"small-{chart}.{kind}" for chart in charts for kind in ("png", "svg", "csv", "json")}
    for chart in charts:
        svg = ElementTree.fromstring(found[f"small-{chart}.svg"])
        words = " ".join(filter(None, (one.text for one in svg.iter("{http://www.w3.org/2000/svg}text"))))
        if chart in in_time:
            assert "0:01:00" in words and "since the start" in words + found[f"small-{chart}.svg"].decode(), chart
        else:
            assert "Do ranks agree?" in words and "rank 7" in words and "✓  agrees" in words and "step 720" in words
        assert found[f"small-{chart}.png"].startswith(b"\x89PNG")
        rows = list(csv.DictReader(found[f"small-{chart}.csv"].decode().splitlines()))
        assert len(rows) == len(json.loads(found[f"small-{chart}.json"])["rows"]) > 1
    assert found["small-agreement-of-ranks.svg"].decode().count('fill="rgb(230, 230, 230)"') >= 2, "words can be read"
    assert reader.page.evaluate(SHADES, base64.b64encode(found["small-ranks-over-time.png"]).decode()) > 10
    assert violations(reader.page) == []
    reader.shot("panels-saving-dark")


def test_a_zoom_lets_all_charts_stand_still(reader: Reader, tab: Tab) -> None:
    reader.open(tab.link("small"))
    chart = reader.page.locator("section[aria-label=Throughput] canvas").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    reader.page.mouse.move(box["x"] + box["width"] * 0.4, middle)
    reader.page.mouse.down()
    reader.page.mouse.move(box["x"] + box["width"] * 0.7, middle, steps=6)
    reader.page.mouse.up()
    reader.page.get_by_text("the job goes on").wait_for(timeout=10_000)
    ranges = "() => [...new Set(Bokeh.documents[0].all_models ? [...Bokeh.documents[0].all_models].filter(m => "
    ranges += "m.type === 'Range1d' && m.start > 5).map(m => Math.round(m.start)) : [])]"
    assert len(reader.page.evaluate(ranges)) >= 1
    reader.page.get_by_role("button", name="Go on").click()
    reader.page.get_by_role("button", name="Pause").wait_for(timeout=10_000)


def test_a_place_in_the_heatmap_chooses_rank_and_step(reader: Reader, tab: Tab) -> None:
    reader.open(tab.link("small"))
    wait_for(lambda: reader.page.evaluate(COLOURS, "Ranks over time") > 10, "the heatmap has colours", 30, every=0.3)
    chart = reader.page.locator("section[aria-label='Ranks over time'] canvas").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    reader.page.mouse.click(box["x"] + box["width"] * 0.8, box["y"] + box["height"] * 0.55)
    wait_for(lambda: "rank" in reader.where() and "step" in reader.where(), "the address says which", 10)
    rank = reader.where()["rank"][0]
    pressed = reader.page.get_by_role("button", name=f"rank {rank}", exact=True).first
    wait_for(lambda: pressed.get_attribute("aria-pressed") == "true", "the table of ranks shows it", 10)
    assert reader.page.get_by_label("ranks", exact=True).input_value() == rank


def test_what_is_coloured_and_which_events(reader: Reader, tab: Tab) -> None:
    reader.open(tab.link("failed"))
    reader.page.get_by_label("what is coloured").select_option("1")
    reader.page.get_by_label("which events").select_option("1")
    events = reader.page.locator("section[aria-label=Events] .events")
    wait_for(lambda: "failure detected" in events.inner_text() and "launched" not in events.inner_text(), "trouble", 10)
    reader.page.get_by_label("whose loss").select_option("1")
    reader.page.get_by_label("what is charted").select_option("rss")
    reader.page.get_by_text("GB over time since the start").wait_for(timeout=10_000)
    reader.page.get_by_role("button", name="Resume from the newest checkpoint").click()
    reader.page.get_by_text("was asked for").wait_for(timeout=10_000)
    reader.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    reader.page.get_by_role("button", name="Copy error report").press("Enter")
    reader.page.get_by_text("is in the clipboard").wait_for(timeout=10_000)
    copied = str(reader.page.evaluate("() => navigator.clipboard.readText()"))
    assert copied.startswith("dtrain job scene (train): FAILED") and "GPU 3 has a total capacity" in copied
    with reader.page.expect_download() as waits:
        reader.page.get_by_role("button", name="Report", exact=True).dblclick()
    assert waits.value.suggested_filename == "failed.html" and waits.value.path().read_bytes() == b"<p>made</p>"
    reader.shot("panels-kept")


def test_a_moment_of_the_past_in_all_panels(reader: Reader, tab: Tab) -> None:
    view = reader.open(tab.link("failed").replace("?", "?theme=light&"))
    page = reader.page
    wait_for(lambda: page.evaluate(COLOURS, "Ranks over time") > 10, "the heatmap has colours", 30, every=0.3)
    checkpoints = page.locator("section[aria-label=Checkpoints]")
    assert view.phase() == "FAILED" and checkpoints.get_by_role("button", name="Resume").count() == 1
    slider = page.get_by_label("moment that is shown")
    slider.fill("130")
    page.get_by_text("As it stood 2 min 10 s after the start").wait_for(timeout=10_000)
    assert view.phase() == "HEALTHY" and view.step() == 520 and page.locator(".notice.bad").count() == 0
    assert page.locator("section[aria-label=Ranks] tr.marked").inner_text().startswith("5")  # slow since 90 s
    assert "failure detected" not in page.locator("section[aria-label=Events]").inner_text()
    assert "step   504" in view.text(".log") and "step   604" not in view.text(".log")
    assert checkpoints.get_by_role("table").count() == 1 and checkpoints.get_by_role("button").count() == 0
    assert violations(page) == []
    reader.shot("panels-past-light")
    slider.press("ArrowLeft")
    wait_for(lambda: reader.where()["at"] == ["129.8"], "a place back, by the keyboard", 10)
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    slider.press("Home")
    page.get_by_text("As it stood 0.0 s after the start").wait_for(timeout=10_000)
    reader.shot("panels-first-moment-dark")
    slider.fill("89.6")
    page.get_by_text("As it stood 1 min 30 s after the start").wait_for(timeout=10_000)
    wait_for(lambda: page.evaluate(COLOURS, "Ranks over time") > 10, "the heatmap has colours again", 10, every=0.3)
    assert page.locator("section[aria-label=Ranks] tr.marked").count() == 0 and checkpoints.get_by_text("None yet")
    assert violations(page) == []
    reader.shot("panels-past-dark")
    page.get_by_role("button", name="▶❘ End").click()
    wait_for(lambda: view.phase() == "FAILED", "how it ended", 10)
    assert "at" not in reader.where() and slider.get_attribute("aria-valuetext") == "now, 3 min 02 s after the start"

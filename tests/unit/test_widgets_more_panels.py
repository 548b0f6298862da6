"""Heatmap, loss, stragglers, communication, events, resources, findings and time, as they are drawn."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from test_views_job import beat, bucket, history, state, update, view_of
from test_widgets_panels import EVIL, Reader
from workbench_widgets.charts import TimeAxis
from workbench_widgets.panels.communication import communication_html
from workbench_widgets.panels.events import Events, events_html
from workbench_widgets.panels.findings import Findings, findings_html
from workbench_widgets.panels.heatmap import Heatmap, head_html, image_of, scale_of
from workbench_widgets.panels.loss import Loss
from workbench_widgets.panels.period import Period
from workbench_widgets.panels.resources import Resources, now_html
from workbench_widgets.panels.stragglers import stragglers_html
from workbench_widgets.source import Choice

from workbench.blackbox import Traffic
from workbench.feed import Update
from workbench.findings import Finding, Severity
from workbench.state import JobPhase
from workbench.views.acts import Act
from workbench.views.findings import Shown
from workbench.views.happenings import Happening
from workbench.views.job import JobView
from workbench.views.panels import PanelBuilder, PanelView
from workbench.views.ranking import ranking


def panels_of(*updates: Update) -> PanelView:
    builder = PanelBuilder()
    for one in updates:
        builder.add(one)
    return builder.view()


# --- nothing of a job can become markup ---


def test_what_comes_from_a_job_is_text() -> None:
    view = view_of(update(beats=(beat(0, activity="COLLECTIVE", collective=EVIL), beat(1))))
    for html in (
        communication_html(view),
        events_html((Happening(1.0, EVIL, EVIL, (1,), is_trouble=True),), 1, 0.0),
        findings_html((Shown(Finding(symptom=EVIL, evidence=(EVIL,), cause=EVIL, advice=EVIL), Act("resume")),)),
        stragglers_html(ranking([replace(row, worker=EVIL) for row in view.rows], {})),
    ):
        read = Reader(html)
        assert read.of("img") == [] and not any("onerror" in name for _, attrs in read.tags for name in attrs)


# --- heatmap ---


def heatmap(points: list[tuple[int, float]] | None = None) -> Heatmap:
    said = points if points is not None else []
    return Heatmap("light", TimeAxis("light"), lambda rank, time: said.append((rank, time)))


def test_the_heatmap_is_one_small_image() -> None:
    panel, view = heatmap(), view_of(update(1024))
    panel.update(view, panels_of(update(1024)).heat)
    (image,) = panel._source.data["image"]
    assert image.shape == (128, 10) and image.nbytes < 130_000
    assert image == pytest.approx(100.0)
    assert "a row is 8 ranks" in panel._head.markup and "Ranks over time" not in panel._head.markup
    assert panel.figure.visible and "1,024 ranks" in panel._head.markup


def test_an_empty_heatmap_says_what_would_fill_it() -> None:
    panel = heatmap()
    assert "after the first seconds with a finished step" in panel._head.markup and not panel.figure.visible


def test_time_without_a_step_stays_empty() -> None:
    heat = panels_of(update(buckets=(bucket(0, 1000.0), bucket(0, 1003.0)))).heat
    assert np.isnan(image_of(heat, 0)).tolist() == [[False, True, True, False]]


def test_the_scale_holds_still_and_noise_does_not_look_like_much() -> None:
    rng = np.random.default_rng(0)
    calm = rng.uniform(99, 101, (8, 100))
    assert scale_of(calm) == scale_of(calm + 0.3)
    low, high = scale_of(calm)
    assert low <= 99 and high >= 1.15 * low
    calm[3, 50:] = 300
    assert scale_of(calm)[1] >= 290
    assert scale_of(np.full((2, 2), np.nan)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("least", "most", "told"),
    [
        (153.0, 1960.0, ("0.14 s", "2 s")),  # ms of a step
        (90.0, 95.0, ("90 ms", "120 ms")),
        (0.0, 1960.0, ("0 s", "2 s")),
        (0.4, 1960.0, ("0 s", "2 s")),
        (0.8, 5.2, ("0.8 ms", "5.2 ms")),
        (0.03, 0.2, ("30 µs", "200 µs")),
        (0.0, 0.0, ("0 µs", "1 µs")),
        (21_000.0, 131_000.0, ("20 s", "140 s")),
    ],
)
def test_the_scale_has_one_unit_and_begins_where_times_do(least: float, most: float, told: tuple[str, str]) -> None:
    low, high = scale_of(np.array([[least] * 50 + [most] * 50]))
    assert low <= least and high >= most
    head = head_html(panels_of(update()).heat, 0, low, high)
    assert re.findall(r"<span>([^<]+)</span>", head) == [told[0], f"{told[1]} and more"]


def test_it_says_what_to_look_at_where_all_wait_for_one() -> None:
    waiting = tuple(
        replace(b, comm=b.duration * (0.1 if b.rank == 1 else 0.5)) for b in history()
    )  # fmt: skip
    panel, view = heatmap(), view_of(update(buckets=waiting))
    panel.update(view, panels_of(update(buckets=waiting)).heat)
    assert "own work tells which" in panel._head.markup
    panel._chosen("metric", "1")
    assert "own work tells which" not in panel._head.markup
    calm = heatmap()
    calm.update(view_of(update()), panels_of(update()).heat)
    assert "own work tells which" not in calm._head.markup


def test_a_place_is_pressed_and_what_is_coloured_is_chosen() -> None:
    points: list[tuple[int, float]] = []
    panel = heatmap(points)
    panel.update(view_of(update()), panels_of(update()).heat)
    event = type("Tap", (), {"x": 65.5, "y": 0.7})
    panel._tapped(lambda rank, time: points.append((rank, time)), event)
    event.y = 9.0
    panel._tapped(lambda rank, time: points.append((rank, time)), event)
    assert points == [(1, 65.5)]
    panel._chosen("metric", "1")
    assert panel._source.data["image"][0] == pytest.approx(60.0)
    panel._chosen("metric", "9")
    panel.choose(Choice(rank=1))
    assert panel._box.visible and (panel._box.bottom, panel._box.top) == (0.5, 1.5)
    panel.choose(Choice())
    assert not panel._box.visible


# --- loss ---


def falling() -> JobView:
    return view_of(update(buckets=tuple(replace(b, loss=2.0 - (b.start - 1050) / 10) for b in history())))


def test_the_loss_is_smoothed_and_by_rank_when_asked_for() -> None:
    panel = Loss("light", TimeAxis("light"))
    assert "run.report(loss=loss)" in panel._head.markup
    panel.update(falling())
    assert panel.figure.visible and len(panel._lines["smoothed"].data_source.data["y"]) == 10
    assert panel._ranks.data_source.data["y"] == []
    panel._chosen("ranks", "1")
    assert [len(y) for y in panel._ranks.data_source.data["y"]] == [10, 10]
    assert panel._lines["smoothed"].data_source.data["y"] == []
    panel.choose(Choice(rank=1))
    assert panel._ranks.data_source.data["alpha"] == [0.2, 1.0]
    panel._chosen("ranks", "")
    panel._chosen("smoothing", "0")
    assert panel._lines["smoothed"].data_source.data["y"] == []
    panel._chosen("smoothing", "rm -rf")
    read = Reader(panel._table.markup)
    assert len(read.of("tr")) == 11 and "smoothed" in read.text


def test_the_learning_rate_stands_below_the_loss() -> None:
    panel = Loss("light", TimeAxis("light"))
    panel.update(falling())
    assert not panel.rates.visible and panel._rate_head.markup == ""
    panel.update(view_of(update(buckets=tuple(replace(b, learning_rate=1e-3 / (b.start - 1049)) for b in history()))))
    assert panel.rates.visible and panel._rate.data_source.data["y"][:2] == pytest.approx([1e-3, 5e-4])
    assert "0.0001 now, 0.001 at most" in panel._rate_head.markup
    assert (panel.rates.y_range.start, panel.rates.y_range.end) == (0.0, pytest.approx(1.1e-3)), "a constant one too"
    assert "learning rate" in Reader(panel._table.markup).text and "0.0001" in panel._table.markup


def test_a_loss_that_is_not_a_number_breaks_the_line() -> None:
    panel = Loss("light", TimeAxis("light"))
    panel.update(view_of(update(buckets=tuple(replace(b, loss=math.inf) for b in history()))))
    assert all(math.isnan(y) for y in panel._lines["as said"].data_source.data["y"])


# --- tables ---


def test_communication_marks_who_is_behind() -> None:
    beats = (
        beat(0, activity="COLLECTIVE", collective="all_reduce", collective_seq=7, since=9.0),
        beat(1, collective="all_reduce", collective_seq=6),
    )
    read = Reader(communication_html(view_of(update(beats=beats))))
    assert "Rank 1 has not entered all_reduce #7" in read.text and "1 collective" in read.text
    assert sum("marked" in (row.get("class") or "") for row in read.of("tr")) == 1
    assert "40 % of a step is communication" in read.text
    assert "Overlap with backward: not measured" in read.text
    assert "Once ranks call torch.distributed" in communication_html(view_of(update(buckets=())))


def test_communication_tells_what_is_sent_and_hidden() -> None:
    beats = tuple(
        beat(k, counted=600, hidden=0.8 - 0.2 * k, traffic=(Traffic("all_reduce (DDP)", 1200, 6_000_000),))
        for k in range(2)
    )
    read = Reader(communication_html(view_of(update(beats=beats))))
    assert "70 % of DDP's communication is hidden behind backward; least 60 % (rank 1)" in read.text
    assert "all_reduce (DDP)" in read.text and "10 kB" in read.text and "12 MB" in read.text


def test_stragglers_are_compared_and_chosen() -> None:
    view = view_of(update(buckets=(*history(1), *(replace(b, rank=1, duration=2.0) for b in history(1)))))
    read = Reader(stragglers_html(ranking(view.rows, {0: 0.03}), chosen=0))
    assert "Rank 1 is slow, the others are not." in read.text and "2.00×" in read.text
    assert [b["value"] for b in read.of("button")] == ["1", "0"]
    assert "compared here" in stragglers_html(())
    past = stragglers_html(ranking(view.rows, {}), is_over=True)
    assert "Rank 1 was slow, the others were not." in Reader(past).text


def test_events_can_be_only_trouble_and_are_drawn_only_when_new() -> None:
    panel, view = Events(), view_of(update())
    more = PanelView(happenings=(Happening(1001.0, "straggler", "slow", (1,), is_trouble=True),
                                 Happening(1000.0, "phase", "HEALTHY")), happened=2)  # fmt: skip
    panel.update(view, more)
    assert "straggler" in panel.root.markup and "HEALTHY" in panel.root.markup
    panel._chosen("trouble", "1")
    assert "HEALTHY" not in panel.root.markup
    assert "No trouble so far." in events_html(more.happenings[1:], 2, 990.0, only_trouble=True)
    assert "There was no trouble." in events_html(more.happenings[1:], 2, 990.0, only_trouble=True, is_over=True)
    said = [("rank 1 takes long", (1,)), ("rank 12 takes long", (1,)), ("killed", (0, 1, 2)), ("all", ())]
    shown = Reader(events_html([Happening(1000.0, "", text, ranks) for text, ranks in said], 4, 990.0)).text
    for words in ("rank 1 takes long +", "rank 12 takes long rank 1+", "killed ranks 0–2+"):
        assert words in shown, shown
    waits = [Happening(1000.0, "waiting", "waiting: needs 4 slots")]
    assert "waitingneeds 4 slots" in Reader(events_html(waits, 1, 990.0)).text
    assert "the newest 1 of 7" in events_html(more.happenings[:1], 7, 990.0)


def test_resources_now_and_over_time() -> None:
    panel = Resources("light", TimeAxis("light"))
    view = view_of(update(beats=(beat(0, cpu=50.0), beat(1, cpu=150.0, disk_read=2e6))))
    panel.update(view, panels_of(update(beats=(beat(0, cpu=50.0), beat(1, cpu=150.0)))).resources)
    read = Reader(panel._table.markup)
    assert "2.0 cores" in read.text and "rank 1" in read.text and "2 MB/s" in read.text
    assert panel._source.data["most"] == [150.0] and panel._source.data["mean"] == [100.0]
    panel._chosen("measure", "rss")
    assert panel._source.data["mean"] == [1.0] and "GB" in panel._head.markup
    panel._chosen("measure", "rm -rf")
    assert now_html(view_of(update(beats=())).rows) == ""
    many = view_of(update(1024, beats=tuple(beat(k, cpu=100.0) for k in range(1024))))
    assert "1,024 cores" in now_html(many.rows)


def test_findings_act_and_choose() -> None:
    acts: list[Act] = []
    ranks: list[str] = []
    panel = Findings(acts.append, lambda name, value: ranks.append(value))
    beats = (
        beat(0, activity="COLLECTIVE", collective="all_reduce", collective_seq=7, since=9.0),
        beat(1, collective="all_reduce", collective_seq=6),
    )
    panel.update(view_of(update(beats=beats)), PanelView())
    assert "Show the stacks" in panel.root.markup
    panel._pressed("stacks", "")
    panel._pressed("cancel", "")  # no finding offers that
    panel._pressed("rank", "1")
    assert acts == [Act("stacks")] and ranks == ["1"]
    assert "Nothing stands out." in findings_html(())
    one = Shown(Finding(symptom="it failed", cause="", advice="", severity=Severity.ERROR), Act("resume"))
    assert "<button" in findings_html((one,)) and "<button" not in findings_html((one,), may_act=False)


# --- time ---


def test_the_axis_follows_and_tells_a_readers_zoom_from_its_own() -> None:
    zoomed: list[int] = []
    axis = TimeAxis("light", lambda: zoomed.append(1))
    axis.chart("x")
    axis.follow(100.0, None)
    axis.follow(160.0, 60.0)
    assert (axis.range.start, axis.range.end) == (100.0, 160.6) and zoomed == []
    axis.range.update(start=120.0, end=130.0)
    assert zoomed
    axis.point_at(42.0)
    assert axis._step[0].visible and axis._step[0].location == 42.0
    axis.point_at(None)
    assert not axis._step[0].visible


def test_the_period_says_since_when_it_stands_still() -> None:
    changed: list[Any] = []
    period = Period(lambda: changed.append(1))
    period.update(100.0)
    period._pressed("length", "60")
    period._pressed("length", "7")
    assert period.length == 60.0
    period._pressed("pause", "")
    period.update(112.0)
    assert "stands still since 12 s ago" in period.root.markup and 'aria-pressed="true"' in period.root.markup
    period._pressed("pause", "")
    assert period.paused_at is None and len(changed) == 4


def test_an_ended_job_is_shown_as_one_that_runs() -> None:
    ended = state(phase=JobPhase.SUCCEEDED, ended_at=1060.0)
    assert "2.00×" not in stragglers_html(ranking(view_of(update(state=ended)).rows, {}))

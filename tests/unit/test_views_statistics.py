"""What gradients look like, as it is told: at two ranks, at a thousand, and where it was not measured."""

from __future__ import annotations

from typing import Any

from test_widgets_panels import EVIL, Reader
from workbench_widgets.panels.gradients import gradients_html
from workbench_widgets.panels.statistics import statistics_html

from workbench.events import GradientsStoodOut
from workbench.findings import Finding
from workbench.telemetry import GradientStatistics, Histogram, LayerStatistics
from workbench.views.gradients import GradientsBuilder, agreement_line
from workbench.views.statistics import ODD, SINGLY, StatisticsBuilder, StatisticsView, bars, shown_bins, statistics_line

COUNTS = (0,) * 16 + (1, 40, 300, 900, 320, 10) + (0,) * 10


def looked(ranks: int = 4, at: int = 0, **fields: Any) -> GradientStatistics:
    values: dict[str, Any] = {
        "norms": tuple(1.0 + 0.01 * (rank % 5) for rank in range(ranks)), "cosines": (0.9,) * ranks,
        "zeros": (0.0,) * ranks, "mean_norm": 0.97, "samples": 4, "every": 37,
        "histograms": tuple(Histogram((rank,), COUNTS) for rank in range(min(ranks, 16))),
        "layers": (LayerStatistics("0", 0.01, 0.4, 0.0025), LayerStatistics("2", 0.02, 0.5, 0.003)),
    } | fields  # fmt: skip
    return GradientStatistics(
        job_id="job", restart_count=0, rank=0, start=2.0 * at, end=2.0 * at + 2, first_step=10 * at,
        last_step=10 * at + 9, ranks=tuple(range(ranks)), **values,
    )  # fmt: skip


def view_of(*reports: GradientStatistics) -> StatisticsView:
    builder = StatisticsBuilder()
    for report in reports:
        builder.add(report)
    return builder.view()


def test_by_rank_in_a_line_and_in_tables() -> None:
    view = view_of(looked(norms=(1.0, 30.0, 1.1, None), broken=((3, 7, 0),)), looked(at=1, norms=(1.0, 30.0, 1.1, None),
                   broken=((3, 7, 0),)))  # fmt: skip
    assert statistics_line(view) == (
        "gradients looked at each 37 steps: norm 0.97 · of single ranks 1 to 30 · cosine to the mean 0.9 · "
        "not finite on rank 3"
    )
    page = Reader(statistics_html(view))
    assert "▲ 27.3" in page.text, "a mark besides the number"
    assert "7 NaN" in page.text
    assert "8 looks, the last at step 19" in page.text
    (shape,) = {one["aria-label"] for one in page.of("span") if one.get("role") == "img" and "rank 1" in str(one)}
    assert shape == "rank 1: half of 1,571 between 0.00098 and 0.0039"
    assert "update / weights" in page.text
    assert "0.0025" in page.text


def test_nothing_yet_says_nothing() -> None:
    assert statistics_html(StatisticsView()) == statistics_line(StatisticsView()) == ""


def test_what_was_not_measured_says_so() -> None:
    why = "fully_shard reduces gradients before a rank has all of its own"
    view = view_of(looked(norms=(), cosines=(), zeros=(), missing=why, histograms=(Histogram((0, 1), COUNTS),)))
    assert statistics_line(view) == f"gradients looked at each 37 steps: norm 0.97; by rank not measured: {why}"
    page = Reader(statistics_html(view))
    assert f"not measured, {why}" in page.text
    assert "of the mean" in page.text


def test_a_thousand_ranks_are_those_far_off_and_the_rest() -> None:
    norms = tuple(40.0 if rank == 700 else 1.0 + rank / 10_000 for rank in range(1024))
    cosines = tuple(-0.5 if rank == 9 else 0.9 for rank in range(1024))
    view = view_of(looked(1024, norms=norms, cosines=cosines))
    assert [row.ranks for row in view.rows[:2]] == [(700,), (9,)]
    assert len(view.rows) == ODD + 1
    assert len(view.rows[-1].ranks) == 1024 - ODD
    assert (view.rows[-1].label, view.rows[-1].cosine) == ("the other 1,016, medians", 0.9)
    assert len(statistics_html(view)) < 20_000
    assert len(view_of(looked(SINGLY)).rows) == SINGLY


def test_bars_show_all_that_is_there() -> None:
    one = Histogram((0,), COUNTS)
    bins = shown_bins([one])
    assert (bins.start, bins.stop) == (16, 22)
    assert bars(one, bins) == "▁▁▃█▃▁"
    assert shown_bins([Histogram((0,), (0,) * 32)]) == range(0)


def test_a_rank_that_stands_out_is_told_with_what_speaks_for_it() -> None:
    finding = Finding(
        symptom="the gradients of rank 2 are large", cause="its shard", advice="swap it", evidence=("z 9",)
    )
    builder = GradientsBuilder()
    builder.add(
        [GradientsStoodOut(time=5.0, restart_count=0, step=40, ranks=(2,), about="norm", score=9.0, finding=finding)],
        [looked()],
    )
    view = builder.view()
    (found,) = view.found
    assert (found.finding, found.ranks) == (finding, (2,))
    assert "a rank stands out" in agreement_line(view)
    assert "! warning · the gradients of rank 2 are large" in Reader(gradients_html(view)).text


def test_nothing_of_a_job_is_markup() -> None:
    html = statistics_html(view_of(looked(layers=(LayerStatistics(EVIL, 1.0, 1.0, 1.0),), missing=EVIL)))
    assert "<img" not in html

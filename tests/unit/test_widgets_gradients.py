"""The panel of replicas: marks and words besides colours, at four ranks and at a thousand."""

from __future__ import annotations

from msgspec.structs import replace
from test_views_gradients import mismatched, report
from test_widgets_panels import EVIL, Reader
from workbench_widgets.panels.findings import MARKS as FINDING_MARKS
from workbench_widgets.panels.gradients import EMPTY, MARKS, gradients_html

from workbench.events import DataDoubted
from workbench.findings import Finding, Severity
from workbench.state import DataAbout, DataDoubt
from workbench.views.gradients import GradientsBuilder, GradientsView


def test_every_severity_has_a_mark_in_both_panels() -> None:
    assert set(MARKS) == set(FINDING_MARKS) == {severity.value for severity in Severity}


def test_an_empty_panel_says_what_would_fill_it() -> None:
    assert gradients_html(GradientsView()) == EMPTY.html()
    assert "all_reduce" in Reader(EMPTY.html()).text
    assert Reader(gradients_html(GradientsView(why_not="no DDP was seen"))).text == "Not checked: no DDP was seen."


def test_a_rank_that_deviates_has_mark_pattern_and_words() -> None:
    builder = GradientsBuilder()
    builder.add([mismatched(17, deviation=0.25)], [report(0), report(1, agreed=9, deviating=((1, 1),), every=2)])
    page = Reader(gradients_html(builder.view()))
    assert "✗ 19 of 20 checks agreed · checked each 2 steps" in page.text
    assert "✗ error · step 17: rank 1 deviates" in page.text
    assert "likely cause: bits flipped" in page.text and "what to do: repair it" in page.text
    assert {"class": "agree", "role": "img", "aria-label": "rank 1: steps 10–19: deviates"} in page.of("div")
    assert [i["title"] for i in page.of("i") if i.get("class") == "agree-DEVIATES" and "title" in i] == [
        "steps 10–19: rank 1 deviates"
    ]
    assert "0.weight" in page.text
    assert "ranks 0, 2, 3" in page.text.replace("ranks 0, 2, 3", "ranks 0, 2, 3")


def test_nothing_checked_yet_is_no_success() -> None:
    builder = GradientsBuilder()
    builder.add([mismatched(17)], ())
    html = gradients_html(builder.view())
    assert "no check yet</span></p>" in html and "✓" not in html
    assert "no check was made</span></p>" in gradients_html(builder.view(), is_over=True)


def test_a_thousand_ranks_are_a_few_lanes() -> None:
    builder = GradientsBuilder()
    builder.add((), [report(at, ranks=1024, deviating=((7, 1),) if at == 5 else ()) for at in range(200)])
    html = gradients_html(builder.view())
    assert len(html) < 20_000
    assert "ranks 0–6, 8–1023" in Reader(html).text


def test_nothing_of_a_job_is_markup() -> None:
    builder = GradientsBuilder()
    finding = Finding(symptom=EVIL, cause=EVIL, advice=EVIL, evidence=(EVIL,))
    builder.add([replace(mismatched(3, tensor=EVIL), finding=finding)], ())
    html = gradients_html(builder.view())
    assert "<img" not in html
    assert EVIL in Reader(html).text


def test_what_was_found_again_is_told_once_with_the_steps_of_before() -> None:
    builder = GradientsBuilder()
    told, doubt = Finding(symptom="alike", cause="one seed", advice="seed"), DataDoubt(about=DataAbout.RANDOM)
    for k in range(1, 6):
        found = replace(told, step=10 * k)
        builder.add([DataDoubted(time=k, restart_count=k, step=10 * k, doubt=doubt, finding=found)], ())
    text = Reader(gradients_html(builder.view())).text
    assert text.count("likely cause: one seed") == 1
    assert "alike (also at step 40, 30, 20 and 1 more time)" in text

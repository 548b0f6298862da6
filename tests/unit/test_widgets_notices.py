"""What the live page makes news of."""

from __future__ import annotations

from msgspec.structs import replace
from test_views_text import view
from workbench_widgets.notices import TEXT, news_of

from workbench.state import Failure, FailureKind, JobPhase

KILLED = Failure(kind=FailureKind.SIGNAL, rank=1, reason="rank 1 killed by SIGKILL at step 4", time=1.0)


def test_failures_recoveries_and_ends_are_news_and_a_start_is_not() -> None:
    job = view()
    assert not any(news_of(replace(job, phase=phase))["is_told"] for phase in (JobPhase.INIT, JobPhase.HEALTHY))
    failing = news_of(replace(job, phase=JobPhase.RECOVERING, reason="restart 1 of 3: rank 1 killed"))
    assert failing["title"] == "digits-12ab failed and is recovering" and failing["is_bad"]
    assert failing["text"] == "restart 1 of 3: rank 1 killed"
    back = news_of(replace(job, restart_count=1, failure=KILLED))
    assert back["title"] == "digits-12ab recovered" and not back["is_bad"]
    assert back["text"] == "restart 1, after: rank 1 killed by SIGKILL at step 4"
    assert news_of(replace(job, phase=JobPhase.SUCCEEDED))["title"] == "digits-12ab finished"
    assert len(news_of(replace(job, phase=JobPhase.FAILED, reason="x " * 999))["text"]) <= TEXT


def test_it_stays_the_same_while_only_steps_go_on() -> None:
    back = view(restart_count=1, failure=KILLED)
    assert news_of(back) == news_of(replace(back, step=back.step + 1, now=back.now + 9, reason="2 of 2 ranks running"))

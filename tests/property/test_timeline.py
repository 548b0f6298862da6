"""Timelines of any story: every rank's time is told once, shares are shares, and it does not matter how news came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.events import (
    CheckpointSaved,
    Event,
    FailureDetected,
    FaultInjected,
    LaunchRequested,
    PhaseChanged,
    RankExited,
    RecoveryStarted,
    RunResumed,
    SlotsAwaited,
    SlotsGranted,
    StallDetected,
    StallEnded,
    StepsBegan,
)
from workbench.feed import Bucket, Total
from workbench.spec import JobSpec
from workbench.state import (
    Checkpoint,
    CheckpointTier,
    Failure,
    FailureKind,
    JobPhase,
    Placement,
    Stall,
    StallKind,
)
from workbench.views import folding
from workbench.views.buckets import across_ranks
from workbench.views.spans import Runs, Span, SpanKind, Timeline, has_rank
from workbench.views.timeline import TimelineBuilder

SOME = st.floats(0.0, 30.0, allow_nan=False).map(lambda s: round(s, 3))
KINDS = st.sampled_from(sorted(FailureKind))


@st.composite
def stories(draw: st.DrawFn, most: int = 5) -> tuple[list[Event], list[Total], float]:
    """A record with attempts, stalls, checkpoints, deaths and resumes, and the totals of its steps."""
    ranks = draw(st.integers(1, 5))
    now, step = 1000.0, 0
    events: list[Event] = [
        LaunchRequested(time=now, job_id="j", spec=JobSpec(entrypoint="t.py", nproc_per_node=ranks, max_restarts=9))
    ]
    buckets: list[Bucket] = []
    for count in range(draw(st.integers(1, most))):
        if draw(st.booleans()):
            now += draw(SOME)
            events.append(SlotsAwaited(time=now, reason="no slot"))
        now += draw(SOME)
        ranks = draw(st.integers(1, 5)) if count else ranks
        places = tuple(Placement(rank=k, local_rank=k, node_rank=0, worker="w", slot=k) for k in range(ranks))
        events += [SlotsGranted(time=now, placements=places), _phase(now, JobPhase.LAUNCHING, count)]
        if draw(st.booleans()):
            now += draw(SOME)
            step = draw(st.integers(0, step))
            events.append(_phase(now, JobPhase.HEALTHY, count))
            if count:
                events.append(RunResumed(time=now, restart_count=count, step=step, tier=CheckpointTier.DISK))
            step += 1
            now += 0.5
            buckets += _steps(ranks, now - 0.5, 0.5, 1, step)
            events.append(StepsBegan(time=now, restart_count=count, step=step))
            for _ in range(draw(st.integers(0, 3))):
                taken, lasts = draw(st.integers(1, 50)), draw(st.floats(0.1, 20.0))
                step += taken
                buckets += _steps(ranks, now, lasts, taken, step)
                now += lasts
                events += draw(_happenings(count, ranks, now, step))
        now += draw(SOME)
        more, is_over = draw(_ends(count, ranks, now, step))
        events += more
        now += draw(SOME) if is_over else 0.0
        events.append(RecoveryStarted(time=now, restart_count=count + 1, reason=f"attempt {count + 1}"))
    return events, across_ranks(buckets), now + draw(SOME)


def _phase(at: float, phase: JobPhase, count: int) -> PhaseChanged:
    return PhaseChanged(time=at, phase=phase, reason="", restart_count=count)


def _steps(ranks: int, start: float, lasts: float, count: int, last: int) -> list[Bucket]:
    nothing = dict.fromkeys(("data", "forward", "backward", "comm", "optimizer", "checkpoint", "tokens"), 0.0)
    whole = {"start": start, "width": lasts, "steps": count, "last_step": last, "duration": lasts, "slowest": lasts}
    return [Bucket(rank=k, samples=1.0, loss=math.nan, **whole, **nothing) for k in range(ranks)]


@st.composite
def _happenings(draw: st.DrawFn, count: int, ranks: int, now: float, step: int) -> list[Event]:
    blamed = tuple(sorted(draw(st.sets(st.integers(0, ranks - 1), max_size=2))))
    stall = Stall(
        kind=StallKind.ABSENT, ranks=blamed, reason="stalled", since=now - draw(SOME), collective="all_reduce"
    )
    point = Checkpoint(step=step, path="/c", world_size=ranks, saved_at=now)
    lasted = draw(st.floats(0.0, 5.0))
    choices: list[Event] = [
        StallDetected(time=now, restart_count=count, stall=stall),
        StallEnded(time=now, restart_count=count, seconds=1.0),
        CheckpointSaved(time=now, restart_count=count, checkpoint=point, seconds=lasted, stalled=lasted),
        FaultInjected(time=now, fault="kill", rank=draw(st.integers(0, ranks - 1))),
        RankExited(time=now, restart_count=count, rank=draw(st.integers(0, ranks - 1)), exit_code=0, step=step),
    ]
    return draw(st.lists(st.sampled_from(choices), max_size=3))


@st.composite
def _ends(draw: st.DrawFn, count: int, ranks: int, now: float, step: int) -> tuple[list[Event], bool]:
    """How an attempt ends, and whether the job does with it."""
    rank = draw(st.integers(0, ranks - 1) | st.none())
    off = draw(st.sampled_from([0.0, -0.01, 3600.0, -3600.0]))  # another host's clock
    cause = Failure(kind=draw(KINDS), rank=rank, reason="it died", time=now + off, step=step)
    others = [
        Failure(kind=draw(KINDS), rank=k, reason="it went along", time=now + draw(SOME))
        for k in draw(st.sets(st.integers(0, ranks - 1), max_size=3))
    ]
    is_over = draw(st.booleans())
    told = FailureDetected(time=now, restart_count=count, failure=cause, consequences=tuple(others))
    phase = draw(st.sampled_from([JobPhase.FAILED, JobPhase.STOPPED, JobPhase.SUCCEEDED]))
    ended = [_phase(now, JobPhase.STOPPING, count), _phase(now, phase, count)]
    return [*(ended if is_over else [_phase(now, JobPhase.RECOVERING, count)]), told], is_over


def of_rank(spans: Sequence[Span], rank: int) -> list[Span]:
    return sorted((s for s in spans if has_rank(s.ranks, rank)), key=lambda s: s.start)


def built(events: Sequence[Event], totals: Sequence[Total], now: float) -> Timeline:
    builder = TimelineBuilder()
    builder.add(events)
    return builder.timeline(totals, now)


@settings(max_examples=200, deadline=None)
@given(stories())
def test_spans_of_a_rank_cover_every_attempt_that_has_it_once(story: tuple[list[Event], list[Total], float]) -> None:
    timeline = built(*story)
    for attempt in timeline.attempts:
        end = timeline.end if attempt.end is None else attempt.end
        for rank in range(attempt.world_size):
            inside = [s for s in of_rank(timeline.spans, rank) if s.end > attempt.start and s.start < end]
            if end > attempt.start:
                assert inside[0].start == attempt.start and inside[-1].end == end
            assert all(a.end == b.start for a, b in pairwise(inside))
    for rank in range(5):
        assert all(a.end <= b.start for a, b in pairwise(of_rank(timeline.spans, rank)))
    assert all(span.end > span.start for span in timeline.spans)


@settings(max_examples=200, deadline=None)
@given(stories())
def test_shares_are_shares(story: tuple[list[Event], list[Total], float]) -> None:
    events, totals, now = story
    goodput = built(events, totals, now).goodput
    spent = sum(total.duration for total in totals)
    assert goodput.useful >= 0 and goodput.redone >= -1e-9 and goodput.wall >= 0
    assert goodput.useful + goodput.redone <= spent + 1e-6
    for share in (goodput.goodput, goodput.ettr):
        assert share is None or 0.0 <= share <= 1.0


@settings(max_examples=100, deadline=None)
@given(stories(), st.lists(st.integers(0, 60), max_size=8))
def test_news_in_parts_tells_what_news_at_once_does(
    story: tuple[list[Event], list[Total], float], cuts: list[int]
) -> None:
    events, totals, now = story
    builder = TimelineBuilder()
    edges = [0, *sorted(cuts), len(events)]
    for first, last in pairwise(edges):
        builder.add(events[first:last])
        if last:
            builder.timeline(totals, now)
    assert builder.timeline(totals, now) == built(events, totals, now)


@settings(max_examples=60, deadline=None)
@given(stories(most=30), st.integers(8, 60), st.data())
def test_folded_spans_cover_what_the_spans_did(
    story: tuple[list[Event], list[Total], float], most: int, data: st.DataObject
) -> None:
    events, totals, now = story
    whole = built(events, totals, now)
    builder = TimelineBuilder()
    builder._spans._most = most
    cut = data.draw(st.integers(0, len(events)))
    builder.add(events[:cut])
    builder.add(events[cut:])
    folded = builder.timeline(totals, now)
    for rank in range(5):
        assert covered(folded.spans, rank) == covered(whole.spans, rank)
    by_kind: dict[SpanKind, float] = {}
    for span in folded.spans:
        size = sum(last - first + 1 for first, last in span.ranks)
        for kind, seconds in [(p.kind, p.seconds) for p in span.parts] or [(span.kind, span.end - span.start)]:
            by_kind[kind] = by_kind.get(kind, 0.0) + seconds * size
    for kind in SpanKind:
        told = sum((s.end - s.start) * sum(b - a + 1 for a, b in s.ranks) for s in whole.spans if s.kind is kind)
        assert math.isclose(by_kind.get(kind, 0.0), told, rel_tol=1e-6, abs_tol=1e-6)


def covered(spans: Sequence[Span], rank: int) -> list[tuple[float, float]]:
    """The time that is told of a rank, as unbroken stretches."""
    made: list[tuple[float, float]] = []
    for span in of_rank(spans, rank):
        if made and made[-1][1] == span.start:
            made[-1] = (made[-1][0], span.end)
        else:
            made.append((span.start, span.end))
    return made


@settings(max_examples=100, deadline=None)
@given(stories())
def test_ranks_folded_together_tell_what_each_alone_would(story: tuple[list[Event], list[Total], float]) -> None:
    """Of a job of one more rank, to which nothing happens, the others' lanes are as they were."""
    events, _, now = story
    whole = built(events, (), now)
    wide = built([_widened(event) for event in events], (), now)
    for rank in range(5):
        mine = [(s.start, s.end, s.kind) for s in of_rank(whole.spans, rank)]
        theirs = [(s.start, s.end, s.kind) for s in of_rank(wide.spans, rank)]
        attempts = [a for a in whole.attempts if rank < a.world_size]
        if len(attempts) == len(whole.attempts):
            assert mine == theirs
    assert len(wide.spans) <= len(whole.spans) + 12 * len(whole.attempts)


def _widened(event: Event) -> Event:
    """The same with 1,024 ranks."""
    if not isinstance(event, SlotsGranted):
        return event
    return SlotsGranted(
        time=event.time,
        placements=tuple(Placement(rank=k, local_rank=k, node_rank=0, worker="w", slot=k) for k in range(1024)),
    )


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=30))
def test_runs_hold_each_rank_once(pairs: list[tuple[int, int]]) -> None:
    from workbench.views.spans import join_runs, size_of

    runs: Runs = join_runs((first, first + more) for first, more in pairs)
    held = {rank for first, more in pairs for rank in range(first, first + more + 1)}
    assert size_of(runs) == len(held) and all(has_rank(runs, rank) for rank in held)
    assert all(a[1] + 1 < b[0] for a, b in pairwise(runs))


def test_the_fold_of_a_fold_is_the_fold() -> None:
    spans = [Span(kind=SpanKind.STEPPING, ranks=((0, 1),), start=float(k), end=k + 1.0, title="") for k in range(64)]
    slabs = list(folding.slabs_of(spans))
    once = folding.fold_slabs(slabs, 8.0)
    assert folding.fold_slabs(folding.fold_slabs(slabs, 4.0), 8.0) == once and len(once) == 8

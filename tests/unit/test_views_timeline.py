"""A job's timeline from its record."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from msgspec.structs import replace
from timeline_records import JOB, START, Story, of_rank, timeline_of, words

from workbench.events import (
    CancelRequested,
    CheckpointFailed,
    CheckpointRefused,
    Event,
    FailureDetected,
    FaultHappened,
    FaultInjected,
    GradientMismatched,
    GradientsStoodOut,
    LaunchRequested,
    NonFiniteFound,
    PhaseChanged,
    RankExited,
    RecoveryStarted,
    ReplicasRepaired,
    ResizeRequested,
    ResumeRequested,
    RunResumed,
    SlotsAwaited,
    SlotsGranted,
    StallDetected,
    StallEnded,
    StepsBegan,
    StragglerDetected,
)
from workbench.findings import Finding
from workbench.spec import JobSpec
from workbench.state import (
    Checkpoint,
    CheckpointTier,
    Compared,
    Failure,
    FailureKind,
    JobPhase,
    Mismatch,
    Placement,
    Stall,
    StallKind,
)
from workbench.views.folding import SPANS
from workbench.views.spans import MarkKind, SpanKind, Timeline, runs_of, size_of
from workbench.views.timeline import ATTEMPTS, COURSES, TimelineBuilder

# --- hand-written records ---------------------------------------------------------------------------------------------


def places(ranks: int) -> tuple[Placement, ...]:
    return tuple(Placement(rank=k, local_rank=k, node_rank=0, worker="w", slot=k) for k in range(ranks))


def phase(at: float, name: str, count: int = 0, reason: str = "") -> PhaseChanged:
    return PhaseChanged(time=at, phase=JobPhase[name], reason=reason, restart_count=count)


def began(at: float, count: int = 0, step: int = 1) -> StepsBegan:
    return StepsBegan(time=at, restart_count=count, step=step)


def launched(ranks: int = 2, at: float = 0.0) -> list[Event]:
    spec = JobSpec(entrypoint="train.py", nproc_per_node=ranks, max_restarts=3)
    return [
        LaunchRequested(time=at, job_id=JOB, spec=spec),
        phase(at, "INIT"),
        SlotsGranted(time=at + 1, placements=places(ranks)),
        phase(at + 1, "LAUNCHING"),
        phase(at + 2, "HEALTHY"),
        began(at + 3),
    ]


def killed(at: float, rank: int, count: int = 0, step: int = 10, kind: FailureKind = FailureKind.SIGNAL) -> list[Event]:
    """A rank dies; 0.2 s later the job restarts."""
    failure = Failure(kind=kind, rank=rank, reason=f"rank {rank} killed by SIGKILL at step {step}", time=at, step=step)
    return [
        RankExited(time=at, restart_count=count, rank=rank, signal=9, step=step),
        phase(at, "RECOVERING", count, failure.reason),
        FailureDetected(time=at + 0.2, restart_count=count, failure=failure),
        RecoveryStarted(time=at + 0.2, restart_count=count + 1, reason=f"restart {count + 1} of 3: {failure.reason}"),
        SlotsGranted(time=at + 0.3, placements=places(2)),
        phase(at + 0.3, "LAUNCHING", count + 1),
        phase(at + 0.4, "HEALTHY", count + 1),
    ]


def stall(*ranks: int, since: float, kind: StallKind = StallKind.ABSENT) -> Stall:
    reason = f"rank {ranks[0]} did not enter all_reduce #12" if ranks else "nobody gets on"
    return Stall(
        kind=kind, ranks=ranks, reason=reason, since=since, step=40, collective="all_reduce", collective_seq=12
    )


# --- what the ranks do ------------------------------------------------------------------------------------------------


def test_a_launch_is_waiting_launching_stepping() -> None:
    timeline = timeline_of(launched(), now=10.0)
    assert [(s.kind, s.ranks, s.start, s.end) for s in timeline.spans] == [
        (SpanKind.SLOTS, ((0, 1),), 0.0, 1.0),
        (SpanKind.LAUNCHING, ((0, 1),), 1.0, 3.0),
        (SpanKind.STEPPING, ((0, 1),), 3.0, 10.0),
    ]
    assert not timeline.is_over and timeline.attempts[0].first_step == 1 and timeline.attempts[0].end is None


def test_a_killed_rank_is_dead_and_all_recover() -> None:
    timeline = timeline_of([*launched(), *killed(5.0, 1), began(6.0, 1, 11)], now=8.0)
    assert words(timeline, 0) == ["waiting for slots", "launching", "stepping", "recovering", "recovering", "recovering", "stepping"]  # fmt: skip  # noqa: E501
    (dead,) = [s for s in timeline.spans if s.kind is SpanKind.DEAD]
    assert (dead.ranks, dead.start, dead.end, dead.title) == (((1, 1),), 5.0, 5.2, "killed by SIGKILL at step 10")
    recovering = [s for s in of_rank(timeline, 0) if s.kind is SpanKind.RECOVERING]
    assert (recovering[0].start, recovering[-1].end) == (5.0, 6.0)
    assert recovering[-1].cause == "restart 1 of 3: rank 1 killed by SIGKILL at step 10"


def test_an_attempt_tells_its_cause_and_what_it_cost() -> None:
    resumed = RunResumed(time=5.8, restart_count=1, step=8, tier=CheckpointTier.MEMORY)
    injected = FaultInjected(time=4.9, fault="kill", rank=1)
    record = [*launched(), injected, *killed(5.0, 1), resumed, began(6.0, 1, 9)]
    first, second = timeline_of(record, now=8.0).attempts
    assert first.cause is not None and first.cause.rank == 1
    assert (first.injected_at, first.fault_at, first.detected_at, first.recovered_at) == (4.9, 4.9, 5.0, 6.0)
    assert first.time_to_detect == pytest.approx(0.1) and first.time_to_recover == pytest.approx(1.1)
    assert (first.first_step, first.last_step, first.lost_steps) == (1, 10, 2)
    assert (second.resumed_step, second.resumed_tier, second.first_step) == (8, CheckpointTier.MEMORY, 9)
    assert second.decision.startswith("restart 1 of 3") and second.cause is None


def test_a_fault_of_another_rank_is_not_what_ended_it() -> None:
    record = [*launched(), FaultInjected(time=4.0, fault="stop", rank=0), *killed(5.0, 1)]
    (attempt, _) = timeline_of(record, now=6.0).attempts
    assert attempt.injected_at is None and attempt.fault_at == 5.0


def test_a_fault_is_injected_when_it_is_done_and_not_when_it_was_asked_for() -> None:
    asked = FaultInjected(time=4.0, fault="hang", rank=1)
    done = FaultHappened(time=4.9, restart_count=0, fault="hang", rank=1)
    (attempt, _) = timeline_of([*launched(), asked, *killed(5.0, 1), done], now=6.0).attempts
    assert attempt.injected_at == 4.9
    refused = FaultHappened(time=4.1, restart_count=0, fault="hang", rank=1, problem="it has no such thing")
    timeline = timeline_of([*launched(), asked, refused, *killed(5.0, 1)], now=6.0)
    assert timeline.attempts[0].injected_at is None
    assert "hang could not be done to rank 1 on purpose: it has no such thing" in [m.title for m in timeline.marks]


def test_a_fault_during_a_recovery_belongs_to_both() -> None:
    record = [*launched(), *killed(5.0, 1), *killed(5.6, 0, 1, 10), began(7.0, 2, 11)]
    first, second, third = timeline_of(record, now=8.0).attempts
    assert (first.recovered_at, second.recovered_at, third.recovered_at) == (7.0, 7.0, None)
    assert second.first_step is None and first.lost_steps == 0


def test_a_stall_shows_who_is_to_blame_and_who_waits() -> None:
    told = StallDetected(time=6.5, restart_count=0, stall=stall(1, since=5.0))
    timeline = timeline_of([*launched(4), told], now=8.0)
    last = {tuple(s.ranks): s for s in timeline.spans if s.end == 8.0}
    assert last[((1, 1),)].kind is SpanKind.STALLED and last[((1, 1),)].start == 5.0
    waiting = last[((0, 0), (2, 3))]
    assert waiting.kind is SpanKind.WAITING and waiting.title == "waiting in all_reduce #12 for rank 1"


def test_a_stall_that_ends_by_itself_is_no_failure() -> None:
    told = StallDetected(time=6.5, restart_count=0, stall=stall(1, since=5.0))
    timeline = timeline_of([*launched(), told, StallEnded(time=7.0, restart_count=0, seconds=2.0)], now=9.0)
    assert words(timeline, 1)[-3:] == ["stepping", "stalled", "stepping"]
    assert timeline.attempts[0].cause is None


def test_a_start_that_was_waited_for_and_then_given_up_is_one_stall() -> None:
    early, late = replace(stall(1, since=5.0), patience=200.0), stall(1, since=5.0)
    told = [StallDetected(time=t, restart_count=0, stall=s) for t, s in ((6.5, early), (7.5, late))]
    timeline = timeline_of([*launched(), *told], now=8.0)
    assert [s.kind for s in timeline.spans if s.ranks == ((1, 1),)].count(SpanKind.STALLED) == 1
    early_mark, late_mark = [mark for mark in timeline.marks if mark.kind is MarkKind.STALLED]
    assert early_mark.title == f"{early.reason}; it has not begun, and may take 3 min 20 s more"
    assert late_mark.title == late.reason


def test_a_stall_that_nobody_can_be_blamed_for_is_everybody_s() -> None:
    told = StallDetected(time=6.5, restart_count=0, stall=stall(since=5.0, kind=StallKind.UNKNOWN))
    (last,) = [s for s in timeline_of([*launched(), told], now=8.0).spans if s.end == 8.0]
    assert last.kind is SpanKind.STALLED and last.ranks == ((0, 1),)


def test_a_stall_that_ends_a_generation_is_diagnosed() -> None:
    blamed = stall(1, since=5.0)
    failure = Failure(kind=FailureKind.TIMEOUT, rank=1, reason=blamed.reason, time=6.5, stall=blamed)
    record = [
        *launched(),
        FaultInjected(time=4.9, fault="stop", rank=1),
        StallDetected(time=6.5, restart_count=0, stall=blamed),
        phase(6.5, "RECOVERING"),
        FailureDetected(time=6.6, restart_count=0, failure=failure),
        RecoveryStarted(time=6.7, restart_count=1, reason="restart 1 of 3"),
        began(7.5, 1, 41),
    ]
    timeline = timeline_of(record, now=9.0)
    first = timeline.attempts[0]
    assert (first.fault_at, first.detected_at, first.diagnosed_at, first.recovered_at) == (4.9, 6.5, 6.5, 7.5)
    assert words(timeline, 1)[2:4] == ["stepping", "stalled"] and SpanKind.DEAD.value not in words(timeline, 1)


def test_a_lost_host_is_one_span() -> None:
    lost = [
        Failure(kind=FailureKind.WORKER_LOST, rank=k, reason=f"rank {k} was lost with its worker b", time=5.0)
        for k in range(4, 8)
    ]
    record = [
        *launched(8),
        phase(5.0, "RECOVERING"),
        FailureDetected(time=5.1, restart_count=0, failure=lost[0], consequences=tuple(lost[1:])),
    ]
    dead = [s for s in timeline_of(record, now=6.0).spans if s.kind is SpanKind.DEAD]
    assert [s.ranks for s in dead] == [((4, 7),)] and dead[0].title == "was lost with its worker b"


def test_ranks_that_end_well_are_finished_until_all_are() -> None:
    record = [
        *launched(),
        RankExited(time=5.0, restart_count=0, rank=0, exit_code=0, step=20),
        RankExited(time=6.0, restart_count=0, rank=1, exit_code=0, step=20),
        phase(6.0, "SUCCEEDED", reason="all 2 ranks finished"),
    ]
    timeline = timeline_of(record, now=99.0)
    assert timeline.is_over and timeline.end == 6.0
    assert words(timeline, 0)[-1] == "finished" and words(timeline, 1)[-1] == "stepping"
    assert timeline.attempts[0].outcome == "SUCCEEDED: all 2 ranks finished"
    assert of_rank(timeline, 1)[-1].title == "steps 1 to 20"


def test_training_stands_still_for_a_checkpoint() -> None:
    story = Story()
    story.launch()
    story.take(5)
    story.save(stalled=0.5)
    story.take(5)
    assert words(story.timeline(), 1)[-3:] == ["stepping", "checkpointing", "stepping"]
    (pause,) = [s for s in story.timeline().spans if s.kind is SpanKind.CHECKPOINTING]
    assert pause.end - pause.start == pytest.approx(0.5) and pause.title == "saving step 6 (1 GB, disk)"


def test_waiting_for_slots_before_and_after_a_failure() -> None:
    record = [*launched()]
    record.insert(2, SlotsAwaited(time=0.5, reason="2 slots are not free"))
    record += killed(5.0, 1)[:4]
    record.append(SlotsAwaited(time=5.3, reason="a slot is missing"))
    timeline = timeline_of(record, now=9.0)
    assert words(timeline, 0) == ["waiting for slots", "launching", "stepping", "recovering", "recovering", "waiting for slots"]  # fmt: skip  # noqa: E501


def test_a_program_without_steps_runs() -> None:
    timeline = timeline_of(launched()[:-1], now=9.0)
    assert words(timeline, 0) == ["waiting for slots", "launching", "running"]
    assert timeline.goodput.goodput is None and timeline.goodput.ettr is None


def test_a_cancel_stops() -> None:
    record = [*launched(), CancelRequested(time=5.0, by="ana"), phase(5.0, "STOPPING", reason="cancelled by ana"),
              phase(6.0, "STOPPED", reason="cancelled by ana")]  # fmt: skip
    timeline = timeline_of(record, now=9.0)
    assert words(timeline, 0)[-1] == "stopping" and timeline.end == 6.0
    assert [m.title for m in timeline.marks] == ["cancel, asked for by ana", "STOPPED: cancelled by ana"]


def test_a_resize_has_other_ranks() -> None:
    record = [
        *launched(4),
        ResizeRequested(time=5.0, ranks=2, by="ana"),
        phase(5.2, "RECOVERING", reason="resized to 2 ranks by ana"),
        RecoveryStarted(time=5.4, restart_count=1, reason="resized to 2 ranks by ana"),
        SlotsGranted(time=5.5, placements=places(2)),
        RunResumed(time=5.8, restart_count=1, step=7, tier=CheckpointTier.DISK),
        began(6.0, 1, 8),
    ]
    timeline = timeline_of(record, now=8.0)
    assert words(timeline, 0)[-1] == "stepping" and words(timeline, 3)[-1] == "recovering"
    assert [a.world_size for a in timeline.attempts] == [4, 2] and timeline.attempts[1].decision.startswith("resized")
    assert timeline.attempts[0].cause is None and timeline.attempts[0].recovered_at is None


def test_a_resume_is_another_attempt_and_the_time_between_is_nobody_s() -> None:
    record = [
        *launched(),
        phase(6.0, "FAILED", reason="rank 1 raised ValueError"),
        ResumeRequested(time=100.0, step=8, ranks=2, by="ana"),
        phase(100.0, "RECOVERING", 1),
        RecoveryStarted(time=100.0, restart_count=1, reason="resumed by ana from step 8"),
        SlotsGranted(time=100.5, placements=places(2)),
        began(102.0, 1, 9),
    ]
    timeline = timeline_of(record, now=104.0)
    assert timeline.attempts[0].end == 6.0 and timeline.attempts[1].start == 100.0
    assert timeline.goodput.wall == pytest.approx(6.0 + 4.0)
    assert [m.title for m in timeline.marks if m.kind is MarkKind.REQUESTED] == ["resume from step 8 on 2 ranks, asked for by ana"]  # fmt: skip  # noqa: E501


def test_everything_worth_a_mark_has_one() -> None:
    bad = Checkpoint(step=5, path="/c/5", world_size=2, saved_at=4.0, problem="model.pt is 12 bytes short")
    differs = Mismatch(compared=Compared.PARAMETERS, ranks=(1,))
    stands = Finding(symptom="the gradients of rank 1 are 3 times smaller", cause="its shard", advice="swap it", step=9)
    odd = Finding(symptom="rank 1 deviates", cause="bits flipped", advice="repair it", step=9)
    record = [
        *launched(),
        CheckpointFailed(time=4.0, restart_count=0, step=5, reason="no space left on device", rank=1),
        StragglerDetected(time=4.5, restart_count=0, rank=1, score=3.0, reason="rank 1 takes 3 times as long"),
        NonFiniteFound(time=4.6, restart_count=0, rank=1, step=9, what="loss"),
        GradientMismatched(time=4.7, restart_count=0, step=9, mismatch=differs, finding=odd),
        ReplicasRepaired(time=4.8, restart_count=0, step=9, ranks=(1,), source=0, tensors=1, size=64),
        GradientsStoodOut(time=4.85, restart_count=0, step=9, ranks=(1,), about="norm", score=-7.25, finding=stands),
        FaultInjected(time=4.9, fault="kill", rank=1),
        FaultHappened(time=4.95, restart_count=0, fault="kill", rank=1, step=10),
        *killed(5.0, 1),
        CheckpointRefused(time=5.5, restart_count=1, checkpoint=bad),
        began(6.0, 1, 5),
    ]
    marks = [(m.kind.name, m.title) for m in timeline_of(record, now=8.0).marks]
    assert marks == [
        ("SAVE_FAILED", "step 5 was not saved: no space left on device"),
        ("STRAGGLER", "rank 1 takes 3 times as long"),
        ("NON_FINITE", "loss of rank 1 is not finite at step 9"),
        ("MISMATCH", "step 9: rank 1 deviates"),
        ("REPAIRED", "rank 1 given what rank 0 has, bit for bit"),
        (
            "STANDS_OUT",
            "step 9: the gradients of rank 1 are 3 times smaller (robust z -7.25); likely cause: its shard",
        ),
        ("REQUESTED", "kill asked for on rank 1"),
        ("INJECTED", "kill done to rank 1 on purpose"),
        ("FAILED", "rank 1 killed by SIGKILL at step 10"),
        ("DECIDED", "restart 1 of 3: rank 1 killed by SIGKILL at step 10"),
        ("REFUSED", "checkpoint of step 5 (disk) passed over: model.pt is 12 bytes short"),
        ("RECOVERED", "all ranks step again, from step 5"),
    ]


def test_a_clock_that_is_an_hour_off_leaves_the_lanes_whole() -> None:
    record = [*launched(), *killed(5.0, 1), began(6.0, 1, 11)]
    told = next(event for event in record if isinstance(event, FailureDetected))
    record[record.index(told)] = replace(told, failure=replace(told.failure, time=3605.0))
    timeline = timeline_of(record, now=8.0)
    for rank in (0, 1):
        spans = of_rank(timeline, rank)
        assert all(a.end == b.start for a, b in pairwise(spans)) and spans[-1].end == 8.0


# --- with the controller ----------------------------------------------------------------------------------------------


def test_kill_recover_kill_again_give_up() -> None:
    story = Story(ranks=4, max_restarts=2)
    story.launch()
    story.take(20)
    story.save(tier=CheckpointTier.MEMORY)
    for _ in range(9):
        story.take(2)
        story.kill(2)
        story.pool.run()
        if story.pool.states[JOB].phase.is_terminal:
            break
        story.launch()
    timeline = story.timeline()
    *failed, last = timeline.attempts
    assert timeline.is_over and len(failed) >= 2
    assert [a.lost_steps for a in failed] == [2, *[3] * (len(failed) - 1)] and last.lost_steps is None
    assert timeline.lost_steps == sum(a.lost_steps or 0 for a in failed)
    assert last.outcome.startswith("FAILED: rank 2 killed by SIGKILL at step 24") and "2" in last.outcome
    assert [a.time_to_detect for a in timeline.attempts] == pytest.approx([0.01] * len(timeline.attempts))
    assert all(a.time_to_recover is not None for a in failed)
    assert sum(m.kind is MarkKind.REQUESTED for m in timeline.marks) == len(timeline.attempts)
    assert_covers(timeline, 4)


def assert_covers(timeline: Timeline, ranks: int) -> None:
    """Every rank's spans follow each other from the job's start to its end."""
    for rank in range(ranks):
        spans = of_rank(timeline, rank)
        assert spans[0].start == timeline.start and spans[-1].end == timeline.end
        assert all(a.end == b.start for a, b in pairwise(spans)), [(s.start, s.end, s.kind) for s in spans]


# --- what the time went into ------------------------------------------------------------------------------------------


def chaos(faults: int = 20, seconds: float = 15.0, step_time: float = 0.1) -> Story:
    """Faults every 15 s; each costs a few steps."""
    story = Story(ranks=2, max_restarts=faults, step_time=step_time)
    story.launch(0.4)
    for number in range(faults):
        story.take(int((seconds - 1) / step_time) - number % 7)
        story.save(stalled=0.0)
        story.take(number % 4)
        story.kill(number % 2, after=0.03 * (number % 5))
        story.pool.run()
        story.launch(0.12)
    story.take(int(seconds / step_time))
    return story


@pytest.mark.parametrize(("seconds", "step_time"), [(15.0, 0.1), (5.0, 0.013), (40.0, 1.7)])
def test_ettr_is_that_of_the_steps_themselves(seconds: float, step_time: float) -> None:
    story = chaos(seconds=seconds, step_time=step_time)
    useful, redone = story.useful()
    goodput = story.timeline().goodput
    wall = story.pool.now - START
    assert goodput.ettr == pytest.approx(useful / wall, rel=0.01)
    assert goodput.useful == pytest.approx(useful, rel=0.01)
    assert goodput.redone == pytest.approx(redone, abs=0.01 * wall)
    assert goodput.wall == pytest.approx(wall)


def test_ettr_of_a_coarse_record_is_that_of_the_steps_too() -> None:
    from workbench.views.buckets import merge_totals

    story = chaos()
    useful, _ = story.useful()
    coarse = merge_totals(story.totals(), 64.0)
    goodput = timeline_of(story.events, coarse, story.pool.now).goodput
    assert len(coarse) < 8 and goodput.useful == pytest.approx(useful, rel=0.01)


def test_steps_behind_a_fallback_to_an_older_checkpoint_do_not_count() -> None:
    story = Story()
    story.launch()
    story.take(100)
    story.saved = 20
    story.kill(0)
    story.pool.run()
    story.launch()
    story.take(30)
    useful, redone = story.useful()
    assert redone == pytest.approx(8.1) and useful == pytest.approx(5.1)
    goodput = story.timeline().goodput
    assert (goodput.useful, goodput.redone) == (pytest.approx(useful, rel=0.02), pytest.approx(redone, rel=0.02))
    assert goodput.goodput is not None and goodput.ettr is not None and goodput.ettr < goodput.goodput < 0.5


def test_standing_still_for_checkpoints_is_told_apart() -> None:
    story = Story()
    story.launch()
    for _ in range(5):
        story.take(10)
        story.save(stalled=1.0)
    goodput = story.timeline().goodput
    assert goodput.checkpoints == pytest.approx(5.0) and goodput.useful == pytest.approx(10.6)
    assert goodput.ettr == pytest.approx(10.6 / goodput.wall)


def test_what_is_on_its_way_is_no_loss() -> None:
    story = Story()
    story.launch()
    story.take(100)
    late = [t for t in story.totals() if t.start + t.width < story.pool.now - 1]
    goodput = timeline_of(story.events, late, story.pool.now).goodput
    assert goodput.goodput == pytest.approx(1.0, abs=0.02)
    stuck = timeline_of(story.events, late, story.pool.now + 60).goodput
    assert stuck.goodput is not None and stuck.goodput < 0.2


# --- many ranks, a long record ----------------------------------------------------------------------------------------


def test_a_thousand_ranks_are_few_spans() -> None:
    timeline = timeline_of([*launched(1024), *killed(5.0, 700)[:4]], now=6.0)
    assert len(timeline.spans) == 6
    assert {size_of(s.ranks) for s in timeline.spans} == {1024, 1023, 1}
    assert runs_of([0, 1, 2, 5]) == ((0, 2), (5, 5))


def months(attempts: int) -> TimelineBuilder:
    builder = TimelineBuilder()
    builder.add(launched())
    for count in range(attempts):
        at = 100.0 + count * 1000
        builder.add([*killed(at, count % 2, count, 10 + count), began(at + 1, count + 1, 10 + count)])
    return builder


def test_a_long_record_is_folded() -> None:
    timeline = months(3000).timeline((), 4e6)
    assert len(timeline.attempts) == ATTEMPTS + 2 and timeline.earlier + len(timeline.attempts) == 3001
    assert SPANS / 4 < len(timeline.spans) <= SPANS + 20
    assert len(timeline.marks) <= 5 * 100 and sum(m.count for m in timeline.marks) == 3 * 3000
    assert timeline.lost_steps == 3000
    assert_covers(timeline, 2)
    folded = next(s for s in timeline.spans if s.parts)
    assert "stepping" in folded.title and "times" in folded.title
    assert sum(part.seconds for part in folded.parts) == pytest.approx(folded.end - folded.start)
    assert all(a.cause is None or not a.cause.traceback for a in timeline.attempts[:-5])


def test_an_update_costs_what_is_new() -> None:
    builder = months(COURSES + 1000)
    before = time.process_time()
    for k in range(100):
        builder.add([FaultInjected(time=1e7 + k, fault="stop", rank=0)])
    adding = time.process_time() - before
    before = time.process_time()
    builder.timeline((), 1e7 + 100)
    assert adding < 0.1 and time.process_time() - before < 0.5

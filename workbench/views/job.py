"""What a panel shows of one job, folded from updates. Pure: the time is the update's `now`.

Rules kept here:

- a rank's numbers are means over its last `WINDOW` seconds, and over at least `FEW` steps when steps are long;
- a running job's throughput is that of the window, and 0 when no step has ended for long; an ended job's is that of its
  whole run;
- what ranks of an earlier generation said does not count as theirs who run now.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from workbench.blackbox import Traffic
from workbench.events import Event, GradientMismatched, NonFiniteFound, SlotsGranted
from workbench.feed import Bucket, Total, Update
from workbench.findings import Finding
from workbench.spec import EntrypointKind
from workbench.state import Checkpoint, Failure, FailureKind, JobPhase, JobState, RankPhase, RankState
from workbench.telemetry import RankBeat
from workbench.views.buckets import across_ranks, join, merge, merge_totals
from workbench.views.checkpoints import CheckpointList
from workbench.views.curve import LossPoint
from workbench.views.found import current
from workbench.views.gradients import GradientsBuilder, GradientsView
from workbench.views.loss import Ranks, diagnose
from workbench.views.series import History, RankPoint, SeriesPoint, known, per_second, point_of, rank_point_of
from workbench.views.spans import Timeline
from workbench.views.straggler import find_slowest, own_time, shares
from workbench.views.timeline import TimelineBuilder
from workbench.views.trouble import Trouble
from workbench.views.wording import exit_text

WINDOW: Final = 5.0  # s
FEW: Final = 3  # steps
SILENT_AFTER: Final = 5.0  # s without a word from a running rank after which its row says so
RANKS_WITH_SERIES: Final = 16
SIGNS: Final = 64  # events that may explain a loss, the newest


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank now. None: not known (yet). `shares` of the step time by phase sum to 1; empty before the first step."""

    rank: int
    phase: RankPhase
    pid: int
    worker: str
    exit: str = ""  # how it ended: "killed by SIGKILL"
    step: int = 0
    activity: str = ""  # a `blackbox.Activity` name
    collective: str = ""
    collective_seq: int = 0  # its number in the default group; 0: it has none
    since: float = 0.0  # s that it has been at it
    silent_for: float = 0.0  # s without a word from it; 0 when it is heard
    step_time: float | None = None
    own_time: float | None = None  # of a step: all but the wait for communication
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    shares: dict[str, float] = {}
    rss: int | None = None
    cpu: float | None = None
    disk_read: float | None = None  # bytes/s
    disk_write: float | None = None
    gpu: float | None = None
    gpu_memory: int | None = None
    loss: float | None = None
    hidden: float | None = None  # share of DDP's communication in which backward still computes; None: not measured
    traffic: tuple[Traffic, ...] = ()  # of this process since it began, in which it has finished `counted` steps
    counted: int = 0
    is_slowest: bool = False
    log_path: str = ""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One job now. Times in s, `throughput` in samples/s of all ranks, `progress` (done, in all) of the rank behind.

    `counts_steps`: progress is in steps of the job; else in a unit of the program's own, or of a pass of many.
    """

    job_id: str
    label: str
    phase: JobPhase
    reason: str
    restart_count: int
    max_restarts: int
    restarts: str  # in words: "restart 1 of 3"; empty before the first
    world_size: int
    is_interactive: bool
    submitted_at: float
    ended_at: float | None
    running_for: float
    now: float
    step: int = 0
    progress: tuple[int, int] | None = None
    counts_steps: bool = True
    left: float | None = None  # s until all is done, when that can be told
    throughput: float = 0.0
    tokens_per_s: float = 0.0
    step_time: float | None = None
    loss: float | None = None
    learning_rate: float | None = None  # of the optimizer's first parameter group; None: not known
    slowest: str = ""  # why a rank is marked, in words
    trouble: tuple[str, ...] = ()  # what is wrong though it goes on, in sentences
    rows: tuple[RankRow, ...] = ()
    series: tuple[SeriesPoint, ...] = ()
    rank_series: dict[int, tuple[RankPoint, ...]] = {}
    failure: Failure | None = None
    has_recovered: bool = False  # of that failure
    telemetry_dropped: int = 0
    output_dropped: int = 0
    timeline: Timeline | None = None  # None: the record's beginning has not come
    checkpoints: tuple[Checkpoint, ...] = ()  # the newest first
    findings: tuple[Finding, ...] = ()  # about the loss, and about what ranks hold and read
    gradients: GradientsView = GradientsView()
    is_saved: bool = False  # of a saved session: nothing comes any more, however it stood

    @property
    def is_over(self) -> bool:
        """Whether it is told in the past."""
        return self.is_saved or self.phase.is_terminal


class ViewBuilder:
    """Add every update of a job in turn, beginning with one from an empty cursor; `view` may be asked at any time.

    `is_past`: the update is of a moment long ago. Beats are kept here and there, so that nobody's silence is known.
    `is_saved`: see `JobView`.
    """

    def __init__(self, *, is_past: bool = False, is_saved: bool = False) -> None:
        self._is_past, self._is_saved = is_past, is_saved
        self._state: JobState | None = None
        self._now = 0.0
        self._granted_at: float | None = None
        self._beats: dict[int, RankBeat] = {}
        self._recent: dict[int, deque[Bucket]] = {}
        self._whole = Bucket(
            rank=0, start=math.inf, width=0.0, steps=0, last_step=0, duration=0.0, slowest=0.0, data=0.0, forward=0.0,
            backward=0.0, comm=0.0, optimizer=0.0, checkpoint=0.0, samples=0.0, tokens=0.0, loss=math.nan,
        )  # fmt: skip
        self._last_step = 0  # of the newest total; a job may have gone back to an earlier one
        self._began = 0.0  # when the generation got its slots
        self._ranks = 0  # that were ever seen to finish a step at the same time
        self._totals = History[Total](merge_totals)
        self._by_rank: dict[int, History[Bucket]] = {}
        self._telemetry_dropped = self._output_dropped = 0
        self._problems: tuple[str, ...] = ()  # of the record
        self._timeline, self._checkpoints, self._trouble = TimelineBuilder(), CheckpointList(), Trouble()
        self._signs: deque[Event] = deque(maxlen=SIGNS)
        self._gradients = GradientsBuilder()

    def add(self, update: Update) -> None:
        old = self._state
        if old is not None and old.restart_count != update.state.restart_count:
            self._beats.clear()  # what the ranks of another generation said is not about these
            self._recent.clear()
            self._signs.clear()
        self._state, self._now = update.state, update.now
        self._telemetry_dropped, self._output_dropped = update.telemetry_dropped, update.output_dropped
        self._problems = update.problems
        for event in update.events:
            if isinstance(event, SlotsGranted):
                self._began = event.time
                self._granted_at = event.time if self._granted_at is None else self._granted_at
            if isinstance(event, (GradientMismatched, NonFiniteFound)):
                self._signs.append(event)
        self._timeline.add(update.events)
        self._checkpoints.add(update.events)
        self._trouble.add(update.events)
        self._gradients.add(update.events, update.checks)
        self._beats.update((beat.rank, beat) for beat in update.beats)
        self._add_buckets(update)

    def _add_buckets(self, update: Update) -> None:
        totals = list(update.totals) or across_ranks(update.buckets)
        self._totals.extend(totals)
        self._ranks = max([self._ranks, *(total.ranks for total in totals)])
        for total in totals:
            self._whole = _add_total(self._whole, total)
            self._last_step = total.last_step
        by_rank: dict[int, list[Bucket]] = {}
        for bucket in update.buckets:
            by_rank.setdefault(bucket.rank, []).append(bucket)
        for rank, buckets in by_rank.items():
            if current := [bucket for bucket in buckets if _end(bucket) > self._began]:
                _keep_recent(self._recent.setdefault(rank, deque()), current)
            if update.state.world_size <= RANKS_WITH_SERIES:
                self._by_rank.setdefault(rank, History(merge)).extend(buckets)

    def view(self) -> JobView:
        """The job as the updates tell it. Raises `ValueError` before the first update."""
        state = self._state
        if state is None:
            raise ValueError("no update has been added yet")
        window = {rank: _sum(buckets) for rank, buckets in self._recent.items()}
        slowest, why = find_slowest(window, is_over=self._is_saved or state.phase.is_terminal)
        rows = tuple(
            self._row(rank, window.get(rank.rank), is_slowest=rank.rank == slowest)
            for rank in state.ranks or _placeholders(state)
        )
        samples, tokens, step_time = self._rates(state, rows, window)
        progress, counts_steps = self._progress(rows)
        gradients = self._gradients.view()
        return JobView(
            job_id=state.job_id,
            label=state.spec.label,
            phase=state.phase,
            reason=state.reason,
            restart_count=state.restart_count,
            max_restarts=state.spec.max_restarts,
            restarts=state.restarts,
            world_size=state.world_size,
            is_interactive=state.spec.kind is EntrypointKind.INTERACTIVE,
            submitted_at=state.submitted_at,
            ended_at=state.ended_at,
            running_for=self._running_for(state),
            now=self._now,
            step=max((row.step for row in rows), default=0) or self._last_step,
            progress=progress,
            counts_steps=counts_steps,
            left=_left(state, progress, step_time) if counts_steps else None,
            throughput=samples,
            tokens_per_s=tokens,
            step_time=step_time,
            loss=_mean([row.loss for row in rows if row.loss is not None]) or known(self._whole.loss),
            learning_rate=self._whole.learning_rate,
            slowest=why,
            trouble=(*self._trouble.sentences, *self._problems),
            rows=rows,
            series=tuple(point_of(total, self._ranks) for total in self._totals.items),
            rank_series={rank: tuple(map(rank_point_of, h.items)) for rank, h in sorted(self._by_rank.items())},
            failure=state.failure,
            has_recovered=state.has_recovered,
            telemetry_dropped=self._telemetry_dropped,
            output_dropped=self._output_dropped,
            timeline=self._timeline.timeline(self._totals.items, self._now) if self._timeline.has_begun else None,
            checkpoints=self._checkpoints.newest_first,
            findings=self._findings(state, _ranks_now(rows, window), gradients),
            gradients=gradients,
            is_saved=self._is_saved,
        )

    def _findings(self, state: JobState, ranks: Ranks, gradients: GradientsView) -> tuple[Finding, ...]:
        is_well = state.phase in (JobPhase.HEALTHY, JobPhase.SUCCEEDED)
        is_told = not is_well and state.failure is not None and state.failure.kind is FailureKind.DIVERGED
        loss = () if is_told else diagnose(self._losses(), tuple(self._signs), ranks)
        return *loss, *(one.finding for one in current(gradients.found, state.restart_count))

    def _losses(self) -> list[LossPoint]:
        """With those of ranks where all of them, or the newest at least, are known by rank."""
        by_start: dict[float, dict[int, float]] = {}
        sources = {rank: history.items for rank, history in self._by_rank.items()} or self._recent
        for rank, buckets in sources.items():
            for bucket in buckets:
                if not math.isnan(bucket.loss):
                    by_start.setdefault(bucket.start, {})[rank] = bucket.loss
        return [
            LossPoint(total.last_step, total.loss, by_start.get(total.start, {}))
            for total in self._totals.items
            if math.isfinite(total.loss)
        ]

    def _running_for(self, state: JobState) -> float:
        start = self._granted_at if self._granted_at is not None else state.submitted_at
        return max(0.0, (self._now if state.ended_at is None else state.ended_at) - start)

    def _row(self, rank: RankState, window: Bucket | None, *, is_slowest: bool) -> RankRow:
        beat = self._beats.get(rank.rank)
        runs = rank.phase is RankPhase.HEALTHY
        heard = max(beat.time if beat else 0.0, window.start + window.width if window else 0.0)
        is_known = runs and heard > 0 and not self._is_past
        silent_for = self._now - heard if is_known and self._now - heard > SILENT_AFTER else 0.0
        shown = beat if runs else None
        steps = window.steps if window else 0
        return RankRow(
            rank=rank.rank,
            phase=rank.phase,
            pid=rank.pid,
            worker=rank.worker,
            exit=exit_text(rank.exit_code, rank.signal, is_ours=rank.phase is RankPhase.STOPPED),
            step=max(beat.step if beat else 0, window.last_step if window else 0),
            activity=shown.activity if shown else "",
            collective=shown.collective if shown else "",
            collective_seq=shown.collective_seq if shown else 0,
            since=shown.since + max(0.0, self._now - shown.time) if shown else 0.0,
            silent_for=silent_for,
            step_time=window.duration / steps if window and steps else None,
            own_time=own_time(window) if window else None,
            samples_per_s=per_second(window, "samples"),
            tokens_per_s=per_second(window, "tokens"),
            shares=shares(window) if window else {},
            rss=shown.rss if shown else None,
            cpu=shown.cpu if shown else None,
            disk_read=shown.disk_read if shown else None,
            disk_write=shown.disk_write if shown else None,
            gpu=shown.gpu if shown else None,
            gpu_memory=shown.gpu_memory if shown else None,
            loss=known(window.loss) if window else None,
            hidden=beat.hidden if beat else None,
            traffic=beat.traffic if beat else (),
            counted=beat.counted if beat else 0,
            is_slowest=is_slowest,
            log_path=rank.log_path,
        )

    def _rates(
        self, state: JobState, rows: tuple[RankRow, ...], window: Mapping[int, Bucket]
    ) -> tuple[float, float, float | None]:
        """Samples/s and tokens/s of all ranks, and the mean step time."""
        if state.phase.is_terminal:
            whole = self._whole
            mean = whole.duration / whole.steps if whole.steps else None
            return per_second(whole, "samples") * self._ranks, per_second(whole, "tokens") * self._ranks, mean
        getting_on = [
            row
            for row in rows
            if row.step_time is not None
            and not row.phase.has_exited
            and self._now - _end(window[row.rank]) < max(WINDOW, 3 * row.step_time) + 2.0
        ]
        mean = _mean([row.step_time for row in rows if row.step_time is not None])
        return sum(r.samples_per_s for r in getting_on), sum(r.tokens_per_s for r in getting_on), mean

    def _progress(self, rows: Sequence[RankRow]) -> tuple[tuple[int, int] | None, bool]:
        """That of the rank behind, and whether it counts the job's steps."""
        told = [(beat.progress, beat.step) for beat in self._beats.values() if beat.progress and beat.progress[1] > 0]
        if not told:
            return None, True
        counts_steps = all(abs(done - step) <= 1 for (done, _), step in told)
        (done, total), _ = min(told, key=lambda one: one[0][0] / one[0][1])
        if counts_steps:  # the last beat is older than what came with a rank's end
            done = min(total, max(done, min(row.step for row in rows)))
        return (done, total), counts_steps


def _ranks_now(rows: tuple[RankRow, ...], window: Mapping[int, Bucket]) -> Ranks:
    buckets = {row.rank: window[row.rank] for row in rows if row.rank in window and window[row.rank].steps}
    return Ranks(
        samples={rank: bucket.samples / bucket.steps for rank, bucket in buckets.items()},
        steps={rank: bucket.last_step for rank, bucket in buckets.items()},
        recent=max([bucket.steps for bucket in buckets.values()], default=0),
    )


def _keep_recent(recent: deque[Bucket], buckets: list[Bucket]) -> None:
    recent.extend(buckets)
    newest, steps = _end(recent[-1]), sum(bucket.steps for bucket in recent)
    while len(recent) > 1 and _end(recent[0]) <= newest - WINDOW and steps - recent[0].steps >= FEW:
        steps -= recent.popleft().steps


def _sum(buckets: deque[Bucket]) -> Bucket:
    whole = buckets[0]
    for bucket in list(buckets)[1:]:
        whole = join(whole, bucket)
    return whole


def _add_total(whole: Bucket, total: Total) -> Bucket:
    """A bucket of "rank 0" that sums all totals there ever were."""
    values = {name: getattr(total, name) for name in total.__struct_fields__ if name not in ("ranks", "fastest")}
    return join(whole, Bucket(rank=0, **values)) if whole.steps else Bucket(rank=0, **values)


def _placeholders(state: JobState) -> tuple[RankState, ...]:
    return tuple(RankState(rank=p.rank, worker=p.worker) for p in state.placements)


def _left(state: JobState, progress: tuple[int, int] | None, step_time: float | None) -> float | None:
    if progress is None or step_time is None or state.phase is not JobPhase.HEALTHY:
        return None
    return max(0, progress[1] - progress[0]) * step_time


def _end(bucket: Bucket) -> float:
    return bucket.start + bucket.width


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None

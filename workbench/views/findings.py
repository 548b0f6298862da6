"""What is wrong with a job or could be better, with its evidence and what to do: a table of rules over what is known.

A rule looks at one thing and gives a `Finding` or nothing. Facts are told as facts; where a cause is guessed it says
"likely".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final, NamedTuple

from workbench.findings import Finding, Severity
from workbench.state import JobPhase
from workbench.views.acts import Act
from workbench.views.advice import advise_on
from workbench.views.communication import entered, odd_ones
from workbench.views.job import JobView
from workbench.views.panels import PanelView
from workbench.views.ranking import pattern, ranking
from workbench.views.spans import MarkKind
from workbench.views.wording import bare_rate, count, percent, plural, ranks_text, seconds

DATA_BOUND: Final = 0.25  # share of a step spent waiting for data
WAIT_BOUND: Final = 0.5  # share of a step spent waiting for other ranks, of the rank that waits the least
IDLE: Final = 40.0  # percent that a GPU is busy
UNSEEN: Final = 0.01  # share of steps whose telemetry was lost


class Shown(NamedTuple):
    """A finding as the page has it: `act` does what it advises, `ranks` are those that it is about."""

    finding: Finding
    act: Act | None = None
    ranks: tuple[int, ...] = ()


def findings(view: JobView, more: PanelView) -> tuple[Shown, ...]:
    """What there is to say now, the gravest first."""
    order = list(Severity)[::-1]
    found = [finding for rule in RULES if (finding := rule(view, more)) is not None] + _of_training(view)
    return tuple(sorted(found, key=lambda one: order.index(one.finding.severity)))


def _shown(
    severity: Severity, symptom: str, evidence: str = "", cause: str = "", advice: str = "",
    act: Act | None = None, ranks: tuple[int, ...] = (),
) -> Shown:  # fmt: skip
    finding = Finding(
        symptom=symptom, cause=cause, advice=advice, evidence=(evidence,) if evidence else (), severity=severity,
        rank=ranks[0] if len(ranks) == 1 else None,
    )  # fmt: skip
    return Shown(finding, act, ranks)


def _failed(view: JobView, more: PanelView) -> Shown | None:
    failure = view.failure
    if failure is None:
        return None
    advice = advise_on(view)
    is_over = view.phase in (JobPhase.FAILED, JobPhase.STOPPED) and not view.has_recovered
    can_resume = is_over and not view.is_interactive and any(not c.problem for c in view.checkpoints)
    then = "recovered from: " if view.has_recovered else ""
    return _shown(
        Severity.NOTICE if then else Severity.ERROR if is_over else Severity.WARNING,
        then + " ".join(failure.reason.split()),
        view.restarts,
        advice.cause if advice else "",
        advice.advice if advice else "",
        Act("resume") if can_resume else None,
        (failure.rank,) if failure.rank is not None else (),
    )


def _stalled(view: JobView, more: PanelView) -> Shown | None:
    marks = view.timeline.marks if view.timeline is not None else ()
    told = [mark for mark in marks if mark.kind in (MarkKind.STALLED, MarkKind.STALL_ENDED)]
    if not told or told[-1].kind is MarkKind.STALL_ENDED or told[-1].restart_count != view.restart_count:
        return None
    if view.phase.is_terminal:
        return None
    return _shown(
        Severity.ERROR, told[-1].title, advice="look at the stacks of the ranks it names", act=Act("stacks"),
        ranks=tuple(rank for a, b in told[-1].ranks for rank in range(a, b + 1)),
    )  # fmt: skip


def _held_up(view: JobView, more: PanelView) -> Shown | None:
    if not (said := odd_ones(entered(view.rows))):
        return None
    return _shown(Severity.WARNING, said, advice="look at their stacks", act=Act("stacks"))


def _of_training(view: JobView) -> list[Shown]:
    """What is known of the loss, and of what ranks hold and read."""
    return [Shown(one, ranks=() if one.rank is None else (one.rank,)) for one in view.findings]


def _straggler(view: JobView, more: PanelView) -> Shown | None:
    ranked = ranking(view.rows, more.best)
    slow = tuple(one for one in ranked if one.is_slow)
    if not slow or view.phase is not JobPhase.HEALTHY or len(ranked) < 2:
        return None
    rest = statistics.median(one.own_time for one in ranked if not one.is_slow)
    changed = slow[0].to_itself is not None and slow[0].to_itself > 1.5
    return _shown(
        Severity.WARNING,
        pattern(ranked),
        f"{ranks_text([slow[0].rank])} needs {seconds(slow[0].own_time)} for its own part of a step, the median rank "
        f"{seconds(rest)}",
        "something on its host changed: its own best was much better" if changed else "",
        "compare the hosts: other processes, clocks, temperature, disks; or give it less work",
        ranks=tuple(one.rank for one in slow[:8]),
    )


def _data_bound(view: JobView, more: PanelView) -> Shown | None:
    advice = "more DataLoader workers, prefetching, or a faster disk"
    return _share_of(view, "data", DATA_BOUND, "waiting for data", advice)


def _wait_bound(view: JobView, more: PanelView) -> Shown | None:
    shares = [row.shares.get("comm", 0.0) for row in view.rows if row.shares]
    if len(shares) < 2 or min(shares) < WAIT_BOUND:
        return None
    spends = "spent" if view.is_over else "spends"
    return _shown(
        Severity.NOTICE,
        f"Every rank {spends} at least {percent(min(shares))} of a step in communication.",
        "",
        "steps are short for what is sent, or the network is slow",
        "larger batches, gradient accumulation with no_sync(), or compressed gradients",
    )


def _share_of(view: JobView, phase: str, least: float, doing: str, advice: str) -> Shown | None:
    shares = {row.rank: row.shares[phase] for row in view.rows if phase in row.shares}
    high = {rank: share for rank, share in shares.items() if share >= least}
    if not high:
        return None
    who = "All ranks" if len(high) == len(shares) and len(shares) > 1 else ranks_text(high).capitalize()
    verb = "spent" if view.is_over else "spends" if len(high) == 1 else "spend"
    text = f"{who} {verb} {percent(statistics.fmean(high.values()))} of a step {doing}."
    return _shown(Severity.NOTICE, text, advice=advice, ranks=tuple(high)[:8])


def _idle_gpus(view: JobView, more: PanelView) -> Shown | None:
    gpus = [row.gpu for row in view.rows if row.gpu is not None]
    if not gpus or view.phase is not JobPhase.HEALTHY or not view.throughput or statistics.fmean(gpus) >= IDLE:
        return None
    return _shown(
        Severity.NOTICE,
        f"The GPUs are busy {statistics.fmean(gpus):.0f} % of the time.",
        f"at {bare_rate(view.throughput)} samples/s",
        advice="larger batches, or see where a step goes in the table of ranks",
    )


def _unseen(view: JobView, more: PanelView) -> Shown | None:
    if not view.step or view.telemetry_dropped < UNSEEN * view.step * max(1, view.world_size):
        return None
    return _shown(
        Severity.NOTICE,
        f"{plural(view.telemetry_dropped, 'step')} went by too fast to be seen.",
        f"of {count(view.step)} a rank",
        advice="means are of the steps that were seen; training is not held up by it",
    )


RULES: Final[tuple[Callable[[JobView, PanelView], Shown | None], ...]] = (
    _failed, _stalled, _held_up, _straggler, _data_bound, _wait_bound, _idle_gpus, _unseen,
)  # fmt: skip

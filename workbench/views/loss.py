"""Why a loss jumps, grows, oscillates, is not finite, or is another on one rank: findings, each cause weighed.

All causes are looked at, and what each was found to be is the evidence: one that is ruled out is told as well. The
first of `CAUSES` that something speaks for is the likely one; a learning rate that is too high is what remains. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from workbench.events import Event, GradientMismatched, NonFiniteFound
from workbench.findings import Finding, Severity
from workbench.views.curve import Anomaly, LossPoint, Shape, find_anomaly, spread, thinned

LEAST: Final = 8  # points at which ranks are compared
TWICE: Final = 2.0  # how much more than the others' a rank's loss must be
SURE: Final = 6.0
MANY: Final = 16  # ranks; of more only the newest points are kept by rank
MANY_SURE: Final = 10.0
FEW: Final = 3
UNEVEN: Final = 1.25  # between the samples a step of two ranks
BURST: Final = 10.0  # times its best level: what half precision and a loss that blows up have in common


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of ranks now: samples a step, steps taken, and how many the quickest has taken of late."""

    samples: Mapping[int, float] = {}
    steps: Mapping[int, int] = {}
    recent: int = 0


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """What all causes are judged by."""

    trouble: Anomaly | None
    odd_rank: OddRank | None
    ranks: Ranks
    mismatch: GradientMismatched | None
    broken: tuple[NonFiniteFound, ...]
    alike: float | None  # by how much of the loss ranks differ; None: not known


class OddRank(msgspec.Struct, frozen=True, kw_only=True):
    """Losses over the points in which it stood out, and since when."""

    rank: int
    loss: float
    others: float
    step: int
    count: int  # ranks in all


def diagnose(points: Sequence[LossPoint], events: Sequence[Event], ranks: Ranks) -> tuple[Finding, ...]:
    """`events`: those about gradients that differ and values that are not finite; others are passed over."""
    kept = behind_now(points)
    broken = tuple(event for event in events if isinstance(event, NonFiniteFound))
    mismatch = next((event for event in reversed(events) if isinstance(event, GradientMismatched)), None)
    signs = Signs(
        trouble=find_anomaly(kept),
        odd_rank=find_odd_rank(kept),
        ranks=ranks,
        mismatch=mismatch,
        broken=broken,
        alike=difference(kept),
    )
    if broken:
        return (_of_broken(signs),)
    if signs.trouble is not None:
        return (_of_trouble(signs, signs.trouble),)
    return (_of_odd_rank(signs.odd_rank, signs),) if signs.odd_rank is not None else ()


def behind_now(points: Sequence[LossPoint]) -> list[LossPoint]:
    """Without the steps that were gone back over: what counts is the way to the newest one."""
    kept: list[LossPoint] = []
    for point in points:
        while kept and kept[-1].step >= point.step:
            kept.pop()
        kept.append(point)
    return kept


def find_odd_rank(points: Sequence[LossPoint]) -> OddRank | None:
    """The rank whose loss stands out above the others' at the newest points, all of them but a few.

    Of two ranks it is the one with the higher loss, which may be the better judge of its data than the other.
    """
    kept = [point for point in thinned(points) if len(point.ranks) > 1][-4 * LEAST :]
    ranks = set.intersection(*(set(point.ranks) for point in kept)) if kept else set()
    if len(ranks) > MANY:
        return _odd_of_many(kept, ranks)
    if len(kept) < LEAST or len(ranks) < 2:
        return None
    above = {rank: [p.ranks[rank] - _others(p, rank) for p in kept] for rank in ranks}
    odd = max(ranks, key=lambda rank: statistics.median(above[rank]))
    # As long as it has stood out by half of what it does now, without a break.
    bar = max(0.0, statistics.median(above[odd][-LEAST:]) / 2)
    since = next((at for at in range(len(kept) - 1, -1, -1) if above[odd][at] <= bar), -1) + 1
    if len(kept) - since < LEAST:
        return None
    own, excess = [p.ranks[odd] for p in kept[since:]], above[odd][since:]
    others = [_others(p, odd) for p in kept[since:]]
    middle, usual = statistics.median(excess), statistics.median(others)
    rest = [
        abs(statistics.median(p.ranks[rank] - _others(p, rank, odd) for p in kept[since:])) for rank in ranks - {odd}
    ]
    noise = max([spread(excess) / len(excess) ** 0.5, *rest])
    if middle < SURE * noise or middle < (TWICE - 1) * abs(usual):
        return None
    return OddRank(rank=odd, loss=statistics.median(own), others=usual, step=kept[since].step, count=len(ranks))


def _odd_of_many(points: Sequence[LossPoint], ranks: set[int]) -> OddRank | None:
    """Of so many the others tell what is usual, and few points do."""
    if len(points) < FEW:
        return None
    losses = {rank: statistics.median(point.ranks[rank] for point in points) for rank in ranks}
    odd, usual = max(losses, key=losses.__getitem__), statistics.median(losses.values())
    needed = max(MANY_SURE * spread(list(losses.values())), (TWICE - 1) * abs(usual))
    if min(point.ranks[odd] for point in points) - usual < needed or needed == 0:
        return None
    return OddRank(rank=odd, loss=losses[odd], others=usual, step=points[0].step, count=len(ranks))


def _others(point: LossPoint, *besides: int) -> float:
    """The median loss of all other ranks; the first of these' own where there is none."""
    return statistics.median(
        [loss for rank, loss in point.ranks.items() if rank not in besides] or [point.ranks[besides[0]]]
    )


def difference(points: Sequence[LossPoint]) -> float | None:
    """Between the ranks' median losses over the newest points, as a share of them."""
    kept = [point.ranks for point in points[-LEAST:] if len(point.ranks) > 1]
    if not kept:
        return None
    ranks = set.intersection(*map(set, kept))
    medians = [statistics.median(losses[rank] for losses in kept) for rank in ranks]
    middle = abs(statistics.median(medians)) if medians else 0.0
    return (max(medians) - min(medians)) / middle if middle else None


# --- causes -----------------------------------------------------------------------------------------------------------


class Cause(msgspec.Struct, frozen=True):
    """`speaks`: the evidence for it, empty if there is none. `denies`: what is told where there is none."""

    speaks: Callable[[Signs], str]
    denies: Callable[[Signs], str]
    cause: str
    advice: str


def _bad_data(signs: Signs) -> str:
    odd = signs.odd_rank
    if odd is None:
        return ""
    rest = "the other has" if odd.count == 2 else "the others have"
    return f"rank {odd.rank}'s loss is {odd.loss:.3g} since step {odd.step} or before, {rest} {odd.others:.3g}"


def _no_bad_data(signs: Signs) -> str:
    return "" if signs.alike is None else f"the losses of ranks differ by {signs.alike:.0%} only"


def _stale(signs: Signs) -> str:
    if signs.mismatch is not None:
        why = signs.mismatch.finding.cause if signs.mismatch.finding is not None else "see the consistency view"
        return f"replicas differ since step {signs.mismatch.step}: {why}"
    steps = signs.ranks.steps
    if steps and max(steps.values()) - min(steps.values()) > signs.ranks.recent + 1:
        last = min(steps, key=steps.__getitem__)
        return f"rank {last} has taken {steps[last]:,} steps, others up to {max(steps.values()):,}"
    return ""


def _uneven(signs: Signs) -> str:
    samples = {rank: count for rank, count in signs.ranks.samples.items() if count > 0}
    if len(samples) < 2:
        return ""
    few, many = min(samples, key=samples.__getitem__), max(samples, key=samples.__getitem__)
    if samples[many] < UNEVEN * samples[few]:
        return ""
    return f"rank {few} trains on {samples[few]:.3g} samples a step, rank {many} on {samples[many]:.3g}"


def _even(signs: Signs) -> str:
    samples = [count for count in signs.ranks.samples.values() if count > 0]
    return f"every rank trains on about {statistics.median(samples):.3g} samples a step" if len(samples) > 1 else ""


def _overflow(signs: Signs) -> str:
    if signs.broken:
        first = signs.broken[0]
        return f"{first.what} of rank {first.rank} was not finite at step {first.step}"
    trouble = signs.trouble
    if trouble is None or trouble.shape is Shape.OSCILLATES or abs(trouble.now) < 1e4 * max(abs(trouble.before), 1e-3):
        return ""
    return f"it is {trouble.now / max(abs(trouble.before), 1e-3):.0e} times what it was"


def _rate(signs: Signs) -> str:
    trouble = signs.trouble
    if trouble is None:
        return ""
    if trouble.shape is Shape.OSCILLATES:
        return "the loss swings and gains nothing"
    return f"the loss rises far beyond its noise ({trouble.noise:.2g} a point)"


def nothing(signs: Signs) -> str:
    return ""


CAUSES: Final = (
    Cause(
        _bad_data, _no_bad_data,
        "that rank's data or labels are wrong, or from another source",
        "look at its shard and its preprocessing (%dtrain logs -r {rank}); train without that rank to compare",
    ),
    Cause(
        _stale, nothing,
        "gradients are stale, or not the same on all ranks",
        "see why replicas differ; do not step while an all-reduce is outstanding, or lower the learning rate with the "
        "staleness",
    ),
    Cause(
        _overflow, nothing,
        "numbers overflowed, in half precision or because a step was far too large",
        "use bfloat16 or a GradScaler, clip gradients, and lower the learning rate",
    ),
    Cause(
        _uneven, _even,
        "shards are uneven: ranks with few samples count as much as those with many",
        "use DistributedSampler with drop_last=True, or weight each rank's loss by its samples",
    ),
    Cause(
        _rate, nothing,
        "the learning rate is too high",
        "lower it three- to tenfold, warm up for some hundred steps, or clip gradients",
    ),
)  # fmt: skip


def _of_trouble(signs: Signs, trouble: Anomaly) -> Finding:
    if trouble.shape is Shape.OSCILLATES:
        symptom = f"the loss oscillates since step {trouble.step}: it swings by {trouble.now:.3g}"
        symptom += f", earlier by {trouble.before:.3g}" if trouble.before < trouble.now else ", from the beginning"
    else:
        symptom = f"the loss {trouble.shape.value} from {trouble.before:.3g} to {trouble.now:.3g}"
        symptom += f" at step {trouble.step}" if trouble.shape is Shape.JUMPS else f" since step {trouble.step}"
    return _finding(symptom, signs, trouble.step)


def _of_odd_rank(odd: OddRank, signs: Signs) -> Finding:
    return _finding(f"rank {odd.rank}'s loss is not like that of the others", signs, odd.step)


def _of_broken(signs: Signs) -> Finding:
    """Who was first, before the all-reduce spread it, tells whose it was."""
    step = min(event.step for event in signs.broken)
    first = sorted({event.rank for event in signs.broken if event.step == step})
    event = next(event for event in signs.broken if event.step == step)
    who = f"of rank {first[0]} " if len(first) == 1 else ""
    symptom = f"{event.what} {who}is not finite since step {step}"
    grew = signs.trouble is not None and signs.trouble.now > BURST * max(abs(signs.trouble.before), 1e-3)
    if grew and signs.trouble is not None:
        text = (
            f"before, the loss {signs.trouble.shape.value} from {signs.trouble.before:.3g} to {signs.trouble.now:.3g}"
        )
        likely, more = CAUSES[-1], (text,)
    elif len(first) == 1 and len(signs.ranks.steps) > 1:
        likely, more = CAUSES[0], (f"rank {first[0]} alone had it first",)
    else:
        likely, more = CAUSES[2], ("the loss was as usual before",)
    return Finding(
        symptom=symptom, evidence=more, cause=likely.cause, advice=likely.advice.format(rank=first[0]),
        severity=Severity.ERROR, step=step, rank=first[0] if len(first) == 1 else None,
    )  # fmt: skip


def _finding(symptom: str, signs: Signs, step: int) -> Finding:
    """With the likely cause first, and all evidence for and against the others after its own."""
    told = [(cause, cause.speaks(signs)) for cause in CAUSES]
    likely, reason = next((cause, text) for cause, text in told if text)
    others = [text or cause.denies(signs) for cause, text in told if cause is not likely and cause.speaks is not _rate]
    is_rank = likely.speaks is _bad_data and signs.odd_rank is not None
    rank = signs.odd_rank.rank if is_rank and signs.odd_rank is not None else None
    return Finding(
        symptom=symptom,
        evidence=(reason, *filter(None, others)),
        cause=likely.cause,
        advice=likely.advice.format(rank=rank),
        severity=Severity.WARNING,
        step=step,
        rank=rank,
    )

"""Which rank's own gradients are not like those of the others: larger, smaller, or pointing elsewhere. Pure.

What the optimizer uses is the mean; a rank whose part of it is odd reads other data, has other labels, computes its
loss otherwise, or was tampered with, and nothing else shows it. Ranks are compared by the robust z-score of Iglewicz
and Hoaglin, How to Detect and Handle Outliers (1993): z = 0.6745 (x - median) / MAD, MAD the median absolute deviation,
which nearly half of the ranks may leave without moving it. Their bound of 3.5 is for many values of a normal
distribution; of few ranks `SURE` is asked, a difference that matters, and that it lasts: it must be there in each of
several reports.

Of two ranks nobody can tell which is odd: both are named, and it is said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from workbench.findings import Finding, Severity
from workbench.telemetry import GradientStatistics

SURE: Final = 6.0
HALF_SURE: Final = 3.0  # in each single report
LEAST: Final = 5  # looks
NEEDED: Final = 3  # reports in a row
KEPT: Final = 6  # reports that are taken together; each has one look at least
FACTOR: Final = 2.0  # by which a norm must be off the median
OF_FEW: Final = 2.5  # the same of fewer than `FEW` ranks, whose MAD is small by chance now and then
OF_TWO: Final = 3.0
FEW: Final = 8
TURNED: Final = 0.25  # by which a cosine must be below the median
EVEN_LOG: Final = 0.05  # a smaller MAD counts as this, of logarithms of norms
EVEN_COSINE: Final = 0.02
TINY: Final = 1e-30  # the norm of what is zero
NAMED: Final = 4  # at a time
OTHERS: Final = "its shard or labels are unlike the others'"
SWAP: Final = (
    "give the shard of {rank} to another rank for some steps: if that one stands out then, it is the data; if {rank} "
    "still does, look at what only it runs, and at its device"
)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """`about`: "direction" or "norm". `score`: the robust z; 0 where of two ranks neither is known to be odd."""

    ranks: tuple[int, ...]
    about: str
    score: float
    finding: Finding


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """The last reports of each optimizer, and who is named for what."""

    recent: Mapping[int, tuple[GradientStatistics, ...]] = {}
    named: frozenset[tuple[int, tuple[int, ...], str]] = frozenset()


class Values(msgspec.Struct, frozen=True):
    """Of the ranks of which all is known: means over the looks."""

    ranks: tuple[int, ...]
    logs: tuple[float, ...]  # of norms
    cosines: tuple[float, ...]
    looks: int
    steps: tuple[int, int]


def advance(marks: Marks, report: GradientStatistics) -> tuple[Marks, tuple[Standing, ...]]:
    """One report more: new marks, and who stands out and was not named for it yet."""
    old = marks.recent.get(report.optimizer, ())
    same = tuple(one for one in old if (one.ranks, one.restart_count) == (report.ranks, report.restart_count))
    recent = (*same, report)[-KEPT:]
    lasting = set.intersection(*({_key(one) for one in judge(values_of([part]), HALF_SURE)} for part in recent))
    all_looks = values_of(recent)
    is_enough = len(recent) >= NEEDED and all_looks.looks >= LEAST
    found = [one for one in judge(all_looks, SURE) if _key(one) in lasting][:NAMED] if is_enough else []
    keys = {(report.optimizer, one.ranks, one.about) for one in found}
    others = {key for key in marks.named if key[0] != report.optimizer}
    new = tuple(one for one in found if (report.optimizer, one.ranks, one.about) not in marks.named)
    return Marks(recent={**marks.recent, report.optimizer: recent}, named=frozenset(others | keys)), new


def values_of(recent: Sequence[GradientStatistics]) -> Values:
    last = recent[-1]
    weights = [report.samples for report in recent]
    ranks, logs, cosines = [], [], []
    for place, rank in enumerate(last.ranks):
        norms = [report.norms[place] if report.norms else None for report in recent]
        turns = [report.cosines[place] if report.cosines else None for report in recent]
        if any(norm is None for norm in norms):
            continue
        ranks.append(rank)
        logs.append(_mean([math.log(max(norm or 0.0, TINY)) for norm in norms], weights))
        cosines.append(_mean([0.0 if turn is None else turn for turn in turns], weights))
    steps = recent[0].first_step, last.last_step
    return Values(tuple(ranks), tuple(logs), tuple(cosines), sum(weights), steps)


def _key(one: Standing) -> tuple[tuple[int, ...], str, bool]:
    return one.ranks, one.about, one.score > 0


def judge(values: Values, sure: float) -> list[Standing]:
    """Who is further off than `sure`, the furthest first."""
    if len(values.ranks) < 2:
        return []
    if len(values.ranks) == 2:
        return _of_two(values)
    turned = _turned(values, sure)
    done = {one.ranks for one in turned}
    found = turned + [one for one in _large_or_small(values, sure) if one.ranks not in done]
    return sorted(found, key=lambda one: -abs(one.score))


def scores(values: Sequence[float], least: float) -> list[float]:
    """Robust z of each; `least`: what a MAD counts as at least: among values that are nearly equal none is odd."""
    middle = statistics.median(values)
    mad = statistics.median(abs(value - middle) for value in values)
    return [0.6745 * (value - middle) / max(mad, least) for value in values]


# --- what there may be to say -----------------------------------------------------------------------------------------


def _turned(values: Values, sure: float) -> list[Standing]:
    """Away from the others: wrong labels, a sign, an attack."""
    middle = statistics.median(values.cosines)
    found = []
    for place, score in enumerate(scores(values.cosines, EVEN_COSINE)):
        cosine = values.cosines[place]
        if score > -sure or middle - cosine < TURNED or values.logs[place] <= math.log(TINY):
            continue
        where = "against" if cosine < 0 else "away from"
        text = f"the gradients of rank {values.ranks[place]} point {where} the mean of all ranks"
        cause = f"{OTHERS}, or the sign of its loss is wrong, or they were tampered with"
        found.append(_standing(values, place, "direction", score, text, cause))
    return found


def _large_or_small(values: Values, sure: float) -> list[Standing]:
    middle = statistics.median(values.logs)
    least = math.log(OF_FEW if len(values.ranks) < FEW else FACTOR)
    found = []
    for place, score in enumerate(scores(values.logs, EVEN_LOG)):
        off = values.logs[place] - middle
        if abs(score) < sure or abs(off) < least:
            continue
        rank = values.ranks[place]
        if values.logs[place] <= math.log(TINY):
            text, cause = f"the gradients of rank {rank} are all zero", "its batches are empty, masked or constant"
        elif off > 0:
            text = f"the gradients of rank {rank} are {math.exp(off):.3g} times as large as the others'"
            cause = f"{OTHERS}, its loss is a sum where theirs is a mean, or they were tampered with"
        else:
            text = f"the gradients of rank {rank} are {math.exp(-off):.3g} times smaller than the others'"
            cause = f"{OTHERS}: repeated, masked or too easy, or its loss is divided once more"
        found.append(_standing(values, place, "norm", score, text, cause))
    return found


def _of_two(values: Values) -> list[Standing]:
    one, other = values.ranks
    factor = math.exp(min(700.0, abs(values.logs[0] - values.logs[1])))
    # Their mean lies between them: the angle from one to the other is the sum of the angles to it.
    between = math.cos(sum(math.acos(max(-1.0, min(1.0, cosine))) for cosine in values.cosines))
    if between < -TURNED:
        about, text = "direction", f"the gradients of ranks {one} and {other} point in opposite directions"
    elif factor >= OF_TWO:
        about, text = "norm", f"the gradients of ranks {one} and {other} differ in size by a factor of {factor:.3g}"
    else:
        return []
    finding = Finding(
        symptom=text,
        cause="one of them reads other data, has other labels or computes its loss otherwise; nothing says which",
        advice="swap their shards for some steps, or run three ranks: then the odd one is named",
        evidence=(_each(values), _when(values)),
        severity=Severity.WARNING,
        step=values.steps[1],
    )
    return [Standing(ranks=(one, other), about=about, score=0.0, finding=finding)]


def _standing(values: Values, place: int, about: str, score: float, text: str, cause: str) -> Standing:
    rank = values.ranks[place]
    usual_norm, usual_cosine = math.exp(statistics.median(values.logs)), statistics.median(values.cosines)
    evidence = (
        f"robust z {score:+.3g} among {len(values.ranks)} ranks",
        f"norm {math.exp(values.logs[place]):.3g}, the median of all {usual_norm:.3g}",
        f"cosine to the mean {values.cosines[place]:.2f}, the median of all {usual_cosine:.2f}",
        _when(values),
    )
    finding = Finding(
        symptom=text, cause=cause, advice=SWAP.format(rank=f"rank {rank}"), evidence=evidence,
        severity=Severity.WARNING, step=values.steps[1], rank=rank,
    )  # fmt: skip
    return Standing(ranks=(rank,), about=about, score=score, finding=finding)


def _each(values: Values) -> str:
    triples = zip(values.ranks, values.logs, values.cosines, strict=True)
    return "; ".join(f"rank {r}: norm {math.exp(log):.3g}, cosine to the mean {c:.2f}" for r, log, c in triples)


def _when(values: Values) -> str:
    return f"before the all-reduce, over {values.looks} looks in steps {values.steps[0]}–{values.steps[1]}"


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / max(1, sum(weights))

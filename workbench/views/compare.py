"""Two runs beside each other: are the losses the same, bit for bit or nearly, and was it as fast? Pure.

Bit for bit is asked of a rerun whose job was deterministic (or when the caller asks); else a curve agrees when the
means of its parts (`PARTS` of equal length) lie within a tolerance of each other, relative to the saved one but at
least to `FLOOR` of its largest: floating point that sums in another order drifts apart, and single steps say little.
"""

from __future__ import annotations

import enum
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from workbench.spec import JobSpec
from workbench.state import JobPhase

PARTS: Final = 20
FLOOR: Final = 0.05
TOLERANCE: Final = 0.05
WARM_UP: Final = 0.1  # of the steps, which throughput is not taken of
_NUMBER: Final = re.compile(
    r"(?<![\w.])(?P<name>(?:[a-z]+[ _-])?(?:loss|accuracy|acc|perplexity|ppl|error|score|auc|f1))\b\s*[:=]?\s*"
    r"(?P<value>[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf)",
    re.IGNORECASE,
)
TEXTS: Final = ("source", "payload")  # fields of a spec that are too long to be shown
UNTOLD: Final = ("cwd", "name", "env")  # on the first two nothing depends; the last may hold secrets: see `env_names`
_FINAL: Final = ("accuracy", "acc", "score", "auc", "f1", "perplexity", "ppl", "error")


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """What of a run is compared. `losses` and `durations` (s) by rank, then step; `printed`: numbers of rank 0's
    output by name, in order; `states`: digests of training states by step.
    """

    name: str
    spec: JobSpec
    phase: JobPhase
    reason: str
    world_size: int
    last_step: int = 0
    losses: dict[int, dict[int, float]] = {}
    durations: dict[int, dict[int, float]] = {}
    samples: dict[int, dict[int, float]] = {}
    printed: dict[str, tuple[float, ...]] = {}
    states: dict[int, str] = {}
    failures: tuple[str, ...] = ()
    packages: dict[str, str] = {}
    parameters: dict[str, str] = {}  # what its program marks as such, as it is written there
    code: dict[str, str] = {}  # digests by name


class Verdict(enum.Enum):
    """How a line of a comparison came out; the value is what a person reads."""

    SAME = "same"
    NEAR = "near"
    DIFFERS = "DIFFERS"
    TOLD = ""  # for information

    @property
    def is_deviation(self) -> bool:
        return self is Verdict.DIFFERS


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One thing of both runs, as text, and what comes of it."""

    what: str
    before: str
    now: str
    verdict: Verdict
    note: str = ""


def printed_numbers(text: str) -> dict[str, tuple[float, ...]]:
    """`loss 0.12`, `accuracy: 97.5%` and the like, by name in small letters."""
    found: dict[str, list[float]] = {}
    for match in _NUMBER.finditer(text):
        found.setdefault(re.sub(r"[ -]", "_", match["name"].lower()), []).append(float(match["value"]))
    return {name: tuple(values) for name, values in found.items()}


def check(before: Trace, now: Trace, *, tolerance: float = TOLERANCE, exact: bool = False) -> list[Line]:
    """A rerun held against the saved run. A `DIFFERS` is a deviation."""
    is_exact = exact or (before.spec.deterministic and before.world_size == now.world_size)
    limit = now.spec.max_steps if 0 < now.spec.max_steps < before.last_step else None
    lines = [_ends(before, now), _steps(before, now, limit), _losses(before, now, tolerance, is_exact)]
    if before.world_size != now.world_size:
        ranks = _line("ranks", before.world_size, now.world_size, Verdict.TOLD, "losses are those of other batches")
        lines.insert(1, ranks)
    is_late = bool(now.spec.resume_from and not before.spec.resume_from)
    lines += _printed(before, now, tolerance, is_exact, is_short=limit is not None, is_late=is_late)
    lines += _states(before, now, is_exact)
    return [*lines, throughput_line(before, now)]


def _line(what: str, before: object, now: object, verdict: Verdict, note: str = "") -> Line:
    return Line(what=what, before=str(before), now=str(now), verdict=verdict, note=note)


def _ends(before: Trace, now: Trace) -> Line:
    is_well = now.phase is JobPhase.SUCCEEDED or now.phase is before.phase
    verdict = Verdict.SAME if now.phase is before.phase else Verdict.TOLD if is_well else Verdict.DIFFERS
    return _line("end", before.phase.value, now.phase.value, verdict, "" if is_well else now.reason)


def _steps(before: Trace, now: Trace, limit: int | None) -> Line:
    wanted = limit or before.last_step
    verdict = Verdict.SAME if now.last_step == wanted else Verdict.DIFFERS
    note = f"ended after {limit} on purpose" if limit else ""
    if before.world_size != now.world_size or before.phase is not JobPhase.SUCCEEDED:
        verdict = Verdict.SAME if now.last_step == wanted else Verdict.TOLD
    return _line("steps", before.last_step, now.last_step, verdict, note)


# --- losses -----------------------------------------------------------------------------------------------------------


def _losses(before: Trace, now: Trace, tolerance: float, exact: bool) -> Line:
    steps, old, new = _common(before, now)
    if not old:
        why = "neither run reported one" if not before.losses and not now.losses else "no step has one in both runs"
        verdict = Verdict.DIFFERS if before.losses and before.phase is JobPhase.SUCCEEDED else Verdict.TOLD
        return _line("loss", "–", "–", verdict, f"{why}: see Run.report")
    ends = f"{old[-1]:.6g}", f"{new[-1]:.6g}"
    return _line(f"loss, {steps:,} steps", *ends, *judge(old, new, tolerance, exact))


def _common(before: Trace, now: Trace) -> tuple[int, list[float], list[float]]:
    """How many steps both runs have losses of, and these: by rank and step where ranks are the same, else means."""
    if before.world_size == now.world_size:
        keys = [
            (rank, step)
            for rank in sorted(before.losses.keys() & now.losses.keys())
            for step in sorted(before.losses[rank].keys() & now.losses[rank].keys())
        ]
        both = [before.losses[r][s] for r, s in keys], [now.losses[r][s] for r, s in keys]
        return len({step for _, step in keys}), *both
    old, new = curve(before), curve(now)
    steps = sorted(old.keys() & new.keys())
    return len(steps), [old[step] for step in steps], [new[step] for step in steps]


def curve(trace: Trace) -> dict[int, float]:
    """The mean loss of the ranks that reported one, by step, in order."""
    by_step: dict[int, list[float]] = {}
    for losses in trace.losses.values():
        for step, loss in losses.items():
            by_step.setdefault(step, []).append(loss)
    return {step: sum(values) / len(values) for step, values in sorted(by_step.items())}


def judge(old: Sequence[float], new: Sequence[float], tolerance: float, exact: bool) -> tuple[Verdict, str]:
    """Whether two series of one length agree, and in which words."""
    at = next((k for k, (a, b) in enumerate(zip(old, new, strict=True)) if a != b and not (a != a and b != b)), None)
    if at is None:
        return Verdict.SAME, "bit for bit"
    where = f"from value {at + 1:,} on"
    if exact:
        return Verdict.DIFFERS, f"{where}: {old[at]!r}, now {new[at]!r}"
    worst = deviation(old, new)
    apart = f"at most {worst:.1%} apart" if worst <= 1 else "more than 100% apart"
    return (Verdict.NEAR if worst <= tolerance else Verdict.DIFFERS), f"{apart}, {where}; allowed {tolerance:.1%}"


def deviation(old: Sequence[float], new: Sequence[float]) -> float:
    """How far the parts of two series lie apart at most; inf when one of them is not finite where the other is."""
    pairs = list(zip(old, new, strict=True))
    scale = FLOOR * max((abs(a) for a, _ in pairs if math.isfinite(a)), default=0.0)
    size = max(1, math.ceil(len(pairs) / PARTS))
    worst = 0.0
    for start in range(0, len(pairs), size):
        part = pairs[start : start + size]
        a, b = (statistics.fmean(side) for side in zip(*part, strict=True))
        if math.isfinite(a) and math.isfinite(b):
            base = max(abs(a), scale)
            worst = max(worst, abs(a - b) / base if base else (0.0 if a == b else math.inf))
        elif not (a == b or (a != a and b != b)):
            return math.inf
    return worst


# --- what was printed, what was saved ---------------------------------------------------------------------------------


def _printed(before: Trace, now: Trace, tolerance: float, exact: bool, *, is_short: bool, is_late: bool) -> list[Line]:
    """`is_short`: it ended earlier on purpose; `is_late`: it began later, from a checkpoint."""
    lines = []
    for name, old in before.printed.items():
        new = now.printed.get(name, ())
        is_final = name.split("_")[-1] in _FINAL
        ends = (f"{old[-1]:.6g}", f"{new[-1]:.6g}") if new else (f"{old[-1]:.6g}", "–")
        count = min(len(old), len(new))
        if (is_short and (is_final or is_late)) or ((is_short or is_late) and not new):
            continue  # it is of another moment of the training
        if len(old) != len(new) and not is_short and not is_late:
            note = f"{len(old)} times, now {len(new)}"
            lines.append(_line(f"printed {name}", *ends, Verdict.DIFFERS, note))
            continue
        both = (old[len(old) - count :], new[len(new) - count :]) if is_late else (old[:count], new[:count])
        verdict, note = judge(*both, tolerance, exact)
        note = f"as printed, {count} times" if verdict is Verdict.SAME else note
        lines.append(_line(f"printed {name}", *ends, verdict, note))
    return lines


def _states(before: Trace, now: Trace, exact: bool) -> list[Line]:
    """The newest training state that both have saved."""
    steps = sorted(before.states.keys() & now.states.keys())
    if not steps:
        return []
    old, new = before.states[steps[-1]], now.states[steps[-1]]
    is_tensors = old.startswith("tensors:") and new.startswith("tensors:")
    is_seeded = before.spec.seed is not None or is_tensors  # else random states are part of it, and begin differently
    worse = Verdict.DIFFERS if exact and is_seeded else Verdict.TOLD
    why = "" if is_seeded else ": it holds random states, and the job had no --seed"
    verdict, note = (Verdict.SAME, "bit for bit") if old == new else (worse, f"not bit for bit{why}")
    a, b = (digest.rpartition(":")[2][:12] for digest in (old, new))
    return [_line(f"state at step {steps[-1]}", a, b, verdict, note)]


# --- speed ------------------------------------------------------------------------------------------------------------


def throughput_line(before: Trace, now: Trace) -> Line:
    """The ratio with its noise; never a deviation: other things may run on the machine."""
    old, new = rate(before), rate(now)
    if old is None or new is None:
        return _line("throughput", "–", "–", Verdict.TOLD, "too few steps")
    note = "ratio " + ratio_text(old.speed, new.speed)
    unit = "samples/s" if old.has_samples and new.has_samples else "steps/s"
    return _line("throughput", f"{old.speed.mean:,.4g} {unit}", f"{new.speed.mean:,.4g} {unit}", Verdict.TOLD, note)


class Speed(NamedTuple):
    """A throughput, and the standard error of that mean."""

    mean: float
    error: float


class Rate(NamedTuple):
    """Samples/s, or steps/s where the samples are not known."""

    speed: Speed
    has_samples: bool


def speed_of(stretches: Sequence[float]) -> Speed | None:
    """From the throughputs of stretches of a run; None of fewer than three. How much they differ is the error: of
    single steps it would be too small, since neighbouring ones are slow together.
    """
    known = [value for value in stretches if value > 0]
    if len(known) < 3:
        return None
    return Speed(statistics.fmean(known), statistics.stdev(known) / math.sqrt(len(known)))


def ratio_text(old: Speed, new: Speed) -> str:
    """`1.25 ± 0.03, faster`: the ratio of two throughputs, its standard error, and whether that is more than noise."""
    ratio = new.mean / old.mean
    noise = ratio * math.hypot(old.error / old.mean, new.error / new.mean)
    word = "no difference beyond the noise" if abs(ratio - 1) <= 2 * noise else "faster" if ratio > 1 else "slower"
    digits = 2 if noise >= 0.005 or noise == 0 else min(4, math.ceil(-math.log10(noise)))
    return f"{ratio:.{digits}f} ± {noise:.{digits}f}, {word}"


def rate(trace: Trace) -> Rate | None:
    """Of the steps after the warm-up; None of too few steps."""
    steps = sorted({step for durations in trace.durations.values() for step in durations})
    steps = steps[int(len(steps) * WARM_UP) :]
    if len(steps) < 2 * PARTS:
        return None
    has_samples = any(sum(by_step.values()) > 0 for by_step in trace.samples.values())
    size = len(steps) // PARTS
    rates = [_stretch(trace, steps[k * size : (k + 1) * size], has_samples) for k in range(PARTS)]
    speed = speed_of(rates)
    return None if speed is None else Rate(speed, has_samples)


def _stretch(trace: Trace, steps: Sequence[int], has_samples: bool) -> float:
    """Of all ranks together, over the time of the mean rank."""
    time = work = 0.0
    for rank, durations in trace.durations.items():
        time += sum(durations.get(step, 0.0) for step in steps)
        samples = trace.samples.get(rank, {})
        work += sum(samples.get(step, 0.0) for step in steps) if has_samples else len(steps) / trace.world_size
    return trace.world_size * work / time if time > 0 else 0.0


# --- configuration ----------------------------------------------------------------------------------------------------


def compare(a: Trace, b: Trace) -> list[Line]:
    """Two runs of any kind: what was asked for differently, how they went. Nothing of it is a deviation."""
    lines = [*differing_fields(a.spec, b.spec), *_differing("package", a.packages, b.packages)]
    lines += _differing("parameter", a.parameters, b.parameters)
    changed = sorted(name for name in a.code.keys() & b.code.keys() if a.code[name] != b.code[name])
    lines += [_line(f"code {name}", "a text", "another one", Verdict.TOLD) for name in changed[:12]]
    lines += [_told(_ends(a, b)), _told(_steps(a, b, None))]
    if _common(a, b)[0] > 0:
        lines.append(_told(_losses(a, b, TOLERANCE, exact=False)))
    else:
        last, other = (f"{list(curve(t).values())[-1]:.6g}" if t.losses else "–" for t in (a, b))
        lines.append(_line("last loss", last, other, Verdict.TOLD))
    for name in dict.fromkeys([*a.printed, *b.printed]):
        last, other = (f"{t.printed[name][-1]:.6g}" if name in t.printed else "–" for t in (a, b))
        lines.append(_line(f"printed {name}, last", last, other, Verdict.TOLD))
    failures = _line(
        "failures", len(a.failures), len(b.failures), Verdict.TOLD, "; ".join([*a.failures, *b.failures])[:200]
    )
    return [*lines, *map(_told, _states(a, b, exact=False)), throughput_line(a, b), failures]


def _told(line: Line) -> Line:
    is_same = line.verdict is Verdict.SAME
    return msgspec.structs.replace(line, verdict=Verdict.SAME if is_same else Verdict.TOLD)


def differing_fields(a: JobSpec, b: JobSpec) -> list[Line]:
    """Fields of the specs that are not the same; of texts only that they differ."""
    lines = []
    for name in JobSpec.__struct_fields__:
        old, new = getattr(a, name), getattr(b, name)
        if old != new and name not in UNTOLD:
            shown = ("a program", "another one") if name in TEXTS else (shown_value(old), shown_value(new))
            lines.append(_line(name, *shown, Verdict.TOLD))
    for name in env_names([a.env, b.env]):
        old, new = (name in env for env in (a.env, b.env))
        note = "another value" if old and new else ""
        lines.append(_line(f"env {name}", "set" if old else "–", "set" if new else "–", Verdict.TOLD, note))
    return lines


def env_names(found: Sequence[Mapping[str, str]]) -> list[str]:
    """Environment variables that are not the same everywhere. Only names are told: a value may be a secret."""
    names = dict.fromkeys(name for env in found for name in env)
    return [name for name in names if len({env.get(name) for env in found}) > 1]


def _differing(what: str, a: Mapping[str, str], b: Mapping[str, str]) -> list[Line]:
    if not a or not b:
        return []
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return [_line(f"{what} {name}", a.get(name, "–"), b.get(name, "–"), Verdict.TOLD) for name in names[:12]]


def shown_value(value: object) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
